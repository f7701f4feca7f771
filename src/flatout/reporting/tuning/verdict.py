"""A recipe by hand: what to change in the script to have the same without flatout.

These are instructions, not a diff of the user's source: flatout has not read it.

What a tuning says, in sentences: the headline, the reasons, the next command.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import Template
from typing import Any

from flatout.records.ablation import FREE_DATA, Ablation, Feeding, Row
from flatout.records.catalogue import setter_of
from flatout.records.recipe import Recipe
from flatout.records.technique import Technique
from flatout.records.units import format_duration, format_rate, format_ratio, format_share
from flatout.reporting.messages import ENGLISH, messages
from flatout.reporting.profile.sentences import MORE, ceilings_sentence
from flatout.reporting.tables import drop_words, gain_words, loss_words, sentence, verdict_words

STOPPED_WORDS = {
    "budget": "the budget left no time for more",
    "interrupted": "it was interrupted",
    "machine busy": "other work kept the machine busy",
    "baseline failed": "the unchanged script did not run",
}
"""Why a tuning ended early."""

FEWEST_PREDICTIONS = 2
"""One prediction shows nothing about the next."""
WORTH_LOOKING = 1.15
"""From this ceiling on data is worth a look, as for the rule `data_wait`: then no one is told that
nothing is worth changing."""
MAX_RESOLUTION = 3.0
"""A tuning that could not even have shown a factor of three knows nothing about the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPlace:
    """Where a tuning left its files, as the user would type it."""

    out: str = "flatout-out"
    start_in: str = ""
    """The folder that the workload starts in; empty for the one the user is in."""


HERE = ResultPlace()
"""The default folder, below the one the user is in."""


def headline(ablation: Ablation) -> str:
    """Return the answer of a tuning in one sentence.

    A gain is claimed only where the whole recipe was confirmed against the baseline.
    """
    pair = ablation.confirmation
    if not ablation.recipe.choices:
        return _nothing_kept(ablation)
    if ablation.needed and len(ablation.needed) == len(ablation.recipe.choices):
        is_of_workers = ablation.needed[0].split()[0] == setter_of("num_workers")
        how = "its loader's workers last" if is_of_workers else "it fits into memory"
        return f"It runs now: with {', '.join(ablation.needed)} {how}, unchanged not."
    kept = f"{len(ablation.recipe.choices)} of {len(_tried(ablation))} techniques kept"
    if pair is None:
        ending = STOPPED_WORDS.get(ablation.stopped, "it ended early")
        return f"Not confirmed yet: {kept}, but {ending} before the whole recipe was proven."
    if pair.covers_one or pair.ratio < 1:
        return f"Not faster: {kept}, but the whole recipe shows {gain_words(pair)}."
    return f"{gain_words(pair)}: {kept}, {_training_words(ablation)}."


def reasons(ablation: Ablation) -> Iterator[str]:
    """Yield what the table cannot say, one sentence each."""
    yield from _script_words(ablation)
    yield from (
        sentence(f"{row.choice.technique}: {row.why}") for row in _ladder(ablation) if row.why
    )
    yield from _costs(ablation)
    yield from _calibration(ablation)
    yield from _drops(ablation)
    yield from limits(ablation)
    if any(row.comparison for row in ablation.rows):
        yield _resolution_words(ablation.resolution)
        yield (
            "Each technique was tried on top of those kept above it, in fresh and "
            "interleaved processes."
        )
    if ablation.final_check or any(row.loss_check.passed for row in ablation.rows):
        yield "The loss checks are short: they catch breakage, not a change of final accuracy."
    yield from (sentence(note) for note in ablation.notes)


def limits(ablation: Ablation) -> Iterator[str]:
    """Yield what limits the training now: the data of a recipe, or what a baseline could gain."""
    if ablation.feeding is not None:
        yield feeding_words(ablation.feeding)
        yield from _faster_words(ablation, ablation.feeding)
    if not ablation.recipe.choices:
        ceilings = messages(ENGLISH).text(ceilings_sentence(ablation.baseline))
        yield sentence(f"The baseline's ceilings: {ceilings}")


