"""The tuner's decisions, on trials made up from a known truth."""

import math
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from flatout.records.ablation import LossCheck, Verdict, ablation_from_json
from flatout.records.machine import Device, Machine
from flatout.records.messages import words
from flatout.records.profile import (
    PeakBytes,
    Spread,
)
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import TECHNIQUE_NOTE, Applied, Outcome, Trial, Workload
from flatout.reporting.tuning.verdict import verdict_of
from flatout.tuning.policy import _drop_one
from flatout.workflow.tune import BaselineFailedError, TuneOptions, tune
from tests.techniques import facts

MACHINE = Machine(
    device=Device(kind="cpu", name="test cpu", memory_bytes=2**34),
    logical_cores=2,
    usable_cores=2,
    physical_cores=2,
    memory_bytes=2**34,
    shm_free_bytes=2**33,
    cpu_features=frozenset({"avx512_bf16"}),
    torch_version="2.13.0",
)
WORKLOAD = Workload(target="train.py", python="python")
PHASES = {"data_wait": 40.0, "forward": 20.0, "backward": 30.0, "optimizer": 8.0, "other": 2.0}


@dataclass
class World:
    """Runs trials in which every technique has a known true factor of the step time."""

    factors: dict[str, float]
    noise: float = 0.01
    broken: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Techniques that cannot be applied, with the status that the process reports."""
    seed: int = 0
    asked: list[str] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    load: dict[str, float] = field(default_factory=dict)
    interrupt_after: int = 10**9
    said: dict[str, str] = field(default_factory=dict)
    """What techniques that act say at their end."""

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def __call__(self, workload, recipe, machine, options):
        if options.probes:  # a look at the samples: nothing is compared with it
            self.looked.append(recipe.label)
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no samples", wall_s=1)
        self.asked.append(recipe.label)
        if len(self.asked) > self.interrupt_after:
            raise KeyboardInterrupt
        if any(name in self.broken for name in recipe.names):
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="RuntimeError: no", wall_s=1)
        for name in recipe.names:
            if name in self.refused:
                applied = Applied(technique=name, status=self.refused[name], why="no such\nthing")
                return Trial(recipe=recipe, outcome=Outcome.REFUSED, applied=(applied,), wall_s=0.1)
        factor = math.prod(self.factors.get(name, 1.0) for name in recipe.names)
        step_ms = 100.0 * factor * math.exp(self.random.gauss(0, self.noise))
        return Trial(
            recipe=recipe,
            outcome=Outcome.OK,
            profile=replace(
                profile(step_ms),
                notes=tuple(
                    words(TECHNIQUE_NOTE, technique=name, why=self.said[name])
                    for name in recipe.names
                    if name in self.said
                ),
            ),
            applied=tuple(Applied(technique=n, status="applied") for n in recipe.names),
            wall_s=1.0,
            details={"load": self.load},
        )


def profile(step_ms):
    scale = step_ms / 100.0
    return facts.profile(
        step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=8),
        phases_ms={name: ms * scale for name, ms in PHASES.items()} | {"h2d": 0.0},
        samples_per_s=1e3 * 16 / step_ms,
        device_name="test cpu",
        device_busy_share=0.6,
        peak_bytes=PeakBytes(device=2**30),
        warmup_ms=500.0,
        cpu_threads=2,
        loaders=(facts.loader(address="train.py:main#0", batch_size=16, fetch_ms=40.0 * scale),),
        models=(facts.model(parameters=10**6, parameter_bytes=4 * 10**6),),
        optimizers=(facts.optimizer(parameters=10**6, parameter_tensors=60),),
    )


@pytest.fixture(autouse=True)
def guard_that_passes(monkeypatch):
    """The guard has tests of its own; here every recipe trains the same thing."""
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", lambda *_: LossCheck(status="within")
    )


def run(world, tmp_path, tell=lambda _: None, **options):
    given = {"budget_s": 600.0, "runner": world, "wait": lambda _most_s: None} | options
    return tune(WORKLOAD, TuneOptions(out=tmp_path, **given), tell, MACHINE)


def no_bundle(*_):
    """Play nothing as one."""
    return False
    yield


def verdicts(ablation):
    return {row.choice.technique: row.verdict for row in ablation.rows if row.stage == "add"}


def test_techniques_that_help_are_kept_and_confirmed(tmp_path):
    world = World({"bf16_autocast": 0.6, "loader_workers": 0.6})

    ablation = run(world, tmp_path)

    assert set(ablation.recipe.names) == {"bf16_autocast", "loader_workers"}
    assert ablation.confirmation.ratio == pytest.approx(1 / 0.36, rel=0.05)
    assert ablation.confirmation.n >= 3
    assert ablation.recipe.training_loaders == ("train.py:main#0",)


def test_techniques_that_do_nothing_are_not_kept(tmp_path):
    ablation = run(World({}), tmp_path)

    assert ablation.recipe.choices == ()
    assert ablation.confirmation is None
    assert Verdict.KEPT not in verdicts(ablation).values()


def test_techniques_that_hurt_are_called_worse(tmp_path):
    ablation = run(World({"bf16_autocast": 1.2}), tmp_path)

    assert verdicts(ablation)["bf16_autocast"] is Verdict.WORSE


def test_techniques_that_are_plainly_no_gain_are_given_up_after_one_pair(tmp_path):
    ablation = run(World({"bf16_autocast": 1.5}), tmp_path, only=("bf16_autocast",))

    row = ablation.rows[0]
    assert (row.verdict, row.comparison.n) == (Verdict.NO_EFFECT, 1)
    assert verdict_of(row).code == "verdict.no_gain"


def test_faster_recipe_that_trains_something_else_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check",
        lambda *_: LossCheck(status="rejected", why="gradient of layer 3 differs by 0.67"),
    )

    ablation = run(World({"bf16_autocast": 0.5}), tmp_path, only=("bf16_autocast",))

    assert verdicts(ablation) == {"bf16_autocast": Verdict.REJECTED}
    assert "layer 3" in ablation.rows[0].why
    assert ablation.recipe.choices == ()


def test_recipe_that_could_not_be_compared_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", lambda *_: LossCheck(status="not_compared")
    )

    ablation = run(World({"bf16_autocast": 0.5}), tmp_path, only=("bf16_autocast",))

    assert ablation.recipe.choices == ()


@pytest.mark.chaos
def test_technique_that_crashes_is_failed_and_the_others_go_on(tmp_path):
    world = World({"loader_workers": 0.6}, broken=("bf16_autocast",))

    ablation = run(world, tmp_path)

    assert verdicts(ablation)["bf16_autocast"] is Verdict.FAILED
    assert ablation.recipe.names == ("loader_workers",)


def test_one_pair_whose_noise_is_not_known_makes_no_other_technique_hopeless(tmp_path):
    world = World({"bf16_autocast": 1.6, "fused_optimizer": 0.8})

    ablation = run(world, tmp_path, only=("bf16_autocast", "fused_optimizer"))

    assert ablation.rows[0].choice.technique == "bf16_autocast"
    assert ablation.rows[0].comparison.n == 1
    assert ablation.recipe.names == ("fused_optimizer",)


def test_technique_that_finds_nothing_to_act_on_is_not_applicable_and_costs_one_trial(tmp_path):
    world = World({}, refused={"bf16_autocast": "not_applicable"})

    ablation = run(world, tmp_path, only=("bf16_autocast",))

    assert verdicts(ablation) == {"bf16_autocast": Verdict.NOT_APPLICABLE}
    assert ablation.rows[0].why == "no such"
    assert world.asked == ["baseline", "baseline", "bf16_autocast"]
    assert ablation_from_json(ablation.to_json()).rows[0].verdict is Verdict.NOT_APPLICABLE


def test_the_samples_are_looked_at_where_the_step_waits_and_a_data_technique_may_be_tried(tmp_path):
    about_data, about_maths = World({}), World({})

    run(about_data, tmp_path / "data", only=("ram_cache",))
    run(about_maths, tmp_path / "maths", only=("bf16_autocast",))

    assert about_data.looked == ["baseline"] * 2  # at how batches are made, and at samples
    assert about_maths.looked == []


def test_technique_that_breaks_while_it_is_applied_is_failed(tmp_path):
    world = World({}, refused={"bf16_autocast": "failed"})

    ablation = run(world, tmp_path, only=("bf16_autocast",))

    assert verdicts(ablation) == {"bf16_autocast": Verdict.FAILED}


def test_numerics_ceiling_is_respected(tmp_path):
    world = World({"bf16_autocast": 0.5})

    ablation = run(world, tmp_path, numerics=Numerics.ROUNDING)

    assert "bf16_autocast" not in verdicts(ablation)
    assert not any("bf16" in label for label in world.asked)


def test_only_and_skip_choose_techniques(tmp_path):
    ablation = run(World({}), tmp_path, skip=("bf16_autocast",), only=("bf16_autocast",))

    assert ablation.rows == ()


def test_pairs_are_interleaved_in_alternating_order(tmp_path):
    world = World({"bf16_autocast": 0.5})

    run(world, tmp_path, only=("bf16_autocast",))

    assert world.asked[1:5] == ["baseline", "bf16_autocast", "bf16_autocast", "baseline"]


@pytest.mark.chaos
def test_ctrl_c_ends_with_the_table_so_far(tmp_path):
    world = World({"bf16_autocast": 0.6, "loader_workers": 0.6}, interrupt_after=9)

    ablation = run(world, tmp_path)

    assert ablation.stopped == "interrupted"
    assert len(ablation.rows) >= 1


@pytest.mark.chaos
def test_resumed_tuning_repeats_no_trial_and_reaches_the_same_end(tmp_path):
    factors = {"bf16_autocast": 0.6, "loader_workers": 0.6}
    run(World(factors, interrupt_after=9), tmp_path)
    resumed = World(factors, seed=1)

    ablation = run(resumed, tmp_path, resume=True)

    whole = run(World(factors), tmp_path / "whole")
    assert ablation.recipe.names == whole.recipe.names
    assert ablation.stopped == "finished"
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    trials = [line for line in lines if '"trial"' in line]
    looks = 4  # at operators, samples, numbers of workers, and a screen: all recorded
    assert len(trials) == looks + 9 + len(resumed.asked)


def test_each_run_is_counted_in_the_progress_together_with_those_that_were_replayed(tmp_path):
    heard, again = [], []
    first = World({"bf16_autocast": 0.6}, interrupt_after=5)
    run(first, tmp_path, heard.append, only=("bf16_autocast",))

    run(World({"bf16_autocast": 0.6}), tmp_path, again.append, only=("bf16_autocast",), resume=True)

    counts = [now.num_runs for now in heard]
    assert counts == sorted(counts)
    assert set(counts) >= {0, 1, 2, 3, 4, 5}
    assert again[0].num_runs == 0
    assert again[-1].num_runs > counts[-1]
    assert all(now.elapsed_s + now.left_s == pytest.approx(600.0) for now in heard)


@pytest.mark.chaos
def test_busy_machine_ends_the_tuning_unless_accepted(tmp_path):
    load = {"foreign_share": 0.5, "delay_share": 0.8, "steal_share": 0.0, "wall_s": 2.0}

    refused = run(World({"bf16_autocast": 0.5}, load=load), tmp_path / "a")
    accepted = run(World({"bf16_autocast": 0.5}, load=load), tmp_path / "b", accepts_load=True)

    assert refused.stopped == "machine busy"
    assert refused.recipe.choices == ()
    assert accepted.recipe.names == ("bf16_autocast",)
    assert any("disturbed" in note for note in accepted.notes)


@pytest.mark.chaos
def test_accepted_load_that_stays_is_not_waited_for(tmp_path):
    load = {"foreign_share": 0.5, "delay_share": 0.8, "steal_share": 0.0, "wall_s": 2.0}
    world = World({"bf16_autocast": 1.6}, load=load)

    run(world, tmp_path, only=("bf16_autocast",), accepts_load=True)

    # The first trial once more, then three pairs: none of theirs is repeated.
    assert world.asked.count("baseline") == 2 + 3
    assert world.asked.count("bf16_autocast") == 3


@pytest.mark.chaos
def test_budget_that_is_spent_ends_the_ladder(tmp_path):
    ablation = run(World({"bf16_autocast": 0.6}), tmp_path, budget_s=0.001)

    assert ablation.stopped == "budget"
    assert any("no time" in note for note in ablation.notes)


@pytest.mark.chaos
def test_script_that_fails_by_itself_is_no_tuning(tmp_path):
    def crashes(workload, recipe, machine, options):
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message="RuntimeError: no data")

    with pytest.raises(BaselineFailedError, match="no data"):
        run(crashes, tmp_path)


class Compiling(World):
    """Takes longer at the start of the first trial of a recipe, and leaves what it compiled."""

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if recipe.choices:
            (options.cache / "compiled.so").touch()
        if recipe.choices and self.asked.count(recipe.label) == 1:
            return replace(trial, profile=replace(trial.profile, warmup_ms=20_500.0))
        return trial


def test_compile_cost_comes_with_its_break_even(tmp_path):
    ablation = run(Compiling({"bf16_autocast": 0.5}), tmp_path, only=("bf16_autocast",))

    row = ablation.rows[0]
    assert row.startup_s == pytest.approx(20.0)
    assert row.break_even_steps == pytest.approx(20.0 / 0.05, rel=0.1)


SMALL = {"bf16_autocast": 0.95, "loader_workers": 0.95, "torch_compile": 0.95}
"""Gains that four pairs at 4 % of noise do not show one at a time."""


def test_small_gains_that_noise_hides_are_kept_together(tmp_path):
    world = World(SMALL, noise=0.04, seed=3)

    ablation = run(world, tmp_path, only=tuple(SMALL), budget_s=6000.0)

    row = next(row for row in ablation.rows if row.together_with)
    assert row.verdict is Verdict.KEPT
    assert {row.choice.technique, *row.together_with} <= set(ablation.recipe.names)
    whys = {r.choice.technique: r.why for r in ablation.rows if "came in together" in r.why}
    assert set(whys) == set(row.together_with)
    own = [r for r in ablation.rows if r.stage == "add" and not r.together_with]
    alone = {r.choice.technique: r.predicted_ratio for r in own}
    names = (row.choice.technique, *row.together_with)
    assert row.predicted_ratio == pytest.approx(math.prod(alone[name] for name in names))


def test_each_technique_that_came_in_together_is_left_out_once(tmp_path):
    world = World(SMALL, noise=0.04, seed=3)

    ablation = run(world, tmp_path, only=tuple(SMALL), budget_s=6000.0)

    dropped = {row.choice.technique for row in ablation.rows if row.stage == "drop"}
    assert dropped >= set(ablation.recipe.names)
    assert len(dropped) > 1


def test_what_the_guard_rejects_is_taken_out_and_the_rest_is_played_together(tmp_path, monkeypatch):
    def check(_, recipe):
        is_wrong = "torch_compile" in recipe.names
        return LossCheck(status="rejected" if is_wrong else "within", why="gradients differ")

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    world = World(SMALL, noise=0.04, seed=3)

    ablation = run(world, tmp_path, only=tuple(SMALL), budget_s=6000.0)

    joint = [{r.choice.technique, *r.together_with} for r in ablation.rows if r.together_with]
    assert joint == [{*SMALL}, {*SMALL} - {"torch_compile"}]


def test_a_row_of_what_was_left_out_again_has_the_readings_of_its_own_trials(tmp_path):
    ablation = run(World(SMALL, noise=0.04, seed=3), tmp_path, only=tuple(SMALL), budget_s=6000.0)

    for row in (row for row in ablation.rows if row.stage == "drop"):
        factor = math.prod(SMALL[name] for name in row.on_top_of)
        assert row.samples_per_s == pytest.approx(160 / factor, rel=0.15)
        assert row.bound_ratio is None


def test_the_only_technique_above_what_a_script_needs_is_left_out_by_the_confirmation_alone():
    choices = [Choice(technique=name) for name in ("microbatching", "bf16_autocast")]
    floor, recipe = Recipe(choices=(choices[0],)), Recipe(choices=tuple(choices))
    state = SimpleNamespace(rows=[], recipe=recipe, floor=floor, passengers=set())

    assert list(_drop_one(state)) == []  # asks for no trial, nor for the technique's row


def test_technique_that_stays_open_gets_all_its_pairs(tmp_path):
    world = World({"bf16_autocast": 0.94}, noise=0.04, seed=1)

    ablation = run(world, tmp_path, only=("bf16_autocast",), budget_s=6000.0)

    rows = [row for row in ablation.rows if row.stage == "add"]
    assert len(rows) == 1
    assert rows[0].comparison.n > 4


def test_with_time_for_one_more_the_open_techniques_go_together_before_a_lesser_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("flatout.tuning.ladder.try_bundle", no_bundle)
    factors = {"bf16_autocast": 0.93, "torch_compile": 0.93, "fused_optimizer": 0.99}
    world = World(factors, noise=0.05, seed=3)

    # Trials last a second and nothing passes: ten seconds stay enough for one, never for two.
    ablation = run(world, tmp_path, only=tuple(factors), budget_s=10.0)

    assert any(row.together_with for row in ablation.rows)
    assert "not tried, no time: fused_optimizer" in " ".join(ablation.notes)


def test_what_the_techniques_of_the_recipe_say_at_their_end_is_noted(tmp_path):
    said = {"bf16_autocast": "2 of 3 modules replaced", "fused_optimizer": "nothing"}
    world = World({"bf16_autocast": 0.6, "fused_optimizer": 1.5}, said=said)

    ablation = run(world, tmp_path, only=tuple(said))

    assert ablation.recipe.names == ("bf16_autocast",)
    assert [note for note in ablation.notes if "found at its end" in note] == [
        "what bf16_autocast found at its end: 2 of 3 modules replaced"
    ]
