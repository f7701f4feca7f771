"""The report of `plan`: will it fit, what fills the memory, what would make it fit.

`render_plan` is for the terminal, `plan_html` one HTML file that loads and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.memory import TensorAtPeak
from flatout.records.plan import MAX_BATCH, Amount, NumberSource, Plan, Rung
from flatout.records.units import format_bytes, format_ratio
from flatout.reporting.parallel_plan import (
    COLUMNS as WAY_COLUMNS,
)
from flatout.reporting.parallel_plan import (
    advice_lines,
    rejected_lines,
    spread_command,
    way_rows,
)
from flatout.reporting.tables import NOTHING, Column, ascii_only, labelled, table, wrapped
from flatout.reporting.templates import render

SOURCE_WORDS = {
    NumberSource.TRACED: "traced",
    NumberSource.SIMULATED: "simulated",
    NumberSource.CALIBRATED: "measured on this GPU",
    NumberSource.ASSUMED: "assumed",
}
PART_WORDS = {
    "optimizer": "optimizer state",
    "fragmentation": "rounding, unused",
    "context": "CUDA context",
    "nccl": "NCCL",
}
WHOLE_BATCH = "A GPU that takes the whole batch:"
SMALL_TIME = 0.005
"""Step times closer than this are the same in a prediction."""


def headline(plan: Plan) -> str:
    """Return the answer in one sentence."""
    capacity = format_bytes(plan.capacity_bytes)
    where = plan.device if capacity in plan.device else f"{plan.device} ({capacity})"
    if plan.fits:
        tail = f", with {plan.retries} allocator retries a step" if plan.retries else ""
        return f"It fits on {where} with {format_bytes(plan.spare_bytes)} to spare{tail}."
    if plan.spare_bytes >= 0:
        lack = f"It may not fit on {where}: {format_bytes(plan.spare_bytes)} to spare are less "
        lack += "than what is uncertain"
    else:
        lack = f"It does not fit on {where}: {format_bytes(-plan.spare_bytes)} too much"
    rung = plan.way_out
    if rung is None:
        return f"{lack}; none of the ways that were looked at suffices."
    verb = "fits" if plan.is_sure(rung) else "may fit"
    return f"{lack}; the cheapest way that {verb}: {choice_words(rung)} ({rung_cost(rung)})."


def used_words(plan: Plan) -> str:
    """Say how much is used, with its interval."""
    batch = f" at a batch of {plan.batch}" if plan.batch else ""
    return f"{amount_words(plan.used)}{batch}"


def amount_words(amount: Amount) -> str:
    """Return bytes with the interval they are in.

    >>> from flatout.records.units import MIB
    >>> amount_words(Amount(bytes=MIB, source=NumberSource.TRACED, low=MIB, high=2 * MIB))
    '1.0 MiB (1.0 MiB to 2.0 MiB)'
    """
    text = format_bytes(amount.bytes)
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    return f"{text} ({format_bytes(amount.low)} to {format_bytes(amount.high)})"


def component_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return name, bytes, share of what is used, and how it is known; nothing that is zero."""
    total = max(1, plan.used.bytes)
    rows = [
        (
            PART_WORDS.get(name, name),
            format_bytes(amount.bytes),
            f"{100 * amount.bytes / total:.1f} %",
            _known_by(amount),
        )
        for name, amount in plan.components.items()
        if amount.bytes
    ]
    used = ("in all", format_bytes(plan.used.bytes), "100.0 %", _known_by(plan.used))
    return [*rows, used]


def peak_words(plan: Plan) -> str:
    """Say when the peak is, and what the allocator makes of it."""
    return (
        f"in {plan.peak_phase} of step {plan.peak_step + 1}: "
        f"{format_bytes(plan.allocated.bytes)} allocated, "
        f"{format_bytes(plan.reserved.bytes)} reserved"
    )


def formula_words(plan: Plan) -> str:
    """Set the classic estimate alongside the plan, with what it misses."""
    if plan.formula_bytes is None:
        return ""
    off = plan.formula_bytes / max(1, plan.used.bytes) - 1
    missed = [f"{name} {format_bytes(count)}" for name, count in plan.formula_missed.items()]
    side = "below" if off < 0 else "above"
    tail = f"; it misses {', '.join(missed[:3])}" if missed else ""
    return (
        f"parameters + activations + optimizer state would be {format_bytes(plan.formula_bytes)}, "
        f"{100 * abs(off):.0f} % {side} what is used{tail}"
    )


def batch_words(plan: Plan) -> str:
    """Say which batches fit; empty where no one asked."""
    batches = plan.largest_batch
    if batches is None or not batches.with_retries:
        return "" if batches is None else "not even one sample fits"
    if not batches.without_retries:
        return f"at most {batches.with_retries}, only with allocator retries, which cost time"
    if batches.without_retries == MAX_BATCH:
        return f"{MAX_BATCH} and more: memory is no limit"
    most = f"at most {batches.without_retries}"
    if batches.with_retries > batches.without_retries:
        most += f"; up to {batches.with_retries} with allocator retries, which cost time"
    return most


