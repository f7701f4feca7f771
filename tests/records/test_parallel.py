"""The table `[parallel]`: what is refused, and what else is made of it."""

import math

import pytest

from flatout.records.errors import UserError
from flatout.records.json_records import from_plain, to_plain
from flatout.records.parallel import (
    SCHEDULES,
    ParallelSpec,
    check_world,
    microbatches_for,
    refit,
    spec_from_toml,
)
from flatout.records.recipe import Recipe
from flatout.records.trial_spec import TrialSpec
from flatout.workflow.recipe_files import read_recipe, write_recipe

SPEC = ParallelSpec(
    pp=2, tp=2, dp_shard=2, zero=2, schedule="gpipe", tp_plan={"layers.*.w1": "colwise"}
)


def test_a_recipe_file_keeps_it(tmp_path):
    path = tmp_path / "recipe.toml"

    write_recipe(Recipe(parallel=SPEC), path)

    assert read_recipe(path, may_spread=True).parallel == SPEC
    with pytest.raises(UserError, match="only 'flatout run' goes by"):
        read_recipe(path)


def test_a_recipe_without_it_has_none(tmp_path):
    path = tmp_path / "recipe.toml"

    write_recipe(Recipe(), path)

    assert read_recipe(path).parallel is None
    assert "parallel" not in path.read_text()


def test_the_training_process_reads_it_back():
    plain = to_plain(TrialSpec(recipe=Recipe(parallel=SPEC)))

    assert from_plain(TrialSpec, plain).recipe.parallel == SPEC


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"tp": 0}, "parallel.tp=0 has to be a whole number >= 1"),
        ({"dp_replicate": 2, "zero": 4}, "zero=4: give 0, 1, 2 or 3"),
        ({"dp_shard": 2}, "shards nothing with zero=0"),
        ({"zero": 2}, "has nothing to shard over"),
        ({"dp_shard": 2, "zero": 2, "offload": True}, "what zero=3 shards: give zero=3"),
        ({"dp_shard": 2, "tp": 2, "zero": 1}, "cannot shard what tp split: give zero=2"),
        ({"dp_shard": 2, "pp": 2, "zero": 1}, "cannot shard what pp split: give zero=2"),
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 1}, "give dp_replicate=1, or zero=2"),
        ({"sequence_parallel": True}, "sequence_parallel needs tp > 1"),
        ({"loss_parallel": True}, "loss_parallel needs tp > 1"),
        ({"pp": 4, "microbatches": 2}, "needs microbatches >= 4"),
        ({"pp": 2, "schedule": "interleaved", "microbatches": 5}, "a multiple of pp=2"),
        ({"pp": 2, "tp": 2, "compile": True}, "not proven exact"),
        ({"schedule": "1f1c"}, "did you mean '1f1b'"),
        ({"tp_plan": {"a": "columnwise"}}, "unknown style 'columnwise'; did you mean 'colwise'"),
        ({"tpp": 2}, "did you mean 'parallel.tp'"),
        ({"tp": "two"}, "tp='two' is no int"),
    ],
)
def test_what_would_not_train_right_is_refused_in_one_line(table, words):
    with pytest.raises(UserError) as refused:
        spec_from_toml(table)

    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_number_of_ranks_is_refused():
    with pytest.raises(UserError, match="needs 8 ranks and 4 were asked for: give --ranks 8"):
        check_world(SPEC, 4)


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [
        ({"dp_replicate": 4}, "ddp"),
        ({"dp_shard": 4, "zero": 1}, "ddp"),
        ({"dp_shard": 4, "zero": 3}, "fully_shard"),
        ({"dp_replicate": 2, "tp": 2}, "fully_shard"),
        ({"dp_replicate": 2, "pp": 2}, "fully_shard"),
        ({"tp": 2, "pp": 2}, "none"),
    ],
)
def test_ddp_never_meets_a_model_that_is_split(sizes, engine):
    assert ParallelSpec(**sizes).engine == engine


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("samples", [1, 3, 8, 50])
def test_the_microbatches_that_are_chosen_are_allowed(schedule, samples):
    spec = ParallelSpec(pp=4, schedule=schedule)

    count = microbatches_for(spec, samples)

    assert ParallelSpec(pp=4, schedule=schedule, microbatches=count).microbatches == count


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        ParallelSpec(dp_replicate=2, dp_shard=2, zero=3),
        ParallelSpec(dp_shard=4, zero=1),
        ParallelSpec(pp=2, tp=2, sequence_parallel=True),
    ],
)
def test_it_fits_any_number_of_ranks(spec, ranks):
    found = refit(spec, ranks)

    assert found.world_size == ranks
    assert math.gcd(found.tp, spec.tp) == found.tp
