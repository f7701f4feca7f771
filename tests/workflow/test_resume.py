"""A resumed tuning goes on only with what its journal was measured of."""

import json
import resource
import signal
from dataclasses import replace

import pytest

from flatout.launch.folder_lock import hold_folder
from flatout.records.ablation import LossCheck
from flatout.records.errors import UserError
from flatout.records.machine import Device
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial, Workload
from flatout.workflow.tune import BaselineFailedError, TuneOptions, tune
from tests.tuning.test_bundle import Clock, Timed
from tests.workflow.test_tune import MACHINE, World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

pytestmark = pytest.mark.chaos

BIG = Device(kind="cuda", name="big gpu", memory_bytes=2**36)


@pytest.fixture
def project(tmp_path):
    """A script that imports a module beside it and is given a file with its settings."""
    (tmp_path / "train.py").write_text("from model import Net\n")
    (tmp_path / "model.py").write_text("Net = None\n")
    (tmp_path / "small.yaml").write_text("width: 8\n")
    (tmp_path / "notes.txt").write_text("nothing yet\n")
    return tmp_path


def tuned(project, world, machine=MACHINE, *, config="small.yaml", resume=False):
    workload = Workload(target="train.py", arguments=(f"--config={config}",), folder=project)
    options = TuneOptions(out=project / "out", only=("bf16_autocast",), runner=world, resume=resume)
    return tune(workload, options, lambda _: None, machine)


def interrupted(project):
    tuned(project, World({"bf16_autocast": 0.6}, interrupt_after=3))


def assert_refused(project, said, machine=MACHINE, **options):
    world = World({})
    with pytest.raises(UserError, match=said):
        tuned(project, world, machine, resume=True, **options)
    assert world.asked == []


def test_it_goes_on_where_nothing_was_changed_that_the_trials_run(project):
    interrupted(project)
    (project / "notes.txt").write_text("much\n")
    resumed = World({"bf16_autocast": 0.6}, seed=1)

    ablation = tuned(project, resumed, resume=True)

    lines = (project / "out" / "journal.jsonl").read_text().splitlines()
    assert ablation.recipe.names == ("bf16_autocast",)
    assert sum('"trial"' in line for line in lines) == 3 + len(resumed.asked)


@pytest.mark.parametrize("name", ["train.py", "model.py", "small.yaml"])
def test_it_refuses_where_a_file_was_changed(project, name):
    interrupted(project)
    (project / name).write_text("batch = 64\n")

    assert_refused(project, rf"another tuning: {name} changed since; run tune without --resume")


def test_of_many_changed_files_a_few_are_named(project):
    names = [f"part{number}" for number in range(5)]
    (project / "train.py").write_text(f"import {', '.join(names)}\n")
    for name in names:
        (project / f"{name}.py").write_text("x = 1\n")
    interrupted(project)
    for name in names:
        (project / f"{name}.py").write_text("x = 2\n")

    assert_refused(project, "part0.py changed since; .*part2.py changed since; 2 more changed")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"device": BIG}, "the device was test cpu and is big gpu now"),
        ({"devices": (BIG, BIG)}, "the device was test cpu and is big gpu, big gpu now"),
        ({"cpu_name": "fast"}, "the CPU was not known and is fast now"),
        ({"usable_cores": 64}, "the number of usable cores was 2 and is 64 now"),
        ({"torch_version": "2.14.0"}, r"torch was 2\.13\.0 and is 2\.14\.0 now"),
    ],
)
def test_it_refuses_on_another_machine(project, facts, said):
    interrupted(project)

    assert_refused(project, said, replace(MACHINE, **facts))


def test_another_command_line_is_told_without_its_files(project):
    (project / "large.yaml").write_text("width: 4096\n")
    interrupted(project)

    assert_refused(project, r"is train\.py --config=large\.yaml now; run tune", config="large.yaml")


def test_a_journal_of_another_version_is_not_called_that_of_a_changed_script(project):
    journal = project / "out" / "journal.jsonl"
    journal.parent.mkdir()
    journal.write_text(json.dumps({"header": {"workload": "train.py", "records": 2}}) + "\n")

    assert_refused(project, "another version of flatout wrote it; run tune")