def keep_words(plan: Plan) -> str:
    """Say how to keep the batch that does not fit as a whole."""
    if plan.accumulating is None or plan.batch is None:
        return ""
    parts = plan.accumulating
    return f"a batch of {plan.batch} as {parts.steps} micro-batches of {parts.micro_batch}"


def choice_words(rung: Rung) -> str:
    """Return what a way consists of."""
    return " + ".join(rung.choices) if rung.choices else "the script as it is"


def rung_cost(rung: Rung) -> str:
    """Say what a way saves and what it costs."""
    return f"saves {format_bytes(rung.saved_bytes)}, {time_words(rung)}"


def time_words(rung: Rung) -> str:
    """Return the predicted step time alongside that of the script as it is."""
    if abs(rung.time_ratio - 1) < SMALL_TIME:
        return "same time"
    return f"{format_ratio(rung.time_ratio)} the time"


def rung_rows(plan: Plan, most: int) -> list[tuple[str, ...]]:
    """Return way, peak, saved, time, whether it fits, the largest batch, and how it is known."""
    rows: list[tuple[str, ...]] = []
    for rung in shown(plan.ladder, most):
        note = "; another training" if rung.changes_training else ""
        rows.append(
            (
                choice_words(rung),
                format_bytes(rung.peak_bytes),
                format_bytes(rung.saved_bytes) if rung.choices else NOTHING,
                NOTHING if not rung.choices else time_words(rung).removesuffix(" the time"),
                fits_words(plan, rung),
                str(rung.largest_batch) if rung.largest_batch else NOTHING,
                SOURCE_WORDS[rung.source] + note,
            )
        )
    return rows


def fits_words(plan: Plan, rung: Rung) -> str:
    """Return whether a way fits, in a word."""
    if not rung.fits:
        return "no"
    return "yes" if plan.is_sure(rung) else "perhaps"


def shown(rungs: Sequence[Rung], most: int) -> list[Rung]:
    """Return the first ways, and the script as it is wherever it is."""
    first = list(rungs[:most])
    return first + [rung for rung in rungs[most:] if not rung.choices]


def tensor_rows(tensors: Sequence[TensorAtPeak], most: int) -> list[tuple[str, str, str, str]]:
    """Return size, shape, what it is, and the line that made it."""
    return [
        (
            format_bytes(tensor.bytes),
            " ".join(filter(None, ["x".join(map(str, tensor.shape)), tensor.dtype])) or NOTHING,
            tensor.kind or tensor.phase,
            ", ".join(filter(None, [tensor.module, tensor.line or tensor.operator])) or NOTHING,
        )
        for tensor in tensors[:most]
    ]


def next_command(plan: Plan, words: str, gpu: str) -> str:
    """Return what to type next.

    Args:
        plan: what was found.
        words: the target with its arguments.
        gpu: the device as the user named it; empty for this machine's own.
    """
    chosen = f" --gpu {gpu}" if gpu else ""
    # A configuration is no training: it can be planned, and that is all.
    can_train = not words.startswith("hf:")
    spread = spread_command(plan, words)
    if spread is not None:
        return spread
    if plan.largest_batch is None and not (plan.fits and can_train):
        return f"flatout plan{chosen} --fit {words}"
    if plan.fits and can_train:
        return f"flatout tune {words}"
    return f"flatout plan{chosen} --html plan.html {words}"


def _known_by(amount: Amount) -> str:
    text = SOURCE_WORDS[amount.source]
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    return f"{text}, {format_bytes(amount.low)} to {format_bytes(amount.high)}"


MOST_TENSORS = 6
MOST_RUNGS = 8
COMPONENTS = (
    Column("at the peak"),
    Column("bytes", is_number=True),
    Column("share", is_number=True),
    Column("known by"),
)
TENSORS = (Column("largest", is_number=True), Column("shape"), Column("what"), Column("made by"))
RUNGS = (
    Column("way"),
    Column("peak", is_number=True),
    Column("saves", is_number=True),
    Column("time", is_number=True),
    Column("fits"),
    Column("largest\nbatch", is_number=True),
    Column("known by"),
)


def render_plan(plan: Plan, *, workload: str, gpu: str = "", width: int = 80) -> str:
    """Return the report: the answer, the evidence, the next command.

    Args:
        plan: what was predicted.
        workload: the target with its arguments, as the user types it.
        gpu: the device as the user named it; empty for this machine's own.
        width: columns of the terminal.
    """
    told = f"{WHOLE_BATCH} {headline(plan)}" if plan.advice else headline(plan)
    lines = [*advice_lines(plan, width), *wrapped(told, width), ""]
    for label, text in _facts(plan):
        lines += labelled(f"{label:<8}", text, width)
    lines += ["", *table(COMPONENTS, component_rows(plan))]
    if plan.largest:
        lines += ["", *table(TENSORS, tensor_rows(plan.largest, MOST_TENSORS))]
    if plan.ladder:
        lines += ["", *_ways(plan)]
    if plan.notes:
        lines.append("")
        for note in plan.notes:
            lines += labelled("note", note, width)
    lines += ["", f"next  {next_command(plan, workload, gpu)}"]
    return ascii_only("\n".join(lines)) + "\n"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [
        ("used", used_words(plan)),
        ("peak", peak_words(plan)),
        ("batch", batch_words(plan)),
        ("keep", keep_words(plan)),
        ("formula", formula_words(plan)),
        ("checked", plan.checked),
    ]
    return [(label, text) for label, text in facts if text]


