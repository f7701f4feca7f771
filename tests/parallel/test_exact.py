"""Every strategy and hybrid trains what one process trains, in double precision."""

import pytest

from tests.parallel.ranks import run_cases
from tests.parallel.specs import SPECS, world_of

MODULE = "tests.parallel.exact_cases"
OTHERS = ("uneven_batches", "tied_words", "learning_rates", "own_plan")
GRADIENT, PARAMETER = 1e-14, 1e-12
REFUSALS = {
    "heads": "does not divide",
    "ddp_in_model": "wrapped in DistributedDataParallel",
    "replicate_in_model": "the composable replicate",
    "zero_redundancy": "ZeroRedundancyOptimizer",
    "branches": "cannot be split",
    "too_few_blocks": "pieces and 4 stages",
    "tied_stages": "one parameter in two stages",
    "batch_norm": "use GroupNorm",
    "fused": "no plan can be derived for FusedBlock",
    "wrong_plan": "gives other numbers with the plan that is yours",
    "unknown_module": "did you mean",
    "model_unused": "never calls model(...)",
}
"""What is said of each training that cannot be spread so."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that gives a case's result: all of one number of ranks run together."""
    found = {}

    def of(name):
        world = world_of(name) if name in SPECS else 2
        if world not in found:
            names = [one for one in SPECS if world_of(one) == world]
            extra = (*OTHERS, "memory", "communication", "refused") if world == 2 else ()
            folder = tmp_path_factory.mktemp(f"ranks{world}")
            found[world] = run_cases(MODULE, world, folder, [*names, *extra])
        return found[world][name]

    return of


@pytest.mark.parametrize("name", [*SPECS, *OTHERS])
def test_it_trains_what_one_process_trains(results, name):
    found = results(name)

    assert "error" not in found, found
    assert found["gradient"] <= GRADIENT
    assert found["parameter"] <= PARAMETER
    assert found["loss"] <= PARAMETER
    assert found["names"] == found["expected_names"]


def test_a_rank_holds_its_share_alone(results):
    shares = results("memory")

    assert shares["zero3"] == pytest.approx(0.5, abs=0.01)
    assert 0.3 < shares["pp"] < 0.7


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_microbatches_reduce_gradients_once(results, engine):
    whole, in_parts = results("communication")[engine]

    assert whole == in_parts > 0


@pytest.mark.parametrize(("name", "words"), REFUSALS.items())
def test_what_cannot_be_spread_is_refused_in_one_line(results, name, words):
    said = results("refused")[name]

    assert words in said
    assert "\n" not in said


def test_every_refusal_is_looked_at(results):
    assert results("refused").keys() == REFUSALS.keys()
