"""A script that runs out of memory by itself: what grew, and what makes it run."""

import shutil
import sys
from dataclasses import replace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Applied, Outcome, Trial, Workload
from flatout.reporting.tuning.text import render_ablation
from flatout.tuning.ranking import Search
from flatout.tuning.rescue import RescueLadder, make_it_run, rungs_for
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.tune import TuneOptions, tune
from tests.paths import ROOT
from tests.support.answered import Answered
from tests.support.trial_runs import machine as this_machine
from tests.techniques.facts import gpu, machine, profile

HUNGRY = ROOT / "tests/scripts/whole/hungry.py"
ROOM = "225"
"""MiB: two thirds of what the training takes, more than it needs with recomputation."""


def hungry(folder, *arguments):
    shutil.copy(HUNGRY, folder / "hungry.py")
    return Workload(target="hungry.py", arguments=arguments, folder=folder, python=sys.executable)


class FakeLab:
    """Runs nothing: it knows which techniques a script fits with."""

    def __init__(self, needs, refused=()):
        self.needs, self.refused, self.seen = set(needs), refused, []

    def __call__(self, experiment):
        recipe = experiment.recipe
        self.seen.append(recipe.names)
        applied = tuple(
            Applied(
                technique=name,
                status="not_applicable" if name in self.refused else "applied",
                why="no such thing",
            )
            for name in recipe.names
        )
        if self.needs <= set(recipe.names):
            return Trial(recipe=recipe, outcome=Outcome.OK, profile=profile(), applied=applied)
        return Trial(recipe=recipe, outcome=Outcome.OOM, message="out of memory", applied=applied)


def rung(name):
    return Choice(technique=name)


def rescue_of(lab, host=None, numerics=Numerics.PRECISION):
    search = Search(machine=host or machine(), ceiling=numerics)
    first = Trial(recipe=Recipe(), outcome=Outcome.OOM, message="the script ran out of memory")
    runner = Answered(lab, search.machine)
    return runner.drive(make_it_run(runner.history, search, first, lambda _: None))


def test_techniques_are_added_until_it_runs_and_those_it_runs_without_are_taken_back():
    lab = FakeLab({"optimizer_in_backward", "activation_checkpointing"})

    rescue = rescue_of(lab)

    assert rescue.recipe.names == ("optimizer_in_backward", "activation_checkpointing")
    assert lab.seen[0] == ("chunked_cross_entropy",)
    verdicts = {row.choice.technique: row.verdict for row in rescue.rows}
    assert verdicts == {
        "chunked_cross_entropy": Verdict.FAILED,
        "optimizer_in_backward": Verdict.KEPT,
        "activation_checkpointing": Verdict.KEPT,
    }


def test_a_technique_that_cannot_act_is_not_carried_along():
    lab = FakeLab({"activation_checkpointing"}, refused=("optimizer_in_backward",))

    rescue = rescue_of(lab)

    assert rescue.recipe.names == ("activation_checkpointing",)
    row = next(r for r in rescue.rows if r.choice.technique == "optimizer_in_backward")
    assert (row.verdict, row.why) == (Verdict.NOT_APPLICABLE, "no such thing")
    assert all("optimizer_in_backward" not in names for names in lab.seen[2:])


def test_when_nothing_helps_it_says_what_was_tried():
    with pytest.raises(UserError, match=r"still does not run: chunked.*microbatching chunks=8"):
        rescue_of(FakeLab({"no such technique"}))


def test_when_time_runs_out_it_says_so():
    search = Search(machine=machine(), ceiling=Numerics.PRECISION)
    first = Trial(recipe=Recipe(), outcome=Outcome.OOM, message="the script ran out of memory")

    overdrawn = Answered(FakeLab({"x"}), machine(), elapsed_s=60.0)

    with pytest.raises(UserError, match="does not run: nothing; there was no time for more"):
        overdrawn.drive(make_it_run(overdrawn.history, search, first, lambda _: None))


def test_a_gpu_has_the_allocator_first_and_the_promise_has_its_ceiling():
    def names(host, numerics):
        search = Search(machine=host, ceiling=numerics)
        return [choice.technique for choice in rungs_for(search)]

    on_cpu = names(machine(), Numerics.EXACT)
    on_gpu = names(machine(device=gpu()), Numerics.TRAINING)

    assert set(on_cpu) == {"optimizer_in_backward", "activation_checkpointing"}
    assert on_gpu[0] == "expandable_segments"
    assert on_gpu[-2:] == ["eight_bit_optimizer", "adafactor"]


def test_a_step_on_the_host_is_for_devices_after_the_activations_went_there():
    def names(host):
        search = Search(machine=host, ceiling=Numerics.PRECISION)
        return [choice.technique for choice in rungs_for(search)]

    assert names(machine(device=gpu()))[-2:] == ["activation_offload", "offloaded_optimizer"]
    assert "offloaded_optimizer" not in names(machine())


def test_a_large_state_goes_to_the_host_in_place_of_steps_in_backward():
    lab = FakeLab({"offloaded_optimizer"})

    rescue = rescue_of(lab, machine(device=gpu()))

    assert rescue.recipe.names == ("offloaded_optimizer",)
    together = {"optimizer_in_backward", "offloaded_optimizer"}
    assert not any(together <= set(names) for names in lab.seen)


def test_one_optimizer_of_few_bits_takes_the_place_of_the_other():
    lab = FakeLab({"adafactor"})

    rescue = rescue_of(lab, numerics=Numerics.TRAINING)

    assert rescue.recipe.names == ("adafactor",)
    both = {"eight_bit_optimizer", "adafactor"}
    assert not any(both <= set(names) for names in lab.seen)


def test_a_technique_that_cannot_act_takes_nothing_s_place():
    lab = FakeLab({"no such technique"}, refused=("offloaded_optimizer",))
    runner = Answered(lab, machine())
    rescue = RescueLadder(history=runner.history, tell=lambda _: None, may_go_on=lambda: True)

    runner.drive(rescue.climb(iter(map(rung, ("optimizer_in_backward", "offloaded_optimizer")))))

    assert rescue.recipe.names == ("optimizer_in_backward",)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_trial_out_of_memory_says_where_and_what_grew(tmp_path):
    trial = run_trial(
        hungry(tmp_path, "--room", "150"), Recipe(), this_machine(), TrialOptions(limit_s=60.0)
    )

    assert trial.outcome is Outcome.OOM
    assert "in forward of step 1; activations and temporaries grew by" in trial.message
    assert "held were activations and temporaries" in trial.message


@pytest.mark.chaos
@pytest.mark.slow
def test_a_script_that_does_not_fit_is_tuned_on_top_of_what_makes_it_run(tmp_path):
    (tmp_path / "work").mkdir()
    options = TuneOptions(
        out=tmp_path / "out",
        budget_s=240.0,
        only=("activation_checkpointing",),
        accepts_load=True,
        confirm_pairs=1,
    )
    events = []

    found = tune(
        hungry(tmp_path / "work", "--room", ROOM),
        options,
        lambda progress: events.append(progress.event),
        replace(this_machine()),
    )

    assert [label.split()[0] for label in found.needed] == ["activation_checkpointing"]
    assert found.recipe.names == ("activation_checkpointing",)
    assert [row.verdict for row in found.rows][-1] is Verdict.KEPT
    assert any("ran out of memory in " in event for event in events)
    text = render_ablation(found, width=100, details=True)
    assert "It runs now: with activation_checkpointing" in text
