"""What was measured, joined with the lines of the source that it comes from."""

import importlib

import pytest

from flatout import rules
from flatout.launch.workloads import parse_workload
from flatout.records.trial import Workload
from flatout.reporting.profile.html import profile_html
from flatout.reporting.profile.text import profile_markdown, render_profile
from flatout.rules import source
from flatout.workflow.measure import add_places, measure
from tests.rules.memory_facts import story, sync
from tests.techniques.facts import loader, machine, profile

LOADER = """\
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __getitem__(self, i):
        return Image.open(self.paths[i])

def make():
    DataLoader(Photos(), batch_size=4)
    return DataLoader(
        Photos(),
        batch_size=8,
    )
"""
SCRIPT = """\
import torch
from data import make
loader = make()
model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for x, y in loader:
    loss = criterion(model(x.cuda()), y.cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
print(total)
"""
LINE = SCRIPT.splitlines().index("    total += loss.item()") + 1
WAITS = (sync(line=f"train.py:{LINE}", ms_per_step=22.0),)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a script and a module of its own; running either would end the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "data.py").write_text(LOADER + "raise SystemExit('was run')\n")
    (folder / "train.py").write_text(SCRIPT + "raise SystemExit('was run')\n")
    return folder


def joined(workload, **facts):
    found = rules.add_findings(profile(**facts), machine())
    return add_places(found, workload)


def places(judged):
    return {
        finding.code: [(place.path, place.line, place.code) for place in finding.places]
        for finding in judged.findings
    }


def test_a_wait_gets_its_line_and_the_command_that_shows_the_change(project):
    judged = joined(Workload(target="train.py"), syncs=WAITS)

    assert places(judged)["sync_in_step"] == [("train.py", LINE, "SYN01")]
    said = f"train.py:{LINE} (SYN01); flatout check --diff train.py shows the change"
    assert f"source line  {said}" in render_profile(judged)
    assert said in render_profile(judged, details=True).replace("\n" + " " * 13, " ")
    assert said in profile_html(judged)
    assert f"train.py:{LINE} (SYN01); flatout check" in profile_markdown(judged)
    assert f"train.py:{LINE} (SYN01)" in render_profile(judged, language="ko")


def test_a_wait_at_another_line_or_in_an_installed_package_gets_none(project):
    others = [f"train.py:{LINE - 1}", f"lib/train.py:{LINE}", "", f"accelerate/train.py:{LINE}"]
    waits = tuple(sync(line=line, ms_per_step=5.0) for line in others)

    judged = joined(Workload(target="train.py"), syncs=waits)

    assert places(judged)["sync_in_step"] == []
    assert "flatout check" not in render_profile(judged)


@pytest.mark.parametrize("line", [11, 13])
def test_of_several_loaders_the_one_that_was_measured_is_named(project, line):
    loaders = (loader(line="data.py:10", is_training=False), loader(line=f"data.py:{line}"))
    phases = {"data_wait": 50.0, "forward": 50.0}

    judged = joined(Workload(target="train.py"), phases_ms=phases, loaders=loaders)

    assert places(judged)["data_wait"] == [("data.py", 11, "DL02")]


def test_a_script_in_a_folder_is_named_as_the_user_types_it(project):
    (project / "src").mkdir()
    (project / "train.py").rename(project / "src/train.py")
    (project / "data.py").rename(project / "src/data.py")

    as_script = joined(parse_workload("src/train.py", ()), syncs=WAITS)
    as_module = joined(parse_workload("-m", ["src.train"]), syncs=WAITS)

    assert places(as_script)["sync_in_step"] == [("src/train.py", LINE, "SYN01")]
    assert places(as_module) == places(as_script)


def test_a_place_of_the_source_is_said_once_and_three_findings_have_some_at_most(project):
    keeps = SCRIPT.replace("    total += loss.item()\n", "    losses.append(loss)\n")
    (project / "train.py").write_text(keeps.replace("total = 0.0", "losses = []"))
    leaking = story(
        leak_bytes_per_step=1e9, kept_graph_nodes_per_step=1e5, kept_graph_names=("losses",)
    )

    judged = joined(Workload(target="train.py"), memory=leaking)

    assert {finding.code for finding in judged.findings} == {"kept_graph", "memory_leak"}
    assert sorted(map(len, places(judged).values())) == [0, 1]


def test_an_ignored_line_and_a_file_that_is_no_python_give_none(project):
    (project / "train.py").write_text(SCRIPT.replace(".item()", ".item()  # flatout: ignore"))
    assert places(joined(Workload(target="train.py"), syncs=WAITS))["sync_in_step"] == []

    (project / "train.py").write_text("import torch\n(")
    assert places(joined(Workload(target="train.py"), syncs=WAITS))["sync_in_step"] == []


def test_settings_that_cannot_be_read_leave_a_note_and_the_findings(project):
    (project / "pyproject.toml").write_text("[tool.flatout.check]\nselect = 3\n")

    judged = joined(Workload(target="train.py"), syncs=WAITS)

    assert places(judged) == {"sync_in_step": []}
    assert any("the source was not checked" in note for note in judged.notes)


def test_the_rules_that_a_finding_names_exist():
    named = set()
    for module in rules._modules().values():
        rule = importlib.import_module(module)
        named |= {*getattr(rule, "AT_LINES", ()), *getattr(rule, "IN_PROJECT", ())}

    assert source.selected(sorted(named), ())


TRAINING = """\
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, i):
        open("/dev/null").close()
        time.sleep(0.002)
        return torch.ones(8)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 1).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(Photos(), batch_size=4):
    opt.zero_grad()
    model(x.to(device)).sum().backward()
    opt.step()
"""


@pytest.mark.slow
def test_a_measured_training_names_the_line_of_its_loader(project):
    (project / "train.py").write_text(TRAINING)

    trial = measure(parse_workload("train.py", ()), limit_s=120.0)

    assert [x.line for x in trial.profile.loaders] == ["train.py:16"]
    assert places(trial.profile)["data_wait"] == [("train.py", 16, "DL02")]
