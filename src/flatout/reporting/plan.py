"""The report of `plan`: will it fit, what fills the memory, what would make it fit.

`render_plan` is for the terminal, `plan_html` one HTML file that loads and runs nothing.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.memory import TensorAtPeak
from flatout.records.messages import (
    ENGLISH,
    Messages,
    Sentence,
    Text,
    joined,
    messages,
    named,
    times,
    words,
)
from flatout.records.plan import MAX_BATCH, Amount, Plan, Rung
from flatout.records.units import format_bytes
from flatout.reporting.blocks import safe
from flatout.reporting.parallel_plan import (
    COLUMNS as WAY_COLUMNS,
)
from flatout.reporting.parallel_plan import (
    advice_lines,
    rejected_lines,
    spread_command,
    way_rows,
)
from flatout.reporting.tables import (
    NOTHING,
    Column,
    display_width,
    labelled,
    padded,
    table,
    wrapped,
)
from flatout.reporting.templates import render

SMALL_TIME = 0.005
"""Step times closer than this are the same in a prediction."""


def headline(plan: Plan) -> Sentence:
    """Return the answer in one sentence."""
    capacity = format_bytes(plan.capacity_bytes)
    where: Text = plan.device
    if capacity not in plan.device:
        where = words("fit.device", device=plan.device, size=capacity)
    spare = format_bytes(abs(plan.spare_bytes))
    if plan.fits:
        name = "fit.yes_with_retries" if plan.retries else "fit.yes"
        return words(name, device=where, spare=spare, n=str(plan.retries))
    lack = words("fit.maybe_not" if plan.spare_bytes >= 0 else "fit.no", device=where, size=spare)
    rung = plan.way_out
    if rung is None:
        return words("fit.no_way", lack=lack)
    name = "fit.way" if plan.is_sure(rung) else "fit.way_maybe"
    return words(name, lack=lack, way=choice_words(rung), cost=rung_cost(rung))


def used_words(plan: Plan) -> Text:
    """Say how much is used, with its interval."""
    amount = amount_words(plan.used)
    if not plan.batch:
        return amount
    return words("fit.used", amount=amount, batch=str(plan.batch))


def amount_words(amount: Amount) -> Text:
    """Return bytes with the interval they are in.

    >>> from flatout.records.plan import NumberSource
    >>> from flatout.records.units import MIB
    >>> amount_words(Amount(bytes=MIB, source=NumberSource.TRACED, low=MIB, high=2 * MIB))
    '1.0 MiB (1.0 MiB to 2.0 MiB)'
    """
    text = format_bytes(amount.bytes)
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    low, high = format_bytes(amount.low), format_bytes(amount.high)
    return words("fit.interval", size=text, low=low, high=high)


def component_rows(plan: Plan) -> list[tuple[Text, ...]]:
    """Return name, bytes, share of what is used, and how it is known; nothing that is zero."""
    total = max(1, plan.used.bytes)
    rows: list[tuple[Text, ...]] = [
        (
            named("part", name),
            format_bytes(amount.bytes),
            f"{100 * amount.bytes / total:.1f} %",
            _known_by(amount),
        )
        for name, amount in plan.components.items()
        if amount.bytes
    ]
    whole = words("fit.in_all")
    return [*rows, (whole, format_bytes(plan.used.bytes), "100.0 %", _known_by(plan.used))]


def peak_words(plan: Plan) -> Sentence:
    """Say when the peak is, and what the allocator makes of it."""
    return words(
        "fit.peak",
        phase=named("phase", plan.peak_phase),
        n=str(plan.peak_step + 1),
        allocated=format_bytes(plan.allocated.bytes),
        reserved=format_bytes(plan.reserved.bytes),
    )


def formula_words(plan: Plan) -> Text:
    """Set the classic estimate alongside the plan, with what it misses."""
    if plan.formula_bytes is None:
        return ""
    off = plan.formula_bytes / max(1, plan.used.bytes) - 1
    missed = tuple(
        words("exhaustion.part", name=named("component", name), size=format_bytes(count))
        for name, count in plan.formula_missed.items()
    )
    said = words(
        "fit.formula_below" if off < 0 else "fit.formula_above",
        size=format_bytes(plan.formula_bytes),
        percent=f"{100 * abs(off):.0f}",
    )
    return joined(said, words("fit.formula_misses", parts=missed[:3])) if missed else said


def batch_words(plan: Plan) -> Text:
    """Say which batches fit; empty where no one asked."""
    batches = plan.largest_batch
    if batches is None or not batches.with_retries:
        return "" if batches is None else words("fit.no_batch")
    if not batches.without_retries:
        return words("fit.batch_retries_only", n=str(batches.with_retries))
    if batches.without_retries == MAX_BATCH:
        return words("fit.any_batch", n=str(MAX_BATCH))
    most = words("fit.batch", n=str(batches.without_retries))
    if batches.with_retries > batches.without_retries:
        return joined(most, words("fit.batch_retries", n=str(batches.with_retries)))
    return most


def keep_words(plan: Plan) -> Text:
    """Say how to keep the batch that does not fit as a whole."""
    if plan.accumulating is None or plan.batch is None:
        return ""
    parts = plan.accumulating
    about = {"batch": str(plan.batch), "n": str(parts.steps), "part": str(parts.micro_batch)}
    return words("fit.keep", **about)


def choice_words(rung: Rung) -> str:
    """Return what a way consists of."""
    return " + ".join(rung.choices) if rung.choices else words("plan.as_it_is")


def rung_cost(rung: Rung) -> Sentence:
    """Say what a way saves and what it costs."""
    time = words("fit.same_time")
    if not _is_same_time(rung):
        time = words("fit.time", ratio=times(rung.time_ratio))
    return words("fit.cost", size=format_bytes(rung.saved_bytes), time=time)


def _is_same_time(rung: Rung) -> bool:
    return abs(rung.time_ratio - 1) < SMALL_TIME


def rung_rows(plan: Plan, most: int) -> list[tuple[Text, ...]]:
    """Return way, peak, saved, time, whether it fits, the largest batch, and how it is known."""
    rows: list[tuple[Text, ...]] = []
    for rung in shown(plan.ladder, most):
        known = words(f"known_by.{rung.source.value}")
        if rung.changes_training:
            known = words("fit.other_training", known=known)
        time = words("fit.same_time") if _is_same_time(rung) else times(rung.time_ratio)
        rows.append(
            (
                choice_words(rung),
                format_bytes(rung.peak_bytes),
                format_bytes(rung.saved_bytes) if rung.choices else NOTHING,
                time if rung.choices else NOTHING,
                fits_words(plan, rung),
                str(rung.largest_batch) if rung.largest_batch else NOTHING,
                known,
            )
        )
    return rows


def fits_words(plan: Plan, rung: Rung) -> Sentence:
    """Return whether a way fits, in a word."""
    if not rung.fits:
        return words("survey.says_no")
    return words("survey.says_yes" if plan.is_sure(rung) else "fit.perhaps")


def shown(rungs: Sequence[Rung], most: int) -> list[Rung]:
    """Return the first ways, and the script as it is wherever it is."""
    first = list(rungs[:most])
    return first + [rung for rung in rungs[most:] if not rung.choices]


def tensor_rows(tensors: Sequence[TensorAtPeak], most: int) -> list[tuple[Text, ...]]:
    """Return size, shape, what it is, and the line that made it."""
    return [
        (
            format_bytes(tensor.bytes),
            " ".join(filter(None, ["x".join(map(str, tensor.shape)), tensor.dtype])) or NOTHING,
            named("tensor_kind", tensor.kind.replace(" ", "_"))
            if tensor.kind
            else named("phase", tensor.phase),
            ", ".join(filter(None, [tensor.module, tensor.line or tensor.operator])) or NOTHING,
        )
        for tensor in tensors[:most]
    ]


def next_command(plan: Plan, workload: str, gpu: str) -> str:
    """Return what to type next."""
    chosen = f" --gpu {shlex.quote(gpu)}" if gpu else ""
    # A configuration is no training: it can be planned, and that is all.
    can_train = not workload.startswith("hf:")
    spread = spread_command(plan, workload)
    if spread is not None:
        return spread
    if plan.largest_batch is None and not (plan.fits and can_train):
        return f"flatout plan{chosen} --fit {workload}"
    if plan.fits and can_train:
        return f"flatout tune {workload}"
    return f"flatout plan{chosen} --html plan.html {workload}"


def _known_by(amount: Amount) -> Sentence:
    text = words(f"known_by.{amount.source.value}")
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    low, high = format_bytes(amount.low), format_bytes(amount.high)
    return words("fit.known_between", known=text, low=low, high=high)


MOST_TENSORS = 6
MOST_RUNGS = 8
COMPONENTS = ("part", "bytes", "share", "known_by")
TENSORS = ("largest", "shape", "what", "made_by")
LARGEST_BATCH = "batch"
RUNGS = ("way", "peak", "saves", "time", "fits", LARGEST_BATCH, "known_by")
NUMBERS = frozenset({"bytes", "share", "largest", "peak", "saves", "time", LARGEST_BATCH})
FACTS = ("used", "peak", "batch", "keep", "formula", "checked")


def render_plan(
    plan: Plan, *, workload: str, gpu: str = "", width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: the answer, the evidence, the next command."""
    say = messages(language)
    told = headline(plan)
    if plan.advice:
        told = words("fit.whole_batch", headline=told)
    lines = [*advice_lines(plan, say, width), *wrapped(say.text(told), width), ""]
    widest = max(LABEL_WIDTH, *(display_width(say(f"fit.label_{name}")) for name in FACTS))
    for name, text in _facts(plan):
        lines += labelled(padded(say(f"fit.label_{name}"), widest), say.text(text), width)
    lines += ["", *_table(COMPONENTS, component_rows(plan), say)]
    if plan.largest:
        lines += ["", *_table(TENSORS, tensor_rows(plan.largest, MOST_TENSORS), say)]
    if plan.ladder:
        lines += ["", *_ways(plan, say)]
    if plan.notes:
        lines.append("")
        for note in plan.notes:
            lines += labelled(say("fit.note"), say.text(note), width)
    lines += ["", f"{say('label.next')}  {next_command(plan, workload, gpu)}"]
    return safe("\n".join(lines), say) + "\n"


