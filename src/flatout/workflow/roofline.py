"""The command `roofline`: what the device can do, and what each product of a step gets of it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from flatout.analysis.product_advice import Change, advised, plan
from flatout.analysis.products import Seen, attention_flops, seen_products, tile_share, wave_share
from flatout.hardware.machine import read_machine
from flatout.hardware.peaks import Peaks, PeaksOf, ask_module, read_peaks
from flatout.launch.trial_process import clean_up_stale_trials, scratch_root
from flatout.records.errors import UserError
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.roofline import DeviceCeilings, Product, ProductAdvice, Roofline
from flatout.records.trial import Workload
from flatout.records.units import format_share
from flatout.tuning.passes import PassRunner, Tell, find_seen

ARITHMETIC = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}
"""What is measured of each device, alongside what a script uses."""
ALONE = "flatout.workflow.products_alone"
"""What the training's own Python runs to time products."""
LAST_CALL_S = 2.0
"""Time that is kept for what is under way when the limit comes."""
FEWEST_LEFT_S = 5.0
"""With less time left nothing is timed."""
MOST_OF_STEP = 1.2
"""When the products alone take more than the step times this, one of the two was disturbed."""
KINDS = {"rocm": "cuda"}
"""What torch calls a device that the driver calls otherwise."""


Groups: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]
Times: TypeAlias = list[list[dict[str, Any]]]
Timer = Callable[[Groups], Times]
"""Times groups of calls alone, as `time_alone` does."""


def roofline(
    workload: Workload | None = None,
    *,
    recipe: Recipe = Recipe(),
    limit_s: float = 300.0,
    machine: Machine | None = None,
    tell: Tell = lambda _: None,
) -> Roofline:
    """Return the device's ceilings and, with a workload, its products against them.

    Raises:
        UserError: if the device cannot be measured, or the script trains nothing.
    """
    if limit_s <= 0:
        raise UserError(f"a limit of {limit_s} s leaves no time to measure; give a positive one")
    machine = machine or read_machine(torch=False)
    if workload is None:
        kind = KINDS.get(machine.device.kind, machine.device.kind)
        stack = {"torch": machine.torch_version, "driver": machine.facts.get("driver", "")}
        return Roofline(
            ceilings=_ceilings(machine, kind, (), sys.executable, tell), environment=stack
        )
    clean_up_stale_trials()
    runner = PassRunner(
        workload=workload, recipe=recipe, machine=machine, limit_s=limit_s, tell=tell
    )
    trial = runner.run(words("progress.plain"), {})
    if trial.profile is None:
        raise UserError(f"{workload.command_line} showed no steady step: {trial.message}")
    # The first step may differ (lazy layers); the median of four does not show it.
    watched = runner.run(words("progress.products"), {"products": {}}, steps=4)
    found = find_seen(watched, "products")
    if found is None:
        errors = "; ".join(watched.details.get("errors", ()))
        trouble = watched.message or errors or "the probe failed"
        raise UserError(f"the products of {workload.command_line} were not seen: {trouble}")
    rows = seen_products(found)
    kind = found["device"] or "cpu"
    used = tuple(sorted({row.product.dtype for row in rows}))
    ceilings = _ceilings(machine, kind, used, workload.python, tell)
    python, threads = workload.python, found["threads"]

    def timer(groups: Groups) -> Times:
        left_s = runner.left_s
        return time_alone(groups, device=kind, threads=threads, python=python, limit_s=left_s)

    tell(words("progress.alone", n=str(len(rows))))
    rows = _timed(rows, timer, ceilings)
    ceilings = _raised(ceilings, rows)
    tell(words("progress.changes"))
    return _noted(
        Roofline(
            ceilings=ceilings,
            workload=workload.command_line,
            step_ms=trial.profile.step_ms.median,
            products=tuple(row.product for row in rows),
            advice=_advice(rows, timer, ceilings),
            attention_flops=attention_flops(found["segments"]),
            environment=dict(trial.profile.environment),
        ),
        trial.profile,
        is_compiled=any("compile" in name for name in recipe.names),
    )


def time_alone(groups: Groups, *, device: str, threads: int, python: str, limit_s: float) -> Times:
    """Return for each call of each group its `ms` and `n`, or `why` there is none.

    Calls of one group are timed in turn, so that they can be compared.
    """
    why: str = words("roofline.no_time")
    if limit_s >= FEWEST_LEFT_S:
        most_s = limit_s - LAST_CALL_S
        job = {"groups": groups, "device": device, "threads": threads, "limit_s": most_s}
        try:
            found: Times = ask_module(python, ALONE, job=job, limit_s=limit_s + 60.0)
            return found
        except ValueError as error:
            why = words("roofline.alone_failed", why=str(error))
    return [[{"why": why} for _ in group] for group in groups]


def _timed(rows: Sequence[Seen], timer: Timer, ceilings: DeviceCeilings) -> tuple[Seen, ...]:
    """Return the products with their times, the largest part of the step first."""
    largest = sorted(rows, key=lambda row: -row.product.count * row.product.flops)
    times = timer([[row.call] for row in largest])
    found = [
        replace(row, product=_with_time(row.product, alone, ceilings))
        for row, (alone,) in zip(largest, times, strict=True)
    ]
    return tuple(sorted(found, key=lambda row: -(row.product.step_ms or 0.0)))


