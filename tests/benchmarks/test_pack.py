import pytest

from benchmarks.suites import pack
from tests.data.packs import image_folder


@pytest.mark.chaos
@pytest.mark.slow
def test_killed_packs_are_finished_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SMALL_SHARD", 20_000)
    source = image_folder(tmp_path / "photos", 300)
    said = []

    found = pack.kill_often(source, tmp_path / "work", said.append, kills=4)

    assert found["is_same"]
    assert found["kills"] == len(found["each"]) == 4
    assert found["inside"] == sum(kill["drafts"] > 0 for kill in found["each"])


def test_file_shards_that_were_being_written_are_told_from_whole_ones(tmp_path):
    for name in ("shard-00000.bin", "shard-00001.bin.draft77", "index.npy.draft77"):
        (tmp_path / name).touch()

    assert pack.drafts(tmp_path) == {"shard-00001.bin.draft77"}


def test_a_way_is_compared_round_by_round():
    cold = [
        {"way": "a", "round": 1, "bytes": 1e6, "wall_s": 1.0},
        {"way": "b", "round": 0, "bytes": 6e6, "wall_s": 1.0},
        {"way": "a", "round": 0, "bytes": 2e6, "wall_s": 1.0},
        {"way": "b", "round": 1, "bytes": 4e6, "wall_s": 1.0},
    ]

    assert pack.against(cold, "a", "b") == [3.0, 4.0]
