"""What ranks exchange in a second: the probe in real processes, and what is made of its file."""

import json

import pytest

from flatout.parallel import links
from flatout.records.plan import NumberSource


@pytest.mark.slow
def test_two_ranks_measure_their_link(tmp_path):
    path = tmp_path / "links.json"

    links.measure_links(path, 2)

    plain = json.loads(path.read_text())
    found = links.link_from(plain)
    assert (plain["backend"], plain["ranks"]) == ("gloo", 2)
    assert found.source is NumberSource.CALIBRATED
    assert found.bytes_per_s > 1e6
    assert found.all_reduce_s(1e6, 2) > 0
    assert 0 <= found.overlap <= 1


def test_another_file_is_refused():
    with pytest.raises(ValueError, match="remove it to measure again"):
        links.link_from({"schema": "flatout.profile/1"})
