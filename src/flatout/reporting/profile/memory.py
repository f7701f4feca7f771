"""The section on the lines that make the host wait for the device.

The section on memory: where it peaks, what fills it then, what is left behind.
"""

from collections import Counter
from collections.abc import Iterator

from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.profile import Profile
from flatout.records.units import format_bytes, format_ms, format_share
from flatout.reporting.tables import PHASE_WORDS, Column, labelled, table

LABEL_WIDTH = 11
MAX_TENSORS = 5
"""Rows of tensors that are alike; JSON and HTML have more."""
MAX_MODULES = 3
MIN_LEAK_BYTES = 1
"""A slope below a byte is the rounding of a median."""
MAX_SHAPE = 24
MAX_PLACE = 40
"""Columns for names that may be of any length: the table fits into 80 columns."""


def memory_lines(profile: Profile, width: int) -> list[str]:
    """Return where memory peaks and what fills it; nothing where no pass looked."""
    story = profile.memory
    if story is None:
        return []
    lines = [
        line
        for label, text in _readings(story)
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]
    if not story.largest:
        return ["", *lines]
    columns = [Column("at the peak", is_number=True), Column("shape"), Column("made by")]
    alike = Counter(map(_row, story.largest))
    rows = [_counted(row, count) for row, count in list(alike.items())[:MAX_TENSORS]]
    return ["", *lines, "", *table(columns, rows)]


def _readings(story: MemoryStory) -> Iterator[tuple[str, str]]:
    peaks = ", ".join(
        f"{_word(phase)} {format_bytes(count)}"
        for phase, count in sorted(story.by_phase.items(), key=lambda item: -item[1])
    )
    yield (
        "tensor peak",
        f"{format_bytes(story.peak_bytes)} in {_word(story.peak_phase)} (n={story.steps} steps); "
        f"by phase: {peaks}",
    )
    modules = [(name, count) for name, count in story.by_module.items() if name][:MAX_MODULES]
    if modules:
        yield "by module", ", ".join(f"{name} {format_bytes(count)}" for name, count in modules)
    if story.leak_bytes_per_step >= MIN_LEAK_BYTES:
        where = "; ".join(
            f"{format_bytes(count)} made at {line or 'a line that is not known'}"
            for line, count in list(story.leak_by_line.items())[:MAX_MODULES]
        )
        text = f"each step leaves {format_bytes(story.leak_bytes_per_step)} behind"
        yield "leak", f"{text}: {where}" if where else text
    if story.reserved_bytes is not None:
        yield "reserved", ", ".join(_pool(story))


def _pool(story: MemoryStory) -> Iterator[str]:
    yield format_bytes(story.reserved_bytes or 0)
    if story.fragmentation_share is not None:
        yield f"{format_share(story.fragmentation_share)} of it used by no tensor at the peak"
    if story.allocation_retries:
        yield f"{story.allocation_retries} times flushed to make room"


def _counted(row: tuple[str, ...], count: int) -> list[str]:
    size, *others = row
    return [f"{count} x {size}" if count > 1 else size, *others]


def _row(tensor: TensorAtPeak) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "1"
    held = f"{shape} {tensor.dtype.removeprefix('torch.')}" if tensor.dtype else "inside an op"
    # What a parameter is for tells more than where it was made.
    names = (tensor.kind, tensor.module, tensor.line or tensor.phase)
    place = ", ".join(name for name in names if name)
    return format_bytes(tensor.bytes), _cut(held, MAX_SHAPE), _cut(place, MAX_PLACE)


def _word(phase: str) -> str:
    return PHASE_WORDS.get(phase, phase)


def _cut(text: str, width: int) -> str:
    """Return a text without its middle where it is too wide.

    >>> _cut("abcdefghij", 7)
    'a...hij'
    """
    if len(text) <= width:
        return text
    tail = (width - 3) * 3 // 4
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


MAX_LINES = 6
"""Lines shown; JSON and HTML have more."""
ON_CPU = "nothing to wait for on the CPU; on a GPU each of these would stop the host"


def syncs_lines(profile: Profile, width: int) -> list[str]:
    """Return the table of the waits; nothing where none was seen."""
    syncs = profile.syncs
    if not syncs:
        return []
    columns = [
        Column("the host waits at"),
        Column("for"),
        Column("per step", is_number=True),
        Column("cost", is_number=True),
    ]
    rows = [
        [
            sync.line or "a line that is not known",
            sync.what,
            f"{sync.per_step:.3g}",
            "-" if sync.ms_per_step is None else format_ms(sync.ms_per_step),
        ]
        for sync in syncs[:MAX_LINES]
    ]
    lines = ["", *table(columns, rows)]
    if len(syncs) > MAX_LINES:
        text = f"{len(syncs) - MAX_LINES} more lines are in the JSON"
        lines += labelled("more".ljust(LABEL_WIDTH), text, width)
    if profile.device_kind == "cpu":
        lines += labelled("waits".ljust(LABEL_WIDTH), ON_CPU, width)
    return lines
