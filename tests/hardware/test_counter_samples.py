"""What a sampler makes of counters: the window that counts, and who else was there."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from flatout.hardware import counters
from flatout.hardware.counters import (
    LOOKS_BACK,
    CounterSample,
    CounterSampler,
    Sources,
    readings_of,
    same_device,
)
from flatout.hardware.load import process_tree
from flatout.records.messages import code_of


def test_samples_outside_of_the_window_do_not_count():
    values = [(0.5, 0.0), (1.5, 0.8), (2.5, 0.0)]
    samples = [CounterSample(at_s=at, values={"util_share": util}) for at, util in values]
    sampler = CounterSampler(Sources(found=(SimpleNamespace(uuid="GPU-a"),)))
    sampler.pids_before = (frozenset(),)
    sampler.samples[0].extend(samples)

    assert sampler.readings("a", 1.0, 2.0).util_share == 0.8
    assert "shorter" in sampler.readings("a", 2.6, 2.7).missing["all"]


def test_a_driver_that_breaks_in_the_thread_ends_the_readings_and_nothing_else():
    class Broken:
        uuid = "GPU-a"
        calls = 0

        def sample(self, *, is_full):
            self.calls += 1
            if self.calls > 3:
                raise OSError("the driver was unloaded")
            return CounterSample(at_s=time.perf_counter(), values={"clock_mhz": 1980.0})

        def close(self):
            pass

    began = time.perf_counter()

    with CounterSampler(Sources(found=(Broken(),)), every_s=0.01) as sampler:
        time.sleep(0.2)
    found = sampler.readings("", began, time.perf_counter())

    assert (found.samples, found.clock_mhz) == (2, 1980.0)
    assert found.missing["later samples"] == "OSError: the driver was unloaded"


OWN, SHELL, OTHER = 10, 11, 99


@pytest.mark.parametrize(
    ("pids", "busy", "others", "idle"),
    [
        ({OWN}, {OWN: 0.9}, 0, 0),
        ({OWN, OTHER}, {OWN: 0.9, OTHER: 0.05}, 1, 0),
        ({OWN, OTHER}, {OWN: 0.9, OTHER: 0.04}, 1, 1),
        ({OWN, OTHER}, {OWN: 0.9}, 1, 1),
        ({OWN, OTHER}, None, 1, 0),
    ],
)
def test_other_processes_are_told_from_the_training_and_the_idle_from_the_working(
    pids, busy, others, idle
):
    sample = CounterSample(at_s=1.0, pids=frozenset(pids), busy_shares=busy)

    found = readings_of([sample], own_pids=frozenset({OWN, SHELL}))

    assert (found.other_processes, found.other_idle_processes) == (others, idle)


def test_a_desktop_that_draws_once_in_a_while_disturbs_nobody():
    pids = frozenset({OWN, OTHER})
    draws = CounterSample(at_s=1.0, pids=pids, busy_shares={OTHER: 0.12})
    rests = [CounterSample(at_s=2.0 + n, pids=pids, busy_shares={}) for n in range(3)]

    assert readings_of([draws, *rests], own_pids=frozenset({OWN})).other_idle_processes == 1
    assert readings_of([draws, rests[0]], own_pids=frozenset({OWN})).other_idle_processes == 0


def test_numbers_of_another_namespace_count_as_others_only_if_they_were_there_before():
    sample = CounterSample(at_s=1.0, pids=frozenset({70, 71}))

    found = readings_of([sample], own_pids=frozenset({OWN}), pids_before=frozenset({71}))

    assert found.other_processes == 1
    assert "container" in found.missing["other_processes"]


def test_devices_are_the_same_whatever_prefix_their_names_have():
    assert same_device("GPU-5a1f", "5A1F")
    assert not same_device("GPU-5a1f", "GPU-77")


def test_processes_below_this_one_are_its_own_and_the_tree_is_not_searched_again(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    searched = []

    def tree(pid):
        searched.append(pid)
        return process_tree(pid)

    class Shared:
        uuid = "GPU-a"
        calls = 0

        def sample(self, *, is_full):
            self.calls += 1
            pids = frozenset({child.pid, 2**22 + 5}) if self.calls > 1 else frozenset()
            return CounterSample(at_s=time.perf_counter(), pids=pids)

        def close(self):
            pass

    monkeypatch.setattr(counters, "process_tree", tree)
    began = time.perf_counter()

    with CounterSampler(Sources(found=(Shared(),)), every_s=0.01) as sampler:
        time.sleep(0.2)
    child.kill()
    child.wait()

    assert sampler.readings("", began, time.perf_counter()).other_processes == 1
    assert searched == [os.getpid()]


def test_a_mean_that_looks_back_to_before_the_window_does_not_count():
    def at(seconds, util, power, active):
        values = {"util_share": util, "power_w": power, "sm_active_share": active}
        return CounterSample(at_s=10 + seconds, values=values)

    short = [at(0.02, 0.35, 150.0, 0.2), at(0.28, 0.97, 390.0, 0.6)]
    found = readings_of(short, began_s=10.0)
    assert (found.util_share, found.sm_active_share, found.power_w) == (0.97, 0.6, None)
    assert code_of(found.missing["power_w"]) == LOOKS_BACK

    longer = [*short, at(1.1, 1.0, 600.0, 0.8), at(1.3, 0.98, 610.0, 0.8)]
    found = readings_of(longer, began_s=10.0)
    assert (found.util_share, found.power_w) == (0.99, 605.0)
    assert found.sm_active_share == pytest.approx(2.2 / 3)

    assert readings_of(short[:1], began_s=10.0).sm_active_share is None
    assert readings_of(short[:1]).sm_active_share == 0.2
