"""Made-up plans for the reports."""

from dataclasses import replace

from flatout.records.memory import TensorAtPeak
from flatout.records.plan import Amount, LargestBatch, NumberSource, Plan, Rung
from flatout.records.units import GIB, MIB


def rung(*choices, **given):
    return Rung(
        **{
            "choices": choices,
            "peak_bytes": 10 * GIB,
            "saved_bytes": 2 * GIB,
            "time_ratio": 1.0,
            "fits": True,
            "why": "a reason",
        }
        | given
    )


def plan(used=12 * GIB, **given):
    context = Amount(bytes=GIB // 2, source=NumberSource.ASSUMED, low=GIB // 4, high=GIB)
    made = Plan(
        target="train.py",
        device="NVIDIA L4",
        capacity_bytes=16 * GIB,
        batch=8,
        allocated=Amount(bytes=used - 2 * GIB, source=NumberSource.TRACED),
        reserved=Amount(bytes=used - GIB // 2, source=NumberSource.SIMULATED),
        used=Amount(bytes=used, source=NumberSource.ASSUMED, low=used - GIB, high=used + GIB),
        components={
            "parameters": Amount(bytes=used - 3 * GIB, source=NumberSource.TRACED),
            "gradients": Amount(bytes=0, source=NumberSource.TRACED),
            "fragmentation": Amount(bytes=2 * GIB + GIB // 2, source=NumberSource.SIMULATED),
            "context": context,
        },
        peak_phase="backward",
        peak_step=1,
        largest=(
            TensorAtPeak(
                bytes=600 * MIB,
                shape=(8192, 50257),
                dtype="float32",
                line="train.py:31",
                phase="backward",
                module="<script>alert(1)</script>",
            ),
        ),
        timeline=((0, GIB), (5, 2 * GIB), (9, GIB)),
        parts={"parameters": (GIB, GIB, GIB), "activations": (0, GIB, 0)},
        phases=((0, "forward", 0), (4, "backward", 0), (7, "optimizer", 0)),
        ladder=(rung(fits=True), rung("fused_optimizer")),
        formula_bytes=9 * GIB,
        formula_missed={"gradients": GIB},
    )
    return replace(made, **given)


def too_large(**given):
    ways = (
        rung("activation_checkpointing mode=full", time_ratio=1.33, source=NumberSource.TRACED),
        rung("adafactor", changes_training=True),
        rung(fits=False, peak_bytes=20 * GIB),
    )
    return plan(
        20 * GIB,
        **{
            "ladder": ways,
            "largest_batch": LargestBatch(without_retries=5, with_retries=6),
        }
        | given,
    )
