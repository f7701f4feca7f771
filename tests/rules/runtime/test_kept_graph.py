import pytest

from flatout.rules.runtime.kept_graph import check
from tests.rules.memory_facts import story
from tests.techniques.facts import machine, profile


def test_a_variable_that_keeps_graphs_is_named():
    keeping = story(kept_graph_nodes_per_step=120.0, kept_graph_names=("running",))

    finding = check(profile(memory=keeping), machine())

    assert finding.because == (
        "`running` keeps the autograd graph of every step: 120 nodes (91.4 KiB of the "
        "host's memory) more after each of 8 steps"
    )
    assert finding.of == "memory"
    assert 0 < finding.share < 0.01


@pytest.mark.parametrize(
    "memory",
    [None, story(), story(kept_graph_nodes_per_step=120.0), story(kept_graph_names=("loss",))],
    ids=["not measured", "steady", "nobody holds them", "no growth"],
)
def test_it_is_silent_without_growth_or_a_name(memory):
    assert check(profile(memory=memory), machine()) is None
