"""What a lab asks of its trials."""

from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.trial_runner import TrialRunner
from tests.techniques.facts import machine


def lab_of(folder, runner):
    return TrialRunner(
        workload=Workload(target="train.py", folder=folder),
        machine=machine(),
        out=folder,
        limit_s=60.0,
        runner=runner,
    )


def test_the_copies_are_looked_at_where_steps_are_timed_and_nowhere_else(tmp_path):
    traced = []

    def runner(_workload, recipe, _machine, options):
        traced.append(options.traces_kernels)
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    lab = lab_of(tmp_path, runner)

    lab.time(Recipe())
    lab.guard(Recipe(), "baseline", {}, 2)
    lab.look("samples", Recipe(), {"pipeline": {}}, 12)

    assert traced == [True, False, False]


def test_a_guard_trial_without_a_record_is_not_judged_by_an_earlier_one_s(tmp_path):
    found = []

    def runner(_workload, recipe, _machine, options):
        found.append(sorted(path.name for path in options.keep.iterdir()))
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    place = tmp_path / "guard" / "candidate-0"
    place.mkdir(parents=True)
    for name in ("guard.json", "guard-rank1.json", "notes.txt"):
        (place / name).write_text("{}")
    lab = lab_of(tmp_path, runner)

    lab.guard(Recipe(), "candidate-0", {}, 2)

    assert found == [["notes.txt"]]


def test_what_a_killed_trial_was_compiling_is_not_read_by_the_next(tmp_path):
    outcomes = iter([Outcome.CRASH, Outcome.HANG])
    lab = lab_of(
        tmp_path, lambda _workload, recipe, *_: Trial(recipe=recipe, outcome=next(outcomes))
    )
    lab.cache = tmp_path / "compiled"
    half = lab.cache / "pz" / "main.so"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"ELF")

    lab.time(Recipe())
    assert half.exists()
    lab.time(Recipe())
    assert list(lab.cache.iterdir()) == []
