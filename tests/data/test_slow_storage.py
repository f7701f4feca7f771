"""On slow storage a packed store saves requests: how much time that is, by a storage's arithmetic.

Nothing here sleeps and no clock is looked at: see `tests/data/slow_storage.py`.
"""

import sys

import pytest

import flatout.data
from flatout.data.sampler import BlockSampler, OrderOptions, permutation
from flatout.data.sources import open_source
from tests.data.packs import file_bytes, packed
from tests.data.slow_storage import SlowStorage, put_before

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reading ahead is asked of Linux here"
)
COUNT = 8192
"""Two windows of block order."""
STORAGES = {
    "a share in the network": {"trip_s": 0.002, "bytes_per_s": 20e6},
    "a disk in a data centre": {"trip_s": 0.010, "bytes_per_s": 100e6},
}
MIN_GAIN = 2.5


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Write many image files, each of its own content behind the picture, and pack them."""
    root = tmp_path_factory.mktemp("photos")
    (root / "photos").mkdir()
    picture = file_bytes(0, "png", size=(56, 56))
    for number in range(COUNT):
        tail = f"tEXt{number:06d}".encode()
        whole = picture[:-12] + len(tail[4:]).to_bytes(4, "big") + tail + bytes(4) + picture[-12:]
        (root / f"photos/{number:05d}.png").write_bytes(whole)
    packed(root / "photos", root / "a", shard_bytes=4 << 20)
    return open_source(str(root / "photos"), work=root / "work"), root / "a"


def shuffled(count):
    return permutation(count, seed=1, epoch=0).tolist()


def read_store(monkeypatch, folder, setting, order):
    """Read every sample of a store in an order; return the storage it was read from."""
    storage = SlowStorage(**setting)
    data = flatout.data.open(folder, decode="bytes")
    with monkeypatch.context() as patched:
        put_before(patched, storage, store=data.store)
        found = {data[number] for number in order(data)}
    assert len(found) == COUNT
    return storage


def in_blocks(data):
    return BlockSampler(data.store, OrderOptions(block=16), is_reordered=data.is_reordered)


def straight_on(data):
    return range(len(data))


def at_random(data):
    return shuffled(len(data))


@pytest.mark.parametrize("order", [in_blocks, straight_on])
@pytest.mark.parametrize("name", STORAGES)
def test_a_store_is_read_faster_in_its_order_than_at_random(monkeypatch, photos, name, order):
    _source, folder = photos

    quick = read_store(monkeypatch, folder, STORAGES[name], order)
    slow = read_store(monkeypatch, folder, STORAGES[name], at_random)

    assert slow.now_s >= MIN_GAIN * quick.now_s, (slow.now_s, quick.now_s)
    assert slow.requests > 10 * quick.requests
    assert quick.bytes <= 1.2 * slow.bytes


@pytest.mark.parametrize("order", [in_blocks, straight_on])
@pytest.mark.parametrize("name", STORAGES)
def test_a_store_is_read_faster_than_shuffled_image_files(monkeypatch, photos, name, order):
    source, folder = photos
    files = SlowStorage(**STORAGES[name])

    quick = read_store(monkeypatch, folder, STORAGES[name], order)
    with monkeypatch.context() as patched:
        put_before(patched, files)
        found = {source.read(number) for number in shuffled(COUNT)}

    assert len(found) == COUNT
    assert files.requests == COUNT
    assert files.now_s >= MIN_GAIN * quick.now_s, (files.now_s, quick.now_s)


def test_the_bucket_lets_through_a_burst_and_then_its_rate(tmp_path):
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    storage = SlowStorage(trip_s=0.5, bytes_per_s=1 << 20)

    storage.read_ahead(str(tmp_path / "a"), 0, 1 << 20)
    burst_s = storage.now_s
    storage.read_ahead(str(tmp_path / "a"), 1 << 20, 3 << 20)

    assert burst_s == 0.5  # a trip; the bytes were there
    # One second a request; half of it passes on the trip.
    assert storage.now_s == pytest.approx(burst_s + 2.0)
    assert (storage.requests, storage.bytes) == (3, 3 << 20)


def test_what_was_read_is_not_asked_for_again(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100_000))
    storage = SlowStorage(trip_s=0.5, bytes_per_s=1e6)

    for begin in (50_000, 50_100, 49_152):
        storage.read(str(tmp_path / "a"), begin, begin + 100)

    assert storage.requests == 1
