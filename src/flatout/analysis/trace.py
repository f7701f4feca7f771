"""From the events of a Chrome trace to a summary. Pure; times in the events are microseconds.

The device's part has been checked on made-up events, and read on an H200. `merged` and
`without` compute with spans of time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatout.analysis.regime import is_product
from flatout.records.messages import words
from flatout.records.readings import Consumer, IdleSplit, TraceEntry, TraceSummary

Span = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union as spans that do not touch, in order.

    >>> merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the total length of spans that do not overlap.

    >>> length([(0.0, 2.0), (3.0, 4.0)])
    3.0
    """
    return sum(stop - start for start, stop in spans)


def without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """Return the parts of the spans that no span of `taken` covers.

    >>> without([(0.0, 4.0)], [(1.0, 2.0), (3.0, 9.0)])
    [(0.0, 1.0), (2.0, 3.0)]
    """
    cuts = merged(taken)
    ends = [stop for _, stop in cuts]
    left: list[Span] = []
    for start, stop in merged(spans):
        reached = start
        place = bisect_right(ends, start)
        while place < len(cuts) and cuts[place][0] < stop:
            if cuts[place][0] > reached:
                left.append((reached, cuts[place][0]))
            reached = cuts[place][1]
            place += 1
        if reached < stop:
            left.append((reached, stop))
    return left


Event = Mapping[str, Any]
STEP = "ProfilerStep#"
"""How torch's profiler names the span of a step."""
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver", "hip_runtime")
TOP_OF_ONE = 3
"""Operators that are named of one place."""
TOP = 10
"""Rows kept: the tenth kernel of a training step rarely holds two percent of it."""
KERNEL_WAIT_US = 0.03
"""Gap between queued kernels that is no one's fault: the default of Holistic Trace Analysis
(`consecutive_kernel_delay`, 30 ns), so that the split can be compared with it."""
COMMUNICATION = ("nccl", "rccl")
LAYOUT = ("nchwtonhwc", "nhwctonchw", "tensortransform", "converttensor")
"""Parts of the names of cuDNN's layout kernels."""
TENSOR_CORE = (
    *("h884", "s884", "c1688", "h1688", "s1688", "i8816", "16816", "hmma", "gmma", "nvjet"),
    *("tensorop", "xmma_gemm", "xmma_implicit_gemm", "xmma_fprop", "xmma_dgrad", "xmma_wgrad"),
    *("xmma_sparse", "xmma_warp_specialized", "flash_fwd", "flash_bwd"),
)
"""Parts of the names of kernels that use tensor cores: the list of PyTorch's TensorBoard plugin
(`tb_plugin/torch_tb_profiler/profiler/tensor_core.py`), cuBLAS's, cuDNN's and attention's newer
names."""
NOT_TENSOR_CORE = ("ffma", "f32f32_f32f32_f32_", "simt")
"""Kernels of the same families that multiply in fp32 without tensor cores."""


def summarise_trace(events: Iterable[Event]) -> TraceSummary | None:
    """Return what the traced steps held; None where no whole step was traced."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [
        span(event)
        for event in whole
        if event["name"].startswith(STEP) and event.get("cat") == "user_annotation"
    ]
    if not steps:
        return None
    first, last = min(start for start, _ in steps), max(stop for _, stop in steps)
    device = [e for e in whole if e.get("cat") in DEVICE_KINDS and e["ts"] >= first]
    # Kernels end after the host's step: the profiler waits for them.
    window = first, max([last, *(span(event)[1] for event in device)])
    step_ms = (window[1] - window[0]) / 1e3 / len(steps)
    times = _self_times(whole, (first, last))
    summary = TraceSummary(
        steps=len(steps),
        step_ms=step_ms,
        operators=tuple(_entries(times, len(steps), step_ms)[:TOP]),
        product_share=_product_share(times),
    )
    if not device:
        return _without_device(summary)
    return _with_device(summary, whole, device, window)


def summarise_device(
    events: Iterable[Event], segments: int, lasted_us: float = 0.0
) -> TraceSummary | None:
    """Return what a device did, where the trace has no marks of steps; None without kernels.

    The summary is that of one of the segments. The device waited for the host in what is not
    between the first and the last event of the time that was traced (`lasted_us`).
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    device = [event for event in whole if event.get("cat") in DEVICE_KINDS]
    if not any(event["cat"] == "kernel" for event in device):
        return None
    last = max(span(event)[1] for event in device)
    window = min(last - lasted_us, *(event["ts"] for event in device)), last
    step_ms = (window[1] - window[0]) / 1e3 / segments
    return _with_device(TraceSummary(steps=segments, step_ms=step_ms), whole, device, window)


