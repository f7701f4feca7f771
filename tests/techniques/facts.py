"""Small profiles and machines to offer techniques and rules to."""

from dataclasses import replace

from flatout.records.journey import Pipeline, Stage
from flatout.records.machine import Device, Machine
from flatout.records.profile import (
    PHASES,
    LoaderFacts,
    ModelFacts,
    OptimizerFacts,
    PeakBytes,
    Profile,
    Spread,
)

GIB = 1024**3
FULL = PeakBytes(allocated=70 * GIB, reserved=75 * GIB, device=76 * GIB)
"""Of a GPU of 80 GiB."""
CPU = Device(kind="cpu", name="a CPU", memory_bytes=16 * GIB)


def gpu(capability=(9, 0), kind="cuda"):
    return Device(kind=kind, name="a GPU", memory_bytes=80 * GIB, compute_capability=capability)


def machine(**changes):
    """Return a machine of 8 cores without an accelerator; `device=gpu()` gives it one."""
    known = Machine(
        device=CPU,
        logical_cores=8,
        usable_cores=8,
        physical_cores=8,
        memory_bytes=16 * GIB,
        shm_free_bytes=8 * GIB,
    )
    return replace(known, **changes)


def profile(*, kind="cpu", phases_ms=(), **changes):
    """Return a profile of 100 ms, 60 in backward and 40 in forward; name the phases to change."""
    known = dict.fromkeys(PHASES, 0.0) | {"forward": 40.0, "backward": 60.0} | dict(phases_ms)
    total = sum(known.values())
    base = Profile(
        step_ms=Spread(median=total, p10=total, p90=total, n=20),
        phases_ms=known,
        samples_per_s=1.0,
        device_kind=kind,
        device_name="a device",
        device_busy_share=0.5,
    )
    return replace(base, **changes)


def loader(**changes):
    known = LoaderFacts(
        address="main:1",
        is_training=True,
        dataset="Photos",
        dataset_len=1000,
        batch_size=10,
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
        batch_bytes=1_000_000,
    )
    return replace(known, **changes)


def starved(wait_ms=300.0, **changes):
    """Return a profile whose loop waits for pictures."""
    known = {"batch_size": 8, "batch_bytes": 8 * 600_000}
    return profile(phases_ms={"data_wait": wait_ms}, loaders=(loader(**known | changes),))


def pipeline(*, is_repeated=None, **cpu_ms):
    """Return a diagnosis with these stages, in CPU milliseconds of a sample."""
    total = sum(cpu_ms.values())
    return Pipeline(
        stages=tuple(Stage(name=n, cpu_ms=ms, share=ms / total) for n, ms in cpu_ms.items()),
        samples=64,
        cpu_ms=total,
        samples_per_s=100.0,
        cores_needed=1.0,
        usable_cores=8,
        is_repeated=is_repeated,
    )


def model(**changes):
    known = ModelFacts(name="Net", parameters=1000, parameter_bytes=4000, dtypes=("float32",))
    return replace(known, **changes)


def optimizer(**changes):
    known = OptimizerFacts(name="AdamW", parameters=1000, has_fused_option=True)
    return replace(known, **changes)
