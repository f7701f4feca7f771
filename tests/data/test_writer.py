import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flatout.data.format import Encoding, read_header
from flatout.data.packed_store import PackedStore
from flatout.records.errors import UserError
from tests.data.packs import digest, file_bytes, image_folder, packed, skipped_in
from tests.support.programs import python

SMALL = 4_000
"""Bytes of a file shard: a few photographs each."""
PACK = """
import functools
from flatout.cli import main
from flatout.data import writer as pack
pack.PackOptions = functools.partial(pack.PackOptions, shard_bytes=50_000)
main()
"""
"""`flatout pack` with file shards small enough that a kill falls between them."""


def start(*arguments):
    """Start `flatout pack` as a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PACK, "pack", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process):
    """Return the exit code and what was written to stderr."""
    errors = process.communicate(timeout=120)[1]
    return process.returncode, errors


def test_samples_lie_in_a_permutation_of_the_seed(tmp_path):
    source = image_folder(tmp_path / "photos", 40)

    packed(source, tmp_path / "a", seed=1)
    packed(source, tmp_path / "b", seed=2)

    first, second = (PackedStore(tmp_path / name).index["original"] for name in "ab")
    assert sorted(first) == sorted(second) == list(range(40))
    assert list(first) != list(range(40))
    assert list(first) != list(second)


def test_the_index_is_a_file_that_numpy_would_have_written(tmp_path):
    packed(image_folder(tmp_path / "photos"), tmp_path / "a")

    np.save(tmp_path / "again.npy", np.load(tmp_path / "a/index.npy"))

    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "a/index.npy").read_bytes()


def test_the_order_of_the_source_is_kept_when_asked(tmp_path):
    header = packed(image_folder(tmp_path / "photos"), tmp_path / "a", is_shuffled=False)

    assert header.order == "source"
    assert list(PackedStore(tmp_path / "a").index["original"]) == list(range(12))


def test_stored_bytes_are_those_of_the_files(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")

    store = PackedStore(tmp_path / "a")

    for place, name in enumerate(store.names):
        image, _label = store.parts(place)
        assert bytes(image[1:]) == (source / name).read_bytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, method):
    if method == "fork" and sys.version_info >= (3, 12):
        pytest.skip("forking a process that has threads is an error in the tests from 3.12 on")
    source = image_folder(tmp_path / "photos", 30)

    packed(source, tmp_path / "one", shard_bytes=SMALL)
    packed(source, tmp_path / "two", shard_bytes=SMALL, workers=2, method=method)

    assert len(read_header(tmp_path / "one").shards) > 4
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


OPEN_FILE = """
import time
from tests.data.packs import Items
class Records(Items):
    def __getitem__(self, index):
        self.items.seek(index)
        time.sleep(0.001)  # another worker may move the place of a file that they share
        return self.items.read(1)
    def __len__(self): return 120
data = Records(open({path!r}, "rb", buffering=0))
"""


def test_forked_workers_do_not_move_a_file_that_the_data_set_has_open(tmp_path):
    if sys.version_info >= (3, 12):
        pytest.skip("forking a process that has threads is an error in the tests from 3.12 on")
    (tmp_path / "records").write_bytes(bytes(range(120)))
    (tmp_path / "opens.py").write_text(OPEN_FILE.format(path=str(tmp_path / "records")))

    packed(f"{tmp_path}/opens.py:data", tmp_path / "a", shard_bytes=50, workers=3, method="fork")

    store = PackedStore(tmp_path / "a")
    found = [bytes(store.parts(place)[0]) for place in store.by_original]
    assert b"".join(found) == bytes(range(120))


def test_a_finished_pack_is_left_alone(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")
    before = digest(tmp_path / "a")

    packed(source, tmp_path / "a")

    assert digest(tmp_path / "a") == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    source = image_folder(tmp_path / "photos")

    with pytest.raises(UserError, match="is not empty"):
        packed(source, source)


def test_a_store_of_another_seed_or_source_is_refused(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")

    with pytest.raises(UserError, match="with other options"):
        packed(source, tmp_path / "a", seed=7)
    (source / "cat/0000.jpeg").write_bytes(file_bytes(99))
    with pytest.raises(UserError, match="from another source"):
        packed(source, tmp_path / "a")


class StoppedError(Exception):
    pass


def stop_after(ticks):
    """Return a `tell` that ends the pack after so many ticks, as an interruption would."""
    left = [ticks]

    def tell(_progress):
        left[0] -= 1
        if not left[0]:
            raise StoppedError

    return tell


@pytest.mark.parametrize("ticks", range(1, 12, 2))
def test_an_interrupted_pack_goes_on_and_ends_with_the_same_bytes(tmp_path, ticks):
    source = image_folder(tmp_path / "photos", 30)
    packed(source, tmp_path / "whole", shard_bytes=SMALL)

    with pytest.raises(StoppedError):
        packed(source, tmp_path / "a", shard_bytes=SMALL, tell=stop_after(ticks))
    with pytest.raises(UserError, match="not packed to its end"):
        read_header(tmp_path / "a")
    packed(source, tmp_path / "a", shard_bytes=SMALL)

    assert digest(tmp_path / "a") == digest(tmp_path / "whole")


def test_an_unfinished_pack_of_other_options_is_not_mixed_in(tmp_path):
    source = image_folder(tmp_path / "photos", 30)
    with pytest.raises(StoppedError):
        packed(source, tmp_path / "a", shard_bytes=SMALL, tell=stop_after(3))

    with pytest.raises(UserError, match=r"another pack \(seed differ\)"):
        packed(source, tmp_path / "a", shard_bytes=SMALL, seed=3)


LARGE = (640, 480)
"""Of images whose packing takes seconds, so that a signal always meets it at work."""


@pytest.mark.chaos
@pytest.mark.slow
def test_kills_at_random_moments_change_nothing_and_leave_no_process(tmp_path):
    source = image_folder(tmp_path / "photos", 400, size=LARGE)
    options = ("--encode", "zstd", "--workers", "2")
    assert finished(start(source, tmp_path / "whole", *options))[0] == 0
    random = np.random.default_rng(0)

    kills = 0
    for _ in range(8):
        process = start(source, tmp_path / "a", *options)
        time.sleep(random.uniform(0.2, 1.0))
        kills += process.poll() is None
        process.kill()
        process.communicate()
    code, errors = finished(start(source, tmp_path / "a", *options))

    assert kills > 2
    assert code == 0, errors
    assert digest(tmp_path / "a") == digest(tmp_path / "whole")
    assert processes_of(tmp_path) == []


def processes_of(folder):
    """Return the command lines of live processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [words] if str(folder) in words else []
    return found


