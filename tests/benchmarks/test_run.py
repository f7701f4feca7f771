"""The programs: what they run, write, refuse and return."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_record, run, run_gpu, suites
from benchmarks.bench import Bench, TrialFailedError
from benchmarks.gpu_record import holds, record_of
from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice
from tests.benchmarks.made_up import a_machine, a_profile, a_record, an_ablation

TINY = run_gpu.Sizes(
    images=72,
    slow=("--limit", "100000", "--context", "16", "--width", "32", "--heads", "2"),
    starved=("--image-size", "32", "--width", "4", "--batch-size", "8"),
    tuned=("--limit", "100000", "--context", "8", "--width", "64", "--batch-size", "64"),
)

EACH_KIND = ("facts", "photographs", "measure starved", "tune starved", "overhead", "aa")
SHORT_S = {"tune": 30.0, "overhead": 1.0, "aa": 1.0}
"""What fills the time that it is given is given little; the least is done in any."""


def shortened(stage):
    """Return a stage that is told of little time, and has much before it is ended."""
    told_s = SHORT_S.get(stage.name.split()[0], 200.0)
    return replace(stage, work=lambda _: stage.work(told_s), most_s=250.0)


def test_an_unknown_suite_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["slow_computer"])

    assert ended.value.code == 2
    assert "there is no suite slow_computer" in capsys.readouterr().err


def test_a_suite_leaves_its_record_and_its_log(tmp_path, capsys):
    def suite(bench):
        bench.say("working")
        return a_record(holds=False)

    assert not run.run_suite(suite, a_machine(), budget_s=1.0, root=tmp_path)

    (folder,) = tmp_path.iterdir()
    assert "working" in (folder / "log.txt").read_text()
    assert "DOES NOT HOLD" in capsys.readouterr().out


def test_a_suite_that_measured_nothing_leaves_no_record(tmp_path, capsys):
    def suite(bench):
        raise TrialFailedError("crash: no such file")

    assert not run.run_suite(suite, a_machine(), budget_s=1.0, root=tmp_path)

    assert list(tmp_path.iterdir()) == []
    assert "nothing measured: crash: no such file" in capsys.readouterr().out


def done(result):
    return {"status": "done", "result": result, "took_s": 1.0}


def starved(before=0.3, after=0.995):
    """Return the result of a tuning that fed a device."""
    found = an_ablation(Choice(technique="bf16_autocast"))
    found = replace(
        found,
        baseline=replace(found.baseline, device_busy_share=before),
        final=replace(found.final, device_busy_share=after),
    )
    return done(found.to_json() | {"trials": []})


def gpu_results(decisions=("no_effect",) * 3, upper=1.008, processes=4):
    added = {"ratio": 1.0, "interval": [0.99, upper], "step_ms": 9.0}
    return {
        "facts": done({"installed": ["numpy"], "doctor": []}),
        "photographs": done({"said": "72 images"}),
        "measure slow_compute": done({"profile": a_profile().to_json()}),
        "tune starved_images": starved(),
        "overhead": done(added | {"processes": [{}] * processes}),
        "aa": done({"decisions": list(decisions)}),
    }


def test_a_gpu_record_holds_when_all_worked_and_both_checks_passed():
    assert holds(gpu_results())
    assert holds(gpu_results(decisions=["no_effect"] * 3 + ["undecided"]))
    assert not holds(gpu_results(decisions=["no_effect"] * 3 + ["worse"]))
    assert not holds({**gpu_results(), "tune already_tuned": {"status": "skipped", "took_s": 0}})
    assert not holds({})


@pytest.mark.parametrize(
    "evidence",
    [{"decisions": ["undecided"] * 9}, {"decisions": []}, {"upper": 1.10}, {"processes": 3}],
)
def test_what_shows_nothing_does_not_hold(evidence):
    assert not holds(gpu_results(**evidence))


def test_a_baseline_alone_is_no_tuning():
    empty = done(an_ablation().to_json() | {"trials": []})

    assert not holds({**gpu_results(), "tune starved_images": empty})


@pytest.mark.parametrize("busy", [(0.6, 0.995), (0.3, 0.7)])
def test_a_device_that_was_fed_before_or_still_waits_does_not_hold(busy):
    assert not holds({**gpu_results(), "tune starved_images": starved(*busy)})


def test_a_record_holds_only_where_all_stages_of_its_sets_were_played(monkeypatch):
    monkeypatch.setattr(gpu_record, "WORDS", dict.fromkeys(gpu_record.STAGES["counters"], str))
    monkeypatch.setattr(gpu_record, "REACHED", {})
    played = {name: done({}) for name in gpu_record.STAGES["counters"]}

    assert record_of(played, part="counters").holds
    assert not record_of({"counters": done({})}, part="counters").holds


def test_sets_that_are_played_together_have_one_folder_and_the_table_comes_last(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(run_gpu, "read_machine", lambda torch: a_machine())
    monkeypatch.setattr(
        run_gpu, "play_apart", lambda stage, *_, **__: {"status": "done", "result": {}}
    )
    words = {name: lambda result: "said" for name in ("gemm", "memory")}
    monkeypatch.setattr(gpu_record, "WORDS", words)
    monkeypatch.setattr(gpu_record, "REACHED", dict.fromkeys(words, bool))

    assert run_gpu.main(["--smoke", "--set", "gemm,memory"]) == 1

    (folder,) = tmp_path.iterdir()
    assert "_gpu_gemm_memory_" in folder.name
    *_, gemm, memory, last = capsys.readouterr().out.splitlines()
    assert gemm.startswith("| gemm | said |")
    assert memory.startswith("| memory | said |")
    assert last == "holds: False"


def test_an_unknown_set_is_refused(capsys):
    with pytest.raises(SystemExit):
        run_gpu.main(["--set", "gemm,memmory"])

    assert "no set memmory" in capsys.readouterr().err


def test_a_gpu_record_reads_stage_by_stage():
    failed = {"status": "failed", "why": "RuntimeError: oom\nmore", "took_s": 3.0}

    record = record_of({**gpu_results(), "tune other": failed})

    words = {row[0]: row[1] for row in record.table}
    assert words["measure slow_compute"] == "step 10.0 ms, data wait 60 %, device busy 40 %"
    assert words["tune starved_images"] == (
        "2.00x [1.90-2.10], n=6, device busy 30 % -> 99.5 % (bf16_autocast)"
    )
    assert words["overhead"] == "+0.0% of 9.00 ms (-1.0% to +0.8%, n=4)"
    assert words["tune other"] == "failed: RuntimeError: oom"
    assert record.finding == "starved_images 2.00x [1.90-2.10], n=6"
    assert record.recipe.names == ("bf16_autocast",)


def test_a_gpu_record_of_nothing_yet_is_a_record():
    record = record_of({"facts": done({"installed": [], "doctor": []})})

    assert (record.holds, record.recipe) == (False, None)


def test_without_a_gpu_the_other_program_is_named(capsys, monkeypatch):
    monkeypatch.setattr(run_gpu, "read_machine", lambda torch: a_machine())

    with pytest.raises(SystemExit) as ended:
        run_gpu.main([])

    assert ended.value.code == 2
    assert "make bench" in capsys.readouterr().err


@pytest.mark.slow
def test_the_stages_work_without_a_gpu_too(tmp_path):
    lines = []
    (tmp_path / "work").mkdir()
    bench = Bench(machine=read_machine(torch=False), work=tmp_path / "work", say=lines.append)

    stages = [
        shortened(stage)
        for stage in run_gpu.chosen(run_gpu.stages_of(bench, TINY), "base,guard,starved", EACH_KIND)
    ]
    results = run_gpu.run_all(bench, stages, tmp_path / "out", lines, total_s=2_000.0)

    failed = {name: entry for name, entry in results.items() if entry["status"] != "done"}
    assert failed == {}
    assert results["measure starved_images"]["status"] == "done"
    (folder,) = (tmp_path / "out").iterdir()
    assert len(list(folder.iterdir())) <= 8
    with tarfile.open(folder / "journals.tar.gz") as journals:
        (first, *_) = journals.getnames()
        assert b"trial" in journals.extractfile(first).read()
    assert set(json.loads((folder / "result.json").read_text())["raw"]) == set(results)


def test_every_suite_can_be_asked_for():
    modules = {path.stem for path in Path(suites.__file__).parent.glob("*.py")} - {"__init__"}

    assert set(run.SUITES) == modules
