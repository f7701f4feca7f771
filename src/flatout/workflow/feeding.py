"""How well a recipe feeds its training: a run with free data, and one that looks at samples.

Before the ladder the second alone: what a sample costs by leg tells which input levers are worth a
trial at all.
"""

from dataclasses import replace

from flatout import techniques
from flatout.core.feeding import Feeding
from flatout.core.pipeline import Pipeline
from flatout.core.profile import Profile
from flatout.core.recipe import Choice, Recipe
from flatout.profiling.feeding import cores_of
from flatout.profiling.pipeline import pipeline_of
from flatout.workflow.lab import Lab
from flatout.workflow.passes import find_seen
from flatout.workflow.passes.ceilings import replay_probe, replaying_ms
from flatout.workflow.ranking import Search

LOOK_S = 1.5
"""Time for a look at the samples, and once more under the profiler."""
LOOK_STEPS = 4
MIN_WAIT_SHARE = 0.02
"""A loop that waits for less has nothing to gain from its data."""
DECODED = ("read", "decode")
THREADS = "cpu_threads"


def is_about_data(search: Search) -> bool:
    """Tell whether any lever on the input pipeline may be tried."""
    names = search.only or techniques.names()
    allowed = (techniques.technique_class(name) for name in names if name not in search.skip)
    return any(kind.family == "data" for kind in allowed)


def look(lab: Lab, recipe: Recipe, profile: Profile) -> Profile:
    """Return the profile with what a sample costs by leg, where its loop waits for data."""
    if profile.share("data_wait") < MIN_WAIT_SHARE or not profile.training_loaders:
        return profile
    return replace(profile, pipeline=find_pipeline(lab, recipe, profile))


def find_pipeline(
    lab: Lab, recipe: Recipe, profile: Profile, *, all_cores: bool = False
) -> Pipeline | None:
    """Return what a sample costs by leg under a recipe; None where it could not be seen.

    Args:
        lab: Runs the recipe.
        recipe: Under which samples are made.
        profile: Its step.
        all_cores: Whether the other cores make samples, too, meanwhile.
    """
    company = {"company": _others(lab, profile)} if all_cores else {}
    options = {"max_s": LOOK_S} | company
    what = "samples on all cores" if all_cores else "samples"
    trial = lab.look(what, recipe, {"pipeline": options}, LOOK_STEPS)
    return pipeline_of(find_seen(trial, "pipeline"), profile, lab.machine, techniques.names())


def find_feeding(lab: Lab, recipe: Recipe, final: Profile) -> Feeding | None:
    """Return how far a recipe is from what its data allow; None where it could not be measured."""
    if not final.training_loaders or not final.samples_per_step:
        return None
    free = lab.look("free data", recipe, replay_probe(final, "host"), None).profile
    pipeline = find_pipeline(lab, recipe, final, all_cores=True) if free is not None else None
    if free is None or pipeline is None:
        return None
    return feeding_of(final, free_ms_of(free), pipeline, find_trained_ms(lab, recipe, free))


def free_ms_of(free: Profile) -> float:
    """Return the step with free data; drawing a replayed batch is no part of it."""
    return free.whole_step_ms - replaying_ms(free)


def find_trained_ms(lab: Lab, recipe: Recipe, free: Profile) -> float:
    """Return the CPU time that a step of training takes from those who make its samples.

    On one thread: several of them spin while they wait for each other, and what they spin is no
    work that has to be done. The other cores make samples meanwhile, as they do when all are busy.
    None of it where another device trains.

    Args:
        lab: Runs the recipe once more.
        recipe: What trains.
        free: Its profile with free data.
    """
    if free.device_kind != "cpu":
        return 0.0
    single = Choice(technique=THREADS, settings={"threads": 1})
    alone = recipe.without(THREADS).plus(single) if free.cpu_threads > 1 else recipe
    probe = replay_probe(free, "host", company=_others(lab, free))
    trial = lab.look("free data on one thread", alone, probe, None)
    profiles = [free] + ([trial.profile] if trial.profile is not None else [])
    # A script may set its threads itself, whatever it was asked for: the fewest count, once.
    fewest = min(profiles, key=lambda x: (x.cpu_threads, x is free))
    return free_ms_of(fewest) * min(max(1, fewest.cpu_threads), cores_of(free, lab.machine))


def _others(lab: Lab, profile: Profile) -> int:
    """Return the cores of a rank beside one."""
    return cores_of(profile, lab.machine) - 1


def feeding_of(final: Profile, free_ms: float, pipeline: Pipeline, step_cpu_ms: float) -> Feeding:
    """Return the rates of a recipe, of all ranks together.

    Args:
        final: The recipe's step.
        free_ms: Its step with free data.
        pipeline: What a sample costs by leg, and the cores of one rank.
        step_cpu_ms: CPU time that one rank's training of a step takes from its cores.
    """
    samples = final.samples_per_step
    trained_ms = step_cpu_ms / final.samples_per_step_per_rank
    decoded_ms = sum(x.cpu_ms for x in pipeline.stages if x.name in DECODED)
    core_ms = 1e3 * pipeline.usable_cores * max(1, len(final.ranks))
    is_decoding = any(x.name == "decode" and x.cpu_ms for x in pipeline.stages)
    return Feeding(
        samples_per_s=1e3 * samples / final.whole_step_ms,
        free_data_per_s=1e3 * samples / free_ms,
        cores_per_s=core_ms / (pipeline.cpu_ms + trained_ms),
        decode_per_s=core_ms / (decoded_ms + trained_ms) if is_decoding else None,
        made_ms=pipeline.cpu_ms,
        trained_ms=trained_ms,
    )