LABEL_WIDTH = 8


def _table(names: Sequence[str], rows: Sequence[Sequence[Text]], say: Messages) -> list[str]:
    columns = [Column(say(f"fit.column_{name}"), is_number=name in NUMBERS) for name in names]
    return table(columns, [[say.text(cell) for cell in row] for row in rows])


def _facts(plan: Plan) -> list[tuple[str, Text]]:
    facts: list[tuple[str, Text]] = [
        ("used", used_words(plan)),
        ("peak", peak_words(plan)),
        ("batch", batch_words(plan)),
        ("keep", keep_words(plan)),
        ("formula", formula_words(plan)),
        ("checked", plan.checked),
    ]
    return [(label, text) for label, text in facts if text]


def _ways(plan: Plan, say: Messages) -> list[str]:
    """Return the ways as a table, without columns that say nothing."""
    rows = rung_rows(plan, MOST_RUNGS)
    kept = [
        position
        for position, name in enumerate(RUNGS)
        if name != LARGEST_BATCH or any(row[position] != NOTHING for row in rows)
    ]
    return _table(
        [RUNGS[position] for position in kept],
        [[row[position] for position in kept] for row in rows],
        say,
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


def plan_html(plan: Plan, *, workload: str, gpu: str = "", language: str = ENGLISH) -> str:
    """Return the page: the answer, the curve of two steps, the tables."""
    say = messages(language)
    return render(
        "plan.html.j2",
        {
            "say": say,
            "headline": headline(plan),
            "advice": plan.advice,
            "way_columns": WAY_COLUMNS,
            "ways": way_rows(plan.parallel, len(plan.parallel)),
            "rejected": rejected_lines(plan.parallel),
            "fits": plan.fits,
            "workload": workload,
            "device": plan.device,
            "facts": _facts(plan),
            "width": WIDTH,
            "height": HEIGHT,
            "layers": layers(plan),
            "phases": phase_lines(plan),
            "capacity_y": _capacity_y(plan),
            "top": format_bytes(_top(plan) / HEADROOM),
            "capacity": format_bytes(plan.capacity_bytes),
            "told": words("fit.curve", peak=peak_words(plan)),
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


def phase_lines(plan: Plan) -> list[tuple[float, Text]]:
    """Return where each phase begins, and its name; of one that lasts no time nothing."""
    if len(plan.timeline) < 2:
        return []
    end = plan.timeline[-1][0] or 1
    starts = [
        (at, words("fit.phase", phase=named("phase", phase), n=str(step + 1)))
        for at, phase, step in plan.phases
        if phase != "setup"
    ]
    last = (end, words("fit.phase", phase="", n=""))
    kept = [
        (at, name)
        for (at, name), (later, _) in zip(starts, [*starts[1:], last], strict=True)
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
