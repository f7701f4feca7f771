"""What a tuning looks at once alongside the timed steps: memory, operators, a batch's journey.

Timed steps show phases and, on CUDA, kernels. What the allocator does, how batches are made and,
on the CPU, which operators take the time: to see that would change the timed steps, so one more
run of the unchanged script shows it. What it saw holds for the recipes on top of it, until a
technique changes just that.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flatout.agent.probes.operator_times import AFTER, STEPS
from flatout.analysis.feeding import MIN_WAIT_SHARE
from flatout.analysis.memory import memory_story
from flatout.analysis.regime import with_regime
from flatout.analysis.trace import summarise_operators
from flatout.records import catalogue
from flatout.records.journey import Journey, Pipeline
from flatout.records.memory import MemoryStory
from flatout.records.profile import Profile
from flatout.records.readings import TraceSummary
from flatout.records.recipe import Recipe
from flatout.records.technique import Technique
from flatout.records.trial import Trial
from flatout.tuning.experiments import Asking, TrialHistory
from flatout.tuning.feeding import is_about_data
from flatout.tuning.passes import find_seen
from flatout.tuning.passes.detail import OBSERVED_STEPS, UNSEEN_STEPS
from flatout.tuning.ranking import Search

UNUSED = "fragmented_memory"
"""What techniques address that need a look at the memory."""
ON_MEMORY = frozenset({UNUSED, "out_of_memory"})
ON_KERNELS = frozenset({"forward", "backward"})
ON_DATA = "data_wait"
FUSING = "compile"
"""Family of the techniques whose gain on the CPU hangs on which operators take the time."""
MOST_SHARE = 0.05
"""Share of the time left that the look may take: the proofs need the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What was seen of the unchanged script; each is empty where no one looked."""

    pipeline: Pipeline | None = None
    """What a sample costs by leg."""
    journey: Journey | None = None
    """How its batches are made, and what its loader's workers do."""
    memory: MemoryStory | None = None
    operators: TraceSummary | None = None
    """Of a CPU's steps; on a GPU each timed trial has its own kernels."""

    def added_to(
        self, profile: Profile, names: Collection[str], floor: Collection[str] = ()
    ) -> Profile:
        """Return the timed profile of a recipe with everything that still holds for it.

        The script was looked at with those of `floor`, without which it does not run.
        """
        changed = _addressed(map(catalogue.technique_class, set(names) - set(floor)))
        trace = None if changed & ON_KERNELS else self.operators
        return with_regime(
            replace(
                profile,
                pipeline=self.pipeline,
                journey=None if ON_DATA in changed else self.journey,
                memory=None if changed & ON_MEMORY else self.memory,
                trace=profile.trace or trace,
            )
        )


def look_closer(
    history: TrialHistory, search: Search, recipe: Recipe, first: Trial, left_s: float
) -> Asking[Looks]:
    """Look at what the timed steps do not show, where a technique needs it and there is time."""
    profile = first.profile
    probes = wanted_probes(search, profile) if profile is not None else {}
    if profile is None or not probes:
        return Looks()
    steps: int | None = UNSEEN_STEPS + OBSERVED_STEPS
    if "operator_times" in probes:
        steps = STEPS + AFTER + 1
    if "journey" in probes:
        steps = None  # as many as are timed: a journey is a matter of many
    made = profile.warmup_steps + profile.step_ms.n
    cost_s = first.wall_s + max(0, (steps or 0) - made) * profile.step_ms.median / 1e3
    if cost_s > MOST_SHARE * left_s:
        return Looks()
    trial = yield from history.look("memory, operators, batches", recipe, probes, steps)
    memory = find_seen(trial, "memory")
    operators = find_seen(trial, "operator_times")
    return Looks(
        journey=trial.profile.journey if trial.profile is not None else None,
        memory=memory_story(memory) if memory else None,
        operators=summarise_operators(operators) if operators else None,
    )


def wanted_probes(search: Search, profile: Profile) -> dict[str, dict[str, Any]]:
    """Return the probes that techniques need which may be tried."""
    probes: dict[str, dict[str, Any]] = {}
    waits = profile.share(ON_DATA) >= MIN_WAIT_SHARE and profile.training_loaders
    if waits and is_about_data(search):
        probes["journey"] = {}
    kinds = search.kinds().values()
    if profile.device_kind == "cpu":  # it has no allocator
        compilers = [kind for kind in kinds if kind.family == FUSING]
        if any(kind.candidates(profile, search.machine) for kind in compilers):
            probes["operator_times"] = {}
    elif UNUSED in _addressed(kinds):
        probes["memory"] = {"steps": OBSERVED_STEPS, "listens": False}
    return probes


def _addressed(kinds: Iterable[type[Technique]]) -> set[str]:
    """Return what some techniques act on."""
    return {what for kind in kinds for what in kind.addresses}
