"""Loader settings: what the search finds under real load, against the rules people go by.

Each scenario is tuned with the techniques of the settings alone. Then the found recipe and the folk
rules run side by side, every arm once a round, each in a process of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bench import Arm, Bench, Record, cells, comparison, interleave, open_lab
from benchmarks.suites import ceilings
from flatout.records.ablation import Ablation, Comparison
from flatout.records.machine import Machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.records.units import format_ms
from flatout.workflow.demo import make_job
from flatout.workflow.tune import TuneOptions, tune

THEME = "loader_settings"
SETTINGS = ("loader_workers", "persistent_workers", "pinned_memory", "worker_threads")
"""The techniques that only set what `DataLoader` is asked for."""
SCENARIOS = {
    "photographs": "decoding and augmenting, CPU training",
    "sleep": "each sample waits for storage",
    "decode": "samples are unpacked",
}
ROUNDS = 5
LEAST_RATIO = 0.98
"""The search may lose this much to a rule that happens to be right: trials have noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One scenario: what was found, and how each rule compares."""

    scenario: str
    found: Recipe
    step_ms: float
    rules: Mapping[str, Comparison]
    """Of each rule: how many times faster the found recipe is than it."""
    rule_ms: Mapping[str, float]


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Tune the settings of each scenario and compare with the rules."""
    settled, raw = [], {}
    for scenario in SCENARIOS:
        one, times = settle(bench, scenario, rounds)
        settled.append(one)
        raw[scenario] = times
    return record_of(settled, raw)


def record_of(settled: Sequence[Settled], raw: Mapping[str, object]) -> Record:
    """Return the record of all scenarios."""
    return Record(
        theme=THEME,
        claim=(
            f"no folk rule is shown to be more than {1 - LEAST_RATIO:.0%} faster than the searched "
            "settings"
        ),
        holds=holds(settled),
        finding=", ".join(f"{one.scenario}: {_worst(one)}" for one in settled),
        table=[
            ("scenario", "settings", "step", "found is", "95 % interval", "n"),
            *(row for one in settled for row in rows(one)),
        ],
        raw=raw,
    )


def folk_rules(machine: Machine) -> dict[str, int]:
    """Return the numbers of workers that people go by, by the rule's name.

    Four a GPU, and two to four a core, as forum answers have it; a CPU training counts as one GPU.
    """
    devices = max(1, len(machine.devices))
    cores = machine.usable_cores
    return {
        "no workers": 0,
        "4 per GPU": 4 * devices,
        "2 per core": 2 * cores,
        "4 per core": 4 * cores,
    }


def settle(bench: Bench, scenario: str, rounds: int) -> tuple[Settled, dict[str, object]]:
    """Tune one scenario, then run the found recipe and the rules in turns."""
    work = _workload(bench, scenario)
    ablation = tune(
        work,
        TuneOptions(
            out=bench.work / f"tune-{scenario}",
            budget_s=bench.budget_s,
            only=SETTINGS,
        ),
        bench.tell,
    )
    lab = open_lab(bench, work, scenario)
    loaders = _addresses(ablation)
    ours = Arm(name="found", lab=lab, recipe=_placed(ablation.recipe, loaders))
    rules = {
        name: Arm(name=name, lab=lab, recipe=_rule(workers, loaders))
        for name, workers in folk_rules(bench.machine).items()
    }
    interleave([ours, *rules.values()], rounds)
    one = Settled(
        scenario=scenario,
        found=ablation.recipe,
        step_ms=ours.median_ms,
        rules={name: comparison(arm, ours) for name, arm in rules.items()},
        rule_ms={name: arm.median_ms for name, arm in rules.items()},
    )
    times = {arm.name: arm.times_s for arm in (ours, *rules.values())}
    return one, {"times_s": times, "ablation": ablation.to_json()}


def holds(settled: Sequence[Settled]) -> bool:
    """Return whether no rule beat the search: not even the upper bound of a ratio says otherwise.

    By bounds, not by ratios: where the search keeps what a rule says, the two are equal, and a
    dozen ratios of equal things are not all above one.
    """
    pairs = [pair for one in settled for pair in one.rules.values()]
    return bool(pairs) and all(pair.interval[1] >= LEAST_RATIO for pair in pairs)


def rows(one: Settled) -> list[tuple[str, ...]]:
    """Return the found settings and each rule."""
    name = f"{one.scenario}: {SCENARIOS[one.scenario]}"
    found = (name, f"found: {one.found.label}", format_ms(one.step_ms), "", "", "")
    return [
        found,
        *(
            ("", rule, format_ms(one.rule_ms[rule]), *cells(pair))
            for rule, pair in one.rules.items()
        ),
    ]


def _worst(one: Settled) -> str:
    rule, pair = min(one.rules.items(), key=lambda item: item[1].ratio)
    return f"{cells(pair)[0]} of {rule}"


def _rule(workers: int, loaders: tuple[str, ...]) -> Recipe:
    """Return the recipe of a rule; the scripts themselves have no workers."""
    if not workers:
        return Recipe(training_loaders=loaders)
    choice = Choice(technique="loader_workers", settings={"num_workers": workers})
    return Recipe(choices=(choice,), training_loaders=loaders)


def _placed(recipe: Recipe, loaders: tuple[str, ...]) -> Recipe:
    return Recipe(choices=recipe.choices, training_loaders=loaders)


def _addresses(ablation: Ablation) -> tuple[str, ...]:
    return tuple(loader.address for loader in ablation.baseline.training_loaders)


def _workload(bench: Bench, scenario: str) -> Workload:
    if scenario == "photographs":
        return make_job(bench.work)
    return bench.workload(ceilings.SCRIPT, scenario, name="work")