def _with_time(product: Product, alone: Mapping[str, Any], ceilings: DeviceCeilings) -> Product:
    """Add the time, and how the sizes suit the processors of a GPU."""
    product = replace(
        product, ms=alone.get("ms"), n_timed=alone.get("n", 0), why=alone.get("why", "")
    )
    if not ceilings.processors or product.operator == "convolution_backward":
        return product  # two products of different sizes in one call
    m, n = product.m, product.n
    return replace(
        product,
        tile_share=tile_share(m, n),
        wave_share=wave_share(m, n, ceilings.processors, batch=product.batch),
    )


def _raised(ceilings: DeviceCeilings, rows: Sequence[Seen]) -> DeviceCeilings:
    """Return ceilings that no product was seen above.

    Then the peak was measured alongside others.
    """
    rates = dict(ceilings.gemm_flops_per_s)
    for product in (row.product for row in rows):
        if product.dtype in rates and product.intensity >= ceilings.ridge(product.dtype):
            rates[product.dtype] = max(rates[product.dtype], product.flops_per_s or 0.0)
    return replace(ceilings, gemm_flops_per_s=rates)


def _advice(
    rows: Sequence[Seen], timer: Timer, ceilings: DeviceCeilings
) -> tuple[ProductAdvice, ...]:
    """Return what was foreseen, timed in turn with what it would replace."""
    changes = plan(rows, ceilings)
    groups = [
        [rows[place].call, call] for change in changes for place, call in change.calls.items()
    ]
    times = iter(timer(groups) if groups else [])
    found = [advised(change, rows, _pairs(change, times)) for change in changes]
    return tuple(sorted(found, key=lambda advice: -(advice.saved_ms or 0.0)))


def _pairs(change: Change, times: Any) -> dict[int, tuple[float, float]]:
    """Return the milliseconds as it is and changed of each product that could be timed."""
    pairs = {}
    for place in change.calls:
        now, changed = next(times)
        if "ms" in now and "ms" in changed:
            pairs[place] = (now["ms"], changed["ms"])
    return pairs


def _ceilings(
    machine: Machine, kind: str, used: Sequence[str], python: str, tell: Tell
) -> DeviceCeilings:
    """Return the device's rates, kept from an earlier time where nothing changed since."""
    if kind not in ARITHMETIC:
        raise UserError(
            f"there is no way to measure a device of kind {kind}; cpu and cuda have one"
        )
    on_cpu = kind == "cpu"
    name = machine.cpu_name if on_cpu else machine.device.name
    peaks: dict[str, Peaks] = {}
    missing: dict[str, str] = {}
    for dtype in dict.fromkeys((*ARITHMETIC[kind], *used)):
        tell(words("progress.peak", dtype=dtype))
        wanted = PeaksOf(
            device_kind=kind,
            device_name=name,
            dtype=dtype,
            threads=machine.physical_cores,
            torch_version=machine.torch_version,
            driver="" if on_cpu else str(machine.facts.get("driver", "")),
        )
        try:
            peaks[dtype] = read_peaks(wanted, scratch_root(), python)
        except ValueError as reason:
            missing[dtype] = str(reason)
    if not peaks:
        raise UserError(f"the device could not be measured: {'; '.join(missing.values())}")
    return _put_together(kind, name, peaks, missing)


def _put_together(
    kind: str, name: str, peaks: Mapping[str, Peaks], missing: Mapping[str, str]
) -> DeviceCeilings:
    def best(of: Callable[[Peaks], float]) -> float:
        return max(map(of, peaks.values()))

    copy = best(lambda peak: peak.memory_bytes_per_s)
    triad = best(lambda peak: peak.triad_bytes_per_s)
    on_cpu = kind == "cpu"
    return DeviceCeilings(
        device_kind=kind,
        device_name=name,
        threads=next(iter(peaks.values())).threads,
        gemm_flops_per_s={dtype: peak.gemm_flops_per_s for dtype, peak in peaks.items()},
        memory_bytes_per_s=max(copy, triad),
        copy_bytes_per_s=copy,
        triad_bytes_per_s=triad,
        to_device_bytes_per_s=None if on_cpu else best(lambda peak: peak.copy_bytes_per_s),
        from_device_bytes_per_s=(
            None if on_cpu else best(lambda peak: peak.from_device_bytes_per_s)
        ),
        processors=max(peak.processors for peak in peaks.values()) or None,
        is_sound=all(peak.is_sound for peak in peaks.values()),
        missing=missing,
    )


def _noted(found: Roofline, profile: Profile, *, is_compiled: bool) -> Roofline:
    """Add what the reader should know."""
    notes = list(profile.invalid)
    if not found.products:
        notes.append(words("roofline.no_products"))
    if found.step_ms and found.products_ms > MOST_OF_STEP * found.step_ms:
        share = format_share(found.products_ms / found.step_ms)
        notes.append(words("roofline.too_much", share=share))
    untimed = [product for product in found.products if product.ms is None]
    if untimed:
        notes.append(words("roofline.untimed", n=str(len(untimed)), why=untimed[0].why))
    if is_compiled or any(model.is_compiled for model in profile.models):
        notes.append(words("roofline.compiled"))
    return replace(found, notes=tuple(notes))
