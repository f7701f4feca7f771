"""No verdict comes from a trial that other work on the machine disturbed."""

from dataclasses import dataclass, field, replace

from flatout.records.ablation import Verdict, ablation_from_json
from flatout.reporting.tuning.text import render_ablation
from tests.workflow.test_tune import World, run, verdicts
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

TECHNIQUES = ("bf16_autocast",)


@dataclass
class Shared(World):
    """A machine on which others take cores during chosen trials; those are ten times slower."""

    busy: dict[int, float] = field(default_factory=dict)
    """By number of the trial the part of the cores that others take."""

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        share = self.busy.get(len(self.asked) - 1, 0.0)
        if not share or trial.profile is None or asked[3].probes:
            return trial
        slow = replace(trial.profile.step_ms, median=10 * trial.profile.step_ms.median)
        load = {"foreign_share": share, "delay_share": 0.5, "steal_share": 0.0, "wall_s": 2.0}
        profile = replace(trial.profile, step_ms=slow)
        return replace(trial, profile=profile, details={"load": load})


def busy_for(label):
    """Return a machine that is busy whenever one recipe runs."""

    @dataclass
    class Always(Shared):
        def __call__(self, *asked):
            self.busy = {len(self.asked): 0.48} if asked[1].label == label else {}
            return super().__call__(*asked)

    return Always


def test_a_technique_whose_trials_were_all_disturbed_is_not_measured(tmp_path):
    names = ("bf16_autocast", "fused_optimizer")
    world = busy_for("bf16_autocast")({"bf16_autocast": 0.5, "fused_optimizer": 0.8})

    ablation = run(world, tmp_path, only=names)

    rows = [row for row in ablation.rows if row.choice.technique == "bf16_autocast"]
    assert all(row.verdict is Verdict.INCONCLUSIVE for row in rows)
    assert all(row.comparison is None for row in rows)
    busy = "it was not measured: the machine was busy (other"
    assert all(row.why.startswith(busy) for row in rows)


def test_a_disturbed_pair_is_played_again(tmp_path):
    world = Shared({"bf16_autocast": 0.5}, busy={2: 0.48, 3: 0.48, 4: 0.48})
    waits = []

    ablation = run(world, tmp_path, only=TECHNIQUES, wait=waits.append)

    assert verdicts(ablation) == {"bf16_autocast": Verdict.KEPT}
    assert ablation.recipe.names == TECHNIQUES
    assert abs(ablation.confirmation.ratio - 2) < 0.1
    assert waits  # for quiet, before a disturbed trial was run again


def test_under_an_accepted_load_a_pair_counts_only_if_both_sides_saw_it(tmp_path):
    world = Shared({"bf16_autocast": 0.5}, busy={3: 0.48, 4: 0.48, 5: 0.48})

    ablation = run(world, tmp_path, only=TECHNIQUES, accepts_load=True)

    assert verdicts(ablation) == {"bf16_autocast": Verdict.KEPT}
    assert abs(ablation.confirmation.ratio - 2) < 0.1


def test_one_loaded_pair_is_not_enough_to_give_a_technique_up(tmp_path):
    load = {"foreign_share": 0.5, "delay_share": 0.8, "steal_share": 0.0, "wall_s": 2.0}

    ablation = run(
        World({"bf16_autocast": 1.6}, load=load), tmp_path, only=TECHNIQUES, accepts_load=True
    )

    assert ablation.rows[0].comparison.n >= 3


def test_a_recipe_whose_confirmation_was_disturbed_stays_and_is_called_unconfirmed(
    tmp_path, monkeypatch
):
    both = ("bf16_autocast", "loader_workers")
    world = Shared({"bf16_autocast": 0.5, "loader_workers": 0.5}, noise=0.001)
    original = world.__class__.__call__

    def later(self, *asked):
        kept = sum(" + " in label for label in self.asked) >= 3
        self.busy = {len(self.asked): 0.6} if kept else {}
        return original(self, *asked)

    monkeypatch.setattr(Shared, "__call__", later)

    ablation = run(world, tmp_path, only=both)

    assert ablation.stopped == "machine busy"
    assert {*ablation.recipe.names} == {*both}
    assert ablation.confirmation is None


def test_the_report_begins_with_how_noisy_the_machine_was(tmp_path):
    world = Shared({"bf16_autocast": 0.5}, busy={2: 0.48})

    ablation = ablation_from_json(run(world, tmp_path, only=TECHNIQUES).to_json())

    assert max(ablation.foreign_shares) == 0.48
    (line,) = [x for x in render_ablation(ablation).splitlines() if "of the cores, at most" in x]
    assert line.endswith("others took 0 % of the cores, at most 48 %")


@dataclass
class Slow(Shared):
    """Trials and waiting take their time, on a clock of the world's own."""

    now: float = 0.0

    def __call__(self, *asked):
        trial = replace(super().__call__(*asked), wall_s=6.0)
        self.now += trial.wall_s
        return trial

    def wait(self, most_s):
        self.now += most_s


def tuned_slowly(world, folder, budget_s=130.0):
    names = ("bf16_autocast", "fused_optimizer")
    return run(
        world, folder, only=names, budget_s=budget_s, clock=lambda: world.now, wait=world.wait
    )


def test_time_that_others_took_is_named_where_it_ends_the_tuning(tmp_path):
    factors = {"bf16_autocast": 1.02, "fused_optimizer": 1.02}
    world = Slow(factors, busy=dict.fromkeys((1, 2, 4), 0.48))

    ablation = tuned_slowly(world, tmp_path)

    assert ablation.stopped == "busy budget"
    text = render_ablation(ablation)
    assert "other work kept the machine busy" in " ".join(text.split())
    assert "left no time" not in text


def test_under_an_accepted_load_the_time_that_others_took_is_named_too(tmp_path):
    load = {"foreign_share": 0.9, "delay_share": 0.8, "steal_share": 0.0, "wall_s": 2.0}
    world = Slow({"bf16_autocast": 1.02, "fused_optimizer": 1.02}, load=load)

    ablation = run(
        world,
        tmp_path,
        only=("bf16_autocast", "fused_optimizer"),
        budget_s=30.0,
        clock=lambda: world.now,
        accepts_load=True,
    )

    assert ablation.stopped == "busy budget"
    assert ablation.notes[-1].endswith("and count where both sides saw the same load")


def test_a_budget_that_is_simply_short_is_called_so(tmp_path):
    ablation = tuned_slowly(Slow({"bf16_autocast": 1.02, "fused_optimizer": 1.02}), tmp_path, 50.0)

    assert ablation.stopped == "budget"
