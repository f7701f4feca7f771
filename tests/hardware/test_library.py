from flatout.hardware.accelerator import find_tcmalloc


def test_the_small_library_is_preferred_over_the_full_one(tmp_path):
    for name in ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4"):
        (tmp_path / name).write_bytes(b"")

    assert find_tcmalloc([tmp_path]) == str(tmp_path / "libtcmalloc_minimal.so.4")


def test_earlier_folders_win(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libtcmalloc.so.4").write_bytes(b"")

    found = find_tcmalloc([tmp_path / "none", tmp_path / "first", tmp_path / "second"])

    assert found == str(tmp_path / "first/libtcmalloc.so.4")


def test_a_dangling_link_is_not_a_library(tmp_path):
    (tmp_path / "libtcmalloc.so.4").symlink_to(tmp_path / "gone")

    assert find_tcmalloc([tmp_path]) is None
