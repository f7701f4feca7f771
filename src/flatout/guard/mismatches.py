"""What must be equal between two guard records whatever was promised: samples, structure, start."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from flatout.agent.guard.record import GuardRecord, Marks, Sketches, Streams
from flatout.agent.guard.structure import FREE_SETTINGS
from flatout.guard.differences import by_key
from flatout.records.messages import words

SETTINGS, LATER = "settings", "later"
"""Stand for the place of what an optimizer is set to, and of what goes on after the first step,
alongside the places of samples."""
EARLY_STEPS = 3
"""Steps whose settings must be equal; later ones may follow a loss, as a rate on a plateau does."""
SLACK_BATCHES = 8
"""Batches that one side may have drawn ahead of the other: a prefetcher's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Something that should have been equal."""

    check: str
    text: str


def mismatches(
    baseline: GuardRecord, other: GuardRecord, *, computed: Set[tuple[str, str]] = frozenset()
) -> Iterator[Mismatch]:
    """Yield everything that differs though no promise allows it, the most telling first.

    `computed` names the root arguments that the training computes (a generator's images), and the
    settings and facts of later steps that it does: they move with every rounding.
    """
    yield from _samples(baseline, other)
    yield from _start(baseline.start, other.start)
    yield from _structure(baseline.structure, other.structure)
    yield from _settings(baseline, other, computed)
    for what, mismatch in _later(baseline, other):
        if (LATER, what) not in computed:
            yield mismatch
    yield from _tensors(baseline, other)
    yield from _arguments(baseline.arguments, other.arguments, computed)


def computed_arguments(baseline: GuardRecord, rounded: GuardRecord) -> set[tuple[str, str]]:
    """Return the root arguments that another precision changes: results, not samples."""
    return {
        (place, path)
        for place, fields in baseline.arguments.items()
        for path, marks in fields.items()
        if _first_difference(marks, rounded.arguments.get(place, {}).get(path, ())) is not None
    }


def computed_settings(baseline: GuardRecord, rounded: GuardRecord) -> set[tuple[str, str]]:
    """Return the settings of later steps that follow from what was trained, as on a plateau."""
    changed = _changed(baseline, rounded)
    return {(SETTINGS, name) for step, _, name, _ in changed if step >= EARLY_STEPS}


def computed_later(baseline: GuardRecord, rounded: GuardRecord) -> set[tuple[str, str]]:
    """Return what goes on after the first step by what was trained, as a running extreme does."""
    return {(LATER, what) for what, _ in _later(baseline, rounded)}


def has_samples(record: GuardRecord, computed: Set[tuple[str, str]] = frozenset()) -> bool:
    """Return whether any content that entered the training was digested."""
    if any(marks for fields in record.samples.values() for marks in fields.values()):
        return True
    return any(
        (place, path) not in computed
        for place, fields in record.arguments.items()
        for path in fields
    )


def _samples(baseline: GuardRecord, other: GuardRecord) -> Iterator[Mismatch]:
    steps = sorted((len(baseline.losses), len(other.losses)))
    missing_share = 1 - steps[0] / steps[1] if steps[1] else 0.0
    for place, fields in baseline.samples.items():
        name = place or words("guard.the_loader")
        theirs = other.samples.get(place)
        if theirs is None:
            yield Mismatch(check="samples", text=words("guard.no_batch", loader=name))
            continue
        for path, marks in fields.items():
            found = theirs.get(path, ())
            number = _first_difference(marks, found)
            if number is not None:
                text = _words("batch_differs", path, n=str(number + 1), loader=name)
                yield Mismatch(check="samples", text=text)
            elif _is_behind(marks, found, missing_share):
                yield Mismatch(check="samples", text=words("guard.other_count", loader=name))
    for place in other.samples.keys() - baseline.samples.keys():
        name = place or words("guard.a_loader")
        yield Mismatch(check="samples", text=words("guard.new_loader", loader=name))


def _arguments(
    baseline: Streams, other: Streams, computed: Set[tuple[str, str]]
) -> Iterator[Mismatch]:
    for place, fields in baseline.items():
        for path, marks in fields.items():
            if (place, path) in computed:
                continue
            number = _first_difference(marks, other.get(place, {}).get(path, ()))
            if number is not None:
                text = _words("call_differs", path, n=str(number + 1), place=place)
                yield Mismatch(check="samples", text=text)


def _words(code: str, path: str, /, **about: str) -> str:
    """Return what differs, and in which part of it where that is known."""
    return words(f"guard.{code}{'_in' if path else ''}", **about, path=path)


def _first_difference(baseline: Marks, other: Marks) -> int | None:
    """Return the first batch that differs, None when all that both sides drew is equal.

    Micro-batches are joined: each side's digests are looked up at the other's numbers of rows. One
    side may have drawn ahead.
    """
    if not baseline or not other:
        return 0 if baseline or other else None
    fewer, more = (baseline, other) if baseline[-1][0] <= other[-1][0] else (other, baseline)
    known = dict(more)
    shared = [number for number, (rows, _) in enumerate(fewer) if rows in known]
    wrong = [number for number in shared if known[fewer[number][0]] != fewer[number][1]]
    if wrong:
        return wrong[0]
    reached = shared[-1] + 1 if shared else 0
    return reached if reached < len(fewer) else None


