import os
import subprocess
import sys
import time

import pytest

from flatout.hardware.load import TICKS_PER_S, LoadMeter, LoadReading, load_meter, process_tree
from tests.support.programs import python

SPIN = "import time\nwhile time.process_time() < 0.4: pass\n"
"""Uses that much of a core, however long it takes on a busy machine."""


def reading(at_s, *, waited=None, own=0, busy=0, steal=0, faults=0):
    return LoadReading(
        at_s=at_s,
        waited_ns=waited or {(1, 1): 0},
        own_ticks=own,
        busy_ticks=busy,
        steal_ticks=steal,
        minor_faults=faults,
    )


def meter(cores=2, usable=0.0):
    return LoadMeter(cpus=frozenset(range(cores)), usable_cores=usable)


def ticks(seconds):
    return round(seconds * TICKS_PER_S)


def test_delay_is_waiting_of_all_threads_per_second():
    before = reading(10.0, waited={(1, 1): 5, (1, 2): 0})
    after = reading(12.0, waited={(1, 1): 100_000_005, (1, 2): 300_000_000})

    assert meter().between(before, after).delay_share == pytest.approx(0.2)


def test_a_thread_that_started_in_between_counts_from_zero():
    before = reading(0.0, waited={(1, 1): 0})
    after = reading(1.0, waited={(1, 1): 0, (1, 9): 70_000_000})

    assert meter().between(before, after).delay_share == pytest.approx(0.07)


def test_a_thread_that_ended_takes_nothing_back():
    before = reading(0.0, waited={(1, 1): 0, (1, 9): 900_000_000})
    after = reading(1.0, waited={(1, 1): 20_000_000})

    assert meter().between(before, after).delay_share == pytest.approx(0.02)


def test_own_work_is_not_foreign():
    load = meter().between(reading(0.0), reading(1.0, own=ticks(1.6), busy=ticks(1.6)))

    assert load.foreign_share == 0.0


def test_work_of_others_is_a_share_of_the_cores():
    load = meter().between(reading(0.0), reading(1.0, own=ticks(1.0), busy=ticks(1.5)))

    assert load.foreign_share == pytest.approx(0.25)


def test_others_beside_a_quota_count_only_where_they_take_what_was_ours():
    quiet = meter(8, 2.0).between(reading(0.0), reading(1.0, own=ticks(2), busy=ticks(7)))
    crowded = meter(8, 2.0).between(reading(0.0), reading(1.0, own=ticks(1), busy=ticks(8)))

    assert quiet.foreign_share == 0.0
    assert crowded.foreign_share == pytest.approx(0.5)


def test_stolen_time_is_a_share_of_the_cores():
    load = meter().between(reading(0.0), reading(2.0, steal=ticks(0.4)))

    assert load.steal_share == pytest.approx(0.1)


def test_minor_faults_are_a_difference():
    load = meter().between(reading(0.0, faults=100), reading(1.0, faults=350))

    assert load.minor_faults == 250


def test_a_kernel_without_statistics_is_told_apart_from_no_delay(tmp_path):
    blind = LoadMeter(cpus=frozenset({0}), proc=tmp_path)

    load = blind.between(blind.read([1]), blind.read([1]))

    assert not load.knows_delay
    assert load.delay_share == 0.0


def test_only_the_cores_of_the_job_are_read(tmp_path):
    lines = ("cpu 900 0 0 0 0 0 0 99", "cpu0 1 2 3 50 60 4 5 7", "cpu1 800 0 0 0 0 0 0 90")
    (tmp_path / "stat").write_text("\n".join(lines) + "\n")

    found = LoadMeter(cpus=frozenset({0}), proc=tmp_path).read([])

    assert (found.busy_ticks, found.steal_ticks) == (15, 7)


def test_a_busy_process_is_seen_as_own_work_and_moves_to_its_parent_when_it_ends():
    here = load_meter()
    before = here.read(process_tree(os.getpid()))

    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after = here.read(process_tree(os.getpid()))

    assert after.own_ticks - before.own_ticks >= ticks(0.2)


def test_the_process_tree_holds_children_of_children():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        grandchild = int(parent.stdout.readline())
        tree = process_tree(os.getpid())
        parent.communicate("\n")

    assert tree[0] == os.getpid()
    assert {parent.pid, grandchild} <= set(tree)


def test_waiting_for_a_core_is_seen_where_the_kernel_keeps_count():
    here = LoadMeter(cpus=frozenset({min(os.sched_getaffinity(0))}))
    core = str(next(iter(here.cpus)))
    pin = f"import os\nos.sched_setaffinity(0, {{{core}}})\n"
    rivals = [subprocess.Popen([sys.executable, "-c", pin + SPIN]) for _ in range(2)]
    pids = [rival.pid for rival in rivals]
    before = here.read(pids)
    last = before
    while any(rival.poll() is None for rival in rivals):
        current = here.read(pids)
        last = current if len(current.waited_ns) == 2 else last
        time.sleep(0.005)

    load = here.between(before, last)

    assert load.delay_share > 0.1 or not load.knows_delay


def test_the_meter_needs_nothing_but_the_standard_library():
    code = (
        "import sys; from flatout.hardware.load import load_meter; load_meter(); "
        "print([m for m in ('torch', 'numpy', 'psutil', 'rich') if m in sys.modules])"
    )

    done = python(["-c", code], check=True)

    assert done.stdout.strip() == "[]"
