import json

import pytest

from flatout.cli import call
from flatout.records.errors import UserError
from flatout.records.profile import profile_from_json
from flatout.reporting.profile.text import MOST_LINES
from flatout.tuning import passes


@pytest.mark.smoke
@pytest.mark.slow
def test_a_script_is_measured_with_its_own_arguments_and_its_files_untouched(folder, capfd):
    code = call(["measure", "--json", "out/a.json", "train.py", "--json", "mine", "--", "--x"])

    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "train.py --json mine -- --x on" in captured.out
    assert captured.out.endswith("next  flatout tune train.py --json mine -- --x\n")
    profile = profile_from_json(json.loads((folder / "out/a.json").read_text()))
    assert profile.step_ms.n > 0
    assert not (folder / "saved.txt").exists()


@pytest.mark.chaos
def test_a_script_that_fails_is_code_2_with_its_own_traceback(folder, capfd):
    code = call(["measure", "--json", "a.json", "crash.py"])

    captured = capfd.readouterr()
    assert code == 2
    assert "ValueError: no data here" in captured.err
    assert 'crash.py", line 2' in captured.err
    assert captured.err.endswith("next     python crash.py\n")
    assert "flatout/" not in captured.err
    assert not (folder / "a.json").exists()


@pytest.mark.chaos
def test_a_json_path_that_cannot_be_written_is_told_before_measuring(folder, capfd):
    (folder / "file").touch()

    code = call(["measure", "--json", "file/a.json", "crash.py"])

    assert code == 2
    assert "flatout: cannot write to file" in capfd.readouterr().err


def test_a_recipe_that_does_not_exist_is_told(folder, capfd):
    assert call(["measure", "--with", "no.toml", "train.py"]) == 2

    assert "there is no recipe at no.toml" in capfd.readouterr().err


@pytest.mark.slow
def test_a_trace_is_written_and_told(folder, capfd):
    code = call(["measure", "--quick", "--details", "--trace", "trace.json.gz", "train.py"])

    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "aten::" in captured.out
    assert "Trace for Perfetto or TensorBoard: trace.json.gz" in " ".join(captured.out.split())
    assert (folder / "trace.json.gz").stat().st_size > 0


def test_a_trace_that_no_viewer_opens_is_told_before_measuring(folder, capfd):
    assert call(["measure", "--trace", "trace.txt", "crash.py"]) == 2

    assert "a trace is a .json.gz or .json file" in capfd.readouterr().err


def test_a_script_that_fails_after_some_steps_leaves_their_report(folder, capfd):
    (folder / "late.py").write_text((folder / "train.py").read_text() + "raise ValueError('late')")

    code = call(["measure", "--quiet", "--json", "a.json", "late.py"])

    captured = capfd.readouterr()
    assert code == 2
    assert "ValueError: late" in captured.err
    assert "this is what was seen in its first 200 steps" in " ".join(captured.out.split())
    assert profile_from_json(json.loads((folder / "a.json").read_text())).step_ms.n > 0
    shown = [*captured.err.splitlines(), *captured.out.splitlines()]
    assert len(shown) <= MOST_LINES
    assert "ValueError: late" in shown[0]
    assert [line for line in shown if line.startswith("next")] == ["next     python late.py"]


def test_every_report_is_written_in_the_language_asked_for(folder, capfd):
    code = call(
        [
            *("measure", "--quick", "--lang", "ko", "--html", "out/a.html"),
            *("--markdown", "out/a.md", "--limit", "2m", "train.py"),
        ]
    )

    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "\uc2a4\ud15d \uc2dc\uac04" in captured.out
    assert '<html lang="ko">' in (folder / "out/a.html").read_text()
    assert "## \ub2e4\uc74c \ub2e8\uacc4" in (folder / "out/a.md").read_text()


def test_quick_runs_the_script_once_and_tells_it(folder, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "flatout.workflow.measure.measure", lambda *_args, **rest: stop(asked, rest)
    )

    codes = [call(["measure", *flags, "train.py"]) for flags in (["--quick", "--limit", "9s"], [])]

    assert codes == [2, 2]
    assert [rest["closer"] for rest in asked] == [(), passes.NAMES]
    assert [rest["limit_s"] for rest in asked] == [9.0, 300.0]
    assert capfd.readouterr().err.count("flatout: measuring the steps as they are\n") == 2


def stop(asked, rest):
    asked.append(rest)
    rest["tell"]("the steps as they are")
    raise UserError("enough")


@pytest.mark.chaos
@pytest.mark.parametrize("flag", ["--html", "--markdown"])
def test_a_report_that_cannot_be_written_is_told_before_measuring(folder, capfd, flag):
    (folder / "file").touch()

    code = call(["measure", flag, "file/a", "crash.py"])

    assert code == 2
    assert "flatout: cannot write to file" in capfd.readouterr().err


@pytest.mark.chaos
@pytest.mark.parametrize("flag", ["--json", "--html", "--markdown"])
def test_a_folder_in_a_report_s_place_is_told_before_measuring(folder, capfd, flag):
    code = call(["measure", flag, ".", "crash.py"])

    assert code == 2
    assert capfd.readouterr().err == "flatout: . is a folder; name a file, such as result.json\n"


@pytest.mark.parametrize("flags", [["--lang", "fr"], ["--limit", "soon"]])
def test_a_language_or_a_time_that_does_not_exist_is_told(folder, capfd, flags):
    assert call(["measure", *flags, "train.py"]) == 2

    assert flags[1] in capfd.readouterr().err


RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(200):
    loss = model(torch.ones(8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_launcher_is_measured_as_it_is_typed_and_without_progress(folder, capfd):
    (folder / "ranks.py").write_text(RANKS)
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]

    code = call(["measure", "--quick", "--quiet", "--json", "-", *launcher, "ranks.py"])

    captured = capfd.readouterr()
    assert code == 0, captured.err
    profile = profile_from_json(json.loads(captured.out))
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert "flatout: measuring" not in captured.err
