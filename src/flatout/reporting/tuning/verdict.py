"""What a tuning says in sentences (headline, reasons, next command), and its recipe by hand."""

import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from string import Template

from flatout.records.ablation import (
    FREE_DATA,
    Ablation,
    Comparison,
    Feeding,
    LossCheck,
    Row,
    Verdict,
)
from flatout.records.catalogue import setter_of, technique_class
from flatout.records.messages import (
    ENGLISH,
    Sentence,
    Text,
    code_of,
    interval_of,
    messages,
    named,
    times,
    words,
    written,
)
from flatout.records.recipe import Recipe
from flatout.records.statistics import Rule
from flatout.records.units import (
    MAX_RATIO_END,
    format_duration,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.profile.sentences import MORE, ceilings_sentence, consumers_sentences

STOPPED = (
    "budget",
    "busy budget",
    "interrupted",
    "machine busy",
    "baseline failed",
    "recipe failed",
)
"""Why a tuning ended early."""
SAID_FIRST = (
    "tune_note.prepared",
    "tune_note.beyond",
    "tune_note.sample_timed",
    "tune_note.sample_failed",
    "tune_note.sample_disturbed",
    "tune_note.packed",
    "tune_note.not_packed",
)
"""Notes that say what more could be gained or answer an option of the user's, in the order in which
they are told."""

FEWEST_PREDICTIONS = 2
"""One prediction shows nothing about the next."""
WORTH_LOOKING = 1.15
"""From this ceiling on data is worth a look, as for the rule `data_wait`: then the report does not
say that nothing is worth changing."""
MAX_RESOLUTION = 3.0
"""A tuning that could not even have shown a factor of three knows nothing about the noise."""
MIN_BESIDE = 0.1
"""Of the run in what no technique is judged by, from which on its gain as a whole is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPlace:
    """Where a tuning left its files, as the user would type it."""

    out: str = "flatout-out"
    start_in: str = ""
    """The folder that the workload starts in; empty for the one the user is in."""


HERE = ResultPlace()
"""The default folder, below the one the user is in."""


def headline(ablation: Ablation) -> Sentence:
    """Return the answer of a tuning in one sentence.

    A gain is claimed only where the whole recipe was confirmed against the baseline.
    """
    pair = ablation.confirmation
    if not ablation.recipe.choices:
        return _nothing_kept(ablation)
    if ablation.needed and len(ablation.needed) == len(ablation.recipe.choices):
        return _only_needed(ablation)
    kept = _kept(ablation)
    if pair is None:
        return words("tuning.unconfirmed", kept=kept, why=stop_reason(ablation))
    if pair.covers_one or pair.ratio < 1:
        return words("tuning.not_faster", kept=kept, gain=gain(pair))
    return words("tuning.faster", gain=gain(pair), kept=kept, training=_training(ablation))


def _only_needed(ablation: Ablation) -> Sentence:
    """Return the answer where nothing was kept but what the baseline has."""
    needed = _needed(ablation)
    is_faster = needed != tuple(ablation.needed)
    if is_faster and ablation.stopped in STOPPED:
        return words("tuning.spread_so_far", needed=needed, why=stop_reason(ablation))
    if is_faster:
        return words("tuning.only_spread", needed=needed)
    is_of_workers = ablation.needed[0].split()[0] == setter_of("num_workers")
    return words(f"tuning.runs_{'workers' if is_of_workers else 'memory'}", needed=needed)


def _kept(ablation: Ablation) -> Sentence:
    """Return how many techniques were kept of those tried, not counting what the baseline has."""
    needed = {label.split()[0] for label in ablation.needed}
    own = {choice.technique for choice in ablation.recipe.choices} - needed
    tried = {row.choice.technique for row in ablation.rows} - needed
    kept = words("tuning.kept", n=str(len(own)), tried=str(len(tried)))
    return words("tuning.kept_on", kept=kept, needed=_needed(ablation)) if needed else kept


def _needed(ablation: Ablation) -> Text:
    """Return what the baseline has, with its gain where that is the way it is spread."""
    gains = {
        row.choice.label: words("tuning.with_gain", what=row.choice.label, gain=gain(pair))
        for row in ablation.rows
        if row.stage == "spread" and (pair := row.comparison) is not None
    }
    return tuple(gains.get(label, label) for label in ablation.needed)


def where(ablation: Ablation) -> Sentence:
    """Return what was tuned, and on which device."""
    place = {"workload": ablation.workload, "device": ablation.baseline.device_name}
    shares = ablation.foreign_shares
    if not shares:
        return words("tuning.where", **place)
    middle, most = format_share(statistics.median(shares)), format_share(max(shares))
    return words("tuning.where_noisy", **place, middle=middle, most=most)


def _proof_of(pair: Comparison) -> Sentence:
    """Return the interval of a comparison with what it was made from."""
    name = "proof" if pair.n != 1 else "proof_one"
    if pair.source == "screen":
        name = "proof_blocks"
    elif pair.blocks:
        name = "proof_both"
    interval = interval_of(pair.interval)
    return words(f"gain.{name}", interval=interval, n=str(pair.n), blocks=str(pair.blocks))


def gain(pair: Comparison) -> Sentence:
    """Return what a comparison shows, with its interval and n."""
    name = "faster" if pair.ratio > 1 else "slower"
    # A ratio that is shown as 1.00x is neither faster nor slower.
    if pair.covers_one or format_ratio(pair.ratio) == format_ratio(1.0):
        name = "no_difference"
    if pair.interval[1] > MAX_RATIO_END:
        name = "undecided"
    return words(f"gain.{name}", ratio=times(pair.ratio), proof=_proof_of(pair))


def verdict_of(row: Row) -> Sentence:
    """Return the verdict on a technique; an interval that covers 1 is no difference."""
    pair = row.comparison
    if row.verdict is Verdict.NO_EFFECT and pair:
        if pair.n == 1 or pair.interval[1] < 1:
            return words("verdict.no_gain")
        if pair.covers_one:
            return words("verdict.no_difference")
        if pair.interval[0] > Rule().gain:
            return words("verdict.outdone")
    return words(f"verdict.{row.verdict.value}")


def loss_of(check: LossCheck | None) -> Text:
    """Return what the guard says about a recipe, in two words."""
    return named("loss", check.status) if check else words("reading.unknown")


def stop_reason(ablation: Ablation) -> Sentence:
    """Return why a tuning ended before all was tried."""
    code = ablation.stopped if ablation.stopped in STOPPED else "early"
    return words(f"stopped.{code.replace(' ', '_')}")


def reasons(ablation: Ablation) -> Iterator[Sentence]:
    """Yield what the table cannot say, one sentence each."""
    check = ablation.aa_check
    if check is not None:
        why = words("tuning.in_brackets", text=written(check.why)) if check.why else ""
        yield words("tuning.twice", check=loss_of(check), why=why)
    for row in ablation.rows:
        if row.stage == "add" and row.why:
            yield words("tuning.why", technique=row.choice.technique, why=written(row.why))
    yield from _costs(ablation)
    yield from _calibration(ablation)
    for row in ablation.rows:
        if row.stage == "drop":
            yield _left_out(row)
    yield from limits(ablation)
    own = [row.comparison for row in ablation.rows if row.stage != "spread"]
    sources = {pair.source for pair in own if pair}
    if "pairs" in sources:
        is_known = ablation.resolution <= MAX_RESOLUTION
        name = "tuning.resolution" if is_known else "tuning.resolution_unknown"
        yield words(name, ratio=times(ablation.resolution))
        yield words("tuning.how")
    if "screen" in sources:
        yield words("tuning.how_screened")
    if ablation.final_check or any(row.loss_check.passed for row in ablation.rows):
        yield words("tuning.short_checks")
    yield from notes(ablation)


def notes(ablation: Ablation) -> Iterator[Sentence]:
    """Yield what the tuning noted on its way, what the short report has first."""
    others = (note for note in ablation.notes if code_of(note) not in SAID_FIRST)
    yield from answers(ablation)
    yield from (words("tuning.note", note=written(note)) for note in others)


def answers(ablation: Ablation) -> Iterator[Sentence]:
    """Yield what an option of the user's asked for, and what more is promised."""
    asked = [note for code in SAID_FIRST for note in ablation.notes if code_of(note) == code]
    return (words("tuning.note", note=written(note)) for note in asked)


def limits(ablation: Ablation) -> Iterator[Sentence]:
    """Yield what limits the training now: the data of a recipe, or what a baseline could gain."""
    beside, pair = ablation.baseline.beside_steps_share, ablation.confirmation
    if beside >= MIN_BESIDE and pair is not None and ablation.recipe.choices:
        whole = 1 / (beside + (1 - beside) / pair.ratio)
        share = format_share(beside)
        yield words("tuning.beside_steps", share=share, ratio=format_ratio(whole))
    if ablation.feeding is not None:
        # A recipe that was faster refutes the claim that this one is fed: only one of them is said.
        faster = [*_faster_ones(ablation, ablation.feeding)]
        yield from faster or [fed(ablation.feeding)]
    if not ablation.recipe.choices:
        yield words("tuning.ceilings", ceilings=ceilings_sentence(ablation.baseline))
        yield from consumers_sentences(ablation.baseline)


def fed(feeding: Feeding) -> Sentence:
    """Return how far a recipe is from what its data allow, and which limit is the lower one."""
    is_free_data = feeding.binds == FREE_DATA
    limit = words("tuning.limit_free_data" if is_free_data else "tuning.limit_cores")
    others = {"cores_could": feeding.cores_per_s}
    if not is_free_data:
        others = {"free_data_could": feeding.free_data_per_s}
        others |= {"decoding_could": feeding.decode_per_s} if feeding.decode_per_s else {}
    other = tuple(words(f"tuning.{k}", rate=format_rate(per_s)) for k, per_s in others.items())
    rate = format_rate(feeding.samples_per_s)
    if feeding.samples_per_s >= feeding.measured_limit_per_s:
        most = format_rate(feeding.measured_limit_per_s)
        return words("tuning.fed", rate=rate, limit=limit, most=most, other=other)
    most, share = format_rate(feeding.limit_per_s), format_share(feeding.share)
    return words("tuning.fed_at", share=share, limit=limit, rate=rate, most=most, other=other)


def _faster_ones(ablation: Ablation, feeding: Feeding) -> Iterator[Sentence]:
    """Yield which recipe that was tried trained faster than the one that is called fed."""
    rate = max(feeding.samples_per_s, feeding.free_data_per_s)
    added = [row for row in ablation.rows if row.stage == "add"]
    rows = [row for row in added if (row.samples_per_s or 0.0) > MORE * rate]
    best = max(rows, key=lambda row: row.samples_per_s or 0.0, default=None)
    if best is not None:
        yield words(
            "tuning.data_is_not_all",
            technique=best.choice.technique,
            verdict=verdict_of(best),
            rate=format_rate(best.samples_per_s or 0.0),
        )


def ending(ablation: Ablation) -> Sentence:
    """Return how long the tuning took and why it ended."""
    took = format_duration(ablation.cost_s)
    if ablation.stopped in STOPPED:
        return words("tuning.took_stopped", time=took, why=stop_reason(ablation))
    return words("tuning.took", time=took)


def next_command(ablation: Ablation, place: ResultPlace) -> str:
    """Return what to type next: to train with the recipe, unless it was no faster."""
    pair, is_cut_short = ablation.confirmation, ablation.stopped in STOPPED
    is_worth_running = bool(ablation.recipe.choices) and not (pair is None and is_cut_short)
    if pair and not ablation.needed and (pair.covers_one or pair.ratio < 1):
        is_worth_running = False
    if is_worth_running:
        recipe = shlex.quote(f"{place.out}/recipe.toml")
        command = f"flatout run --with {recipe} {ablation.workload}"
    elif is_cut_short:
        command = f"flatout tune --resume --out {shlex.quote(place.out)} {ablation.workload}"
    else:
        command = f"python {ablation.workload}"
    return f"cd {shlex.quote(place.start_in)} && {command}" if place.start_in else command


def _nothing_kept(ablation: Ablation) -> Sentence:
    number = len({row.choice.technique for row in ablation.rows})
    tried = words("tuning.tried" if number != 1 else "tuning.tried_one", n=str(number))
    pair = ablation.confirmation
    if pair is not None:
        check = ablation.final_check
        if pair.interval[1] > 1 and check is not None and check.passed:
            return words("tuning.not_proven", tried=tried, gain=gain(pair))
        return words("tuning.leave_it", tried=tried)
    if ablation.stopped in STOPPED:
        open_one = _most_promising(ablation)
        looks = words("tuning.looks", **open_one) if open_one else ""
        return words("tuning.no_answer", tried=tried, why=stop_reason(ablation), looks=looks)
    free_data = ablation.baseline.ceilings.free_data
    name = "no_gain" if free_data >= WORTH_LOOKING else "nothing"
    return words(f"tuning.{name}", tried=tried, ceiling=times(free_data))


def _most_promising(ablation: Ablation) -> dict[str, Text]:
    """Return which technique more pairs would be for, and what they have shown; {} for none."""
    found = [
        (pair, " + ".join([row.choice.label, *row.together_with]))
        for row in ablation.rows
        if row.verdict is Verdict.INCONCLUSIVE and (pair := row.comparison) is not None
        if pair.source == "pairs" and pair.n > 1 and pair.ratio >= Rule().promising
    ]
    if not found:
        return {}
    pair, label = max(found, key=lambda item: item[0].interval[0])
    return {"technique": label, "ratio": times(pair.ratio), "proof": _proof_of(pair)}


def _training(ablation: Ablation) -> Sentence:
    check = ablation.final_check
    if check is None or not check.passed:
        return words("tuning.training_unproven")
    kind = check.status if check.status in ("on_purpose", "same") else "within"
    return words(f"tuning.training_{kind}")


def _costs(ablation: Ablation) -> Iterator[Sentence]:
    epoch = ablation.baseline.epoch_steps
    for row in ablation.kept:
        # A technique that was kept may have been left out of the recipe again.
        if row.break_even_steps is None or row.choice.technique not in ablation.recipe.names:
            continue
        epochs: Text = ""
        if epoch:
            epochs = words("tuning.cost_epochs", n=f"{row.break_even_steps / epoch:.1f}")
        about = {"time": format_duration(row.startup_s), "steps": str(row.break_even_steps)}
        yield words("tuning.cost", technique=row.choice.technique, epochs=epochs, **about)


def _calibration(ablation: Ablation) -> Iterator[Sentence]:
    """Say how far the predictions were off, so that a reader knows what the next ones are worth."""
    known = ablation.calibration
    if len(known) < FEWEST_PREDICTIONS:
        return
    off = sorted(known, key=lambda item: abs(math.log(item.error)))
    middle, worst = off[len(off) // 2], off[-1]
    yield words(
        "tuning.predictions",
        n=str(len(known)),
        factor=f"{math.exp(abs(math.log(middle.error))):.2f}",
        worst=worst.technique,
        predicted=times(worst.predicted),
        measured=times(worst.measured),
    )


def _left_out(row: Row) -> Sentence:
    """Say what a kept technique still brings in the final recipe."""
    name = {Verdict.KEPT: "pays", Verdict.NO_EFFECT: "pays_not", Verdict.WORSE: "pays_not"}
    shown = words("tuning.shown", gain=gain(row.comparison)) if row.comparison else ""
    known = words(f"tuning.drop_{name.get(row.verdict, 'undecided')}", shown=shown)
    return words("tuning.drop", technique=row.choice.technique, known=known)


def hand_changes(recipe: Recipe, language: str = ENGLISH) -> dict[str, list[str]]:
    """Return what each choice of a recipe, by its label, changes in a script, in its order.

    Lines that start with `- ` are taken out, with `+ ` put in; others are plain words. There are
    none where nothing is known.
    """
    say, changes = messages(language), {}
    for choice in recipe.choices:
        # Texts go in without quotes, the lines have them. A name that is no setting stays.
        values = {k: v if isinstance(v, str) else repr(v) for k, v in choice.settings.items()}
        text = technique_class(choice.technique).by_hand.strip("\n")
        lines = Template(text).safe_substitute(values).splitlines()
        changes[choice.label] = [say.text(line) for line in lines]
    return changes