def feeding_words(feeding: Feeding) -> str:
    """Say how far a recipe is from what its data allow, and which limit is the lower one.

    >>> feeding_words(Feeding(samples_per_s=97, free_data_per_s=150, cores_per_s=100, made_ms=20))
    'Fed at 97 % of what the cores can make: 97.0 of 100 samples/s; free data would give 150.'
    >>> feeding_words(Feeding(samples_per_s=102, free_data_per_s=150, cores_per_s=100))
    'Fed: 102 samples/s, no less than what the cores can make (100); free data would give 150.'
    """
    if feeding.binds == FREE_DATA:
        limit, other = (
            "what free data would give this recipe",
            f"the cores could make {format_rate(feeding.cores_per_s)}",
        )
    else:
        limit = "what the cores can make"
        other = f"free data would give {format_rate(feeding.free_data_per_s)}"
    if feeding.decode_per_s is not None and feeding.binds != FREE_DATA:
        other += f", decoding alone would allow {format_rate(feeding.decode_per_s)}"
    measured = format_rate(feeding.measured_limit_per_s)
    if feeding.samples_per_s >= feeding.measured_limit_per_s:
        rate = format_rate(feeding.samples_per_s)
        return f"Fed: {rate} samples/s, no less than {limit} ({measured}); {other}."
    rates = f"{format_rate(feeding.samples_per_s)} of {format_rate(feeding.limit_per_s)} samples/s"
    return f"Fed at {format_share(feeding.share)} of {limit}: {rates}; {other}."


def _faster_words(ablation: Ablation, feeding: Feeding) -> Iterator[str]:
    """Say which recipe that was tried trained faster than the one that is called fed."""
    rate = max(feeding.samples_per_s, feeding.free_data_per_s)
    rows = [row for row in ablation.rows if (row.samples_per_s or 0.0) > MORE * rate]
    best = max(rows, key=lambda row: row.samples_per_s or 0.0, default=None)
    if best is not None:
        yield (
            f"Data is not all: with {best.choice.technique} ({verdict_words(best)}) it made "
            f"{format_rate(best.samples_per_s or 0.0)} samples/s."
        )


def ending(ablation: Ablation) -> str:
    """Say how long the tuning took and why it ended."""
    took = f"Tuning took {format_duration(ablation.cost_s)}"
    why = STOPPED_WORDS.get(ablation.stopped)
    return f"{took}; it ended because {why}." if why else f"{took}."


def next_command(ablation: Ablation, place: ResultPlace) -> str:
    """Return what to type next."""
    command = _command(ablation, place)
    return f"cd {place.start_in} && {command}" if place.start_in else command


def _command(ablation: Ablation, place: ResultPlace) -> str:
    is_cut_short = ablation.stopped in STOPPED_WORDS
    if _is_worth_running(ablation, is_cut_short=is_cut_short):
        return f"flatout run --with {place.out}/recipe.toml {ablation.workload}"
    if is_cut_short:
        return f"flatout tune --resume --out {place.out} {ablation.workload}"
    return f"python {ablation.workload}"


def _is_worth_running(ablation: Ablation, *, is_cut_short: bool) -> bool:
    """Return whether to train with the recipe: not with one that was confirmed to be no faster."""
    pair = ablation.confirmation
    if not ablation.recipe.choices or (pair is None and is_cut_short):
        return False
    return bool(ablation.needed) or pair is None or not (pair.covers_one or pair.ratio < 1)


def _resolution_words(resolution: float) -> str:
    if resolution > MAX_RESOLUTION:
        return "Resolution unknown: too few pairs, or too much noise, to tell what could be shown."
    return (
        f"Resolution {format_ratio(resolution)}: a smaller gain cannot be shown at this machine's "
        "noise; such a technique is inconclusive, which is not the same as no gain."
    )


def _tried(ablation: Ablation) -> set[str]:
    return {row.choice.technique for row in ablation.rows}


def _ladder(ablation: Ablation) -> list[Row]:
    return [row for row in ablation.rows if row.stage == "add"]