def test_a_module_that_came_in_unseen_is_named(project):
    (project / "train.py").write_text("import later\n")
    interrupted(project)
    (project / "later.py").write_text("x = 1\n")

    assert_refused(project, r"another tuning: later\.py changed since; run tune")


def test_what_was_asked_for_at_the_beginning_holds_on(project):
    workload = Workload(target="train.py", folder=project)
    asked = {"out": project / "out", "only": ("loader_workers",), "numerics": Numerics.EXACT}
    first = World({"loader_workers": 0.6}, interrupt_after=2)
    tune(workload, TuneOptions(runner=first, **asked), lambda _: None, MACHINE)
    again = World({"loader_workers": 0.6, "bf16_autocast": 0.3}, seed=1)
    options = TuneOptions(out=project / "out", runner=again, resume=True)

    ablation = tune(workload, options, lambda _: None, MACHINE)

    assert ablation.recipe.names == ("loader_workers",)
    assert not any("bf16" in label for label in again.asked)


def test_half_a_last_line_is_dropped_and_the_next_row_is_kept(project):
    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"key": "time [')
    resumed = World({"bf16_autocast": 0.6}, seed=1)

    tuned(project, resumed, resume=True)

    lines = journal.read_bytes().splitlines()
    assert sum(b'"trial"' in line for line in lines) == 3 + len(resumed.asked)
    assert [json.loads(line)["key"] for line in lines[1:]] != []


@pytest.mark.parametrize(
    "header",
    [b'{"header": {"device": "', b"\xff\xfe", b"[]", b'{"header": 3}', b"[" * 100_000, b""],
)
def test_a_journal_whose_header_cannot_be_read_is_refused(project, header):
    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    rows = journal.read_bytes().splitlines()[1:]
    journal.write_bytes(b"\n".join([header, *rows, b""]))

    assert_refused(project, r"line 1 of .*journal\.jsonl cannot be read")


@pytest.mark.parametrize("row", [b"\xff", b"7", b"{}", b'{"key": [], "trial": 0}', b"{"])
def test_a_journal_with_a_line_that_cannot_be_read_is_refused(project, row):
    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    header, *rows = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([header, row, *rows, b""]))

    assert_refused(project, r"line 2 of .*journal\.jsonl cannot be read")


def test_an_older_header_without_a_fact_is_another_machine_s(project):
    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    header, *rows = journal.read_text().splitlines()
    facts = json.loads(header)["header"]
    del facts["cpu"]
    facts["cores"] = 64
    journal.write_text("\n".join([json.dumps({"header": facts}), *rows, ""]))

    assert_refused(project, "the number of usable cores was 64 and is 2 now")


def test_a_second_tuning_of_one_out_folder_is_refused(project):
    (project / "out").mkdir()
    (project / "link").symlink_to("out")

    with hold_folder(project / "link", project), pytest.raises(UserError, match="another tuning"):
        interrupted(project)

    interrupted(project)
    assert not (project / "locks").exists()


def test_a_row_that_does_not_fit_on_the_disk_ends_the_tuning_and_keeps_the_rows_before(project):
    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    before = journal.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limit[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write to .*--resume"):
            tuned(project, World({"bf16_autocast": 0.6}), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)

    assert journal.read_bytes() == before


def test_what_the_guard_took_is_part_of_what_a_resumed_tuning_took(tmp_path, monkeypatch):
    def check(guard, recipe):
        guard.lab.guard(recipe, "candidate", {}, 2)
        return LossCheck(status="within")

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    world, only = Timed({"bf16_autocast": 0.6}), ("bf16_autocast",)
    before = run(world, tmp_path, only=only, clock=world.clock)

    after = run(World({}), tmp_path, only=only, clock=Clock(), resume=True)

    assert after.cost_s == pytest.approx(before.cost_s)


def test_a_baseline_that_failed_is_run_again_and_not_reported_from_the_journal(project):
    def fails(_workload, recipe, *_):
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no disk", wall_s=1.0)

    interrupted(project)
    journal = project / "out" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(BaselineFailedError, match="no disk"):
        tuned(project, fails, resume=True)

    with pytest.raises(UserError, match="nothing to resume"):
        tuned(project, World({}), resume=True)
