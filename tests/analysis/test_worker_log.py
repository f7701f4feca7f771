import errno
import os
import signal
import time

from flatout.analysis.worker_log import (
    FIELDS,
    MAX_KEPT,
    PREFIX,
    RECORD,
    OwnBytes,
    WorkerLog,
    named,
    read_anonymous,
    read_io,
    read_log,
    read_pss,
    thinned,
)


def record(value):
    return [float(value)] * len(FIELDS)


def test_a_worker_that_is_killed_leaves_what_it_wrote(tmp_path):
    pid = os.fork()
    if pid == 0:
        log = WorkerLog(tmp_path)
        log.write(1.0, lambda: record(1))
        log.write(2.0, lambda: record(2))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    assert read_log(tmp_path, pid) == [record(1), record(2)]


def test_a_young_record_is_not_written_again(tmp_path):
    log = WorkerLog(tmp_path)

    for moment in (1.0, 1.01, 1.02, 1.06):
        log.write(moment, lambda moment=moment: record(moment))

    assert [values[0] for values in read_log(tmp_path, os.getpid())] == [1.0, 1.06]


def test_a_half_written_record_is_left_out(tmp_path):
    whole = RECORD.pack(*record(3))
    (tmp_path / f"{PREFIX}7").write_bytes(whole + whole[:20])

    assert read_log(tmp_path, 7) == [record(3)]
    assert read_log(tmp_path, 8) == []


def test_a_long_run_keeps_its_first_and_its_last_record():
    kept = thinned([record(i) for i in range(10 * MAX_KEPT + 7)])

    assert len(kept) <= MAX_KEPT + 1
    assert (kept[0][0], kept[-1][0]) == (0.0, 10 * MAX_KEPT + 6)


def test_what_the_kernel_refuses_is_told_by_its_number(tmp_path):
    assert read_io(tmp_path) == (-errno.ENOENT, -errno.ENOENT)
    assert read_anonymous(tmp_path) == -errno.ENOENT
    assert read_pss(tmp_path) == -errno.ENOENT


def test_bytes_come_from_the_names_that_the_kernel_gives(tmp_path):
    (tmp_path / "io").write_text("rchar: 300\nwchar: 7\nread_bytes: 4096\n")
    (tmp_path / "statm").write_text("900 70 20 1 0 300 0\n")
    (tmp_path / "smaps_rollup").write_text(
        "0-1 [rollup]\nRss: 40 kB\nPss: 12 kB\nPss_Dirty: 3 kB\n"
    )

    found = OwnBytes(tmp_path).read(time.perf_counter())

    assert found == (300.0, 4096.0, 50.0 * os.sysconf("SC_PAGE_SIZE"), 12 * 1024.0)
    assert named(record(2))["pss_bytes"] == 2.0