def _nothing_kept(ablation: Ablation) -> str:
    tried = f"{len(_tried(ablation))} technique{'s' * (len(_tried(ablation)) != 1)} tried"
    if ablation.confirmation is not None:
        return f"Leave it as it is: {tried}, and the recipe that they gave did not hold."
    if why := STOPPED_WORDS.get(ablation.stopped):
        return f"No answer yet: {tried}, none kept, and {why}."
    free_data = ablation.baseline.ceilings.free_data
    ceiling = format_ratio(free_data)
    if free_data >= WORTH_LOOKING:
        return (
            f"No gain found: {tried}, none of them a gain that could be shown; free data would "
            f"give up to {ceiling}, which takes a change of the data set or its loader."
        )
    return (
        f"Nothing worth changing: {tried}, none of them a gain that could be shown; "
        f"free data would give at most {ceiling}."
    )


def _training_words(ablation: Ablation) -> str:
    check = ablation.final_check
    if check is None or not check.passed:
        return "training not proven the same"
    if check.status == "on_purpose":
        return "training changed on purpose, looked at for damage only"
    if check.status == "same":
        return "losses and gradients bit-identical"
    return "losses and gradients within the guard's limits"


def _script_words(ablation: Ablation) -> Iterator[str]:
    check = ablation.aa_check
    if check is None:
        return
    why = f" ({check.why})" if check.why else ""
    yield sentence(f"The unchanged script run twice: {loss_words(check)}{why}")


def _costs(ablation: Ablation) -> Iterator[str]:
    epoch = ablation.baseline.epoch_steps
    for row in ablation.kept:
        # A technique that was kept may have been left out of the recipe again.
        if row.break_even_steps is None or row.choice.technique not in ablation.recipe.names:
            continue
        epochs = f" ({row.break_even_steps / epoch:.1f} epochs)" if epoch else ""
        yield (
            f"{row.choice.technique} needs {format_duration(row.startup_s)} more at the start "
            f"and has paid that back after {row.break_even_steps} steps{epochs}."
        )


def _calibration(ablation: Ablation) -> Iterator[str]:
    """Say how far the predictions were off, so that a reader knows what the next ones are worth."""
    known = ablation.calibration
    if len(known) < FEWEST_PREDICTIONS:
        return
    off = sorted(known, key=lambda item: abs(math.log(item.error)))
    middle, worst = off[len(off) // 2], off[-1]
    factor = math.exp(abs(math.log(middle.error)))
    yield (
        f"Predictions of {len(known)} techniques were off by a factor of {factor:.2f} in the "
        "middle; "
        f"the worst was {worst.technique}, {format_ratio(worst.predicted)} predicted and "
        f"{format_ratio(worst.measured)} measured."
    )


def _drops(ablation: Ablation) -> Iterator[str]:
    for row in ablation.rows:
        if row.stage == "drop":
            name = row.choice.technique
            yield f"The final recipe with {name} against without: {drop_words(row)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class HandChange:
    """What one technique of a recipe changes in a script."""

    label: str
    """The technique with its settings."""
    lines: tuple[str, ...]
    """Lines that start with `- ` are taken out, with `+ ` put in; others are plain words. Empty
    when nothing is known."""


def hand_changes(
    recipe: Recipe, technique_class: Callable[[str], type[Technique]]
) -> tuple[HandChange, ...]:
    """Return the changes of a recipe, in its order.

    Args:
        recipe: The chosen techniques.
        technique_class: Finds the class of a technique by its name.
    """
    return tuple(
        HandChange(
            label=choice.label,
            lines=_filled(technique_class(choice.technique).by_hand, dict(choice.settings)),
        )
        for choice in recipe.choices
    )


def _filled(text: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Put the settings in for `$name`; a name that is no setting stays as it is."""
    values = {name: _source(value) for name, value in settings.items()}
    return tuple(Template(text.strip("\n")).safe_substitute(values).splitlines())


def _source(value: Any) -> str:
    """Return a setting as it is in a script; texts go without quotes, the lines have them."""
    return value if isinstance(value, str) else repr(value)
