"""The report of `plan`: will it fit, what fills the memory, what would make it fit, and where."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flatout.records.memory import TensorAtPeak
from flatout.records.messages import (
    ENGLISH,
    Sentence,
    Text,
    joined,
    messages,
    named,
    times,
    words,
)
from flatout.records.parallel import spec_to_toml
from flatout.records.plan import (
    MAX_BATCH,
    Amount,
    NumberSource,
    ParallelAdvice,
    ParallelPlan,
    Plan,
    Rung,
)
from flatout.records.units import format_bytes, format_ms, format_share
from flatout.reporting.blocks import (
    UNKNOWN,
    WORD_COLUMNS,
    Block,
    Facts,
    Next,
    Table,
    known_columns,
    report,
)
from flatout.reporting.templates import render

SMALL_TIME = 0.005
"""Step times closer than this are the same in a prediction."""
MOST_TENSORS = 6
MOST_RUNGS = 8
MOST_RUNGS_ON_A_PAGE = 20
MOST_WAYS = 6
MOST_REJECTED = 12
LABELS = "fit.label_"
COMPONENTS = ("part", "size", "share", "known_by")
TENSORS = ("largest", "shape", "kind", "made_by")
RUNGS = ("way", "peak", "saves", "time", "fits", "largest_batch", "known_by")
WAYS = ("spread_as", "step", "fullest", "exchange", "bubble", "time_known_by")
WIDTH, HEIGHT = 1000.0, 260.0
HEADROOM = 1.04
ORDER = (
    *("parameters", "buffers", "optimizer", "gradients"),
    *("inputs", "activations", "temporaries", "workspace"),
)
"""From the ground up: what stays is below what comes and goes."""


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
    time = words("fit.same_time")
    if not _is_same_time(rung):
        time = words("fit.time", ratio=times(rung.time_ratio))
    cost = words("fit.cost", size=format_bytes(rung.saved_bytes), time=time)
    name = "fit.way" if plan.is_sure(rung) else "fit.way_maybe"
    return words(name, lack=lack, way=choice_words(rung), cost=cost)


def amount_words(amount: Amount) -> Text:
    """Return bytes with the interval they are in.

    >>> from flatout.records.units import MIB
    >>> amount_words(Amount(bytes=MIB, source=NumberSource.TRACED, low=MIB, high=2 * MIB))
    '1.0 MiB (1.0 MiB to 2.0 MiB)'
    """
    text = format_bytes(amount.bytes)
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    low, high = format_bytes(amount.low), format_bytes(amount.high)
    return words("fit.interval", size=text, low=low, high=high)


def components(plan: Plan) -> Table:
    """Return name, bytes, share of what is used, and how it is known; nothing that is zero."""
    total = max(1, plan.used.bytes)
    parts: list[tuple[Text, Amount]] = [(named("part", x), y) for x, y in plan.components.items()]
    rows = tuple(
        (name, format_bytes(one.bytes), f"{100 * one.bytes / total:.1f} %", _known_by(one))
        for name, one in (*parts, (words("fit.in_all"), plan.used))
        if one.bytes
    )
    return Table(columns=COMPONENTS, rows=rows)


def _known_by(amount: Amount) -> Sentence:
    text = words(f"known_by.{amount.source.value}")
    if amount.low is None or amount.high is None or amount.low == amount.high:
        return text
    low, high = format_bytes(amount.low), format_bytes(amount.high)
    return words("fit.known_between", known=text, low=low, high=high)


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


def _facts(plan: Plan) -> tuple[tuple[str, Text], ...]:
    used, keep = amount_words(plan.used), ""
    if plan.batch:
        used = words("fit.used", amount=used, batch=str(plan.batch))
    if plan.accumulating is not None and plan.batch is not None:
        parts = plan.accumulating
        about = {"n": str(parts.steps), "part": str(parts.micro_batch)}
        keep = words("fit.keep", batch=str(plan.batch), **about)
    return (
        ("used", used),
        ("peak", peak_words(plan)),
        ("batch", batch_words(plan)),
        ("keep", keep),
        ("formula", formula_words(plan)),
        ("checked", plan.checked),
    )


def choice_words(rung: Rung) -> str:
    """Return what a way consists of."""
    return " + ".join(rung.choices) if rung.choices else words("plan.as_it_is")


def _is_same_time(rung: Rung) -> bool:
    return abs(rung.time_ratio - 1) < SMALL_TIME


def rungs(plan: Plan, most: int) -> Table:
    """Return way, peak, saved, time, whether it fits, the largest batch, and how it is known."""
    rows: list[tuple[Text, ...]] = []
    # The first ways, and the script as it is wherever that is.
    for rung in (*plan.ladder[:most], *(rung for rung in plan.ladder[most:] if not rung.choices)):
        known = words(f"known_by.{rung.source.value}")
        if rung.changes_training:
            known = words("fit.other_training", known=known)
        time = words("fit.same_time") if _is_same_time(rung) else times(rung.time_ratio)
        fits = "survey.says_yes" if plan.is_sure(rung) else "fit.perhaps"
        rows.append(
            (
                choice_words(rung),
                format_bytes(rung.peak_bytes),
                format_bytes(rung.saved_bytes) if rung.choices else UNKNOWN,
                time if rung.choices else UNKNOWN,
                words(fits if rung.fits else "survey.says_no"),
                str(rung.largest_batch) if rung.largest_batch else UNKNOWN,
                known,
            )
        )
    return known_columns(Table(columns=RUNGS, rows=tuple(rows)))


def tensors(largest: Sequence[TensorAtPeak]) -> Table:
    """Return size, shape, what it is, and the line that made it."""
    rows = tuple(
        (
            format_bytes(tensor.bytes),
            " ".join(filter(None, ["x".join(map(str, tensor.shape)), tensor.dtype])) or UNKNOWN,
            named("tensor_kind", tensor.kind.replace(" ", "_"))
            if tensor.kind
            else named("phase", tensor.phase),
            ", ".join(filter(None, [tensor.module, tensor.line or tensor.operator])) or UNKNOWN,
        )
        for tensor in largest
    )
    return Table(columns=TENSORS, rows=rows)


def ways(plans: Sequence[ParallelPlan]) -> Table:
    """Return spec, step, memory, exchange, bubble and source of the ways that fit."""
    rows: list[tuple[Text, ...]] = []
    for plan in plans:
        if not plan.fits or plan.step_ms is None:
            continue
        # A time that is known by a profile, of whichever GPU, is calibrated.
        is_measured = plan.step_ms.source is NumberSource.CALIBRATED
        rows.append(
            (
                plan.spec.label,
                format_ms(plan.step_ms.value),
                format_bytes(int(plan.peak_bytes.value)) if plan.peak_bytes else UNKNOWN,
                *(_share(plan, name) for name in ("communication", "bubble")),
                words(f"known_by.{'profile' if is_measured else plan.step_ms.source.value}"),
            )
        )
    return known_columns(Table(columns=WAYS, rows=tuple(rows)))


def _share(plan: ParallelPlan, name: str) -> str:
    found = plan.shares.get(name)
    return format_share(min(1.0, found.value)) if found is not None else UNKNOWN


def rejected(plans: Sequence[ParallelPlan]) -> Facts:
    """Return why each way was rejected; those that are too many are counted."""
    found = [plan for plan in plans if not plan.fits]
    lines: list[Text] = [
        words("joint.because", one=plan.spec.label, other=plan.why)
        for plan in found[:MOST_REJECTED]
    ]
    if len(found) > MOST_REJECTED:
        lines.append(words("way.more_rejected", n=str(len(found) - MOST_REJECTED)))
    return Facts(rows=tuple(("rejected", line) for line in lines), labels="way.label_")


def next_command(plan: Plan, workload: str, gpu: str) -> str:
    """Return what to type next."""
    chosen = f" --gpu {shlex.quote(gpu)}" if gpu else ""
    # A configuration is no training: it can be planned, and that is all.
    can_train = not workload.startswith("hf:")
    spread = spread_command(plan, workload) if can_train else None
    if spread is not None:
        return spread
    if plan.largest_batch is None and not (plan.fits and can_train):
        return f"flatout plan{chosen} --fit {workload}"
    if plan.fits and can_train:
        return f"flatout tune {workload}"
    return f"flatout plan{chosen} --html plan.html {workload}"


def spread_command(plan: Plan, workload: str) -> str | None:
    """Return the command that trains as advised; None where there is nothing to spread."""
    advice = plan.advice
    if advice is None or advice.spec is None or advice.ranks in (None, 1):
        return None
    spec = advice.spec
    found = spec_to_toml(spec).items()
    values = " ".join(f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in found)
    in_recipe = f", with [parallel] {values} in it"
    if ".py:" in workload:
        return f"flatout run --with recipe.toml {workload}{in_recipe}"
    gpus = min(int(plan.environment.get("gpus", spec.world_size)), spec.world_size)
    hosts = spec.world_size // gpus
    where = f"--gpus {gpus}" + (f" --hosts {hosts} --rendezvous HOST:PORT" if hosts > 1 else "")
    if spec.dp_shard > 1 and spec.dp_replicate > 1:
        return f"flatout run --with recipe.toml {where} {workload}{in_recipe}"
    zero = f" --zero {spec.zero}" if spec.zero else ""
    zero += " --offload" if spec.offload else ""
    return f"flatout run {where}{zero} {workload}"


def render_plan(
    plan: Plan, *, workload: str, gpu: str = "", width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: the answer, the evidence, the next command."""
    blocks = _blocks(plan, next_command(plan, workload, gpu))
    return report(blocks, messages(language), width)


