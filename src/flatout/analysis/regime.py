"""What bounds the step, and what a technique could give at most. Pure; runs in the parent.

A technique that acts on six percent of the step gives 1.06x at most (Amdahl's law), however good it
is (`best_case`). `loaders_per_s` reads a pass of the ceilings.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flatout.records.messages import joined, named, words
from flatout.records.profile import CAUSES, PHASES, Bound, Ceilings, Profile, Regime, most_times

SURE_BATCHES = 2
"""Fewer batches than this after the prefetched ones make no rate."""


def main_dtype(flops: Mapping[str, float]) -> str:
    """Return the dtype in which most of the operations are done; empty where there are none.

    >>> main_dtype({"float32": 1.0, "bfloat16": 9.0})
    'bfloat16'
    """
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else ""


def drained_per_s(drained: Mapping[str, Any]) -> float | None:
    """Return samples per second of a drained loader; None where too few batches came.

    The clock starts when the batches that were prefetched during the workers' start are gone, or
    at half of the batches where there were not more.

    >>> drained_per_s({"times_s": [5.0, 6.0, 7.0], "samples": [8, 8, 8], "ahead": 0})
    8.0
    """
    times_s, samples = drained["times_s"], drained["samples"]
    first = min(drained["ahead"], (len(times_s) - 1) // 2)
    if len(times_s) - first < SURE_BATCHES:
        return None
    elapsed_s: float = times_s[-1] - times_s[first]
    return float(sum(samples[first + 1 :])) / elapsed_s if elapsed_s > 0 else None


def loaders_per_s(seen: Mapping[str, Any]) -> float | None:
    """Return samples per second of the training loaders; the slowest where a step draws of several.

    None where one of them could not be measured.
    """
    rates = [drained_per_s(drained) for drained in seen["loaders"].values()]
    known = [rate for rate in rates if rate]
    return min(known) if known and len(known) == len(rates) else None


COMPUTE = ("forward", "backward", "optimizer")
COMPUTE_CAUSES = ("gemm", "bandwidth", "compute")
"""Causes that are in the kernels themselves."""
SMALL_WORK_CAUSES = ("launch", "bandwidth", "compute")
"""Causes that fusing operations takes away."""
PRODUCTS = re.compile(
    r"gemm|gemv|cutlass|wgmma|xmma|nvjet|matmul|\bmma|conv|wgrad|dgrad|winograd|cudnn|flash|fmha|"
    r"attention|triton_tem|aten::(mm|bmm|addmm|baddbmm|addbmm|linear)$|"
    r"mkldnn_linear|mkl_linear|linear_pointwise|mkldnn_rnn",
    re.IGNORECASE,
)
"""Names of kernels and operators that are matrix products, convolutions or attention."""
NO_PRODUCTS = re.compile(
    r"bn_|batch_?norm|nchwtonhwc|nhwctonchw|tensortransform|convert|pooling|cudnn::ops::",
    re.IGNORECASE,
)
"""Names of cuDNN's other kernels, and of conversions."""
MARGIN = 1.5
"""A share may be this many times what was measured: phases are medians, and clocks differ."""
SLACK = 0.01
"""Added to every share before a technique is called hopeless: one percent of the step is noise."""


def with_regime(profile: Profile) -> Profile:
    """Return the profile with its regime, from everything it holds."""
    return replace(profile, regime=regime_of(profile))


def regime_of(profile: Profile) -> Regime:
    """Return what bounds the step, as far as the profile tells."""
    shares: dict[str, float] = {}
    evidence, missing = [], {}
    for cause, (share, why) in {
        "input": _input(profile),
        "sync": _sync(profile),
        "communication": _communication(profile),
        "launch": _launch(profile),
    }.items():
        if share is None:
            missing[cause] = why
            continue
        # Each is seen apart from the others: what they hold twice counts once.
        shares[cause] = min(share, max(0.0, 1 - sum(shares.values())))
        if share > 0:
            evidence.append(f"{cause}: {why}")
    kernels = max(0.0, profile.share(*COMPUTE) - sum(shares.values()) + shares["input"])
    split, why = _split(profile, kernels)
    shares |= split
    outside = profile.share("other") - shares.get("sync", 0.0) - shares.get("launch", 0.0)
    shares["other"] = min(max(0.0, outside), max(0.0, 1 - sum(shares.values())))
    if why:
        evidence.append(f"kernels: {why}")
    if "compute" in split:
        missing["gemm"] = missing["bandwidth"] = "a trace tells products from the rest: --trace"
    name = max(CAUSES, key=lambda cause: shares.get(cause, 0.0))
    return Regime(
        name=name if shares.get(name) else "compute",
        shares=shares,
        evidence=tuple(evidence),
        amdahl={phase: most_times(profile.share(phase)) for phase in PHASES}
        | {"data_wait": most_times(data_share(profile))},
        missing=missing,
    )


