"""The cost model against vTrain's published times, where their table is at hand."""

import random
import statistics

import pytest

from benchmarks.suites import parallel_cost as suite
from flatout.parallel.cost import DeviceCosts, StepWork, Work, step_cost
from flatout.records.errors import UserError
from flatout.records.plan import NumberSource


@pytest.fixture(scope="module")
def table():
    try:
        return suite.read_table(suite.folder())
    except UserError as error:
        pytest.skip(str(error))


def test_the_designed_calibration_reaches_its_bars_on_rows_it_has_not_seen(table):
    designed = [row for row in table.single if suite.is_designed(row)]

    _, found = table.tested(designed)

    assert (len(designed), found.rows, found.scenarios) == (80, 1360, 136)
    assert found.mean_error <= suite.MOST_ERROR
    assert found.regret <= suite.MOST_REGRET
    assert found.top_three <= suite.MOST_TOP_THREE


def test_it_chooses_better_than_the_rules_of_thumb_and_chance(table):
    others = [row for row in table.single if not suite.is_designed(row)]
    fewest = suite.RULES["rule: fewest TP x PP, then the biggest microbatch"]

    by_rule = suite.score(others, suite.ranks_by(others, fewest))

    assert by_rule.regret > 2 * suite.MOST_REGRET
    assert suite.random_plan_regret(others) > 0.5


@pytest.mark.slow
def test_twenty_random_rows_are_a_calibration_too(table):
    samples = [
        random.Random(seed).sample(list(table.single), suite.RANDOM_ROWS)
        for seed in range(suite.SEEDS)
    ]

    regrets = [table.tested(sample)[1].regret for sample in samples]

    assert statistics.median(regrets) <= suite.MOST_RANDOM_REGRET


def test_a_missing_table_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(suite.VARIABLE, str(tmp_path))

    with pytest.raises(UserError, match=suite.VARIABLE):
        suite.folder()


def test_a_fit_finds_the_constants_that_made_the_steps():
    made = DeviceCosts(s_per_flop=2e-3, s_per_byte=1e-3, s_per_start=0.05, step_s=0.01)
    steps = [
        StepWork(stages=(Work(flops=f * b, moved_bytes=g * b, starts=depth),) * 2, microbatches=4)
        for b in (1, 2, 4, 8)
        for f, g, depth in ((10, 5, 2), (20, 30, 3), (15, 2, 6))
    ]

    found = suite.fit(steps, [step_cost(step, made).total_s for step in steps])

    for name in ("s_per_flop", "s_per_byte", "s_per_start", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=1e-3)
    assert found.source is NumberSource.CALIBRATED


def test_too_few_measured_steps_are_refused():
    with pytest.raises(ValueError, match="measure more microbatch sizes"):
        suite.fit([StepWork(stages=(Work(flops=1.0),))], [1.0])
