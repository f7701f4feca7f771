"""Slow compute: the tuner against the baseline and against what an expert wrote by hand."""

from benchmarks.bench import Arm, Bench, Record, cells, comparison, interleave, open_lab, trials_in
from flatout.records.ablation import Ablation, Comparison
from flatout.records.units import format_ms
from flatout.workflow.demo import scenarios
from flatout.workflow.tune import TuneOptions, tune

THEME = "slow_compute"
ROUNDS = 6
"""Fresh processes per arm after the tuning: the interval of the claim comes from these alone."""
LEAST_RATIO, LEAST_LOWER_END = 2.0, 1.8
"""What the final recipe must reach on a CPU that multiplies bf16 in hardware."""
LEAST_OF_HAND_TUNED = 0.95


def run(bench: Bench) -> Record:
    """Tune, then run baseline, tuned and hand-tuned round by round."""
    script, hand_tuned = (
        bench.workload(scenarios() / THEME / name) for name in ("train.py", "hand_tuned.py")
    )
    ablation = tune(
        script,
        TuneOptions(out=bench.work / "tune", budget_s=bench.budget_s),
        bench.tell,
    )
    baseline, tuned, by_hand = arms = [
        Arm(name="baseline", lab=open_lab(bench, script, "baseline")),
        Arm(
            name="tuned by flatout",
            lab=open_lab(bench, script, "tuned"),
            recipe=ablation.recipe,
        ),
        Arm(name="tuned by hand", lab=open_lab(bench, hand_tuned, "hand")),
    ]
    interleave(arms, ROUNDS)
    final, reference = comparison(baseline, tuned), comparison(baseline, by_hand)
    against_hand = comparison(by_hand, tuned)
    claim, holds = verdict(ablation, final, against_hand, has_bf16=has_fast_bf16(bench))
    rows = [
        ("", "step", "ratio", "95 % interval", "n"),
        ("baseline", format_ms(baseline.median_ms), "1.00x", "", str(ROUNDS)),
        ("tuned by hand", format_ms(by_hand.median_ms), *cells(reference)),
        (f"flatout: {ablation.recipe.label}", format_ms(tuned.median_ms), *cells(final)),
        ("flatout against by hand", "", *cells(against_hand)),
    ]
    return Record(
        theme=THEME,
        claim=claim,
        holds=holds,
        finding=f"{cells(final)[0]} [{cells(final)[1]}], by hand {cells(reference)[0]}",
        table=rows,
        raw={
            "ablation": ablation.to_json(),
            "rounds_s": {arm.name: arm.times_s for arm in arms},
            "trials": trials_in(bench.work),
        },
        recipe=ablation.recipe,
        ablations=[ablation],
    )


def has_fast_bf16(bench: Bench) -> bool:
    """Return whether bf16 should pay here."""
    return bench.machine.device.kind != "cpu" or bench.machine.has_fast_cpu_bf16


def verdict(
    ablation: Ablation, final: Comparison, against_hand: Comparison, *, has_bf16: bool
) -> tuple[str, bool]:
    """Return the claim that fits the hardware and whether it holds."""
    if not has_bf16:
        claim = "on a CPU without bf16 hardware, bf16 is not kept"
        return claim, "bf16_autocast" not in ablation.recipe.names
    claim = (
        f"at least {LEAST_RATIO:.1f}x with the interval above {LEAST_LOWER_END:.1f}x, and at least "
        f"{LEAST_OF_HAND_TUNED:.0%} of what tuning by hand reaches"
    )
    is_fast = final.ratio >= LEAST_RATIO and final.interval[0] > LEAST_LOWER_END
    return claim, is_fast and against_hand.ratio >= LEAST_OF_HAND_TUNED
