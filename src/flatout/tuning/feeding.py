"""How well a recipe feeds its training: a run with free data, and one that looks at samples.

Before the ladder the second alone: what a sample costs by leg tells which input techniques are
worth a trial at all.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.analysis.feeding import MIN_WAIT_SHARE, cores_of
from flatout.analysis.journey import pipeline_of
from flatout.analysis.steps import block_means
from flatout.records import catalogue
from flatout.records.ablation import Feeding
from flatout.records.journey import Pipeline
from flatout.records.machine import Machine
from flatout.records.messages import interval_of, times, words
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Rule
from flatout.records.units import format_bytes, format_share
from flatout.tuning.experiments import Asking, TrialHistory
from flatout.tuning.pairs import failed_verdict, play
from flatout.tuning.passes import find_seen
from flatout.tuning.passes.ceilings import replay_probe, replaying_ms
from flatout.tuning.ranking import Search, candidate_of

LOOK_S = 1.5
"""Time for a look at the samples, and once more under the profiler."""
LOOK_STEPS = 4
STILL_WAITING = 0.1
"""Share of a recipe's step in waiting from which the next thing to do is named."""
WORTH_PREPARING = 1.1
"""A predicted gain below this is not worth a command and the disk that it fills."""
LEAST_SAMPLE_PAIRS, MOST_SAMPLE_PAIRS = 2, 3
"""Pairs that show what packing all of the data would bring."""
SAMPLE_TIMED = "tune_note.sample_timed"
"""What the message is called that says so."""
DECODED = ("read", "decode")
SENT = ("transport", "copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one rank's samples take of its cores while all of them are at work."""

    trained_ms: float = 0.0
    """CPU time of a training step; none where another device trains."""
    made_ms: float | None = None
    """CPU time to make a sample alongside that training; None where no one saw both at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A packed sample of the data, which stands for all of them in trials that are timed only."""

    choice: Choice
    samples: int
    mean_bytes: float
    """Of one of them in the store."""


def is_about_data(search: Search) -> bool:
    """Return whether any technique on the input pipeline may be tried."""
    return any(kind.family == "data" for kind in search.kinds().values())


def look(history: TrialHistory, recipe: Recipe, profile: Profile) -> Asking[Profile]:
    """Return the profile with what a sample costs by leg, where its loop waits for data."""
    if profile.share("data_wait") < MIN_WAIT_SHARE or not profile.training_loaders:
        return profile
    pipeline = yield from find_pipeline(history, recipe, profile)
    return replace(profile, pipeline=pipeline)


def find_pipeline(
    history: TrialHistory, recipe: Recipe, profile: Profile, *, all_cores: bool = False
) -> Asking[Pipeline | None]:
    """Return what a sample costs by leg under a recipe; None where it could not be seen.

    With `all_cores` the other cores make samples, too, meanwhile.
    """
    company = {"company": cores_of(profile, history.machine) - 1} if all_cores else {}
    options = {"max_s": LOOK_S} | company
    what = "samples on all cores" if all_cores else "samples"
    trial = yield from history.look(what, recipe, {"pipeline": options}, LOOK_STEPS)
    return pipeline_of(find_seen(trial, "pipeline"), profile, history.machine, catalogue.names())


def note_prepared(recipe: Recipe, profile: Profile, machine: Machine) -> list[str]:
    """Return what is promised by techniques that only a command of the user's can try."""
    share, pipeline = profile.share("data_wait"), profile.pipeline
    if share < STILL_WAITING or pipeline is None:
        return []
    found: list[str] = []
    for name, command in catalogue.declared("prepared_by").items():
        if name in recipe.names or not pipeline.legs_of(name):
            continue
        option = catalogue.technique_class(name)()
        promised = candidate_of(name, option, profile, machine)
        if promised.ratio >= WORTH_PREPARING:
            found.append(
                words(
                    "tune_note.prepared",
                    share=format_share(share),
                    technique=name,
                    ratio=times(promised.ratio),
                    why=promised.effect.why,
                    command=command,
                )
            )
    return found


def time_stored_sample(
    history: TrialHistory, recipe: Recipe, sample: StoredSample, may_go_on: Callable[[int], bool]
) -> Asking[str]:
    """Return a sentence on what a recipe gains where all samples come from a store.

    Such trials train on the wrong samples: nothing but their time is read, and the guard is not
    asked. Two pairs are played in any case.
    """
    stored = recipe.plus(sample.choice)
    rule = Rule(max_pairs=MOST_SAMPLE_PAIRS, at_least=LEAST_SAMPLE_PAIRS)
    match = yield from play(history, recipe, stored, may_go_on=may_go_on, rule=rule)
    pair = match.comparison
    if match.failure is not None:
        return words("tune_note.sample_failed", why=failed_verdict(match.failure)[1])
    if pair is None or match.candidate is None:
        return words("tune_note.sample_disturbed", why=match.disturbed)
    return words(
        SAMPLE_TIMED,
        n=str(sample.samples),
        ratio=times(pair.ratio),
        interval=interval_of(pair.interval),
        pairs=str(pair.n),
        rate=format_bytes(sample.mean_bytes * match.candidate.samples_per_s),
    )


def find_feeding(history: TrialHistory, recipe: Recipe, final: Profile) -> Asking[Feeding | None]:
    """Return how far a recipe is from what its data allow; None where it could not be measured."""
    if not final.training_loaders or not final.samples_per_step:
        return None
    trial = yield from history.look("free data", recipe, replay_probe(final, "host"), None)
    free, pipeline = trial.profile, None
    if free is not None:
        pipeline = yield from find_pipeline(history, recipe, final, all_cores=True)
    if free is None or pipeline is None:
        return None
    costs = yield from find_costs(history, recipe, final)
    return feeding_of(final, free_ms_of(free), pipeline, costs)


def free_ms_of(free: Profile) -> float:
    """Return the step with free data; drawing a replayed batch is no part of it."""
    return free.whole_step_ms - replaying_ms(free)


def find_costs(
    history: TrialHistory, recipe: Recipe, final: Profile, steps: int | None = None
) -> Asking[Costs]:
    """Return what training and making take of the cores that they share.

    Both at a time, none waiting for the other: the training with free data, and alongside it as
    many processes as fill the cores, at least as many as the recipe has workers. By themselves they
    take less: 115 ms a step against 121 in the training itself (measured, 2 cores, 2 workers), as
    what takes turns on a core takes its caches, too. On one thread: several of them spin while they
    wait for each other, and what they spin is no work that has to be done.

    Over as many steps as a trial measures, if not given.
    """
    if final.device_kind != "cpu":
        return Costs()
    single = Choice(technique=catalogue.setter_of("threads"), settings={"threads": 1})
    alone = recipe.without(single.technique).plus(single) if final.cpu_threads > 1 else recipe
    workers = sum(loader.workers for loader in final.training_loaders)
    company = max(cores_of(final, history.machine) - 1, workers)
    probe = replay_probe(final, "host", company=company)
    trial = yield from history.look("free data beside full cores", alone, probe, steps)
    seen = find_seen(trial, "replay")
    if trial.profile is None or not seen or not seen["trained_s"]:
        # Its threads as they are, at most one on each core: what they spin is in it.
        threads = min(max(1, final.cpu_threads), cores_of(final, history.machine))
        return Costs(trained_ms=threads * (final.step_ms.median - final.phases_ms["data_wait"]))
    per_step = max(1, round(trial.profile.batches_per_step))
    # Of all steps, as the loop may look at other data between two of them.
    batch_s = statistics.median(block_means(seen["trained_s"], per_step))
    made = seen["made_samples"]
    return Costs(
        trained_ms=1e3 * per_step * batch_s, made_ms=1e3 * seen["made_s"] / made if made else None
    )


def feeding_of(final: Profile, free_ms: float, pipeline: Pipeline, costs: Costs) -> Feeding:
    """Return the rates of a recipe, of all ranks together.

    `pipeline` has the cores of one rank.
    """
    samples = final.samples_per_step
    trained_ms = costs.trained_ms / final.samples_per_step_per_rank
    legs_ms = {stage.name: stage.cpu_ms for stage in pipeline.stages}
    decoded_ms = sum(legs_ms.get(name, 0.0) for name in DECODED)
    made_ms = pipeline.cpu_ms
    if costs.made_ms is not None:
        made_ms = costs.made_ms + sum(legs_ms.get(name, 0.0) for name in SENT)
    core_ms = 1e3 * pipeline.usable_cores * max(1, len(final.ranks))
    return Feeding(
        samples_per_s=1e3 * samples / final.whole_step_ms,
        free_data_per_s=1e3 * samples / free_ms,
        cores_per_s=core_ms / (made_ms + trained_ms),
        decode_per_s=core_ms / (decoded_ms + trained_ms) if legs_ms.get("decode") else None,
        made_ms=made_ms,
        trained_ms=trained_ms,
    )
