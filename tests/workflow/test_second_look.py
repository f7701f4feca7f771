"""Techniques that noise hid at first get another look on top of what was kept since."""

from dataclasses import dataclass, field, replace

from flatout.records.ablation import Verdict
from tests.workflow.test_tune import World, profile, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

TECHNIQUES = ("bf16_autocast", "loader_workers")
SWINGS = (1.45, 1.0, 1.5, 0.9)
"""What other work made of a technique's first trials: slower on average, and nothing is certain."""


@dataclass
class NoisyAtFirst(World):
    """The first trials of one technique alone were disturbed."""

    swings: list[float] = field(default_factory=lambda: list(SWINGS))

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if recipe.names == ("bf16_autocast",) and trial.profile and self.swings:
            step_ms = trial.profile.step_ms.median * self.swings.pop(0)
            return replace(trial, profile=profile(step_ms))
        return trial


def verdicts_of(ablation, name):
    return [row.verdict for row in ablation.rows if row.choice.technique == name]


def tuned(world, tmp_path, monkeypatch, **options):
    # The one that is disturbed comes first.
    monkeypatch.setattr("flatout.tuning.ladder.rank", ranked_by_name)
    return run(world, tmp_path, only=TECHNIQUES, **options)


def ranked_by_name(*facts):
    from flatout.tuning.ranking import rank

    return sorted(rank(*facts), key=lambda found: found.choice.technique)


def test_a_technique_that_was_disturbed_comes_in_on_top_of_the_next_one(tmp_path, monkeypatch):
    world = NoisyAtFirst({"loader_workers": 0.6, "bf16_autocast": 0.85})

    ablation = tuned(world, tmp_path, monkeypatch)

    assert verdicts_of(ablation, "bf16_autocast")[:2] == [Verdict.INCONCLUSIVE, Verdict.KEPT]
    assert set(ablation.recipe.names) == set(TECHNIQUES)


def test_one_that_does_nothing_is_looked_at_once_more_and_left_out(tmp_path, monkeypatch):
    ablation = tuned(
        NoisyAtFirst({"loader_workers": 0.6}, swings=[1.25, 0.85, 1.3, 0.8]), tmp_path, monkeypatch
    )

    found = verdicts_of(ablation, "bf16_autocast")
    assert len(found) == 2
    assert Verdict.KEPT not in found


def test_where_nothing_was_kept_since_there_is_no_second_look(tmp_path, monkeypatch):
    ablation = tuned(NoisyAtFirst({}), tmp_path, monkeypatch)

    assert len(verdicts_of(ablation, "bf16_autocast")) == 1