def is_product(name: str) -> bool:
    """Return whether a kernel or operator is a matrix product, a convolution or attention.

    >>> is_product("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"), is_product("aten::addmm")
    (True, True)
    >>> is_product("void cudnn::bn_fw_tr_1C11_kernel_NCHW"), is_product("aten::add_")
    (False, False)
    """
    return bool(PRODUCTS.search(name)) and not NO_PRODUCTS.search(name)


def data_share(profile: Profile) -> float:
    """Return the share of the whole step that data cost: what free data could take away at most.

    The wait, the epoch's start, and where a run with free data showed it, what the workers take
    from the rest of the step.
    """
    whole_ms = profile.whole_step_ms
    waited_ms = whole_ms - profile.step_ms.median * (1 - profile.share("data_wait"))
    return min(1.0, waited_ms / whole_ms + profile.ceilings.slowed_share) if whole_ms else 0.0


def held_to_phases(profile: Profile, measured: Ceilings) -> Ceilings:
    """Return measured ceilings, none of them above what the profile says there is to be saved.

    The runs that measure them are other processes at other moments: without this, a machine that
    drifts would give free data more than the wait that it takes away. What can be saved of data and
    copies together is at least what can be saved of one.
    """
    with_measured = replace(profile, ceilings=measured)
    data, copies = data_share(with_measured), profile.share("h2d")
    step_of_whole = profile.step_ms.median / profile.whole_step_ms
    other = profile.share("other")
    free_data = min(measured.free_data, most_times(data))
    # Copies that no clock of the device told apart are part of the rest.
    free_copies = min(measured.free_copies, most_times((copies or other) * step_of_whole))
    # Nothing hides the loop's own code from a CPU: a replay that was slower says nothing of it.
    least = most_times(other * step_of_whole) if profile.device_kind == "cpu" else 1.0
    outside = min(1.0, data + (copies + other) * step_of_whole)
    return replace(
        measured,
        free_data=free_data,
        free_copies=free_copies,
        compute_only=max(
            free_data, free_copies, least, min(measured.compute_only, most_times(outside))
        ),
    )


def best_case(profile: Profile, addresses: Collection[str]) -> Bound:
    """Return the most that a technique could give which acts on the given phases.

    Generous on purpose, as a hopeless technique is never tried: of the median and the mean the
    larger share counts, with the epoch's start where the loader is concerned. A technique that
    addresses no phase of the step is not bounded.
    """
    phases = [phase for phase in PHASES if phase in addresses]
    if not phases or profile.step_ms.median <= 0 or not any(profile.phases_ms.values()):
        return Bound(ratio=float("inf"), share=1.0, why=words("row.nothing_bounds"))
    share = max(profile.share(*phases), _mean_share(profile, phases))
    acted_on = joined(*(named("phase", phase) for phase in phases), joint="joint.with")
    if "data_wait" in phases:
        extra = data_share(profile) - profile.share("data_wait")
        share = min(1.0, share + max(0.0, extra))
        if extra > SLACK:
            acted_on = words("row.bound_more", phases=acted_on)
    ratio = most_times(share)
    name = "row.bound" if len(phases) == 1 else "row.bound_many"
    why = words(name, phases=acted_on, share=f"{100 * share:.1f}", ratio=f"{ratio:.2f}")
    return Bound(ratio=ratio, share=share, why=why)


def is_hopeless(bound: Bound, smallest: float) -> bool:
    """Return whether even a generous reading of the best case stays below a gain that could show.

    >>> is_hopeless(Bound(ratio=1.002, share=0.002, why=""), 1.02)
    True
    >>> is_hopeless(Bound(ratio=1.02, share=0.02, why=""), 1.02)
    False
    """
    return most_times(MARGIN * bound.share + SLACK) < smallest


def addressable_ms(
    profile: Profile, phases: Iterable[str], causes: Collection[str] = CAUSES
) -> float:
    """Return the milliseconds of some phases that lie with some causes.

    Where the profile does not tell the causes apart, that is all of them: predictions are meant
    to be optimistic, and the trial decides.
    """
    whole_ms = profile.step_ms.median * profile.share(*phases)
    shares = profile.regime.shares if profile.regime else {}
    known = {c: s for c, s in shares.items() if c not in ("input", "communication", "other")}
    total = sum(known.values())
    if total <= 0:
        return whole_ms
    return whole_ms * sum(share for cause, share in known.items() if cause in causes) / total


def lowered_ms(profile: Profile) -> float:
    """Return the milliseconds of forward and backward that half precision makes faster, at most.

    On a CPU these are the products alone, where they are known: everything else computes as slowly
    in bf16 (an encoder of width 64, products far below the peak rate, ran at 0.87x on a CPU with
    AVX-512 and bf16). A GPU's other kernels move half the bytes.
    """
    is_products_alone = profile.device_kind == "cpu" and products_are_known(profile)
    causes = ("gemm",) if is_products_alone else COMPUTE_CAUSES
    return addressable_ms(profile, ("forward", "backward"), causes)


