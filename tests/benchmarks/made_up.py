"""Records and results made up for the tests of the benchmarks' pure parts."""

from benchmarks.bench import Record
from flatout.records.ablation import Ablation, Comparison, Row, Verdict
from flatout.records.machine import Device, Machine
from flatout.records.profile import PHASES, Profile, Spread
from flatout.records.recipe import Choice, Recipe

BF16 = Choice(technique="bf16_autocast")


def a_machine(kind="cpu", name="AMD EPYC", features=("avx512_bf16",)):
    device = Device(kind=kind, name=name, memory_bytes=1)
    return Machine(
        device=device,
        devices=() if kind == "cpu" else (device,),
        cpu_name="AMD EPYC",
        logical_cores=4,
        usable_cores=2,
        physical_cores=2,
        memory_bytes=1,
        shm_free_bytes=1,
        cpu_features=frozenset(features),
        torch_version="2.13.0",
        facts={"python": "3.11.7", "system": "Linux-6.1-of-somebody", "compiler": "/usr/bin/g++"},
    )


def a_record(**changes):
    fields = {
        "theme": "speed",
        "claim": "twice as fast",
        "holds": True,
        "finding": "2.10x",
        "table": [("", "step"), ("baseline", "2.00 ms")],
        "raw": {"times_s": [0.002, 0.0021], "path": "/tmp/x"},
        "repeat": "python -m benchmarks.run speed",
    }
    return Record(**{**fields, **changes})


def a_profile(step_ms=10.0):
    phases = dict.fromkeys(PHASES, 0.0) | {"data_wait": 0.6 * step_ms, "forward": 0.4 * step_ms}
    return Profile(
        step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=8),
        phases_ms=phases,
        samples_per_s=100.0,
        device_kind="cpu",
        device_name="AMD EPYC",
        device_busy_share=0.4,
    )


def a_pair(ratio, low=None, n=6):
    return Comparison(ratio=ratio, interval=(low or 0.95 * ratio, 1.05 * ratio), n=n)


def an_ablation(*choices, ratio=2.0, stopped="finished"):
    """Return the result of a tuning that kept the given techniques."""
    rows = tuple(
        Row(
            choice=choice,
            numerics="precision",
            verdict=Verdict.KEPT,
            comparison=a_pair(ratio),
            samples_per_s=200.0,
        )
        for choice in choices
    )
    return Ablation(
        workload="train.py",
        baseline=a_profile(),
        rows=rows,
        recipe=Recipe(choices=choices),
        confirmation=a_pair(ratio) if choices else None,
        final=a_profile(10.0 / ratio) if choices else None,
        stopped=stopped,
    )