def _blocks(plan: Plan, command: str) -> Iterator[Block]:
    if plan.advice:
        yield from _advice(plan, plan.advice)
        yield words("fit.whole_batch", headline=headline(plan))
    else:
        yield headline(plan)
    yield Facts(rows=_facts(plan), labels=LABELS)
    yield components(plan)
    yield tensors(plan.largest[:MOST_TENSORS])
    yield rungs(plan, MOST_RUNGS)
    yield Facts(rows=tuple(("note", note) for note in plan.notes), labels=LABELS)
    yield Next(command=command)


def _advice(plan: Plan, found: ParallelAdvice) -> Iterator[Block]:
    """Yield the verdict, the ways that fit, and the rejected ones."""
    yield found.verdict
    shown = ways(plan.parallel)
    yield replace(shown, rows=shown.rows[:MOST_WAYS])
    if found.batch:
        first = next((one for one in plan.parallel if one.fits), None)
        why = words("way.why", way=first.spec.label, why=first.why) if first else ""
        yield words("way.batch_stays", batch=str(found.batch), why=why)
    yield rejected(plan.parallel)


def plan_html(plan: Plan, *, workload: str, gpu: str = "", language: str = ENGLISH) -> str:
    """Return the page: the answer, the curve of two steps, the tables."""
    # The height of the device's memory, where it is inside the drawing.
    capacity_share = plan.capacity_bytes / _top(plan)
    capacity_y = round(HEIGHT * (1 - capacity_share), 1) if capacity_share <= 1 else None
    return render(
        "plan.html.j2",
        {
            "say": messages(language),
            "plan": plan,
            "headline": headline(plan),
            "words": WORD_COLUMNS,
            "ways": ways(plan.parallel),
            "rejected": rejected(plan.parallel).rows,
            "workload": workload,
            "facts": _facts(plan),
            "width": WIDTH,
            "height": HEIGHT,
            "layers": layers(plan),
            "phases": phase_lines(plan),
            "capacity_y": capacity_y,
            "top": format_bytes(_top(plan) / HEADROOM),
            "capacity": format_bytes(plan.capacity_bytes),
            "told": words("fit.curve", peak=peak_words(plan)),
            "components": components(plan),
            "tensors": tensors(plan.largest),
            "rungs": rungs(plan, MOST_RUNGS_ON_A_PAGE),
            "whys": [(choice_words(rung), rung.why) for rung in plan.ladder if rung.choices],
            "next_command": next_command(plan, workload, gpu),
        },
    )


