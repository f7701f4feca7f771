"""A predicted run opens in torch's own viewer; a recorded one is played back, never executed."""

import os
import pickle

import pytest

from benchmarks.recorded_snapshot import read_snapshot, replay_recorded
from flatout.planner.allocator_settings import parse_settings
from flatout.planner.replay import replay, snapshot_of, write_snapshot
from flatout.records.errors import UserError
from tests.support.toy import toy_stream

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:32")


@pytest.mark.parametrize("text", SETTINGS)
def test_torch_s_own_viewer_reads_a_predicted_snapshot(tmp_path, text):
    from torch.cuda import _memory_viz

    path = tmp_path / "predicted.pickle"
    write_snapshot(snapshot_of(toy_stream(), parse_settings(text)), path)
    with path.open("rb") as stream:
        loaded = pickle.load(stream)

    assert "cudaMalloc" in _memory_viz.trace(loaded) or "expandable" in text
    assert "TOTAL MEM" in _memory_viz.trace(loaded)
    assert "segments" in _memory_viz.segsum(loaded).lower()
    assert "aten.mm" in _memory_viz.memory(loaded, format_flamegraph=lambda lines: lines)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(loaded)
    assert "Allocator State History" in _memory_viz.segment_plot(loaded)


@pytest.mark.parametrize("text", SETTINGS)
def test_a_snapshot_holds_what_is_alive_at_the_end(text):
    stream = toy_stream()

    found = snapshot_of(stream, parse_settings(text))

    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    asked = sum(b["requested_size"] for b in blocks if b["state"] == "active_allocated")
    assert asked == stream.alive()[-1]
    for segment in found["segments"]:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


@pytest.mark.parametrize("text", SETTINGS)
def test_a_recorded_run_is_replayed_to_the_same_segments(tmp_path, text):
    chosen = parse_settings(text)
    stream = toy_stream(batch=9)
    path = tmp_path / "recorded.pickle"
    write_snapshot(snapshot_of(stream, chosen), path)

    found = replay_recorded(read_snapshot(path), chosen)

    assert found.is_exact
    assert found.error == 0
    assert found.simulated_reserved == replay(stream, chosen).peak_reserved
    assert found.requests == sum(e.born for e in stream.events)
    assert found.left_out == 0


def test_another_allocator_than_the_recorded_one_differs():
    recorded = snapshot_of(toy_stream(batch=9), parse_settings(""))

    found = replay_recorded(recorded, parse_settings("expandable_segments:True"))

    assert not found.is_exact
    assert found.first_difference is not None
    assert found.error < 0


def test_a_run_that_gave_memory_back_is_followed():
    stream = toy_stream(16)
    capacity = replay(stream).peak_allocated + 12 * 2**20
    recorded = snapshot_of(stream, parse_settings(""), capacity)
    assert any(e["action"] == "segment_free" for e in recorded["device_traces"][0])

    found = replay_recorded(recorded, parse_settings(""))

    assert found.is_exact
    assert found.error == 0


class Hostile:
    def __reduce__(self):
        return os.system, ("echo owned",)


@pytest.mark.parametrize("content", [Hostile(), {"device_traces": Hostile()}])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, content):
    path = tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps(content))

    with pytest.raises(UserError, match="wants to load"):
        read_snapshot(path)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_what_is_no_snapshot_is_refused(tmp_path, content):
    path = tmp_path / "other.pickle"
    path.write_bytes(content)

    with pytest.raises(UserError, match="no memory snapshot"):
        read_snapshot(path)