def full_fp32_ms(profile: Profile) -> float | None:
    """Return what products outside the tensor cores take of a step; None without kernels' times.

    On a device with tensor cores these are the products in full fp32.
    """
    trace = profile.trace
    if trace is None or trace.product_share is None or trace.tensor_core_share is None:
        return None
    share = max(0.0, trace.product_share - trace.tensor_core_share)
    return share * profile.device_busy_share * profile.step_ms.median


def idle_share(profile: Profile) -> float:
    """Return the share of the time in which the device had nothing to do, as far as is known.

    It is what waits of the host may cost at most: a wait for a busy device costs nothing on its
    own.
    """
    seen = profile.trace.idle.idle_share if profile.trace and profile.trace.idle else 1.0
    return min(max(0.0, 1 - profile.device_busy_share), seen)


def _input(profile: Profile) -> tuple[float, str]:
    share = profile.share("data_wait", "h2d")
    return share, f"data wait and copies to the device are {100 * share:.1f} % of the step"


def _sync(profile: Profile) -> tuple[float | None, str]:
    if profile.device_kind == "cpu":
        return 0.0, ""
    known = [point.ms_per_step for point in profile.syncs if point.ms_per_step is not None]
    if not known:
        return None, "the waits of the host: measure without --quick"
    share = min(sum(known) / profile.step_ms.median, idle_share(profile))
    return share, f"the host waits for the device in {len(known)} places, {100 * share:.1f} %"


def _communication(profile: Profile) -> tuple[float, str]:
    exposed_ms, step_ms = exposed_communication(profile) or (0.0, 0.0)
    share = min(1.0, exposed_ms / step_ms) if step_ms else 0.0
    return share, f"collectives that nothing hides are {100 * share:.1f} % of the step"


def exposed_communication(profile: Profile) -> tuple[float, float] | None:
    """Return exposed communication and the step it is in, milliseconds; None where unseen.

    Whoever waits for a slow rank does so in a collective, so the rank that is last tells best what
    communication itself costs. One rank's trace cannot tell that waiting from bandwidth.
    """
    known = [
        (rank.exposed_communication_ms, rank.step_ms)
        for rank in profile.ranks
        if rank.exposed_communication_ms is not None
    ]
    if known:
        return min(known, key=lambda pair: pair[0])
    trace = profile.trace
    if trace is None or not trace.exposed_communication_ms:
        return None
    if any(rank.is_straggler for rank in profile.ranks):
        return None
    return trace.exposed_communication_ms, trace.step_ms


def _launch(profile: Profile) -> tuple[float | None, str]:
    if profile.device_kind == "cpu":
        return None, "operators on a CPU start where they run"
    if profile.trace is None or profile.trace.idle is None:
        return None, "the idle times of the device: measure --trace"
    # The profiler slows the host. What a traced step takes longer than a timed one is that.
    traced_ms, step_ms = profile.trace.step_ms, profile.step_ms.median
    waiting_ms = profile.trace.idle.host_wait_share * traced_ms - max(0.0, traced_ms - step_ms)
    waiting = min(1.0, max(0.0, waiting_ms) / step_ms)
    share = max(0.0, waiting - _input(profile)[0] - (_sync(profile)[0] or 0.0))
    return share, f"the device waits {100 * share:.1f} % of the time for kernels to be launched"


def _split(profile: Profile, kernels: float) -> tuple[dict[str, float], str]:
    """Return the kernels' share split into products and the rest, where something tells."""
    products = profile.trace.product_share if profile.trace else None
    if products is not None:
        why = f"{100 * products:.0f} % of their time in products, convolutions and attention"
        return {"gemm": kernels * products, "bandwidth": kernels * (1 - products)}, why
    least_ms = profile.limits.least_step_ms if profile.limits else None
    if least_ms:
        gemm = min(kernels, least_ms / profile.step_ms.median)
        why = f"the products alone take {100 * gemm:.0f} % of the step at the measured peak rate"
        return {"gemm": gemm, "compute": kernels - gemm}, why
    return {"compute": kernels}, ""


def products_are_known(profile: Profile) -> bool:
    """Return whether it is known which part of the kernels' time is not in products."""
    return profile.regime is not None and "bandwidth" in profile.regime.shares


def _mean_share(profile: Profile, phases: Iterable[str]) -> float:
    """Return the phases' share over all steps kept: a median hides what every tenth step does."""
    columns = [PHASES.index(phase) for phase in phases]
    total = sum(sum(step) for step in profile.steps_ms)
    return sum(step[c] for step in profile.steps_ms for c in columns) / total if total else 0.0
