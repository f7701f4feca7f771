import pytest

from flatout.data.caching import free_memory_bytes, local_ranks

GIB = 1024**3


def host(root, *, available_gib=16, limit="max", used=0, stat=""):
    """Write the files of a kernel: a host, and a version 2 group with its limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {available_gib * GIB // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (root / "proc/self/mountinfo").write_text(
        "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    )
    folder = root / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)
    return root


def test_without_a_limit_what_the_host_can_give_is_free(tmp_path):
    assert free_memory_bytes(host(tmp_path)) == 16 * GIB


def test_what_is_free_is_known_where_linux_does_not_tell(tmp_path):
    assert free_memory_bytes(tmp_path) > 0


def test_a_groups_limit_counts_less_what_it_uses(tmp_path):
    root = host(tmp_path, limit=8 * GIB, used=5 * GIB)

    assert free_memory_bytes(root) == 3 * GIB


def test_page_cache_of_the_group_can_be_given_back(tmp_path):
    root = host(tmp_path, limit=8 * GIB, used=5 * GIB, stat=f"anon 1\ninactive_file {GIB}\n")

    assert free_memory_bytes(root) == 4 * GIB


def test_a_full_group_has_nothing_and_not_less(tmp_path):
    assert free_memory_bytes(host(tmp_path, limit=GIB, used=2 * GIB)) == 0


def test_this_machine_has_memory():
    assert free_memory_bytes() > 0


@pytest.mark.parametrize(("text", "ranks"), [("8", 8), ("", 1), ("many", 1), ("0", 1)])
def test_ranks_of_this_host_are_those_that_torchrun_tells(text, ranks):
    assert local_ranks({"LOCAL_WORLD_SIZE": text}) == ranks
