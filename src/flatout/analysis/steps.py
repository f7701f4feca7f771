"""From recorded segments to training steps, and from steps to one robust step time. Pure."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flatout.records.phase_clock import NAMES, SAVE
from flatout.records.trial_result import Segment

MIN_STEPS = 8
"""Steps after warm-up that make a trial: more does not lower the spread between processes
(research on 112 A/A processes: 5 and 12 steps give SD 2.4 and 2.6 %)."""
MIN_WINDOW_S = 0.5
FAST_STEP_S = 0.010
MIN_FAST_STEPS = 50
"""Below 10 ms a step, 50 steps are needed: SD 5.7 % at 5 steps, 3.0 % at 50."""
MIN_FAST_SAMPLES = 16
"""Of those looked into: phases and counts are theirs."""
WARM_TOLERANCE = 0.05
"""A step within 5 % of the later steps' median counts as steady even where their spread is tiny."""
MAD_TO_SD = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""
MIN_TRAINING = 3
"""Segments that make a training of its own, apart from one before it: a generator that comes after
its critic's first steps is none."""
ALIKE = 1.5
"""Trainings whose median steps are within this ratio are the same one again, as folds and restarts
are; noise between them is far smaller, other models mostly far apart."""
SELDOM = 50
"""An optimizer that steps so many times less often than another ends no steps: a multiplier or a
temperature that is updated once in an epoch, for which a measurement cannot wait."""
USUAL = 2
"""Times what most steps hold: a step that holds more evaluations than that holds one of its own."""
WHOLE_EPOCH = 0.9
"""Share of an epoch's steps that stands for all of them: the first holds the start."""
MAX_EPOCH_S = 8.0
"""With longer epochs the start of the workers is below 5 % of one, and a trial does not wait."""
NOTHING = (0.0,) * len(NAMES)
"""No seconds in any phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: everything up to and including a step of the anchor optimizer."""

    seconds: tuple[float, ...]
    """By phase, as `flatout.records.phase_clock.NAMES`."""
    end: float
    batches: int
    samples: int
    backwards: int
    is_dirty: bool
    """Whether evaluation, saving or the start of a loader's iterator is in it; see `window_of`."""
    losses: tuple[float, ...]
    evals: int = 0
    starts: int = 0
    """Of loaders' iterators."""
    communication: tuple[float, ...] = NOTHING
    """Seconds in collectives, by the phase they were called in."""
    calls: tuple[int, ...] = ()
    """Forwards of each root, by order of discovery."""
    is_sampled: bool = True
    """False for a skipped step, of which the length is known and no phases or counts."""

    @property
    def wall_s(self) -> float:
        """Duration of the step."""
        return sum(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps of a run that count."""

    steps: tuple[Step, ...]
    """Every training step, warm-up included."""
    measured: tuple[Step, ...]
    """Clean steps after warm-up."""
    warmup_steps: int
    """Steps that do not count, those after the warm-up too."""
    is_warm: bool
    """False when half the steps were dropped and they were still not steady."""
    are_clean: bool
    """False when too few clean steps were left, or most hold an evaluation or the start of an
    iterator: then these count."""
    period: int
    """Steps over which the time is averaged before the median is taken."""

    @property
    def warm_up_s(self) -> float:
        """Seconds until the first measured step began."""
        first = self.measured[0] if self.measured else None
        before = itertools.takewhile(lambda step: step is not first, self.steps)
        return sum(step.wall_s for step in before)

    @property
    def sampled(self) -> tuple[Step, ...]:
        """The sampled ones of the measured steps: phases and counts are theirs."""
        return tuple(step for step in self.measured if step.is_sampled) or self.measured

    def medians_ms(self, of: Callable[[Step], Sequence[float]]) -> dict[str, float]:
        """Return milliseconds by phase of something about a step; evaluating and saving is other.

        Medians, because one step with a log line or a garbage collection would move a mean.
        """
        columns = zip(*map(of, self.sampled), strict=True)
        found = {
            name: 1e3 * statistics.median(block_means(column, self.period))
            for name, column in zip(NAMES, columns, strict=True)
        }
        found["other"] += found.pop("eval") + found.pop("save")
        return found

    @property
    def is_enough(self) -> bool:
        """Whether the window makes a trial."""
        sampled = sum(step.is_sampled for step in self.measured)
        if not self.is_warm or sampled < MIN_STEPS * self.period:
            return False  # phases are those of these steps
        total_s = sum(step.wall_s for step in self.measured)
        if total_s < MIN_WINDOW_S:
            return False
        is_fast = total_s / len(self.measured) < FAST_STEP_S
        if not is_fast:
            return True
        enough = MIN_FAST_STEPS * self.period, MIN_FAST_SAMPLES * self.period
        return len(self.measured) >= enough[0] and sampled >= enough[1]


Row = TypeVar("Row")


def find_anchor(whos: Sequence[int]) -> int:
    """Return the optimizer whose step ends a training step: the least frequent, ties the last.

    A generator and a critic that alternate make one step of two; five critic steps and one
    generator step make one too. Those that take each other's place count as one (`places_of`), one
    that hardly ever steps (`SELDOM`) as none.

    >>> find_anchor([0, 1, 0, 1]), find_anchor([0, 0, 0, 1]), find_anchor([1, 1, 0, 2, 2, 0])
    (1, 1, 0)
    """
    places = places_of(whos)
    counts = Counter(places[who] for who in whos)
    most = max(counts.values())
    fewest = min(count for count in counts.values() if count * SELDOM >= most)
    last_seen = {places[who]: (index, who) for index, who in enumerate(whos)}
    # An optimizer that is ahead by its running step ties with the others.
    place = max((p for p in counts if counts[p] == fewest), key=lambda place: last_seen[place])
    return last_seen[place][1]


def places_of(whos: Sequence[int]) -> dict[int, int]:
    """Return of each optimizer of a training the first one in its place.

    A loop within a loop makes its optimizer again for each task, and others step in between: one
    whose steps begin after those of another have ended, and not at once, takes that one's place.

    >>> places_of([1, 1, 0, 2, 2, 0]), places_of([0, 0, 0, 1])
    ({1: 1, 0: 0, 2: 1}, {0: 0, 1: 1})
    """
    first: dict[int, int] = {}
    for index, who in enumerate(whos):
        first.setdefault(who, index)
    last = {who: index for index, who in enumerate(whos)}
    ends: dict[int, int] = {}
    places: dict[int, int] = {}
    for who, began in first.items():
        place = next((place for place, end in ends.items() if end + 1 < began), who)
        places[who], ends[place] = place, last[who]
    return places


def trainings_of(whos: Sequence[int]) -> list[slice]:
    """Return where each of the trainings is that follow each other, mostly one.

    Optimizers that take turns belong to one training; one that begins where all others have ended
    begins another: the next fold, the next model, or an optimizer built again in each epoch.

    >>> trainings_of([0, 1, 0, 1, 0, 1]), trainings_of([0, 0, 0, 1, 1, 1])
    ([slice(0, 6, None)], [slice(0, 3, None), slice(3, 6, None)])
    """
    last = {who: index for index, who in enumerate(whos)}
    found, start, reach = [], 0, -1
    for index, who in enumerate(whos):
        is_apart = index - start >= MIN_TRAINING and len(whos) - index >= MIN_TRAINING
        if index > reach and is_apart:
            found.append(slice(start, index))
            start = index
        reach = max(reach, last[who])
    return [*found, slice(start, len(whos))]


def groups_of(rows: Sequence[Row], whos: Sequence[int]) -> list[list[list[Row]]]:
    """Return the segments of each step, by training; those after a last step belong to none."""
    found = []
    for training in trainings_of(whos) if whos else ():
        places = places_of(whos[training])
        anchor = places[find_anchor(whos[training])]
        groups: list[list[Row]] = [[]]
        for row, who in zip(rows[training], whos[training], strict=True):
            groups[-1].append(row)
            if places[who] == anchor:
                groups.append([])
        found.append(groups[:-1])
    return found


def sums_by_step(rows: Sequence[Mapping[str, Any]], what: str) -> list[Counter[str]]:
    """Return the sums over the segments of each step."""
    steps: list[Counter[str]] = []
    for group in itertools.chain.from_iterable(groups_of(rows, [row["who"] for row in rows])):
        steps.append(Counter())
        for row in group:
            steps[-1].update(row[what])
    return steps


def medians_by_step(rows: Sequence[Mapping[str, Any]], what: str) -> dict[str, float]:
    """Return the medians of those sums, by name.

    >>> rows = [{"who": 0, "flops": {"float32": 6}}, {"who": 1, "flops": {"float32": 4}}]
    >>> medians_by_step(rows, "flops")
    {'float32': 10}
    """
    steps = sums_by_step(rows, what)
    names = sorted({name for step in steps for name in step})
    return {name: statistics.median(step[name] for step in steps) for name in names}


def running_anchor(whos: Sequence[int]) -> int:
    """Return the optimizer that ends the steps of the training that runs now."""
    return find_anchor(whos[trainings_of(whos)[-1]])


def steps_of(segments: Sequence[Segment]) -> tuple[Step, ...]:
    """Group segments into training steps.

    Of trainings that follow each other, those count that are like the one with most steps.
    """
    whos = [segment.who for segment in segments]
    trainings = []
    for groups in groups_of(segments, whos):
        steps_with = Counter(who for group in groups for who in {part.who for part in group})
        lasting = {who for who, count in steps_with.items() if count > 1}
        pairs = zip(groups, _go_on(groups), strict=True)
        trainings.append([step_of(group, lasting, goes_on=goes_on) for group, goes_on in pairs])
    if len(trainings) < 2:
        return tuple(trainings[0]) if trainings else ()
    usual = [statistics.median(step.wall_s for step in steps) for steps in trainings]
    main = max(range(len(trainings)), key=lambda number: (len(trainings[number]), number))
    alike = (
        steps
        for steps, median_s in zip(trainings, usual, strict=True)
        if usual[main] / ALIKE <= median_s <= usual[main] * ALIKE
    )
    return tuple(itertools.chain.from_iterable(alike))


def _go_on(groups: Sequence[Sequence[Segment]]) -> list[bool]:
    """Return which steps go on with the batch of one before, as chunks of long sequences do.

    That is until the next batch, and after the last one for as many steps as there are mostly from
    one to the next. Where a script has kept its batches, or makes them, only evaluations draw some.
    """
    drawn = [
        number
        for number, group in enumerate(groups)
        if any(part.samples for part in group)
        and not any(part.evals or part.loader_starts for part in group)
    ]
    if len(drawn) < 2:
        return [False] * len(groups)
    apart = statistics.median_low(after - before for before, after in itertools.pairwise(drawn))
    return [drawn[0] - apart < number < drawn[-1] + apart for number in range(len(groups))]


def step_of(
    group: Sequence[Segment], lasting: Collection[int] = (), *, goes_on: bool = False
) -> Step:
    """Return the step of a group of segments, one in most scripts.

    `lasting` are the optimizers that are in other steps of the training, too. Where it `goes_on`
    with the batch of a step before, it has no samples of its own.
    """
    part = group[0] if len(group) == 1 else _joined(group)
    return Step(
        seconds=tuple(part.seconds),
        end=part.end,
        batches=part.batches,
        samples=part.samples or (0 if goes_on else _called_with(group, lasting)),
        backwards=part.backwards,
        is_dirty=part.evals + part.loader_starts > 0 or part.seconds[SAVE] > 0,
        losses=tuple(part.losses),
        evals=part.evals,
        starts=part.loader_starts,
        communication=tuple(part.communication or NOTHING),
        calls=tuple(part.calls),
        is_sampled=part.is_sampled,
    )


def _joined(group: Sequence[Segment]) -> Segment:
    counted = ("batches", "samples", "backwards", "evals", "loader_starts")
    communication = [part.communication for part in group if part.communication]
    return replace(
        group[-1],
        **{name: sum(getattr(part, name) for part in group) for name in counted},
        seconds=[*map(sum, zip(*(part.seconds for part in group), strict=True))],
        losses=[loss for part in group for loss in part.losses],
        communication=[*map(sum, zip(*communication, strict=True))],
        calls=[*map(sum, itertools.zip_longest(*(part.calls for part in group), fillvalue=0))],
        is_sampled=all(part.is_sampled for part in group),
    )


def _called_with(group: Sequence[Segment], lasting: Collection[int]) -> int:
    """Return how many samples the model was given in a step without batches.

    Optimizers that take turns train on the same ones, as an actor's and its critic's, of which each
    goes through the critic. One that is made again for each task has samples of its own.
    """
    own, shared = 0, Counter[int]()
    for part in group:
        if part.who in lasting:
            shared[part.who] += part.called_with
        else:
            own += part.called_with
    return own + max(shared.values(), default=0)


def window_of(steps: Sequence[Step], period: int = 1) -> Window:
    """Choose the steps that count: clean ones, after the point where times became steady.

    `period` is the number of loader workers: batches arrive in bursts of that many, so one step's
    time says little and a block's mean is what is compared. What most steps hold makes none dirty:
    a call of a teacher, a rollout before each update, a loader that is started for each batch.
    """
    usual = usual_work(steps)
    if any(usual):
        steps = [replace(step, is_dirty=is_dirty(step, usual)) for step in steps]
    clean = [step for index, step in enumerate(steps) if index > 0 and not step.is_dirty]
    is_enough = len(clean) >= MIN_STEPS or len(clean) * 2 >= len(steps)
    are_clean = is_enough and not any(usual)
    usable = clean if is_enough else list(steps[1:])
    walls = [step.wall_s for step in usable]
    start, is_warm = find_warm(rolling_means(walls, period))
    return Window(
        steps=tuple(steps),
        measured=tuple(usable[start:]),
        warmup_steps=len(steps) - len(usable[start:]) if usable else len(steps),
        is_warm=is_warm,
        are_clean=are_clean,
        period=period,
    )


def usual_work(steps: Sequence[Step]) -> tuple[int, int]:
    """Return how many evaluations and starts of an iterator most steps hold; mostly none."""
    seen = [step for step in steps if step.is_sampled]
    if not seen:
        return 0, 0
    return (
        statistics.median_low(step.evals for step in seen),
        statistics.median_low(step.starts for step in seen),
    )


def is_dirty(step: Step, usual: tuple[int, int] = (0, 0)) -> bool:
    """Return whether a step saves, or holds more evaluations or starts than most steps do."""
    evals, starts = usual
    return step.seconds[SAVE] > 0 or step.evals > USUAL * evals or step.starts > USUAL * starts


def whole_epochs(window: Window, epoch_steps: int) -> list[list[Step]]:
    """Return the measured steps of each epoch of which nearly all were measured.

    An epoch is between steps that hold the start of a loader, an evaluation or a save.
    """
    measured = {id(step) for step in window.measured}
    epochs: list[list[Step]] = [[]]
    for step in window.steps:
        if id(step) in measured and not step.is_dirty:
            epochs[-1].append(step)
        elif epochs[-1]:
            epochs.append([])
    fewest = max(1, WHOLE_EPOCH * (epoch_steps - 1))
    return [epoch for epoch in epochs if len(epoch) >= fewest]


def wanted_starts(epoch_s: float) -> int:
    """Return after how many starts of the workers a trial may end: one whole epoch, if it is short.

    >>> wanted_starts(2.0), wanted_starts(6.0), wanted_starts(60.0)
    (3, 2, 0)
    """
    if epoch_s >= MAX_EPOCH_S:
        return 0
    return 3 if 2 * epoch_s < MAX_EPOCH_S else 2


def find_warm(walls: Sequence[float]) -> tuple[int, bool]:
    """Return the index of the first steady step, and whether one was found.

    Steady: it and the next two are within three robust standard deviations, or 5 %, of the median
    of the second half. At most half is dropped.

    >>> find_warm([9.0, 3.0, 1.0, 1.0, 1.01, 1.0, 0.99, 1.0])
    (2, True)
    """
    if len(walls) < 3:
        return 0, False
    half = walls[len(walls) // 2 :]
    centre = statistics.median(half)
    spread = statistics.median(abs(wall - centre) for wall in half)
    limit = max(3 * MAD_TO_SD * spread, WARM_TOLERANCE * centre)
    last = len(walls) // 2
    for index in range(last + 1):
        if all(abs(wall - centre) <= limit for wall in walls[index : index + 3]):
            return index, True
    return last, False


def rolling_means(values: Sequence[float], period: int) -> list[float]:
    """Return the mean of every `period` consecutive values.

    >>> rolling_means([1.0, 3.0, 1.0, 3.0], 2)
    [2.0, 2.0, 2.0]
    """
    if period <= 1:
        return list(values)
    return [sum(values[i : i + period]) / period for i in range(len(values) - period + 1)]


def block_means(values: Sequence[float], period: int) -> list[float]:
    """Return the means of consecutive blocks of `period` values, a short last block left out.

    >>> block_means([1.0, 3.0, 1.0, 3.0, 9.0], 2)
    [2.0, 2.0]
    """
    if len(values) < period:
        return list(values)
    starts = range(0, len(values) - period + 1, period)
    return [sum(values[i : i + period]) / period for i in starts]