def of_steps(summary: TraceSummary, segments_per_step: float) -> TraceSummary:
    """Return the summary of a step from that of a segment; shares stay what they are."""
    exposed = summary.exposed_communication_ms
    return replace(
        summary,
        steps=max(1, round(summary.steps / segments_per_step)),
        step_ms=summary.step_ms * segments_per_step,
        kernels=tuple(
            replace(
                entry,
                calls_per_step=entry.calls_per_step * segments_per_step,
                ms_per_step=entry.ms_per_step * segments_per_step,
            )
            for entry in summary.kernels
        ),
        exposed_communication_ms=exposed * segments_per_step if exposed is not None else None,
    )


def summarise_operators(seen: Mapping[str, Any]) -> TraceSummary | None:
    """Return what a CPU's operators took, from the probe's own times; None where it saw no step."""
    steps, times = seen["steps"], seen["operators"]
    if not steps or not times:
        return None
    step_ms = seen["traced_ms"] / steps
    entries = _entries(times, steps, step_ms)
    summary = TraceSummary(
        steps=steps,
        step_ms=step_ms,
        operators=tuple(entries[:TOP]),
        consumers=find_consumers(entries, seen.get("places", ())),
        product_share=_product_share(times),
    )
    return _without_device(summary)


def find_consumers(
    entries: Sequence[TraceEntry], places: Iterable[Sequence[Any]]
) -> tuple[Consumer, ...]:
    """Return the places that take the most, the largest first.

    Places are of operators the module, line and work there: an operator's time is shared out by
    work, as no one timed its calls apart.
    """
    by_name: dict[str, dict[tuple[str, str], float]] = {}
    for name, module, line, work in places:
        by_name.setdefault(name, {})[module, line] = work
    parts: dict[tuple[str, str], list[TraceEntry]] = {}
    for entry in entries:
        works = by_name.get(entry.name, {})
        total = sum(works.values())
        for place, work in works.items() if total else ():
            part = work / total
            parts.setdefault(place, []).append(
                replace(entry, ms_per_step=part * entry.ms_per_step, share=part * entry.share)
            )
    parts.pop(("", ""), None)
    found = [
        Consumer(
            module=module,
            line=line,
            share=sum(entry.share for entry in own),
            operators=tuple(sorted(own, key=lambda entry: -entry.share)[:TOP_OF_ONE]),
        )
        for (module, line), own in parts.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.share)[:TOP])


def span(event: Event) -> Span:
    """Return begin and end of an event.

    >>> span({"ts": 2.0, "dur": 3.0})
    (2.0, 5.0)
    """
    return event["ts"], event["ts"] + event["dur"]


def _without_device(summary: TraceSummary) -> TraceSummary:
    unseen = ("kernels", "idle", "exposed communication", "layout conversions", "tensor cores")
    return replace(summary, missing=dict.fromkeys(unseen, words("note.no_kernels")))


