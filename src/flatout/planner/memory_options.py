"""Ways to make a step fit, the fastest that fits first (`ladder`).

`candidates` are their techniques: what each makes of the stream, and costs in time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flatout.analysis import stream_changes as transforms
from flatout.planner.allocator_settings import AllocatorSettings
from flatout.planner.device_model import DeviceModel
from flatout.planner.largest_batch import TOO_MUCH, accumulation, largest_steady_batch
from flatout.planner.replay import AllocatorReplay, replay
from flatout.records.catalogue import declaring
from flatout.records.memory_stream import MemoryStream
from flatout.records.messages import words
from flatout.records.plan import Accumulating, NumberSource, Rung
from flatout.records.recipe import Choice
from flatout.records.technique import MemoryOption, Numerics, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOption:
    """One technique with one setting."""

    label: str
    """`technique setting=value`."""
    model: MemoryOption
    """Of a group always: settings of one technique are in one, too."""
    changes_training: bool = False


def candidates() -> list[TracedOption]:
    """Return all techniques; ways to spread the training are `flatout.parallel.search`'s."""
    return [
        TracedOption(
            label=Choice(technique=name_of(kind), settings=option.settings).label,
            model=replace(option, group=option.group or name_of(kind)),
            changes_training=kind.numerics is Numerics.TRAINING,
        )
        for kind in declaring("memory_options")
        for option in kind.memory_options()
        if not option.splits_by
    ]


MOST_TOGETHER = 6
"""Techniques put together at most: what does not fit then does not fit by techniques."""
MOST_BATCHES = 4
"""Ways of which the largest batch is looked for, each by several replays."""

