"""Real trainings of two ranks with gloo: all are measured, all stop, the slow one is named."""

from dataclasses import replace

import psutil
import pytest

from flatout.agent.guard.record import find_records
from flatout.records.ablation import LossCheck
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from flatout.techniques.data.loader_workers import most_workers
from flatout.tuning.guard_checker import GuardChecker, of_all_ranks
from flatout.tuning.trial_runner import TrialRunner
from tests.support.programs import workload_of
from tests.support.trial_runs import copy_scripts, machine, profile_of, sound, trial_of

pytestmark = pytest.mark.slow

LAUNCHER = "-m torch.distributed.run"
TORCHRUN = "--standalone --nproc-per-node 2 two_ranks.py"


def torchrun(arguments, techniques=()):
    return trial_of(f"'{LAUNCHER}' {TORCHRUN} {arguments}", techniques)


@pytest.mark.parametrize(
    ("slow", "because"),
    [
        ("data", "data wait takes it"),
        ("forward", "forward takes it"),
        ("backward", "backward takes it"),
        ("batch", "its steps hold 16 samples against 4"),
        ("data --by-hand", "data wait takes it"),
    ],
)
def test_slow_rank_is_named_with_its_cause(slow, because):
    ranks = sound(torchrun(f"--slow {slow}")).ranks

    assert [rank.is_straggler for rank in ranks] == [False, True]
    assert because in ranks[1].because


def test_each_of_two_ranks_is_given_half_of_the_workers():
    both = sound(torchrun("--slow data"))
    here = replace(machine(), usable_cores=8, memory_bytes=2**40)

    assert len(both.ranks) == 2
    assert most_workers(replace(both, ranks=()), here) == 2 * most_workers(both, here)


def test_rank_that_is_ahead_waits_in_collectives():
    first, second = sound(torchrun("--slow forward")).ranks

    assert first.exposed_communication_ms > 10
    assert second.exposed_communication_ms < 0.5 * first.exposed_communication_ms


def test_samples_are_those_of_all_ranks():
    profile = sound(torchrun("--slow batch"))

    assert profile.samples_per_step == 4 + 16
    assert profile.samples_per_s == pytest.approx(sum(r.samples_per_s for r in profile.ranks))


def test_phases_of_a_rank_add_up_to_its_step():
    for rank in sound(torchrun("--slow data")).ranks:
        assert sum(rank.phases_ms.values()) == pytest.approx(rank.step_ms)


def test_ranks_stop_by_themselves_together():
    trial = torchrun("--slow data")

    # `result`: the launcher itself was slow to end, after both ranks had.
    assert trial.details["why"] in {"ended", "result"}
    assert trial.details["exit_code"] in {0, None}
    assert not [note for note in trial.profile.notes if "not in these numbers" in note]


def test_ranks_that_the_script_spawns_are_measured_too():
    profile = profile_of("two_ranks.py --spawn --slow forward")

    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert "forward takes it" in profile.ranks[1].because


@pytest.mark.parametrize(
    "command", [f"'{LAUNCHER}' {TORCHRUN} --crash", "two_ranks.py --spawn --crash"]
)
def test_rank_that_fails_fails_the_trial_with_its_own_traceback(command):
    trial = trial_of(command)

    assert trial.outcome is Outcome.CRASH
    assert trial.message == "ValueError: rank one lost its data"
    assert 'raise ValueError("rank one lost its data")' in trial.traceback
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert [name for name in names if "two_ranks" in name] == []


def test_technique_that_one_rank_refuses_was_not_applied():
    trial = torchrun("--ready", ("ram_cache", "fused_optimizer"))

    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    (applied,) = trial.not_applied
    assert (applied.technique, applied.status) == ("ram_cache", "not_applicable")
    assert applied.why == "rank 1: the samples lie in memory already"


def lab_of(out, target, arguments):
    workload = workload_of(copy_scripts(), target, *arguments.split())
    return TrialRunner(workload=workload, machine=machine(), out=out, limit_s=250.0)


def both_recorded(path):
    records = find_records(path)
    return len(records) == 2 and all(record.losses and record.gradients for record in records)


def test_every_rank_is_judged(tmp_path):
    lab = lab_of(tmp_path, LAUNCHER, TORCHRUN)
    referee = GuardChecker(lab, lambda _: None)

    check = referee.check(Recipe(choices=(Choice(technique="fused_optimizer"),)))

    assert check.passed, check.why
    assert both_recorded(tmp_path / "guard" / "baseline" / "guard.json")


def test_ranks_that_hold_different_parameters_are_judged_each_by_itself(tmp_path):
    launched = TORCHRUN.replace("two_ranks.py", "two_stages.py")
    referee = GuardChecker(lab_of(tmp_path, LAUNCHER, launched), lambda _: None)

    check = referee.check(
        Recipe(choices=(Choice(technique="loader_workers", settings={"num_workers": 1}),))
    )

    assert check.status == "same", check.why


def test_ranks_that_the_script_spawns_leave_their_records_too(tmp_path):
    spec = {"seed": 0, "drops_dropout": True, "drops_autocast": False, "reference": None}

    trial = lab_of(tmp_path, "two_ranks.py", "--spawn").guard(Recipe(), "baseline", spec, 4)

    assert both_recorded(trial.guard_path), trial.message


def test_the_rank_that_fails_decides_and_is_named():
    same, rejected = LossCheck(status="same"), LossCheck(status="rejected", why="other samples")

    assert of_all_ranks([same, rejected], 2, 2).why == "rank 1: other samples"
    assert of_all_ranks([rejected], 1, 1) == rejected
    assert of_all_ranks([same], 2, 1).status == "not_compared"
    assert of_all_ranks([same, same], 2, 2) == same


def test_training_of_one_process_has_no_ranks():
    profile = profile_of(f"'{LAUNCHER}' --standalone --nproc-per-node 1 plain_loop.py")

    assert profile.ranks == ()