def _with_device(
    summary: TraceSummary, whole: Sequence[Event], device: Sequence[Event], window: Span
) -> TraceSummary:
    kernels = [event for event in device if event["cat"] == "kernel"]
    times = [(event["name"], 1, event["dur"] / 1e3) for event in kernels]
    communication = [event for event in kernels if _is_named(event, COMMUNICATION)]
    names = {event["name"] for event in communication}
    compute = [event for event in device if event["cat"] != "kernel" or event["name"] not in names]
    exposed = without(map(span, communication), map(span, compute))
    with_tensor_cores = [event for event in kernels if not _is_named(event, NOT_TENSOR_CORE)]
    busy_us = sum(event["dur"] for event in kernels)
    return replace(
        summary,
        kernels=tuple(_entries(times, summary.steps, summary.step_ms)[:TOP]),
        idle=idle_split(whole, device, window),
        exposed_communication_ms=length(exposed) / 1e3 / summary.steps,
        layout_conversion_share=_share_of(kernels, LAYOUT, busy_us),
        product_share=_product_share(times),
        tensor_core_share=_share_of(with_tensor_cores, TENSOR_CORE, busy_us),
    )


def idle_split(whole: Iterable[Event], device: Sequence[Event], window: Span) -> IdleSplit:
    """Return the device's idle time by what the next thing on it waited for."""
    launched: dict[Any, float] = {
        event["args"]["correlation"]: event["ts"]
        for event in whole
        if event.get("cat") in LAUNCH_KINDS and "correlation" in event.get("args", {})
    }
    starts: dict[float, float] = {}
    for event in device:
        number = event.get("args", {}).get("correlation")
        launch: float = launched[number] if number in launched else event["ts"]
        starts[event["ts"]] = min(launch, starts.get(event["ts"], launch))
    shares = [0.0, 0.0, 0.0]
    for began, ended in without([window], map(span, device)):
        launch = starts.get(ended, ended)  # nothing follows at the end: the host was done
        is_queued = launch <= began
        cause = (1 if ended - began <= KERNEL_WAIT_US else 2) if is_queued else 0
        shares[cause] += (ended - began) / (window[1] - window[0])
    return IdleSplit(host_wait_share=shares[0], kernel_wait_share=shares[1], other_share=shares[2])


Times = Sequence[tuple[str, int, float]]
"""Names, each with calls and milliseconds; a name may come again."""


def _self_times(whole: Iterable[Event], window: Span) -> list[tuple[str, int, float]]:
    """Return what every operator took on its own: without the operators it calls."""
    first, last = window
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in whole:
        if event.get("cat") == "cpu_op" and event["ts"] < last and span(event)[1] > first:
            by_thread[event["tid"]].append(event)
    found = []
    for events in by_thread.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [event["dur"] for event in events]
        open_events: list[int] = []
        for index, event in enumerate(events):
            while open_events and span(events[open_events[-1]])[1] <= event["ts"]:
                open_events.pop()
            if open_events:
                own[open_events[-1]] -= event["dur"]
            open_events.append(index)
        found += [(e["name"], 1, max(0.0, us) / 1e3) for e, us in zip(events, own, strict=True)]
    return found


def _entries(times: Times, steps: int, step_ms: float) -> list[TraceEntry]:
    """Return what each name takes of a step, the largest first."""
    total_ms: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, count, ms in times:
        total_ms[name] += ms
        calls[name] += count
    return [
        TraceEntry(
            name=name,
            calls_per_step=calls[name] / steps,
            ms_per_step=total_ms[name] / steps,
            share=total_ms[name] / steps / step_ms if step_ms else 0.0,
        )
        for name in sorted(total_ms, key=lambda name: -total_ms[name])
    ]


def _product_share(times: Times) -> float | None:
    total = sum(ms for _, _, ms in times)
    return sum(ms for name, _, ms in times if is_product(name)) / total if total else None


def _share_of(kernels: Iterable[Event], parts: Sequence[str], busy_us: float) -> float:
    named_us: float = sum(event["dur"] for event in kernels if _is_named(event, parts))
    return named_us / busy_us if busy_us else 0.0


def _is_named(event: Event, parts: Sequence[str]) -> bool:
    name = str(event["name"]).lower()
    return any(part in name for part in parts)
