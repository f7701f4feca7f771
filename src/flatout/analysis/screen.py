"""Screening: each technique's own effect, from blocks of steps of one training that switched them.

Equal trials in fresh processes differ by 2 to 7 %; blocks of steps inside one process by some 2 %,
and what drifts cancels where settings alternate at random. A pair of processes says something about
one technique, a block of a balanced design says something about all of them.

The design is two-level: a Hadamard matrix and its fold-over, in which no main effect is confounded
with the interaction of two others (resolution IV: Box, Hunter and Hunter, Statistics for
Experimenters, chapter 6). Columns are dealt again for each replicate, so that what is confounded in
one of them is not in the next. Log block times are fitted by `flatout.analysis.regression`, which
takes off what the machine's own speed drifts. Pure; runs in the training process, which decides
with it what to switch next, and in flatout's own, which reports.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flatout.analysis.regression import BEND, Array, huber, whitening
from flatout.records.statistics import InProcess, Rule, student_quantile

Cell = tuple[str, ...]
"""Labels of the techniques that are on in a block."""
NOTHING_ON: Cell = ()
FEWEST_FREE = 4
"""Degrees of freedom from which an interval says anything."""
LOAD_LIMIT = 0.10
"""Share of the cores that others took, from which a block is thrown away. Ticks of 10 ms make a
share of 5 % of a block of 0.4 s on two cores out of four of them."""
FEWEST_BLOCKS = 2
"""Blocks with a technique on, and without it, from which it is in the fit."""
SURPRISE = 4.0
"""Deviations from which an interaction that no one named is taken into the fit."""
MOST_SURPRISES = 3
SMALLEST_GAIN = math.log(1.01)
"""A technique with a smaller effect within the best recipe is left out of what is proposed."""
FEWEST_REPLICATES = 2
"""Replicates before a technique leaves the design: one has too few blocks to know its own noise."""
MOST_REPLICATES = 12
CREDIT_REPLICATES = (4, 12)
"""Fewest and most visits to the best recipe without one of its techniques, for its own effect."""
CREDIT_WIDTH = math.log(1.02)
"""Half of the interval from which a technique's own effect is known well enough."""
SCREEN_UNTIL, LAST_UNTIL, AGAIN_UNTIL = 0.5, 0.75, 0.85
"""Shares of the time at which the first techniques, those that come last, and those that are tested
again have had theirs; what is left measures each technique's own effect within the best
recipe."""
BEGUN_UNTIL = 0.9
"""Share of the time after which none of those that come last is begun: what it takes to start is
counted, as far as it is known of another one."""
MOST_CELLS = 4096
"""Recipes that are looked through for the best one; with more techniques each is judged alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenFactor:
    """One technique with its settings, as a factor of the design."""

    label: str
    group: str = ""
    """Of the techniques of one group at most one is on; the label where there is no other."""
    partners: tuple[str, ...] = ()
    """Labels of those with which its interaction is always fitted."""
    is_last: bool = False
    """Whether it is screened once the others are settled: it depends on what they set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenBlock:
    """Some steps of a training with one setting."""

    on: Cell
    step_s: float
    """The middle step, or the mean where work comes in bursts."""
    steps: int
    samples: float = 0.0
    """Samples a step; 0 where they are not known."""
    load_share: float = 0.0
    """Share of the cores that other processes and other virtual machines took."""
    left_out: str = ""
    """Why it does not count; empty where it does."""
    process: int = 0
    """Which process it ran in, where there was more than one."""
    stage: str = ""
    """Which part of the plan it belongs to: what drifts between two parts is in no effect."""
    at_s: float = 0.0
    """When it began, by the process's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenEffect(InProcess):
    """What one technique does to the step, in logs: above 0 it is faster.

    Its blocks are those with it on, or without it, that counted: the fewer of both.
    """

    def bound(self, confidence: float, side: int) -> float:
        """Return the one-sided bound, `side` -1 for the lower and +1 for the upper one."""
        return self.log_ratio + side * student_quantile(confidence, self.freedom) * self.error

    @property
    def ratio(self) -> float:
        """The ratio of the steps: above 1 it is faster."""
        return math.exp(self.log_ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        return math.exp(self.bound(0.975, -1)), math.exp(self.bound(0.975, +1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenFit:
    """A robust fit of log step times."""

    factors: tuple[ScreenFactor, ...]
    terms: tuple[Cell, ...]
    """What each coefficient stands for: one technique, or two that are on together; after the other
    columns, which no question is asked about."""
    coefficients: Array
    covariance: Array
    freedom: int
    residual_sd: float
    """Of blocks that lie next to each other: what the level drifts is not in it."""
    counts: dict[str, int] = field(default_factory=dict)

    def contrast(self, with_it: Collection[str], without: Collection[str]) -> ScreenEffect | None:
        """Return what the first recipe gains on the second; None where that was not seen."""
        fitted = {name for term in self.terms for name in term}
        if not {*with_it}.symmetric_difference(without) <= fitted:
            return None
        start = len(self.coefficients) - len(self.terms)
        vector = np.zeros(len(self.coefficients))
        for place, term in enumerate(self.terms, start):
            vector[place] = float({*term} <= {*without}) - float({*term} <= {*with_it})
        differing = {*with_it}.symmetric_difference(without)
        return ScreenEffect(
            log_ratio=float(vector @ self.coefficients),
            error=math.sqrt(max(0.0, float(vector @ self.covariance @ vector))),
            freedom=self.freedom,
            n=min((self.counts[name] for name in differing), default=0),
        )

    def effect(self, label: str, recipe: Collection[str]) -> ScreenEffect | None:
        """Return a technique's own effect on top of the others of a recipe."""
        others = _without_rivals(label, recipe, self.factors)
        return self.contrast({*others, label}, others)

    def best(self, among: Collection[str] | None = None) -> Cell:
        """Return the recipe with the shortest fitted step, without what brings next to nothing.

        `among`: labels of the techniques that it may hold; None for all.
        """
        known = {name for term in self.terms for name in term}
        known = known if among is None else known & {*among}
        groups = _groups(self.factors, known)
        if math.prod(len(labels) + 1 for labels in groups.values()) > MOST_CELLS:
            cells: Iterable[Cell] = [self._each_alone(groups)]
        else:
            options = [[(), *((label,) for label in labels)] for labels in groups.values()]
            cells = (tuple(itertools.chain(*parts)) for parts in itertools.product(*options))
        found = min(cells, key=self._fitted)
        return tuple(name for name in found if self._is_worth(name, found))

    def _each_alone(self, groups: dict[str, list[str]]) -> Cell:
        leaders = (
            min(labels, key=lambda name: self._fitted((name,))) for labels in groups.values()
        )
        return tuple(name for name in leaders if self._fitted((name,)) < 0)

    def _fitted(self, cell: Cell) -> float:
        own = self.coefficients[len(self.coefficients) - len(self.terms) :]
        on = {*cell}
        return float(sum(c for c, term in zip(own, self.terms, strict=True) if {*term} <= on))

    def _is_worth(self, label: str, recipe: Cell) -> bool:
        effect = self.effect(label, recipe)
        if effect is None or effect.log_ratio < SMALLEST_GAIN:
            return False
        return effect.bound(0.9, -1) > 0