def _ways(plan: Plan) -> list[str]:
    """Return the ways as a table, without columns that say nothing."""
    rows = rung_rows(plan, MOST_RUNGS)
    kept = [
        position
        for position, column in enumerate(RUNGS)
        if column.title != "largest\nbatch" or any(row[position] != "-" for row in rows)
    ]
    return table(
        [RUNGS[position] for position in kept],
        [[row[position] for position in kept] for row in rows],
    )


WIDTH, HEIGHT = 1000.0, 260.0
HEADROOM = 1.04
MOST_RUNGS_ON_A_PAGE = 20
ORDER = (
    *("parameters", "buffers", "optimizer", "gradients"),
    *("inputs", "activations", "temporaries", "workspace"),
)
"""From the ground up: what stays is below what comes and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One component of the curve."""

    name: str
    points: str
    """Of a polygon."""


def plan_html(plan: Plan, *, workload: str, gpu: str = "") -> str:
    """Return the page: the answer, the curve of two steps, the tables.

    Args:
        plan: what was predicted.
        workload: the target with its arguments, as the user types it.
        gpu: the device as the user named it.
    """
    return render(
        "plan.html.j2",
        {
            "headline": headline(plan),
            "advice": plan.advice,
            "whole_batch": WHOLE_BATCH,
            "way_columns": [column.title for column in WAY_COLUMNS],
            "ways": way_rows(plan.parallel, len(plan.parallel)),
            "rejected": rejected_lines(plan.parallel),
            "fits": plan.fits,
            "workload": workload,
            "device": plan.device,
            "facts": [
                ("used", used_words(plan)),
                ("peak", peak_words(plan)),
                ("largest batch", batch_words(plan)),
                ("to keep it", keep_words(plan)),
                ("classic formula", formula_words(plan)),
                ("checked", plan.checked),
            ],
            "width": WIDTH,
            "height": HEIGHT,
            "layers": layers(plan),
            "phases": phase_lines(plan),
            "capacity_y": _capacity_y(plan),
            "top": format_bytes(_top(plan) / HEADROOM),
            "capacity": format_bytes(plan.capacity_bytes),
            "told": f"Allocated bytes over the traced steps: {peak_words(plan)}.",
            "components": component_rows(plan),
            "tensors": tensor_rows(plan.largest, len(plan.largest)),
            "rungs": rung_rows(plan, MOST_RUNGS_ON_A_PAGE),
            "whys": [(choice_words(rung), rung.why) for rung in plan.ladder if rung.choices],
            "notes": plan.notes,
            "next_command": next_command(plan, workload, gpu),
        },
    )


def layers(plan: Plan) -> list[Layer]:
    """Return the components as stacked polygons, from the ground up."""
    if len(plan.timeline) < 2:
        return []
    across, top = _across(plan), _top(plan)
    ground = [0] * len(plan.timeline)
    found = []
    for name in (name for name in ORDER if name in plan.parts):
        roof = [below + own for below, own in zip(ground, plan.parts[name], strict=True)]
        upper, lower = _line(across, roof, top), _line(across, ground, top)
        found.append(Layer(name=name, points=" ".join([*upper, *reversed(lower)])))
        ground = roof
    return found


def phase_lines(plan: Plan) -> list[tuple[float, str]]:
    """Return where each phase begins, and its name; of one that lasts no time nothing."""
    if len(plan.timeline) < 2:
        return []
    end = plan.timeline[-1][0] or 1
    starts = [(at, f"{phase} {step + 1}") for at, phase, step in plan.phases if phase != "setup"]
    kept = [
        (at, name)
        for (at, name), (later, _) in zip(starts, [*starts[1:], (end, "")], strict=True)
        if later - at > end / 50
    ]
    return [(round(WIDTH * at / end, 1), name) for at, name in kept]


def _across(plan: Plan) -> list[float]:
    end = plan.timeline[-1][0] or 1
    return [WIDTH * at / end for at, _count in plan.timeline]


def _top(plan: Plan) -> float:
    return HEADROOM * max([1, *(count for _at, count in plan.timeline)])


def _capacity_y(plan: Plan) -> float | None:
    """Return the height of the device's memory, where it is inside the drawing."""
    share = plan.capacity_bytes / _top(plan)
    return round(HEIGHT * (1 - share), 1) if share <= 1 else None


def _line(across: Sequence[float], counts: Sequence[int], top: float) -> list[str]:
    return [
        f"{x:.1f},{HEIGHT * (1 - count / top):.1f}" for x, count in zip(across, counts, strict=True)
    ]