@pytest.mark.chaos
def test_ctrl_c_ends_all_processes_and_says_how_to_go_on(tmp_path):
    source = image_folder(tmp_path / "photos", 400, size=LARGE)
    process = start(source, tmp_path / "a", "--encode", "zstd", "--workers", "2")
    wait_for(lambda: (tmp_path / "a/.pack/plan.json").exists())

    os.killpg(process.pid, signal.SIGINT)
    code, errors = finished(process)

    assert code == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    assert processes_of(tmp_path) == []


def wait_for(condition, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.chaos
def test_a_killed_worker_is_named_and_its_work_is_done_by_the_next_call(tmp_path):
    source = image_folder(tmp_path / "photos", 900)
    process = start(source, tmp_path / "a", "--encode", "zstd", "--workers", "2")
    wait_for(lambda: children_of(process.pid))

    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    code, errors = finished(process)

    assert code == 2
    assert "a worker process died (signal 9)" in errors
    assert finished(start(source, tmp_path / "a", "--encode", "zstd"))[0] == 0


def children_of(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in path.read_text().split()]
    return [child for child in found if b"resource_tracker" not in command_line(child)]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"resource_tracker"


@pytest.mark.slow
@pytest.mark.chaos
def test_two_packs_into_one_folder_do_not_meet(tmp_path):
    source = image_folder(tmp_path / "photos", 900)
    first = start(source, tmp_path / "a", "--encode", "zstd")
    wait_for(lambda: (tmp_path / "a/.pack/plan.json").exists())
    os.kill(first.pid, signal.SIGSTOP)

    code, errors = finished(start(source, tmp_path / "a", "--encode", "zstd"))
    os.kill(first.pid, signal.SIGCONT)

    assert code == 2
    assert "another process is packing into" in errors
    assert finished(first)[0] == 0


@pytest.mark.chaos
def test_a_full_disk_is_named_and_the_next_call_goes_on(tmp_path):
    source = image_folder(tmp_path / "photos", 60)
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n{PACK}"

    done = python(["-c", code, "pack", source, tmp_path / "a"])

    assert done.returncode == 2
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "a").glob("*.draft*"))
    assert packed(source, tmp_path / "a").samples == 60


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos")
    free = shutil.disk_usage(tmp_path)._replace(free=2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)

    with pytest.raises(UserError, match=r"are needed and 2\.0 KiB are free"):
        packed(source, tmp_path / "a")
    assert not list((tmp_path / "a").glob("*.bin"))


def damage(source):
    """Spoil three of the files: cut one off, fill one with text, empty one."""
    cut = source / "cat/0001.jpeg"
    cut.write_bytes(cut.read_bytes()[:-40])
    (source / "dog/0005.jpeg").write_bytes(b"<html>404 not found</html>")
    (source / "owl/0009.jpeg").write_bytes(b"")


@pytest.mark.parametrize("kind", ["original", "raw"])
def test_damaged_images_stop_the_pack_with_their_name(tmp_path, kind):
    source = image_folder(tmp_path / "photos")
    damage(source)

    with pytest.raises(UserError, match=r"\d{4}\.jpeg: .*--on-bad skip"):
        packed(source, tmp_path / "a", encoding=Encoding(kind=kind))


def test_damaged_images_are_left_out_counted_and_named(tmp_path):
    source = image_folder(tmp_path / "photos")
    damage(source)

    header = packed(source, tmp_path / "a", on_bad="skip")

    assert (header.samples, header.skipped) == (9, 3)
    reasons = {row["name"]: row["reason"] for row in skipped_in(tmp_path / "a")}
    assert "cut off" in reasons["cat/0001.jpeg"]
    assert "not an image" in reasons["dog/0005.jpeg"]
    assert "empty" in reasons["owl/0009.jpeg"]
    assert set(PackedStore(tmp_path / "a").names).isdisjoint(reasons)


def test_a_file_that_vanishes_after_the_folder_was_read_is_named(tmp_path):
    source = image_folder(tmp_path / "photos", 40)

    def remove_one(_progress):
        (source / "owl/0039.jpeg").unlink(missing_ok=True)
        (source / "cat/0000.jpeg").unlink(missing_ok=True)

    header = packed(source, tmp_path / "a", on_bad="skip", shard_bytes=SMALL, tell=remove_one)

    assert header.skipped >= 1
    assert {row["reason"] for row in skipped_in(tmp_path / "a")} == {"the file is gone"}


def test_a_source_of_bad_samples_only_makes_no_store(tmp_path):
    source = image_folder(tmp_path / "photos", 3)
    for path in source.rglob("*.jpeg"):
        path.write_bytes(b"no image")

    with pytest.raises(UserError, match="all 3 samples are bad"):
        packed(source, tmp_path / "a", on_bad="skip")
