"""Ways to spread a training over GPUs in words: the verdict, a table, a line for each rejected one.

The same rows serve the terminal and the page.
"""

from collections.abc import Mapping, Sequence

from flatout.records.messages import Messages, Text, words
from flatout.records.parallel import ParallelSpec, spec_to_toml
from flatout.records.plan import NumberSource, ParallelPlan, Plan
from flatout.records.units import format_bytes, format_ms, format_share
from flatout.reporting.tables import NOTHING, Column, table, wrapped

MOST_WAYS = 6
MOST_REJECTED = 12
COLUMNS = ("spread_as", "step", "fullest", "exchange", "bubble", "time_known_by")
TEXTS = ("spread_as", "time_known_by")
"""Columns that hold no numbers."""


def advice_lines(plan: Plan, say: Messages, width: int) -> list[str]:
    """Return the verdict, the ways that fit, and the rejected ones; nothing for one GPU."""
    advice = plan.advice
    if advice is None:
        return []
    lines = [*wrapped(say.text(advice.verdict), width), ""]
    rows = way_rows(plan.parallel, MOST_WAYS)
    if rows:
        columns = [Column(say(f"way.column_{n}"), is_number=n not in TEXTS) for n in COLUMNS]
        lines += [*table(columns, [[say.text(cell) for cell in row] for row in rows]), ""]
    if advice.batch:
        kept = say("way.batch_stays", batch=advice.batch)
        lines += [*wrapped(f"{kept} {say.text(why_words(plan))}".strip(), width), ""]
    for line in rejected_lines(plan.parallel):
        lines += wrapped(say.text(line), width)
    return lines if lines[-1] == "" else [*lines, ""]


def way_rows(plans: Sequence[ParallelPlan], most: int) -> list[tuple[Text, ...]]:
    """Return spec, step, memory, exchange, bubble and source of the fastest ways that fit."""
    fitting = [plan for plan in plans if plan.fits and plan.step_ms is not None]
    return [
        (
            plan.spec.label,
            format_ms(plan.step_ms.value) if plan.step_ms else NOTHING,
            format_bytes(int(plan.peak_bytes.value)) if plan.peak_bytes else NOTHING,
            _share(plan, "communication"),
            _share(plan, "bubble"),
            _known_by(plan.step_ms.source) if plan.step_ms else NOTHING,
        )
        for plan in fitting[:most]
    ]


def _known_by(source: NumberSource) -> Text:
    """Return how a time is known: by a profile, of whichever GPU, it is calibrated."""
    calibrated = source is NumberSource.CALIBRATED
    return words("known_by.profile" if calibrated else f"known_by.{source.value}")


def _share(plan: ParallelPlan, name: str) -> str:
    found = plan.shares.get(name)
    return format_share(min(1.0, found.value)) if found is not None else NOTHING


def why_words(plan: Plan) -> Text:
    """Say where the time of the fastest way goes."""
    first = next((one for one in plan.parallel if one.fits), None)
    return words("way.why", way=first.spec.label, why=first.why) if first else ""


def rejected_lines(plans: Sequence[ParallelPlan]) -> list[Text]:
    """Return a line for each rejected way; those that are too many are counted."""
    rejected = [plan for plan in plans if not plan.fits]
    lines: list[Text] = [
        words("way.rejected", way=plan.spec.label, why=plan.why)
        for plan in rejected[:MOST_REJECTED]
    ]
    if len(rejected) > MOST_REJECTED:
        lines.append(words("way.more_rejected", n=str(len(rejected) - MOST_REJECTED)))
    return lines


def spread_command(plan: Plan, workload: str) -> str | None:
    """Return the command that trains as advised; None where there is nothing to spread."""
    advice = plan.advice
    if advice is None or advice.spec is None or advice.ranks in (None, 1):
        return None
    if workload.startswith("hf:"):
        return None
    spec = advice.spec
    in_recipe = f", with {recipe_words(spec)} in it"
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


def recipe_words(spec: ParallelSpec) -> str:
    """Return the table of a recipe on one line.

    >>> recipe_words(ParallelSpec(dp_replicate=2, tp=2))
    '[parallel] dp_replicate=2 tp=2'
    """
    found: Mapping[str, object] = spec_to_toml(spec)
    values = (f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in found.items())
    return f"[parallel] {' '.join(values)}"
