"""A profile in which every part is filled in, made by hand: no machine measured it."""

from dataclasses import replace

from flatout.records.journey import TRAINING, WORKERS, Journey, Leg, WorkerFacts
from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.messages import words
from flatout.records.profile import PHASES, Ceilings
from flatout.records.readings import GpuReadings, Limits, RankFacts, SyncPoint
from tests.rules.pipeline_facts import pipeline

MIB = 1024**2
HOSTILE = "<img src=x onerror=document.title='pwned'>\"'`{{7*7}}"


def filled(profile, name="layer4.1.conv2"):
    """Return the profile with every optional part; `name` stands wherever a name may stand."""
    phases = [profile.phases_ms[phase] for phase in PHASES]
    steps = tuple(
        tuple(round(ms * (1 + 0.06 * ((7 * step + 3 * place) % 11 - 5) / 5), 3)
              for place, ms in enumerate(phases))
        for step in range(60)
    )  # fmt: skip
    return replace(
        profile,
        device_kind="cuda",
        gpu_util_share=0.93,
        mfu=0.21,
        steps_ms=steps,
        journey=_journey(),
        pipeline=pipeline(needed=6.7, usable=4.0),
        memory=_memory(name),
        syncs=(
            SyncPoint(line=f"{name}.py:41", what="item", per_step=1.0, ms_per_step=12.4),
            SyncPoint(line="metrics.py:9", what="nonzero", per_step=0.1),
        ),
        gpu=_gpu(),
        limits=Limits(
            flops_per_step=3.7e11,
            gemm_flops_per_s=2.5e13,
            gemm_dtype="float32",
            memory_bytes_per_s=1.4e12,
            copy_bytes_per_s=2.4e10,
            loader_samples_per_s=243.0,
            least_step_ms=14.8,
            missing={"decode": "no image was decoded"},
        ),
        ceilings=Ceilings(free_data=2.6, free_copies=2.8, compute_only=3.1, is_measured=True),
        ranks=(
            RankFacts(rank=0, step_ms=212.4, phases_ms=profile.phases_ms, samples_per_s=150.6),
            RankFacts(
                rank=1,
                step_ms=212.9,
                phases_ms=profile.phases_ms,
                samples_per_s=150.1,
                exposed_communication_ms=31.0,
                is_straggler=True,
                because="it waits 40 ms longer for data than the others",
            ),
        ),
        notes=(words("note.not_steady"), name),
    )


def _journey():
    legs = [
        Leg(name="data_wait", where=TRAINING, ms=131.3, share=0.618),
        Leg(
            name="h2d",
            where=TRAINING,
            ms=1.6,
            share=0.008,
            bytes_per_step=19.3e6,
            bytes_per_s=1.2e10,
            limit_bytes_per_s=2.4e10,
        ),
        Leg(name="forward", where=TRAINING, ms=24.2, share=0.114, per_sample_ms=0.756),
        Leg(name="backward", where=TRAINING, ms=47.9, share=0.226),
        Leg(name="read", where=WORKERS, ms=40.1, share=0.094, bytes_per_step=4.1e6),
        Leg(name="decode", where=WORKERS, ms=301.7, share=0.71, per_sample_ms=9.43),
        Leg(name="collate", where=WORKERS, ms=9.8, share=0.02),
    ]
    workers = [
        WorkerFacts(
            number=number,
            busy_share=share,
            user_share=0.8 * share,
            system_share=0.1 * share,
            voluntary_switches_per_s=110.0,
            involuntary_switches_per_s=14.0,
            storage_bytes_per_step=0.0,
            read_bytes_per_step=4.1e6,
            pss_bytes=310 * MIB,
            growth_bytes_per_step=1200.0,
        )
        for number, share in ((-1, 0.07), (0, 0.97), (1, 0.95))
    ]
    return Journey(
        legs=tuple(legs), workers=tuple(workers), missing={"pin": "memory is not pinned"}
    )


def _memory(name):
    rise = [(float(ms), int(MIB * (400 + 9 * ms))) for ms in range(0, 160, 4)]
    fall = [(float(ms), int(MIB * (1840 - 24 * (ms - 160)))) for ms in range(160, 213, 4)]
    return MemoryStory(
        peak_bytes=1840 * MIB,
        peak_phase="backward",
        by_phase={"data_wait": 400 * MIB, "forward": 1700 * MIB, "backward": 1840 * MIB},
        by_module={name: 610 * MIB, "layer3": 300 * MIB, "": 41 * MIB},
        largest=(
            TensorAtPeak(
                bytes=205 * MIB,
                shape=(32, 64, 112, 112),
                dtype="float32",
                line=f"{name}.py:88",
                phase="forward",
                module=name,
            ),
            TensorAtPeak(bytes=98 * MIB, shape=(), dtype="float32", line="", phase="forward"),
        ),
        timeline=tuple(rise + fall),
        leak_bytes_per_step=3.0 * MIB,
        reserved_bytes=2400 * MIB,
        fragmentation_share=0.23,
        allocation_retries=2,
        snapshot=f"out/{name}.pickle",
    )


def _gpu():
    return GpuReadings(
        util_share=0.93,
        sm_active_share=0.31,
        tensor_active_share=0.08,
        memory_used_bytes=9 * 1024**3,
        memory_total_bytes=80 * 1024**3,
        power_w=212.0,
        power_limit_w=700.0,
        clock_mhz=1695.0,
        max_clock_mhz=1980.0,
        temperature_c=61.0,
        throttle=("power cap",),
        pcie_rx_bytes_per_s=1.1e9,
        pcie_tx_bytes_per_s=4.0e7,
        other_processes=1,
        samples=60,
        series=tuple((0.2 * i, 0.98 if i % 5 else 0.55) for i in range(60)),
        missing={"fans": "the driver does not say"},
    )
