"""The ladder: naive scripts tuned by `tune` alone, against the usual order of techniques by hand.

By hand means: precision, layout, compilation and so on in the order of the tutorials, each step
kept where two runs of it are faster than two of what was there. That, and everything switched on,
are measured once more alongside the tuned recipe, in turn and in fresh processes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import (
    Arm,
    Bench,
    Record,
    TrialFailedError,
    cells,
    comparison,
    interleave,
    open_lab,
    trials_in,
)
from flatout.records.ablation import Ablation, Comparison
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.records.units import format_ms
from flatout.tuning.trial_runner import TrialRunner
from flatout.workflow.demo import scenarios
from flatout.workflow.tune import TuneOptions, tune

THEME = "ladder"
BUDGET_S = 300.0
"""For one tuning, half of what is usual. In 150 s a slow hour of the machine left no time for the
techniques that are worth a few hundredths, which those by hand got."""
SMOKE_S = 30.0
"""With a smaller budget the sizes are so small that only the suite itself is tried out."""
ROUNDS = 4
FEWEST_ROUNDS = 2
"""Of the last comparison, and with a smaller budget."""
HAND_RUNS = 2
"""Processes that someone who tunes by hand looks at before keeping a step."""
LEAST_OF_BY_HAND = 0.95
CACHE = "compiled"
"""Folder of what was compiled, for all that are compared."""
IMAGES = Path(__file__).parent.parent / "scripts" / "naive_images.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One naive script."""

    name: str
    target: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the last comparison of one script shows."""

    name: str
    ablation: Ablation
    baseline: Arm
    tuned: Arm
    by_hand: tuple[Arm, ...]
    """Greedy, and everything on."""
    tried_by_hand: tuple[tuple[str, float | None], ...]
    """Each rung with its median step in ms; None where it could not act."""

    @property
    def best_by_hand(self) -> Arm:
        """The faster of what was done by hand."""
        return min(self.by_hand, key=lambda arm: arm.median_ms)

    @property
    def against_hand(self) -> Comparison:
        """How many times faster the tuned recipe is."""
        return comparison(self.best_by_hand, self.tuned)


def run(bench: Bench) -> Record:
    """Tune both scripts, climb the ladder by hand, compare."""
    results = [measured(script, bench) for script in scripts(bench.budget_s)]
    return Record(
        theme=THEME,
        claim=(
            f"on a small ResNet and a small GPT, tune alone reaches at least "
            f"{LEAST_OF_BY_HAND:.0%} of the best recipe that the usual order by hand gives"
        ),
        holds=holds(results),
        finding=", ".join(
            f"{r.name} {cells(comparison(r.baseline, r.tuned))[0]}, "
            f"{r.against_hand.ratio:.0%} of by hand"
            for r in results
        ),
        table=rows(results),
        raw={
            "ablations": {r.name: r.ablation.to_json() for r in results},
            "by_hand": {r.name: [list(rung) for rung in r.tried_by_hand] for r in results},
            "rounds_s": {
                r.name: {arm.name: arm.times_s for arm in (r.baseline, r.tuned, *r.by_hand)}
                for r in results
            },
            "trials": trials_in(bench.work),
        },
        ablations=[r.ablation for r in results],
        notes=[f"{r.name}: {note}" for r in results for note in r.ablation.notes],
    )


def scripts(budget_s: float = BUDGET_S) -> tuple[Script, ...]:
    """Return the naive ResNet and the naive GPT, tiny ones for a tiny budget."""
    is_smoke = budget_s < SMOKE_S
    side, batch = ("8", "2") if is_smoke else ("32", "16")
    gpt = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--limit", "100000")
    return (
        Script(
            name="ResNet-18",
            target=IMAGES,
            arguments=(
                *("--model", "resnet18", "--side", side, "--classes", "10"),
                *("--batch-size", batch, "--batches", "40"),
            ),
        ),
        Script(
            name="GPT",
            target=scenarios() / "naive_attention" / "train.py",
            arguments=gpt if is_smoke else (),
        ),
    )


def rungs(bench: Bench) -> tuple[Choice, ...]:
    """Return the steps in the order in which people take them."""
    is_cpu = bench.machine.device.kind == "cpu"
    allocator = Choice(technique="expandable_segments")
    if is_cpu:
        library = "tcmalloc" if bench.machine.tcmalloc_path else "glibc"
        allocator = Choice(technique="cpu_allocator", settings={"library": library})
    names = ("sdpa_attention", "bf16_autocast", "channels_last", "torch_compile", "fused_optimizer")
    return (*(Choice(technique=name) for name in names), allocator)


def measured(script: Script, bench: Bench) -> Result:
    """Tune one script, climb by hand, and compare what came out, round by round."""
    bench.say(f"{script.name}: tune")
    work = bench.work / script.name
    workload = bench.workload(script.target, *script.arguments)
    budget_s = min(bench.budget_s, BUDGET_S)
    ablation = tune(workload, TuneOptions(out=work / "tune", budget_s=budget_s), bench.tell)
    bench.say(f"{script.name}: by hand")
    greedy, everything, tried = climb_by_hand(
        open_lab(bench, workload, f"{script.name}/hand", cache=bench.work / CACHE), bench
    )
    recipes = {"baseline": Recipe(), "tuned by flatout": ablation.recipe}
    recipes |= {"by hand, step by step": greedy, "by hand, everything": everything}
    arms = arms_of(recipes, bench, workload, work)
    bench.say(f"{script.name}: {', '.join(arms)} in turn")
    distinct = list({id(arm): arm for arm in arms.values()}.values())
    interleave(distinct, ROUNDS if budget_s >= BUDGET_S else FEWEST_ROUNDS)
    baseline, tuned, *by_hand = arms.values()
    return Result(
        name=script.name,
        ablation=ablation,
        baseline=baseline,
        tuned=tuned,
        by_hand=tuple(by_hand),
        tried_by_hand=tried,
    )


def climb_by_hand(
    lab: TrialRunner, bench: Bench
) -> tuple[Recipe, Recipe, tuple[tuple[str, float | None], ...]]:
    """Return what is kept step by step, everything that could act, and what each step showed."""
    recipe = everything = Recipe()
    best_ms = _median_ms(lab, recipe)
    if best_ms is None:
        raise TrialFailedError("the unchanged script gave no measurement")
    tried: list[tuple[str, float | None]] = [("baseline", best_ms)]
    for choice in rungs(bench):
        step_ms = _median_ms(lab, recipe.plus(choice))
        tried.append((choice.label, step_ms))
        bench.say(
            f"  {choice.label}: {'not applicable' if step_ms is None else f'{step_ms:.0f} ms'}"
        )
        if step_ms is None:
            continue
        everything = everything.plus(choice)
        if step_ms < best_ms:
            recipe, best_ms = recipe.plus(choice), step_ms
    return recipe, everything, tuple(tried)


def arms_of(
    recipes: dict[str, Recipe], bench: Bench, workload: Workload, work: Path
) -> dict[str, Arm]:
    """Return one arm for each distinct set of techniques: the same recipe is not measured twice."""
    arms: dict[str, Arm] = {}
    by_techniques: dict[frozenset[str], Arm] = {}
    for name, recipe in recipes.items():
        levers = frozenset(choice.label for choice in recipe.choices)
        if levers not in by_techniques:
            lab = open_lab(bench, workload, f"{work}/round {name}", cache=bench.work / CACHE)
            by_techniques[levers] = Arm(name=name, lab=lab, recipe=recipe)
        arms[name] = by_techniques[levers]
    return arms


def holds(results: Sequence[Result]) -> bool:
    """Return whether tune reached what the hand did, on every script."""
    return all(result.against_hand.ratio >= LEAST_OF_BY_HAND for result in results)


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return baseline, by hand and tuned for each script, and tuned against by hand."""
    table: list[tuple[str, ...]] = [("", "step", "ratio", "95 % interval", "n")]
    for result in results:
        arms = {id(a): a for a in (result.baseline, *result.by_hand, result.tuned)}
        for arm in arms.values():
            own: tuple[Any, ...] = ("1.00x", "", str(len(arm.profiles)))
            if arm is not result.baseline:
                own = cells(comparison(result.baseline, arm))
            levers = f": {arm.recipe.label}" if arm.recipe.choices else ""
            table.append((f"{result.name}, {arm.name}{levers}", format_ms(arm.median_ms), *own))
        if result.tuned is result.best_by_hand:
            table.append((f"{result.name}, tuned against by hand: the same recipe", *[""] * 4))
            continue
        table.append((f"{result.name}, tuned against by hand", "", *cells(result.against_hand)))
    return table


def _median_ms(lab: TrialRunner, recipe: Recipe) -> float | None:
    """Return the median step of a few runs.

    None where a technique cannot act or the script fails.
    """
    found = []
    for _ in range(HAND_RUNS):
        trial = lab.time(recipe, must_apply=True)
        if trial.outcome is not Outcome.OK or trial.profile is None or trial.not_applied:
            return None
        found.append(trial.profile.whole_step_ms)
    return statistics.median(found)
