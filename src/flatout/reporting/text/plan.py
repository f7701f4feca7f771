"""The report of `plan`: will it fit, what fills the memory, what would make it fit."""

from flatout.core.plan import Plan
from flatout.reporting import plan_words as words
from flatout.reporting.tables import Column, ascii_only, labelled, table, wrapped

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
    lines = [*wrapped(words.headline(plan), width), ""]
    for label, text in _facts(plan):
        lines += labelled(f"{label:<8}", text, width)
    lines += ["", *table(COMPONENTS, words.component_rows(plan))]
    if plan.largest:
        lines += ["", *table(TENSORS, words.tensor_rows(plan.largest, MOST_TENSORS))]
    if plan.ladder:
        lines += ["", *_ways(plan)]
    if plan.notes:
        lines.append("")
        for note in plan.notes:
            lines += labelled("note", note, width)
    lines += ["", f"next  {words.next_command(plan, workload, gpu)}"]
    return ascii_only("\n".join(lines)) + "\n"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [
        ("used", words.used_words(plan)),
        ("peak", words.peak_words(plan)),
        ("batch", words.batch_words(plan)),
        ("keep", words.keep_words(plan)),
        ("formula", words.formula_words(plan)),
        ("checked", plan.checked),
    ]
    return [(label, text) for label, text in facts if text]


def _ways(plan: Plan) -> list[str]:
    """Return the ways as a table, without columns that say nothing."""
    rows = words.rung_rows(plan, MOST_RUNGS)
    kept = [
        position
        for position, column in enumerate(RUNGS)
        if column.title != "largest\nbatch" or any(row[position] != "-" for row in rows)
    ]
    return table(
        [RUNGS[position] for position in kept],
        [[row[position] for position in kept] for row in rows],
    )