def _is_behind(baseline: Marks, other: Marks, missing_share: float) -> bool:
    """Return whether one side drew fewer rows than drawing ahead and fewer steps explain."""
    fewer, more = sorted((baseline, other), key=lambda marks: marks[-1][0])
    ahead = sum(rows > fewer[-1][0] for rows, _ in more)
    return ahead > SLACK_BATCHES + missing_share * len(more)


def _start(baseline: Sketches, other: Sketches) -> Iterator[Mismatch]:
    for name, value in baseline.items():
        if name in other and not np.array_equal(value, other[name]):
            yield Mismatch(check="start", text=words("guard.starts", name=name))


def _structure(baseline: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Mismatch]:
    for name, line in baseline.items():
        if other.get(name) != line:
            now = other.get(name) or words("guard.gone")
            text = words("guard.module", name=name, now=now, was=line)
            yield Mismatch(check="structure", text=text)
    for name in other.keys() - baseline.keys():
        yield Mismatch(check="structure", text=words("guard.module_new", name=name))


def _settings(
    baseline: GuardRecord, other: GuardRecord, computed: Set[tuple[str, str]]
) -> Iterator[Mismatch]:
    for step, where, name, text in _changed(baseline, other):
        if step < EARLY_STEPS or (SETTINGS, name) not in computed:
            about = {"n": str(step + 1), "where": where, "name": name, "changed": text}
            yield Mismatch(check="settings", text=words("guard.setting", **about))


def _changed(baseline: GuardRecord, other: GuardRecord) -> Iterator[tuple[int, str, str, str]]:
    """Yield step, optimizer and group, name and values of each setting that differs."""
    theirs = {item.number: item for item in other.optimizers}
    for item in baseline.optimizers:
        found = theirs.get(item.number)
        if found is None or found.kind != item.kind:
            continue  # the tensors and the shadow step tell
        for step, (ours, changed) in enumerate(zip(item.settings, found.settings, strict=False)):
            for group, (a, b) in enumerate(zip(ours, changed, strict=False)):
                where = words("guard.group", optimizer=str(item.number), group=str(group))
                for name, text in _group(a, b):
                    yield step, where, name, text


def _group(
    baseline: Mapping[str, object], other: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    for name in baseline.keys() | other.keys():
        if name not in FREE_SETTINGS and baseline.get(name) != other.get(name):
            now, was = str(other.get(name)), str(baseline.get(name))
            yield name, words("guard.changed", now=now, was=was)


def _later(baseline: GuardRecord, other: GuardRecord) -> Iterator[tuple[str, Mismatch]]:
    """Yield what begins after the first step, by name, where both sides made equally many."""
    if len(baseline.losses) != len(other.losses):
        return
    for what in sorted(baseline.later.keys() | other.later.keys()):
        is_buffer = what.startswith("buffer ")
        if is_buffer and not (what in baseline.later and what in other.later):
            continue  # buffers on one side only are counted elsewhere
        before = words("guard.as_before")
        ours, theirs = (side.later.get(what, before) for side in (baseline, other))
        if ours != theirs:
            check = "buffers" if is_buffer else "structure"
            text = words("guard.later", what=what, now=theirs, was=ours)
            yield what, Mismatch(check=check, text=text)


def _tensors(baseline: GuardRecord, other: GuardRecord) -> Iterator[Mismatch]:
    """Yield the tensors that have a gradient on one side only, and parameters in other groups."""
    theirs = by_key(other)
    for key, ours in by_key(baseline).items():
        if key not in theirs:
            continue  # steps are counted elsewhere
        name = words("guard.gradient_of", n=str(key[1]))
        yield from _one_sided(ours.sketches.keys(), theirs[key].sketches.keys(), name)
    groups = {item.number: item.groups for item in other.optimizers}
    for item in baseline.optimizers:
        yield from _groups(item.number, item.groups, groups.get(item.number, ()))


def _groups(
    number: int, baseline: Sequence[Sequence[str]], other: Sequence[Sequence[str]]
) -> Iterator[Mismatch]:
    ours = {name for group in baseline for name in group}
    theirs = {name for group in other for name in group}
    yield from _one_sided(ours, theirs, words("guard.optimizer", n=str(number)))
    if ours == theirs and [*baseline] != [*other]:
        text = words("guard.other_groups", n=str(number))
        yield Mismatch(check="tensors", text=text)


def _one_sided(baseline: Set[str], other: Set[str], where: str) -> Iterator[Mismatch]:
    for name in sorted(baseline - other):
        yield Mismatch(check="tensors", text=words("guard.missing_in", name=name, where=where))
    for name in sorted(other - baseline):
        yield Mismatch(check="tensors", text=words("guard.only_in", name=name, where=where))