def _groups(factors: Sequence[ScreenFactor], labels: Collection[str]) -> dict[str, list[str]]:
    """Return those labels by group."""
    groups: dict[str, list[str]] = {}
    for factor in factors:
        if factor.label in labels:
            groups.setdefault(factor.group or factor.label, []).append(factor.label)
    return groups


def _are_rivals(one: str, other: str, factors: Sequence[ScreenFactor]) -> bool:
    group = {factor.label: factor.group or factor.label for factor in factors}
    return one == other or (one in group and group[one] == group.get(other))


def _without_rivals(
    label: str, recipe: Collection[str], factors: Sequence[ScreenFactor]
) -> list[str]:
    return [name for name in recipe if not _are_rivals(name, label, factors)]


def counting(blocks: Sequence[ScreenBlock]) -> list[ScreenBlock]:
    """Return the blocks that count: whole ones, without those in which others took the cores.

    Where most are disturbed, all are kept: then that is what the machine is like, and the interval
    says it.
    """
    whole = [block for block in blocks if not block.left_out]
    quiet = [block for block in whole if block.load_share <= LOAD_LIMIT]
    return quiet if 2 * len(quiet) >= len(whole) else whole


def fit_blocks(blocks: Sequence[ScreenBlock], factors: Sequence[ScreenFactor]) -> ScreenFit | None:
    """Fit the log of the blocks' steps; None where there are too few blocks for any interval.

    Fitted are the techniques that were seen both on and off, the interactions that they name, and
    of all others those that stick out of the residuals.
    """
    used = counting(blocks)
    labels = [f.label for f in factors if _num_rarer(used, f.label) >= FEWEST_BLOCKS]
    if not labels or len(used) < 2:
        return None
    y = np.log([block.step_s for block in used])
    terms: list[Cell] = [(label,) for label in labels]
    nuisance = _nuisance(used)
    for factor in factors:
        pairs = [(factor.label, other) for other in factor.partners]
        terms += [pair for pair in pairs if _is_estimable(used, nuisance, [*terms, pair])]
    if not _is_estimable(used, nuisance, terms):
        return None
    at, processes = (np.array([getattr(b, name) for b in used]) for name in ("at_s", "process"))
    drift = whitening(_matrix(used, nuisance, terms), y, at, processes)
    white = np.eye(len(used)) if drift is None else drift
    terms = _with_surprises(used, white @ y, white, nuisance, terms, labels)
    coefficients, covariance, sd = huber(white @ _matrix(used, nuisance, terms), white @ y)
    return ScreenFit(
        factors=tuple(factors),
        terms=tuple(terms),
        coefficients=coefficients,
        covariance=covariance,
        freedom=len(used) - len(coefficients) - (drift is not None),
        residual_sd=sd,
        counts={label: _num_rarer(used, label) for label in labels},
    )


