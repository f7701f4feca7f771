"""The product of our own against cuBLAS: plain, and with what follows it fused in.

Both in turn, operands of normal random numbers, times by events on the device: of replays of a CUDA
graph of some calls, since Python may need as long for a call as the device. What follows the
product is given to cuBLAS's side twice: as torch runs it, and compiled.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import Bench

ROUNDS = 15
BLOCK_S = 0.02
"""A block of calls of one side lasts about this long: hundreds of launches in flight."""
GRAPH_CALLS = 8
"""Calls in one graph: to replay it takes the host less than the device needs for one of them."""
HOST_CALLS = 32
"""Calls over which the host's time is taken: few enough that the queue does not fill up."""
GOAL_SHARE = 0.95
"""Of cuBLAS's rate, for the plain product."""
MOST_OFF = 2**-6
"""How far ours may be from torch's, in units of the largest entry: both round to bf16, torch once
more between the product and each thing that follows. As the kernel's own tests have it."""
VARIANTS = ("tiled", "persistent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product to compare."""

    name: str
    size: int
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False
    dtype: str = "bfloat16"

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the product."""
        return self.activation == "none" and not self.has_bias and not self.has_residual


def cases(sizes: Sequence[int]) -> list[Case]:
    """Return the plain products at every size, and the fused ones at the first."""
    first = sizes[0]
    return [
        *(Case(name=f"plain {size}", size=size) for size in sizes),
        Case(name=f"bias + gelu {first}", size=first, activation="gelu", has_bias=True),
        Case(name=f"relu2 {first}", size=first, activation="relu2"),
        Case(name=f"swiglu {first}", size=first, activation="swiglu"),
        Case(name=f"residual {first}", size=first, has_residual=True),
    ]


def run(seconds: float, bench: Bench, sizes: Sequence[int] = (4096, 8192)) -> dict[str, Any]:
    """Compare case by case until the time is up; what was not reached is told.

    What follows is fused into the variant that was the fastest alone: to compile and tune the other
    one as well would take the time twice.
    """
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    wanted = cases(sizes)
    longest_s = 0.0
    try:
        for case in wanted:
            began = time.monotonic()
            if began + longest_s > deadline:
                continue
            rows.append(guarded(case, VARIANTS if case.is_plain else _fastest(rows)))
            longest_s = max(longest_s, time.monotonic() - began)
            bench.say(f"  gemm {words(rows[-1])}")
            bench.note({"rows": rows, "missed": []})
    except KeyboardInterrupt:  # the stage's time is up: what was compared counts
        bench.say("  gemm: no time was left")
    seen = {row["case"] for row in rows}
    return {"rows": rows, "missed": [case.name for case in wanted if case.name not in seen]}


def guarded(case: Case, variants: Sequence[str]) -> dict[str, Any]:
    """Return the comparison of a case; one that fails is a row that says so."""
    try:
        return compared(case, variants)
    except Exception as error:  # noqa: BLE001  one case must not take the others down
        failed = {"case": case.name, "is_plain": case.is_plain, "is_kernel": False}
        return failed | {"ours": {}, "theirs": {}, "why": f"{type(error).__name__}: {error}"[:500]}


def words(row: Mapping[str, Any]) -> str:
    """Return one comparison as a line."""
    best = max(row["ours"], key=lambda name: row["ours"][name]["tflops"], default=None)
    theirs = ", ".join(f"{name} {side['tflops']:.4g}" for name, side in row["theirs"].items())
    if best is None:
        return f"{row['case']}: ours failed ({row['why']}); {theirs} TFLOP/s"
    name = best if row["is_kernel"] else "no kernel here, plain operations"
    wrong = [f"; {variant} is WRONG by {side['off']:.2g}" for variant, side in _wrong(row).items()]
    rate = f"{row['ours'][best]['tflops']:.4g}"
    return f"{row['case']}: {name} {rate}; {theirs} TFLOP/s{''.join(wrong)}"


def is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether every case was compared and is right, as fast as cuBLAS or ahead of torch."""
    return bool(result["rows"]) and not result["missed"] and all(map(_is_good, result["rows"]))


def _is_good(row: Mapping[str, Any]) -> bool:
    """Return whether a plain product nearly keeps up, and a fused one is ahead."""
    if row["is_plain"]:
        return share_of_cublas(row) >= GOAL_SHARE
    return share_of(row, row["theirs"]) > 1.0


def share_of_cublas(row: Mapping[str, Any]) -> float:
    """Return our best rate as a share of torch's; 0 where none of our kernels ran."""
    return share_of(row, ("torch",))


def share_of(row: Mapping[str, Any], sides: Iterable[str]) -> float:
    """Return our best rate as a share of the best of theirs; 0 where ours ran nowhere or is wrong.

    One wrong variant is enough for that: no one chooses the right one by its result.
    """
    if not row["is_kernel"] or _wrong(row):
        return 0.0
    best = max((side["tflops"] for side in row["ours"].values()), default=0.0)
    return float(best / max(row["theirs"][name]["tflops"] for name in sides))


def _wrong(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return our variants whose result is too far off, or no number at all."""
    ours = row["ours"].items()
    return {name: side for name, side in ours if not side["off"] <= MOST_OFF}


def _fastest(rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Return the variant that multiplied fastest so far; all where none has worked."""
    rates = [
        (side["tflops"], name)
        for row in rows
        if row["is_plain"]
        for name, side in row["ours"].items()
        if name not in _wrong(row)
    ]
    return (max(rates)[1],) if rates else VARIANTS


def compared(case: Case, variants: Sequence[str] = VARIANTS) -> dict[str, Any]:
    """Return the rates of both sides, and how far ours is off."""
    import torch

    from examples.gemm.product import kernel_available

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = operands(case, device)
    reference, compiled = theirs(case, given, device)
    flops = 2.0 * case.size**3 * (2 if case.activation == "swiglu" else 1)
    row: dict[str, Any] = {"case": case.name, "is_plain": case.is_plain, "why": ""}
    row |= {"ours": {}, "theirs": {}}
    row["is_kernel"] = kernel_available(given["a"].device, given["a"].dtype)
    sides: dict[str, Callable[[], Any]] = {"torch": reference}
    wanted = reference()
    if compiled is not None and (trouble := _trouble(compiled)) is None:
        sides["torch compiled"] = compiled
    elif compiled is not None:
        row["why"] = f"torch compiled: {trouble}"
    for variant in variants:
        call = ours(case, given, variant)
        if (trouble := _trouble(call)) is not None:
            row["why"] = f"{variant}: {trouble}"
            continue
        off = (call().float() - wanted.float()).abs().max() / wanted.float().abs().max()
        sides[variant] = call
        row["ours"][variant] = {"off": float(off)}
    host_ms = {name: 1e3 * host_s(call, device) for name, call in sides.items()}
    goes, calls, row["timed"] = played_as(sides, device)
    for name, times_s in in_turn(goes, device).items():
        times = [time_s / calls for time_s in times_s]
        rate = {"ms": [1e3 * t for t in times], "tflops": flops / statistics.median(times) / 1e12}
        side = row["ours"] if name in row["ours"] else row["theirs"]
        side[name] = {**side.get(name, {}), **rate, "host_ms": host_ms[name]}
    return row


def played_as(
    sides: Mapping[str, Callable[[], Any]], device: str
) -> tuple[Mapping[str, Callable[[], Any]], int, str]:
    """Return what is timed of each side, how many products that is, and words on it.

    All sides of a case are timed in one way: a graph alongside plain calls would be no comparison.
    """
    if device == "cpu":
        return sides, 1, "plain calls"
    goes: dict[str, Callable[[], Any]] = {}

    def capture() -> None:
        for name, call in sides.items():
            goes[name] = graph_of(call)

    if (trouble := _trouble(capture)) is not None:
        lacks = next(name for name in sides if name not in goes)
        return sides, 1, f"plain calls: no graph of {lacks}: {trouble}"
    return goes, GRAPH_CALLS, f"replays of a CUDA graph of {GRAPH_CALLS} calls"


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of some calls, on the operands that they hold."""
    import torch

    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        call()  # what a stream needs once, such as cuBLAS's workspace, cannot be captured
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        # The compiler's threads may call the driver meanwhile.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                call()
    finally:
        torch.cuda.set_stream(current)  # where a capture fails, torch stays on the other one
    return graph.replay


def host_s(call: Callable[[], Any], device: str) -> float:
    """Return the host's seconds for one call: on a device until it is queued, not until it ran."""
    import torch

    call()
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - began) / HOST_CALLS


def _trouble(call: Callable[[], Any]) -> str | None:
    """Call once; return what went wrong, if anything did. A first call compiles and tunes."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  one side that fails is a result
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"
    return None


def operands(case: Case, device: str) -> dict[str, Any]:
    """Return operands as a linear layer has them: the right one is a weight, turned."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    columns = case.size * (2 if case.activation == "swiglu" else 1)

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype)

    return {
        "a": made(case.size, case.size),
        "b": made(columns, case.size).t(),
        "bias": made(columns) if case.has_bias else None,
        "residual": made(case.size, case.size) if case.has_residual else None,
    }


def ours(case: Case, given: Mapping[str, Any], variant: str) -> Callable[[], Any]:
    """Return a call of our kernel."""
    from examples.gemm import gemm

    return lambda: gemm(**given, activation=case.activation, variant=variant)


def theirs(
    case: Case, given: Mapping[str, Any], device: str
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Return the same by torch's own operators, and compiled where something follows."""
    import torch

    from examples.gemm.product import activated

    def plain() -> Any:
        a, b, bias = given["a"], given["b"], given["bias"]
        before = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        out = activated(before, case.activation)
        return out if given["residual"] is None else out + given["residual"]

    follows = case.activation != "none" or case.has_residual
    if not follows or device == "cpu":
        return plain, None
    return plain, torch.compile(plain)


def in_turn(sides: Mapping[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    """Return seconds of one call of each side, a block of each in turn."""
    calls = {}
    for name, call in sides.items():
        block_s(call, 3, device)
        calls[name] = max(1, round(BLOCK_S / max(block_s(call, 2, device), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            times[name].append(block_s(sides[name], calls[name], device))
    return times


def block_s(call: Callable[[], Any], calls: int, device: str) -> float:
    """Return the seconds of one call over a block of them."""
    import torch

    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
