"""Ceilings: what is foreseen with replayed batches, and what happens when data really are free."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.hardware.machine import read_machine
from flatout.hardware.peaks import Peaks
from flatout.records.readings import Limits
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial
from flatout.tuning.passes import PassRunner, ceilings
from flatout.tuning.passes.ceilings import MOST_REPEATS, ceilings_of, with_peaks
from flatout.workflow.measure import measure
from tests.benchmarks.made_up import a_profile
from tests.paths import ROOT
from tests.support.programs import workload_of
from tests.techniques.facts import loader, machine

SCRIPTS = ROOT / "tests/scripts/passes"


def workload(script, *arguments):
    return workload_of(
        Path(tempfile.mkdtemp(prefix="flatout-test-")), str(SCRIPTS / script), *arguments
    )


@functools.cache
def measured(script, *arguments, closer=()):
    return measure(
        workload(script, *arguments),
        closer=closer,
        limit_s=240.0,
        machine=read_machine(torch=False),
    )


@pytest.mark.slow
def test_foreseen_gain_is_what_free_data_really_give():
    # How close it comes, with decoded data and with workers too, is what `make bench` asks.
    foreseen = measured("slow_legs.py", "sleep", closer=("ceilings",)).profile

    free = measured("slow_legs.py", "sleep", "--free").profile

    if free.invalid or any("other work disturbed" in note for note in foreseen.notes):
        pytest.skip("other work never left the cores alone")
    assert foreseen.ceilings.is_measured, foreseen.notes
    really = foreseen.whole_step_ms / free.whole_step_ms
    assert really > 1.5
    assert foreseen.ceilings.free_data == pytest.approx(really, rel=0.25)


@pytest.mark.slow
def test_the_pass_adds_limits_and_mfu():
    profile = measured("slow_legs.py", "sleep", closer=("ceilings",)).profile

    limits = profile.limits
    # 8 rows through 64 by 128 and 128 by 4 weights, twice; the first layer's input needs no
    # gradient.
    assert limits.flops_per_step == 2 * 8 * (2 * 64 * 128 + 3 * 128 * 4)
    assert limits.gemm_dtype == "float32"
    assert limits.least_step_ms == pytest.approx(
        1e3 * limits.flops_per_step / limits.gemm_flops_per_s
    )
    assert profile.mfu == pytest.approx(limits.least_step_ms / profile.step_ms.median)
    # A batch of 8 takes 100 ms to make, and more where others have the cores.
    assert 10 < limits.loader_samples_per_s < 85
    assert limits.missing == {}


@pytest.mark.slow
def test_a_script_without_a_loader_says_why_there_are_no_measured_ceilings():
    profile = measured("slow_legs.py", "no_loader", closer=("ceilings",)).profile

    assert not profile.ceilings.is_measured
    assert "ceilings are not measured: no DataLoader feeds the training" in profile.notes
    assert "no DataLoader" in profile.limits.missing["loader_samples_per_s"]
    assert profile.limits.flops_per_step > 0


def test_without_time_nothing_is_run():
    runner = PassRunner(
        workload=workload("slow_legs.py", "sleep"),
        recipe=Recipe(),
        machine=read_machine(torch=False),
        limit_s=1.0,
        last_wall_s=5.0,
    )
    fed = replace(a_profile(), loaders=measured_loaders())

    profile = ceilings.add(fed, runner)

    assert profile.ceilings == fed.ceilings
    assert profile.limits is None
    assert [note for note in profile.notes if "no time was left" in note]


def measured_loaders():
    return (loader(address="train.py:<module>#0", dataset_len=100, batch_size=8, batch_bytes=0),)


def test_copies_cost_what_the_replay_on_the_device_saves():
    # 10 ms as it is, 8 ms with replayed batches, 6 ms with batches on the device; 2.4 computing.
    host, device = (replace(a_profile(ms), device_kind="cuda") for ms in (8.0, 6.0))

    found = ceilings_of(10.0, host, device)

    assert found.free_data == pytest.approx(10 / 8)
    assert found.free_copies == pytest.approx(10 / 8)
    assert found.compute_only == pytest.approx(10 / 2.4)
    assert found.is_measured


def test_drawing_a_replayed_batch_is_no_part_of_free_data():
    replayed = a_profile(8.0)
    phases_ms = {**replayed.phases_ms, "data_wait": 0.5}

    found = ceilings_of(10.0, replace(replayed, phases_ms=phases_ms), replayed)

    assert found.free_data == pytest.approx(10 / 7.5)


def test_what_is_free_never_slows_down():
    host, device = (replace(a_profile(ms), device_kind="cuda") for ms in (10.4, 10.9))

    found = ceilings_of(10.0, host, device)

    assert (found.free_data, found.free_copies) == (1.0, 1.0)


def test_mfu_is_operations_a_second_of_the_peak():
    profile = replace(a_profile(10.0), limits=Limits(flops_per_step=3e9))
    peaks = Peaks(
        dtype="bfloat16",
        gemm_flops_per_s=1e12,
        memory_bytes_per_s=1e10,
        copy_bytes_per_s=5e9,
        threads=2,
    )

    found = with_peaks(profile, peaks)

    assert found.mfu == pytest.approx(0.3)
    assert found.limits.least_step_ms == pytest.approx(3.0)
    assert found.limits.gemm_dtype == "bfloat16"


def test_without_counted_operations_there_is_no_mfu():
    peaks = Peaks(
        dtype="float32",
        gemm_flops_per_s=1e12,
        memory_bytes_per_s=1e10,
        copy_bytes_per_s=5e9,
        threads=2,
    )

    found = with_peaks(a_profile(10.0), peaks)

    assert found.mfu is None
    assert found.limits.least_step_ms is None
    assert found.limits.memory_bytes_per_s == 1e10


@pytest.mark.parametrize(("kind", "driver"), [("cuda", "570.1"), ("cpu", "")])
def test_peaks_of_a_gpu_are_those_of_its_driver_as_the_roofline_keeps_them(
    monkeypatch, kind, driver
):
    wanted = []

    def read_peaks(what, *_):
        wanted.append(what)
        raise ValueError("not measured in this test")

    monkeypatch.setattr(ceilings, "read_peaks", read_peaks)
    runner = PassRunner(
        workload=workload("slow_legs.py"),
        recipe=Recipe(),
        machine=machine(facts={"driver": "570.1"}),
        limit_s=1.0,
    )

    ceilings._with_peaks(replace(a_profile(10.0), device_kind=kind), "float32", runner)

    assert [what.driver for what in wanted] == [driver]


def test_peaks_that_a_training_exceeds_are_measured_again(monkeypatch):
    slow = Peaks(
        dtype="float32",
        gemm_flops_per_s=1.0,
        memory_bytes_per_s=1.0,
        copy_bytes_per_s=1.0,
        threads=2,
    )
    kept = [slow, replace(slow, gemm_flops_per_s=100.0)]
    monkeypatch.setattr(ceilings, "read_peaks", lambda *_: kept.pop(0))
    monkeypatch.setattr(ceilings, "forget_peaks", lambda *_: None)

    assert ceilings._sound_peaks(None, "python", least=50.0).gemm_flops_per_s == 100.0


def waiting(step_ms=10.0, wait_ms=3.6, **changes):
    """Return a profile whose step waits for data."""
    steps = a_profile(step_ms)
    phases = steps.phases_ms | {"data_wait": wait_ms, "forward": step_ms - wait_ms}
    return replace(steps, phases_ms=phases, loaders=measured_loaders(), **changes)


def with_runs_of(monkeypatch, *profiles):
    """Return the profile after its ceilings, whose runs give these profiles one after the other."""
    answers = iter(profiles)
    replayed = {"probes": {"replay": {"replayed": 1}}}

    def run(_runner, _what, _probes, **_options):
        found = next(answers)
        return Trial(recipe=Recipe(), outcome=Outcome.OK, profile=found, details=replayed)

    monkeypatch.setattr(PassRunner, "run", run)
    runner = PassRunner(
        workload=workload("slow_legs.py"), recipe=Recipe(), machine=machine(), limit_s=60.0
    )
    return ceilings.with_ceilings(waiting(), runner)


def test_a_wait_that_a_slowed_run_does_not_show_is_no_ceiling_of_one(monkeypatch):
    # 36 % of the step waits; others took the cores while the replay ran.
    found = with_runs_of(monkeypatch, waiting(), waiting(step_ms=10.0, wait_ms=0.0), waiting())

    assert not found.ceilings.is_measured
    assert found.ceilings.free_data == waiting().ceilings.free_data
    assert any("36 % of its time" in note for note in found.notes)


def test_ceilings_of_disturbed_runs_are_not_measured(monkeypatch):
    busy = waiting(invalid=("other processes used 40 % of the cores",))

    found = with_runs_of(
        monkeypatch, waiting(), waiting(step_ms=6.4, wait_ms=0.0), *[busy] * (1 + MOST_REPEATS)
    )

    assert not found.ceilings.is_measured
    assert any("other processes used 40 % of the cores" in note for note in found.notes)


def test_a_disturbed_run_is_repeated(monkeypatch):
    busy = waiting(step_ms=30.0, invalid=("other processes used 40 % of the cores",))
    free = waiting(step_ms=6.4, wait_ms=0.0)

    found = with_runs_of(monkeypatch, busy, waiting(), busy, free, waiting())

    assert found.ceilings.is_measured
    assert found.ceilings.free_data == pytest.approx(10 / 6.4)


def test_ceilings_of_quiet_runs_are_measured(monkeypatch):
    found = with_runs_of(monkeypatch, waiting(), waiting(step_ms=6.4, wait_ms=0.0), waiting())

    assert found.ceilings.is_measured
    assert found.ceilings.free_data == pytest.approx(10 / 6.4)
