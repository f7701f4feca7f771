"""What must be equal between two guard records whatever was promised: samples, structure, start."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from flatout.agent.guard.record import GuardRecord, Marks, Sketches, Streams
from flatout.agent.guard.structure import FREE_SETTINGS
from flatout.guard.differences import by_key
from flatout.guard.limits import SHARE_CAP
from flatout.records.messages import words

SETTINGS, LATER = "settings", "later"
"""Stand for the place of what an optimizer is set to, and of what goes on after the first step,
alongside the places of samples."""
EARLY_STEPS = 3
"""Steps whose settings must be equal; later ones may follow a loss, as a rate on a plateau does."""
SLACK_BATCHES = 8
"""Batches that one side may have drawn ahead of the other: a prefetcher's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was compared, and its distance as a share of its limit."""

    check: str
    text: str
    share: float = SHARE_CAP
    """The most for what should have been equal, and is not."""


def mismatches(
    baseline: GuardRecord, other: GuardRecord, *, computed: Set[tuple[str, str]] = frozenset()
) -> Iterator[Reading]:
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


def computed_late(baseline: GuardRecord, other: GuardRecord) -> set[tuple[str, str]]:
    """Return what follows from what was trained: settings of later steps, as on a plateau.

    So does what goes on after the first step, as a running extreme does.
    """
    changed = _changed(baseline, other)
    settings = {(SETTINGS, name) for step, _, name, _ in changed if step >= EARLY_STEPS}
    return settings | {(LATER, what) for what, _ in _later(baseline, other)}


def has_samples(record: GuardRecord, computed: Set[tuple[str, str]] = frozenset()) -> bool:
    """Return whether any content that entered the training was digested."""
    if any(marks for fields in record.samples.values() for marks in fields.values()):
        return True
    return any(
        (place, path) not in computed
        for place, fields in record.arguments.items()
        for path in fields
    )


def _samples(baseline: GuardRecord, other: GuardRecord) -> Iterator[Reading]:
    steps = sorted((len(baseline.losses), len(other.losses)))
    missing_share = 1 - steps[0] / steps[1] if steps[1] else 0.0
    for place, fields in baseline.samples.items():
        name = place or words("guard.the_loader")
        theirs = other.samples.get(place)
        if theirs is None:
            yield Reading(check="samples", text=words("guard.no_batch", loader=name))
            continue
        for path, marks in fields.items():
            found = theirs.get(path, ())
            number = _first_difference(marks, found)
            if number is not None:
                text = _words("batch_differs", path, n=str(number + 1), loader=name)
                yield Reading(check="samples", text=text)
            elif _is_behind(marks, found, missing_share):
                yield Reading(check="samples", text=words("guard.other_count", loader=name))
    for place in other.samples.keys() - baseline.samples.keys():
        name = place or words("guard.a_loader")
        yield Reading(check="samples", text=words("guard.new_loader", loader=name))


def _arguments(
    baseline: Streams, other: Streams, computed: Set[tuple[str, str]]
) -> Iterator[Reading]:
    for place, fields in baseline.items():
        for path, marks in fields.items():
            if (place, path) in computed:
                continue
            number = _first_difference(marks, other.get(place, {}).get(path, ()))
            if number is not None:
                text = _words("call_differs", path, n=str(number + 1), place=place)
                yield Reading(check="samples", text=text)


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


def _start(baseline: Sketches, other: Sketches) -> Iterator[Reading]:
    for name, value in baseline.items():
        if name in other and not np.array_equal(value, other[name]):
            yield Reading(check="start", text=words("guard.starts", name=name))


def _structure(baseline: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Reading]:
    for name, line in baseline.items():
        if other.get(name) != line:
            now = other.get(name) or words("guard.gone")
            text = words("guard.module", name=name, now=now, was=line)
            yield Reading(check="structure", text=text)
    for name in other.keys() - baseline.keys():
        yield Reading(check="structure", text=words("guard.module_new", name=name))


def _settings(
    baseline: GuardRecord, other: GuardRecord, computed: Set[tuple[str, str]]
) -> Iterator[Reading]:
    for step, where, name, text in _changed(baseline, other):
        if step < EARLY_STEPS or (SETTINGS, name) not in computed:
            about = {"n": str(step + 1), "where": where, "name": name, "changed": text}
            yield Reading(check="settings", text=words("guard.setting", **about))


def _changed(baseline: GuardRecord, other: GuardRecord) -> Iterator[tuple[int, str, str, str]]:
    """Yield step, optimizer and group, name and values of each setting that differs."""
    theirs = {item.number: item for item in other.optimizers}
    for item in baseline.optimizers:
        found = theirs.get(item.number)
        if found is None or found.kind != item.kind:
            continue  # the tensors and the shadow step tell
        for step, both in enumerate(zip(item.settings, found.settings, strict=False)):
            for group, (ours, changed) in enumerate(zip(*both, strict=False)):
                where = words("guard.group", optimizer=str(item.number), group=str(group))
                for name in (ours.keys() | changed.keys()) - FREE_SETTINGS:
                    if ours.get(name) != changed.get(name):
                        now, was = str(changed.get(name)), str(ours.get(name))
                        yield step, where, name, words("guard.changed", now=now, was=was)


def _later(baseline: GuardRecord, other: GuardRecord) -> Iterator[tuple[str, Reading]]:
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
            yield what, Reading(check=check, text=text)


def _tensors(baseline: GuardRecord, other: GuardRecord) -> Iterator[Reading]:
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
) -> Iterator[Reading]:
    ours = {name for group in baseline for name in group}
    theirs = {name for group in other for name in group}
    yield from _one_sided(ours, theirs, words("guard.optimizer", n=str(number)))
    if ours == theirs and [*baseline] != [*other]:
        text = words("guard.other_groups", n=str(number))
        yield Reading(check="tensors", text=text)


def _one_sided(baseline: Set[str], other: Set[str], where: str) -> Iterator[Reading]:
    for name in sorted(baseline - other):
        yield Reading(check="tensors", text=words("guard.missing_in", name=name, where=where))
    for name in sorted(other - baseline):
        yield Reading(check="tensors", text=words("guard.only_in", name=name, where=where))