At = Callable[[int], MemoryStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is planned.

    The stream at every batch, where it is, and what was traced of techniques.
    """

    stream: MemoryStream
    """At the planned batch, with workspaces."""
    ground: DeviceModel
    at: At | None = None
    """The same at another batch, where that can be said."""
    traced: Mapping[str, MemoryStream] = field(default_factory=dict)
    """Streams of techniques that were traced for real, by label."""
    refused: frozenset[str] = frozenset()
    """Labels of techniques that were tried and do not apply."""
    largest: int | None = None
    """The largest batch of the step as it is, where it was looked for already."""
    finds_batches: bool = False
    """Whether the largest batch of each way that fits is looked for."""
    replays: dict[tuple[str, ...], AllocatorReplay] = field(default_factory=dict, compare=False)
    """What is known of the stream with techniques that were not traced, by their labels: a setup
    with more of them traced shares it."""


def ladder(setup: Setup) -> tuple[Rung, ...]:
    """Return the step as it is and every way that saves memory."""
    base = replay_as_it_is(setup)
    options = [
        option
        for option in candidates()
        if option.model.helps(setup.stream, setup.ground) and option.label not in setup.refused
    ]
    rungs = [_rung(setup, (), base, base, why=words("plan.as_it_is"))]
    considered: list[TracedOption] = []
    for is_last in (False, True):
        own = [option for option in options if option.model.is_last is is_last]
        singles = [_single(setup, option, base) for option in own]
        singles += [] if is_last else _smaller_batches(setup, base)
        rungs += [rung for rung in singles if rung.saved_bytes > 0]
        considered += own
        if own and not _has_way(rungs):
            rungs += _together(setup, considered, rungs, base)
        if _has_way(rungs):
            break
    by_label = {option.label: option for option in options}
    return tuple(
        _with_batch(setup, rung, by_label) if number < MOST_BATCHES else rung
        for number, rung in enumerate(sorted(rungs, key=_order))
    )


def replay_as_it_is(setup: Setup) -> AllocatorReplay:
    """Return the replay of the step without techniques; of one that does not fit with its peak."""
    return _known(setup, (), lambda: _played(setup, setup.stream))


def _has_way(rungs: Sequence[Rung]) -> bool:
    """Return whether one of them fits and trains the same."""
    return any(rung.fits and not rung.changes_training for rung in rungs)


def _with_batch(setup: Setup, rung: Rung, by_label: Mapping[str, TracedOption]) -> Rung:
    """Return the way with the largest batch that it allows, where that is asked and known."""
    at = setup.at
    if not (rung.fits and setup.finds_batches and all(c in by_label for c in rung.choices)):
        return rung
    if not rung.choices and setup.largest is not None:
        return replace(rung, largest_batch=setup.largest)
    if at is None or any(choice in setup.traced for choice in rung.choices):
        return rung
    options = [by_label[choice] for choice in rung.choices]
    most = largest_steady_batch(
        lambda batch: _changed(at(batch), options),
        setup.ground.limit(setup.stream),
        _settings(setup, options),
    )
    return replace(rung, largest_batch=most)


def _order(rung: Rung) -> tuple[bool, bool, float, bool, int]:
    """Sort what fits first, then what trains the same, then by time, then what changes less.

    Of what does not fit the smallest comes first: its time is of no use.
    """
    time = round(rung.time_ratio, 2) if rung.fits else 0.0
    is_change = bool(rung.choices) and rung.fits
    return not rung.fits, rung.changes_training, time, is_change, rung.peak_bytes


def _single(setup: Setup, option: TracedOption, base: AllocatorReplay) -> Rung:
    stream = setup.traced.get(option.label)
    found = _modelled(setup, (option,)) if stream is None else _played(setup, stream, (option,))
    source = NumberSource.ASSUMED
    if stream is not None:
        source = NumberSource.TRACED
    elif option.model.expands_segments:
        source = NumberSource.SIMULATED
    ratio = option.model.cost(setup.stream, setup.ground)
    rung = _rung(setup, (option.label,), found, base, ratio=ratio, why=option.model.why)
    return replace(rung, source=source, changes_training=option.changes_training)


def _together(
    setup: Setup, options: Sequence[TracedOption], rungs: Sequence[Rung], base: AllocatorReplay
) -> list[Rung]:
    """Add techniques one at a time, the cheapest byte first, until it fits, or all that help."""
    by_label: dict[tuple[str, ...], TracedOption] = {(o.label,): o for o in options}
    alone = [r for r in rungs if r.choices in by_label and not r.changes_training]
    alone.sort(key=lambda rung: ((rung.time_ratio - 1) / rung.saved_bytes, -rung.saved_bytes))
    saved = {rung.choices[0]: rung.saved_bytes for rung in alone}
    chosen: list[TracedOption] = []
    sets: list[list[TracedOption]] = []
    for rung in alone:
        option = by_label[rung.choices]
        rivals = [one for one in chosen if one.model.group == option.model.group]
        if any(saved[one.label] >= rung.saved_bytes for one in rivals):
            continue
        # A stronger setting of what was chosen takes its place.
        chosen = [*(one for one in chosen if one not in rivals), option]
        if 2 <= len(chosen) <= MOST_TOGETHER:
            sets.append(chosen)
    if not sets:
        return []
    # Each set takes less memory than the one before.
    place = bisect_left(sets, x=True, key=lambda one: _modelled(setup, one).fits)
    chosen = sets[min(place, len(sets) - 1)]
    cost = 1 + sum(one.model.cost(setup.stream, setup.ground) - 1 for one in chosen)
    labels, found = tuple(one.label for one in chosen), _modelled(setup, chosen)
    return [_rung(setup, labels, found, base, ratio=cost, why=words("plan.all_together"))]


def _changed(stream: MemoryStream, options: Sequence[TracedOption]) -> MemoryStream:
    for option in options:
        stream = option.model.change(stream)
    return stream


def _settings(setup: Setup, options: Sequence[TracedOption]) -> AllocatorSettings:
    """Return the allocator's settings with these techniques."""
    settings = setup.ground.settings
    if any(option.model.expands_segments for option in options):
        return replace(settings, expandable_segments=True)
    return settings


def _smaller_batches(setup: Setup, base: AllocatorReplay) -> Iterator[Rung]:
    """Yield the step with its batch in parts: by the user's loop, and by the technique."""
    batch = setup.stream.batch
    if setup.at is None or batch is None or batch < 2:
        return
    at, splits = setup.at, [*_splits(batch)]

    def played(split: Accumulating) -> AllocatorReplay:
        size = split.micro_batch
        return _known(setup, (f"batch={size}",), partial(_smaller_batch, setup, at, size))

    # What tensors alone take shrinks with the batch; of what may fit each is played.
    start = bisect_left(splits, x=True, key=lambda split: played(split) is not TOO_MUCH)
    for split in splits[start:]:
        found = played(split)
        if found.fits:
            break
    label = f"batch={split.micro_batch} accumulate={split.steps} (by hand)"
    why = words("plan.split")
    yield _rung(setup, (label,), found, base, why=why)
    for kind in declaring("memory_options"):
        for option in kind.memory_options():
            if option.splits_by:
                choice = Choice(technique=name_of(kind), settings={option.splits_by: split.steps})
                ratio = option.cost(setup.stream, setup.ground)
                yield _rung(setup, (choice.label,), found, base, ratio=ratio, why=option.why)


def _smaller_batch(setup: Setup, at: At, size: int) -> AllocatorReplay:
    """Return the replay of a part of the batch; of one that is too large no more than that it is.

    The last one is told with its peak.
    """
    stream = transforms.accumulated(at(size))
    if size > 1 and _is_too_large(stream, setup.ground.limit(stream)):
        return TOO_MUCH
    return _played(setup, stream)


def _splits(batch: int) -> Iterator[Accumulating]:
    """Yield ever more and smaller micro-batches, down to single samples."""
    size = batch
    while size > 1:
        split = accumulation(batch, size // 2)
        assert split is not None
        size = split.micro_batch
        yield split


def _rung(
    setup: Setup,
    choices: tuple[str, ...],
    found: AllocatorReplay,
    base: AllocatorReplay,
    *,
    ratio: float = 1.0,
    why: str,
) -> Rung:
    return Rung(
        choices=choices,
        peak_bytes=found.peak_reserved + setup.ground.outside.bytes,
        saved_bytes=base.peak_reserved - found.peak_reserved,
        time_ratio=ratio,
        fits=found.fits,
        why=why,
        source=NumberSource.ASSUMED if choices else NumberSource.TRACED,
    )


def _modelled(setup: Setup, options: Sequence[TracedOption]) -> AllocatorReplay:
    """Return the replay with techniques by their models."""
    labels = tuple(option.label for option in options)
    return _known(setup, labels, lambda: _played(setup, _changed(setup.stream, options), options))


def _known(
    setup: Setup, labels: tuple[str, ...], make: Callable[[], AllocatorReplay]
) -> AllocatorReplay:
    if labels not in setup.replays:
        setup.replays[labels] = make()
    return setup.replays[labels]


def _played(
    setup: Setup, stream: MemoryStream, options: Sequence[TracedOption] = ()
) -> AllocatorReplay:
    """Return the replay on the device; of what does not fit, with its peak on an endless one."""
    settings, limit = _settings(setup, options), setup.ground.limit(stream)
    if not _is_too_large(stream, limit):
        found = replay(stream, settings, capacity=limit)
        if found.fits:
            return found
    return replace(replay(stream, settings), full_at=0)


def _is_too_large(stream: MemoryStream, limit: int) -> bool:
    """Return whether what is asked for is too much already: no need to play it on the device."""
    return max(stream.alive(), default=0) > limit
