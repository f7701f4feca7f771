import mmap

import pytest

from flatout.data.packed_store import Ahead, advise, ask, asking_files, looking_ahead
from tests.data.page_cache import cached_pages, cached_share, evict, wait_for


def cold_file(tmp_path, name="photo.bin", count=400_000):
    path = tmp_path / name
    path.write_bytes(bytes(count))
    evict(path)
    if cached_pages(path):
        pytest.skip("this file system keeps its pages")
    return path


def test_advice_brings_a_cold_file_into_the_page_cache(tmp_path):
    path = cold_file(tmp_path)

    assert advise(str(path))

    assert wait_for(lambda: cached_pages(path) > 50)


def test_the_thread_asks_for_the_files_of_a_batch(tmp_path):
    paths = [cold_file(tmp_path, f"{number}.bin") for number in range(3)]
    ahead = Ahead(asking_files(lambda number: str(paths[number])))

    ahead.want([0, 2])

    assert wait_for(lambda: cached_pages(paths[0]) > 50 and cached_pages(paths[2]) > 50)
    assert cached_pages(paths[1]) == 0
    ahead.close()


def test_a_large_file_comes_whole(tmp_path):
    path = cold_file(tmp_path, count=20 << 20)

    assert advise(str(path))

    assert wait_for(lambda: cached_pages(path) == path.stat().st_size // mmap.PAGESIZE)


def test_bytes_in_the_middle_come_without_the_rest(tmp_path):
    path = cold_file(tmp_path, count=20 << 20)

    with path.open("rb") as file:
        ask(file.fileno(), (6 << 20) + 5, (18 << 20) + 5)

    assert wait_for(lambda: cached_share(path, (6 << 20) + 5, (18 << 20) + 5) == 1.0)
    assert cached_pages(path) == (12 << 20) // mmap.PAGESIZE + 1


@pytest.mark.chaos
def test_files_that_are_gone_or_rules_that_fail_do_not_end_the_thread(tmp_path):
    present = tmp_path / "a"
    present.write_bytes(b"x")
    found = {1: str(tmp_path / "gone"), 2: str(present)}
    ahead = Ahead(asking_files(found.__getitem__))

    ahead.want([0, 1])
    ahead.want([2])

    assert wait_for(lambda: ahead.asked == 1)
    ahead.close()


def test_batches_come_unchanged_and_are_announced_earlier():
    told, ends = [], []
    batches = looking_ahead(iter([[0], [1], [2], [3]]), told.append, 2, lambda: ends.append(1))

    first = next(batches)
    announced = list(told)

    assert first == [0]
    assert announced == [[0], [1], [2]]
    assert list(batches) == [[1], [2], [3]]
    assert ends == [1]
