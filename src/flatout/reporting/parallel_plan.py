"""Ways to spread a training over GPUs in words: the verdict, a table, a line for each rejected one.

The same rows serve the terminal and the page.
"""

from collections.abc import Mapping, Sequence

from flatout.records.parallel import ParallelSpec, spec_to_toml
from flatout.records.plan import NumberSource, ParallelPlan, Plan
from flatout.records.units import format_bytes, format_ms, format_share
from flatout.reporting.tables import NOTHING, Column, table, wrapped

MOST_WAYS = 6
MOST_REJECTED = 12
COLUMNS = (
    Column("spread as"),
    Column("step", is_number=True),
    Column("fullest GPU", is_number=True),
    Column("exchange", is_number=True),
    Column("bubble", is_number=True),
    Column("time known by"),
)
KNOWN_BY = {
    NumberSource.TRACED: "traced",
    NumberSource.SIMULATED: "simulated",
    NumberSource.CALIBRATED: "calibrated",
    NumberSource.ASSUMED: "assumed",
}


def advice_lines(plan: Plan, width: int) -> list[str]:
    """Return the verdict, the ways that fit, and the rejected ones; nothing for one GPU."""
    advice = plan.advice
    if advice is None:
        return []
    lines = [*wrapped(advice.verdict, width), ""]
    rows = way_rows(plan.parallel, MOST_WAYS)
    if rows:
        lines += [*table(COLUMNS, rows), ""]
    if advice.batch:
        kept = f"The batch of a step stays {advice.batch} samples over all GPUs."
        lines += [*wrapped(f"{kept} {why_words(plan)}".strip(), width), ""]
    for line in rejected_lines(plan.parallel):
        lines += wrapped(line, width)
    return lines if lines[-1] == "" else [*lines, ""]


def way_rows(plans: Sequence[ParallelPlan], most: int) -> list[tuple[str, ...]]:
    """Return spec, step, memory, exchange, bubble and source of the fastest ways that fit."""
    fitting = [plan for plan in plans if plan.fits and plan.step_ms is not None]
    return [
        (
            plan.spec.label,
            format_ms(plan.step_ms.value) if plan.step_ms else NOTHING,
            format_bytes(int(plan.peak_bytes.value)) if plan.peak_bytes else NOTHING,
            _share(plan, "communication"),
            _share(plan, "bubble"),
            KNOWN_BY[plan.step_ms.source] if plan.step_ms else NOTHING,
        )
        for plan in fitting[:most]
    ]


def _share(plan: ParallelPlan, name: str) -> str:
    found = plan.shares.get(name)
    return format_share(min(1.0, found.value)) if found is not None else NOTHING


def why_words(plan: Plan) -> str:
    """Say where the time of the fastest way goes."""
    first = next((one for one in plan.parallel if one.fits), None)
    return f"{first.spec.label}: {first.why}." if first else ""


def rejected_lines(plans: Sequence[ParallelPlan]) -> list[str]:
    """Return a line for each rejected way; those that are too many are counted."""
    rejected = [plan for plan in plans if not plan.fits]
    lines = [f"rejected  {plan.spec.label}: {plan.why}" for plan in rejected[:MOST_REJECTED]]
    if len(rejected) > MOST_REJECTED:
        lines.append(f"rejected  {len(rejected) - MOST_REJECTED} more; --json has them all")
    return lines


def spread_command(plan: Plan, words: str) -> str | None:
    """Return the command that trains as advised; None where there is nothing to spread."""
    advice = plan.advice
    if advice is None or advice.spec is None or advice.ranks in (None, 1) or words[:3] == "hf:":
        return None
    spec = advice.spec
    if ".py:" in words:
        return f"flatout run --with recipe.toml {words}, with {recipe_words(spec)} in it"
    hosts = int(plan.environment.get("hosts", 1)) if advice.ranks == advice.asked else 1
    many = f" --hosts {hosts} --rendezvous HOST:PORT" if hosts > 1 else ""
    zero = f" --zero {spec.zero}" if spec.zero else ""
    return f"flatout run --gpus {spec.world_size // hosts}{many}{zero} {words}"


def recipe_words(spec: ParallelSpec) -> str:
    """Return the table of a recipe on one line.

    >>> recipe_words(ParallelSpec(dp_replicate=2, tp=2))
    '[parallel] dp_replicate=2 tp=2'
    """
    found: Mapping[str, object] = spec_to_toml(spec)
    values = (f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in found.items())
    return f"[parallel] {' '.join(values)}"
