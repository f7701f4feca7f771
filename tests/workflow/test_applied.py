"""What became of a recipe's techniques, from what each process of a training wrote."""

import pytest

from flatout.records.recipe import Choice, Recipe
from flatout.records.trial_result import RankPlace, Segment, TrialResult
from flatout.tuning.trials import applied_of

ONE = (Segment(),)
RECIPE = Recipe(choices=(Choice(technique="ram_cache"), Choice(technique="fused_optimizer")))
WORKS = {"ram_cache": ("applied", ""), "fused_optimizer": ("applied", "")}


def process(status, rank=None, segments=ONE):
    ranks = None if rank is None else RankPlace(rank=rank, world_size=2)
    return TrialResult(status=status, ranks=ranks, segments=segments)


def found(*results):
    return [(item.technique, item.status, item.why) for item in applied_of(RECIPE, results)]


def test_techniques_that_act_on_every_rank_were_applied():
    both = found(process(WORKS, 1), process(WORKS, 0))

    assert both == [("ram_cache", "applied", ""), ("fused_optimizer", "applied", "")]


@pytest.mark.parametrize("status", ["not_applicable", "failed"])
def test_a_technique_that_any_rank_refuses_was_not_applied(status):
    broken = WORKS | {"ram_cache": (status, "no room")}

    both = found(process(broken, 1), process(WORKS, 0))

    assert both == [("ram_cache", status, "rank 1: no room"), ("fused_optimizer", "applied", "")]


def test_the_first_rank_speaks_for_itself():
    broken = WORKS | {"ram_cache": ("not_applicable", "no room")}
    other = WORKS | {"ram_cache": ("not_applicable", "another reason")}

    assert found(process(broken, 0), process(other, 1))[0][2] == "no room"


def test_a_process_that_is_no_rank_or_does_not_train_has_no_say():
    broken = WORKS | {"ram_cache": ("not_applicable", "no room")}

    helped = found(process(WORKS, 0), process(broken, 1, segments=()), process(broken))

    assert helped[0] == ("ram_cache", "applied", "")


def test_a_hook_point_that_another_rank_never_reaches_is_no_refusal():
    assert found(process(WORKS, 0), process({}, 1))[0][1] == "applied"
    assert found(process({}, 0))[0][1] == "unseen"
    assert found() == []