def layers(plan: Plan) -> list[tuple[str, str]]:
    """Return the components, each with the points of its polygon, stacked from the ground up."""
    if len(plan.timeline) < 2:
        return []
    top, end = _top(plan), plan.timeline[-1][0] or 1
    across = [WIDTH * at / end for at, _count in plan.timeline]

    def line(counts: Sequence[int]) -> list[str]:
        heights = (HEIGHT * (1 - count / top) for count in counts)
        return [f"{x:.1f},{y:.1f}" for x, y in zip(across, heights, strict=True)]

    ground = [0] * len(plan.timeline)
    found = []
    for name in (name for name in ORDER if name in plan.parts):
        roof = [below + own for below, own in zip(ground, plan.parts[name], strict=True)]
        found.append((name, " ".join([*line(roof), *reversed(line(ground))])))
        ground = roof
    return found


def phase_lines(plan: Plan) -> list[tuple[float, Text]]:
    """Return where each phase begins, and its name; of one that lasts no time nothing."""
    if len(plan.timeline) < 2:
        return []
    end = plan.timeline[-1][0] or 1
    starts = [phase for phase in plan.phases if phase[1] != "setup"]
    ends = [*(at for at, _, _ in starts[1:]), end]
    return [
        (
            round(WIDTH * at / end, 1),
            words("fit.phase", phase=named("phase", phase), n=str(step + 1)),
        )
        for (at, phase, step), until in zip(starts, ends, strict=True)
        if until - at > end / 50
    ]


def _top(plan: Plan) -> float:
    return HEADROOM * max([1, *(count for _at, count in plan.timeline)])
