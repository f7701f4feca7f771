"""The cost model against vTrain's published times, where their table is at hand."""

import random
import statistics

import pytest

from benchmarks.suites import parallel_cost as suite
from flatout.records.errors import UserError


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