def _num_rarer(blocks: Sequence[ScreenBlock], label: str) -> int:
    on = sum(label in block.on for block in blocks)
    return min(on, len(blocks) - on)


def _nuisance(blocks: Sequence[ScreenBlock]) -> Array:
    """Return the columns that are no technique: parts of the plan, samples that vary."""
    parts = sorted({(block.process, block.stage) for block in blocks})
    columns = [[float((b.process, b.stage) == part) for b in blocks] for part in parts]
    samples = np.array([block.samples for block in blocks])
    if samples.min() > 0 and np.ptp(samples) > 0.01 * samples.mean():
        columns.append(list(np.log(samples / samples.mean())))
    return np.column_stack(columns).astype(np.float64)


def _matrix(blocks: Sequence[ScreenBlock], nuisance: Array, terms: Sequence[Cell]) -> Array:
    rows = [[float({*term} <= {*block.on}) for term in terms] for block in blocks]
    return np.column_stack([nuisance, np.array(rows, dtype=float)])


def _is_estimable(blocks: Sequence[ScreenBlock], nuisance: Array, terms: Sequence[Cell]) -> bool:
    matrix = _matrix(blocks, nuisance, terms)
    num_rows, num_columns = matrix.shape
    if num_rows - num_columns < FEWEST_FREE:
        return False
    return bool(np.linalg.matrix_rank(matrix) == num_columns)


def _with_surprises(
    blocks: Sequence[ScreenBlock],
    y: Array,
    white: Array,
    nuisance: Array,
    terms: list[Cell],
    labels: Sequence[str],
) -> list[Cell]:
    """Return the terms with the interactions that the residuals ask for, the strongest first.

    `y` is whitened already.
    """
    for _ in range(MOST_SURPRISES):
        named = {frozenset(term) for term in terms}
        pairs = [p for p in itertools.combinations(labels, 2) if frozenset(p) not in named]
        matrix = white @ _matrix(blocks, nuisance, terms)
        num_free = len(y) - matrix.shape[1] - 1
        if not pairs or num_free < FEWEST_FREE:
            return terms
        coefficients, _, sd = huber(matrix, y)
        residuals = np.clip(y - matrix @ coefficients, -BEND * sd, BEND * sd)
        columns = white @ _matrix(blocks, nuisance[:, :0], pairs)
        columns -= matrix @ np.linalg.lstsq(matrix, columns, rcond=None)[0]
        sizes = np.linalg.norm(columns, axis=0)
        # What the other terms say already has nothing left of its own.
        steep = np.where(sizes > 0.1, np.abs(residuals @ columns) / np.maximum(sizes, 0.1), 0.0)
        place = int(np.argmax(steep))
        left = math.sqrt(max(float(residuals @ residuals) - steep[place] ** 2, 1e-12) / num_free)
        if steep[place] < SURPRISE * left:
            return terms
        terms = [*terms, pairs[place]]
    return terms


