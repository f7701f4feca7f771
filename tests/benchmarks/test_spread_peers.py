import pytest

from benchmarks.bench import Bench
from benchmarks.suites import spread_peers
from flatout.hardware.machine import read_machine


def test_what_is_edited_is_counted_by_line():
    assert spread_peers.edits("flatout") == 0
    assert 5 <= spread_peers.edits("accelerate") < spread_peers.edits("lightning")


@pytest.mark.slow
def test_each_way_trains_to_the_weights_of_one_process(tmp_path):
    record = spread_peers.run(Bench(machine=read_machine(torch=False), work=tmp_path, budget_s=1.0))

    assert record.holds
    assert [row[0] for row in record.table[1:]] == list(spread_peers.COMMANDS)