def hadamard(order: int) -> Array:
    """Return a Hadamard matrix of at least an order: Sylvester's doubling, or Paley's of primes.

    >>> hadamard(3).shape, hadamard(9).shape, hadamard(17).shape
    ((4, 4), (12, 12), (20, 20))
    """
    size = 1 if order <= 1 else 2 if order == 2 else -(-order // 4) * 4
    while True:
        found = _sylvester(size) if size & (size - 1) == 0 else _paley(size)
        if found is not None:
            return found
        size += 4


def _sylvester(size: int) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley(size: int) -> Array | None:
    """Return Paley's first construction, for a prime of 3 modulo 4 below the size."""
    prime = size - 1
    if prime % 4 != 3 or any(prime % d == 0 for d in range(2, math.isqrt(prime) + 1)):
        return None
    squares = {x * x % prime for x in range(1, prime)}
    matrix = np.ones((size, size))
    for row, column in itertools.product(range(prime), repeat=2):
        difference = (column - row) % prime
        matrix[row + 1, column + 1] = 1.0 if difference in squares else -1.0
    return matrix


def replicate(groups: Sequence[Sequence[str]], deal: random.Random) -> list[Cell]:
    """Return the cells of one replicate in random order: each group on in half of them.

    Where a group has several techniques, its cells that are on go to them in turn.
    """
    base = hadamard(max(2, len(groups)))
    # Columns of either sign: of four techniques both halves of all cells come in turn.
    signs = np.array([deal.choice((1.0, -1.0)) for _ in base])
    design = np.vstack([base, -base]) * signs
    columns = deal.sample(range(base.shape[1]), len(groups))
    turns = [itertools.cycle(deal.sample(list(labels), len(labels))) for labels in groups]
    cells = [
        tuple(next(turn) for turn, column in zip(turns, columns, strict=True) if row[column] > 0)
        for row in deal.sample(list(design), len(design))
    ]
    return [tuple(sorted(cell)) for cell in cells]


class ScreenPlan:
    """Which cell comes next, given the blocks so far; the same blocks always give the same cells.

    Each technique is first on alone, which pays its start-up and shows whether it works. Then come
    replicates of the design, in which those whose interval is settled leave it. Those that come
    last follow on top of what the others settled. What saved next to nothing of the first steps is
    tested again where it may be more of the shorter ones. At the end the best recipe takes
    turns with itself less one technique: each one's own effect within it.
    """

    def __init__(self, factors: Sequence[ScreenFactor], *, seed: int = 0) -> None:
        self.factors = tuple(factors)
        self.open = [factor.label for factor in factors]
        """Labels of the techniques of which it is not known whether they help."""
        self.on: list[str] = []
        """Those that are settled to help, and those of the best guess once their time is over."""
        self.stage = "screen"
        """`screen`, `introduce last`, `last`, `again`, `credit` or `over`."""
        self.credit_from: int | None = None
        """Blocks before the stage in which techniques are left out of the best recipe; None where
        the time was over before it."""
        self._deal = random.Random(seed)
        self._queue: list[Cell] = []
        self._queues = self._replicates()
        self._introduced: set[str] = set()
        self._visited: set[Cell] = set()
        self._blocks: Sequence[ScreenBlock] = ()
        self._used_share = self._startup_share = 0.0

    def drop(self, label: str) -> None:
        """Leave out a technique that failed or has nothing to act on."""
        self.factors = tuple(factor for factor in self.factors if factor.label != label)
        self.open = [name for name in self.open if name != label]
        self.on = [name for name in self.on if name != label]
        self._queue = [tuple(name for name in cell if name != label) for cell in self._queue]

    def next_cell(
        self, blocks: Sequence[ScreenBlock], used_share: float, startup_share: float = 0.0
    ) -> Cell | None:
        """Return the techniques of the next block; None once nothing is left to be seen.

        Args:
            blocks: All blocks so far.
            used_share: Share of the time that is used, in [0, 1].
            startup_share: What starting one of those that come last takes of the time.
        """
        self._blocks, self._used_share, self._startup_share = blocks, used_share, startup_share
        if used_share >= 1:
            self.stage = "over"
        if not self._queue and self.stage != "over":
            self._queue = next(self._queues, [])
        if not self._queue or self.stage == "over":
            return None
        cell = self._queue.pop(0)
        self._visited.add(cell)
        return cell

    def _replicates(self) -> Iterator[list[Cell]]:
        """Yield cells that belong together; those after them once they have all been seen."""
        yield from self._alone(self._labels(is_last=False))
        yield from self._screened(self._labels(is_last=False), SCREEN_UNTIL)
        self.stage = "introduce last"
        # Of rivals one at a time, the most hopeful first: each may compile the model.
        first: dict[str, str] = {}
        for factor in self.factors:
            if factor.is_last:
                first.setdefault(factor.group or factor.label, factor.label)
        yield from self._alone([*first.values()])
        while new := [x for x in self._labels(is_last=True) if x not in self._introduced]:
            if self._used_share + self._startup_share >= BEGUN_UNTIL:
                break
            yield from self._alone(new[:1])
        self.stage = "last"
        # What was started has cost its time already: it is compared at least once.
        yield from self._screened(self._labels(is_last=True), LAST_UNTIL, fewest=1)
        self.stage = "again"
        again = self._larger_now(self._blocks)
        self.open += again
        # From these blocks alone: the share of the step differs from what it was before.
        yield from self._screened(again, AGAIN_UNTIL, begin=len(self._blocks), fewest=1)
        self.stage, self.credit_from = "credit", len(self._blocks)
        yield from self._credited()
        self.stage = "over"

    def _labels(self, *, is_last: bool) -> list[str]:
        return [f.label for f in self.factors if f.is_last == is_last]

    def _alone(self, new: Sequence[str]) -> Iterator[list[Cell]]:
        """Yield each new technique on top of what is settled."""
        self._introduced |= {*new}
        if new:
            yield [tuple(self.on), *(tuple(sorted([*self.on, label])) for label in new)]

    def _larger_now(self, blocks: Sequence[ScreenBlock]) -> list[str]:
        """Return what saved too little of the steps at first and may save enough of the last ones.

        The fit is one of ratios. What an optimizer saves is so many milliseconds, whatever else is
        on: 0.9 % of the step of a GPT-2 in fp32 on an H200, 4 % once it was compiled in bf16.
        """
        fit, used = fit_blocks(blocks, self.factors), counting(blocks)
        now = [block.step_s for block in used if {*block.on} == {*self.on}]
        first = [math.log(block.step_s) for block in used if block.stage == "screen"]
        found: list[str] = []
        for label in self._labels(is_last=False) if fit and now and first else ():
            is_out = label not in self.open and label not in self.on
            effect = fit.effect(label, self.on) if fit else None
            rivals = (x for x in self.on if _are_rivals(label, x, self.factors))
            if not is_out or effect is None or any(rivals):
                continue
            saved_s = math.exp(float(np.mean(first))) * (1 - 1 / effect.ratio)
            is_enough = saved_s > (1 - 1 / Rule().gain) * float(np.median(now))
            found += [label] if is_enough and effect.bound(0.9, -1) > 0 else []
        return found

    def _screened(
        self, labels: Collection[str], until: float, *, begin: int = 0, fewest: int = 0
    ) -> Iterator[list[Cell]]:
        """Yield replicates until all is settled or a share of the time is over.

        At least the `fewest`; blocks count from `begin` on.
        """
        for number in range(MOST_REPLICATES + 1):
            self._settle(self._blocks[begin:], labels, number)
            unsettled = {x for x in self.open if x in labels and x in self._introduced}
            groups = _groups(self.factors, unsettled)
            is_late = self._used_share >= until and number >= fewest
            if not groups or is_late or number == MOST_REPLICATES:
                break
            rest = [name for name in self.on if not any(name in g for g in groups.values())]
            design = replicate([*groups.values()], self._deal)
            yield [tuple(sorted({*rest, *cell})) for cell in design]
        self._guess(self._blocks[begin:], labels)

    def _settle(
        self, blocks: Sequence[ScreenBlock], labels: Collection[str], replicates: int
    ) -> None:
        """Take those out of the design whose interval says enough, as the rule for pairs has it."""
        fit = fit_blocks(blocks, self.factors)
        if fit is None or replicates < FEWEST_REPLICATES:
            return
        rule = Rule()
        # Of two that are equal one has to stay: what has left the design beats no other.
        best = {*fit.best([*self.open, *self.on]), *self.on}
        asked = [x for x in self.open if x in labels]
        effects = {label: fit.effect(label, best) for label in asked}
        known = {label: effect for label, effect in effects.items() if effect is not None}
        for label, effect in known.items():
            without = _without_rivals(label, best, self.factors)
            has_rival = not {*best} <= {*without, label}
            against = fit.contrast([*without, label], best) if has_rival else None
            is_beaten = against is not None and against.bound(rule.drop_confidence, +1) < (
                SMALLEST_GAIN
            )
            if is_beaten or effect.bound(rule.drop_confidence, +1) < math.log(rule.gain):
                self.open.remove(label)
        # After those: what has lost its last rival is settled with it.
        for label in [x for x in known if x in self.open]:
            has_rivals = any(_are_rivals(x, label, self.factors) for x in self.open if x != label)
            is_sure = known[label].bound(rule.keep_confidence, -1) > math.log(rule.gain)
            if is_sure and not has_rivals:
                self.open.remove(label)
                self.on = [*_without_rivals(label, self.on, self.factors), label]

    def _guess(self, blocks: Sequence[ScreenBlock], labels: Collection[str]) -> None:
        """Take on what the fit says of those that stay open; the last stage asks again."""
        fit = fit_blocks(blocks, self.factors)
        best = fit.best([*self.open, *self.on]) if fit else ()
        self.on += [x for x in best if x in labels and x not in self.on]

    def _credited(self) -> Iterator[list[Cell]]:
        """Yield the best recipe, and it less each technique, until each one's effect is known."""
        fewest, most = CREDIT_REPLICATES
        for number in range(most):
            best = tuple(sorted(self.on))
            effects = own_effects(self._blocks[self.credit_from :], self.factors, best)
            last = {*self._labels(is_last=True)}
            less = [tuple(x for x in best if x != label) for label in best]
            # To compile other models takes the time of what was not tried yet.
            if self._used_share + self._startup_share >= LAST_UNTIL:
                less = [cell for cell in less if cell in self._visited or not last & {*cell}]
            is_known = len(effects) == len(less) and all(
                effect.bound(0.975, +1) - effect.log_ratio < CREDIT_WIDTH
                for effect in effects.values()
            )
            if not best or (number >= fewest and is_known):
                return
            cells = [best, best, *less, *([()] if len(best) > 1 else [])]
            yield self._deal.sample(cells, len(cells))


def own_effects(
    blocks: Sequence[ScreenBlock], factors: Sequence[ScreenFactor], best: Cell
) -> dict[str, ScreenEffect]:
    """Return each technique's effect within a recipe, from blocks of it with one of them left out.

    No model of how they act together is in it: only the recipe and its neighbours are compared.
    """
    near = [block for block in blocks if len({*best} - {*block.on}) <= 1]
    near = [block for block in near if {*block.on} <= {*best}]
    alone = [ScreenFactor(label=f.label) for f in factors if f.label in best]
    fit = fit_blocks(near, alone)
    found = {label: fit.effect(label, best) for label in best} if fit else {}
    return {label: effect for label, effect in found.items() if effect is not None}


def whole_effect(blocks: Sequence[ScreenBlock], recipe: Cell) -> InProcess | None:
    """Return what a recipe does as a whole, from blocks of it and of nothing; None for too few.

    The blocks are those of the last stage: those before chose the recipe, and flatter it.
    """
    near = [block for block in blocks if {*block.on} in ({*recipe}, {*NOTHING_ON})]
    merged = [replace(block, on=("whole",) if block.on else NOTHING_ON) for block in near]
    fit = fit_blocks(merged, [ScreenFactor(label="whole")])
    return fit.effect("whole", ("whole",)) if fit and recipe else None


def find_suspects(on: Cell, blocks: Sequence[ScreenBlock]) -> list[str]:
    """Return the techniques that may be why a block failed: those that no whole block had on.

    All that were on where each of them has worked before.

    >>> worked = ScreenBlock(on=("a",), step_s=1.0, steps=3)
    >>> find_suspects(("a", "b"), [worked]), find_suspects(("a",), [worked])
    (['b'], ['a'])
    """
    proven = {label for block in blocks for label in block.on if block.steps}
    return [label for label in on if label not in proven] or list(on)
