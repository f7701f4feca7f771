"""The search: scripts of twelve kinds, each tuned in five minutes, next to the best known by hand.

    python -m benchmarks.run search --only gpt,cnn_files

Machine time is scarce: each workload leaves its part of the record, and the record is made of all
parts that were measured on this device, so that a later run adds those that are missing.
"""

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import tomllib

from benchmarks.bench import (
    Bench,
    Record,
    TrialFailedError,
    cells,
    make_photographs,
    open_lab,
)
from benchmarks.suites.ladder import CACHE
from flatout.records.ablation import Ablation, Comparison, Row, ablation_from_json
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Decision, Rule
from flatout.records.trial import Outcome, Workload
from flatout.records.units import format_ratio, format_share
from flatout.tuning.experiments import MachineBusyError
from flatout.tuning.pairs import play
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.turns import can_take_turns
from flatout.workflow.demo import scenarios
from flatout.workflow.tune import TuneOptions, tune

THEME = "search"
SCRIPTS = Path(__file__).parent.parent / "scripts" / "search"
PHOTOGRAPHS = Path(__file__).parent.parent / "scripts" / "naive_photographs.py"
BY_HAND = Path(__file__).parent.parent / "hand_recipes.toml"
BUDGET_S = 300.0
SMOKE_S = 30.0
"""With a smaller budget the sizes are so small that only the suite itself is tried out."""
PAIRS, SMOKE_PAIRS = 4, 1
"""Pairs of flatout's recipe with the best by hand, and at most of one screened effect."""
MOST_EFFECTS = 4
"""Screened techniques of a workload whose effect is measured again in fresh pairs."""
SLOWEST = 1.3
"""Times the fastest step from which a recipe of the list is not raced."""
MIDDLE, WORST = 0.97, 0.93
"""What flatout's recipes should reach of the best known, in the middle and in the worst."""
TYPICAL_ERROR = 0.03
WRONG_SIGNS = 0.05
FALSE_GAINS = 0.01
SAME = 1.02
"""Below this a ratio has no sign."""
WORKLOADS = (
    *("cnn_files", "cnn_arrays", "gpt", "encoder_texts", "tabular", "rnn"),
    *("gan", "diffusion", "lora", "hf_trainer", "lightning", "accelerate"),
)


def run(bench: Bench) -> Record:
    """Measure the chosen workloads, and make the record of all parts."""
    names, parts = bench.chosen(WORKLOADS, "workload")
    device = bench.machine.device.name
    for name in names:
        try:
            part = measured(name, bench)
        except (MachineBusyError, TrialFailedError, UserError) as error:
            bench.say(f"{name}: nothing measured: {error or 'other work keeps the machine busy'}")
            continue
        (parts / f"{name}.json").write_text(json.dumps(part, default=str), encoding="utf-8")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(parts.glob("*.json"))]
    found = [part for part in found if part["device"] == device]
    if not found:
        raise TrialFailedError("no workload gave a result")
    return record_of(found)


def measured(name: str, bench: Bench) -> dict[str, Any]:
    """Tune one workload, race what came out against the list, and look at the screen again."""
    is_smoke = bench.budget_s < SMOKE_S
    work = bench.work / name
    work.mkdir(parents=True, exist_ok=True)
    workload = workload_of(name, work, is_smoke=is_smoke)
    options = TuneOptions(
        out=work / "tune", budget_s=min(bench.budget_s, BUDGET_S), accepts_load=is_smoke
    )
    bench.say(f"{name}: tune")
    ablation = tune(workload, options, bench.tell)
    own = replace(ablation.recipe, about={})
    lab = open_lab(bench, workload, f"{name}/hand", cache=bench.work / CACHE)
    lab.history.accepts_load = is_smoke
    bench.say(f"{name}: {own.label}; by hand")
    others = contenders(name, lab)
    best, raced = race(lab, own, others, SMOKE_PAIRS if is_smoke else PAIRS)
    decision = lab.drive(play(lab.history, Recipe(), Recipe(), may_go_on=lambda _: not is_smoke))
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": bench.machine.device.name,
        "ablation": ablation.to_json(),
        "best": f"{best}: {others[best].label}",
        "against_best": raced,
        "against_baseline": plain(ablation.confirmation) if ablation.confirmation else None,
        "effects": [] if is_smoke else effects(ablation, lab, bench),
        "aa": decision.decision.value,
    }


def workload_of(name: str, work: Path, *, is_smoke: bool) -> Workload:
    """Return a workload, its data made where it reads files."""
    arguments: tuple[str, ...] = ("tiny",) if is_smoke else ()
    target = {
        "cnn_files": PHOTOGRAPHS,
        "gpt": scenarios() / "naive_attention" / "train.py",
        "lightning": SCRIPTS / "lightning_module.py",
        "accelerate": SCRIPTS / "accelerate_loop.py",
    }.get(name, SCRIPTS / f"{name}.py")
    if name == "gpt":
        small = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32")
        arguments = (*small, "--limit", "100000") if is_smoke else ()
    if name == "cnn_files":
        folder = make_photographs(work / "photographs", 24 if is_smoke else 400)
        arguments = ("--data", str(folder), *(("--side", "32") if is_smoke else ()))
    return Workload(target=str(target), arguments=arguments, folder=work, python=sys.executable)


def contenders(name: str, lab: TrialRunner) -> dict[str, Recipe]:
    """Return the unchanged script and what acts of the list, without what is far from the fastest.

    From here on pairs take turns where the script can.
    """
    listed = tomllib.loads(BY_HAND.read_text(encoding="utf-8"))[name]
    steps_ms: dict[str, tuple[float, Recipe]] = {}
    for number, labels in enumerate([[], *listed]):
        recipe = Recipe(choices=tuple(map(Choice.from_label, labels)))
        trial = lab.time(recipe, must_apply=True)
        if trial.outcome is Outcome.OK and trial.profile and not trial.not_applied:
            key = f"by hand {number}" if number else "unchanged"
            steps_ms[key] = trial.profile.whole_step_ms, recipe
        if not number:
            lab.history.takes_turns = can_take_turns(trial, lab.machine)
    fastest = min((step_ms for step_ms, _ in steps_ms.values()), default=0.0)
    return {key: recipe for key, (ms, recipe) in steps_ms.items() if ms <= SLOWEST * fastest}


def race(
    lab: TrialRunner, own: Recipe, others: Mapping[str, Recipe], pairs: int
) -> tuple[str, dict[str, Any] | None]:
    """Return the best of the other recipes, and how much faster flatout's is than that one.

    None where the two are the same. A pair each finds the best; it is then raced in fresh pairs,
    for the one that looks best in a few is so partly by luck.
    """
    labels = frozenset(choice.label for choice in own.choices)
    same = [
        key
        for key, recipe in others.items()
        if frozenset(choice.label for choice in recipe.choices) == labels
    ]
    ratios = {key: ratio(lab, others[key], own, 1).ratio for key in others if key not in same}
    best = min(ratios, key=lambda key: ratios[key], default=same[0] if same else "")
    if same and ratios.get(best, 1.0) >= 1:
        return same[0], None
    return best, plain(ratio(lab, others[best], own, pairs))


def ratio(lab: TrialRunner, base: Recipe, candidate: Recipe, pairs: int) -> Comparison:
    """Return how much faster one recipe is than the other, from so many fresh pairs."""
    rule = Rule(at_least=pairs, max_pairs=pairs)
    asked = play(lab.history, base, candidate, may_go_on=lambda _: True, rule=rule)
    found = lab.drive(asked).comparison
    if found is None:
        raise TrialFailedError(f"no pair of {base.label} and {candidate.label}")
    return found


def effects(ablation: Ablation, lab: TrialRunner, bench: Bench) -> list[dict[str, Any]]:
    """Return what the screen says of some techniques, and what fresh pairs say of the same."""
    rows = [row for row in ablation.rows if row.comparison and row.comparison.source == "screen"]
    found = []
    for row in rows[:MOST_EFFECTS]:
        base, recipe = sides_of(row, ablation)
        bench.say(f"  {row.choice.label} in fresh pairs")
        rule = Rule(max_pairs=PAIRS)
        match = lab.drive(play(lab.history, base, recipe, may_go_on=lambda _: True, rule=rule))
        if match.comparison is not None and row.comparison is not None:
            found.append(
                {
                    "technique": row.choice.label,
                    "screen": plain(row.comparison),
                    "pairs": plain(match.comparison),
                }
            )
    return found


def sides_of(row: Row, ablation: Ablation) -> tuple[Recipe, Recipe]:
    """Return the recipes without and with a technique, on top of what it was screened with."""
    others = [x.choice for x in ablation.rows if x.choice.technique in row.on_top_of]
    base = Recipe()
    for choice in others:
        base = base.plus(choice)
    return base, base.plus(row.choice)


def plain(pair: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    return {"ratio": pair.ratio, "interval": list(pair.interval), "n": pair.n}


def judged_per_minute(ablation: Ablation) -> float:
    """Return the techniques with a measured ratio, for each minute that the tuning took."""
    judged = {row.choice.technique for row in ablation.rows if row.comparison}
    return len(judged) / max(ablation.cost_s / 60, 1e-9)


def record_of(parts: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record of all parts."""
    ablations = [ablation_from_json(part["ablation"]) for part in parts]
    of_best = {x["name"]: x["against_best"]["ratio"] if x["against_best"] else 1.0 for x in parts}
    cases = [case for part in parts for case in part["effects"]]
    errors = [abs(case["screen"]["ratio"] / case["pairs"]["ratio"] - 1) for case in cases]
    wrong = sum(has_wrong_sign(case) for case in cases)
    false_gains = sum(part["aa"] == Decision.KEPT.value for part in parts)
    is_near = median(of_best.values()) >= MIDDLE and min(of_best.values()) >= WORST
    is_right = bool(errors) and median(errors) <= TYPICAL_ERROR
    is_signed = wrong <= WRONG_SIGNS * len(cases)
    finding = (
        f"{len(parts)} of {len(WORKLOADS)} workloads: {format_share(median(of_best.values()))} of "
        f"the best in the middle, {format_share(min(of_best.values()))} in the worst; "
    )
    finding += (
        f"screened effects off by {format_share(median(errors))} in the middle of {len(cases)}, "
        f"{wrong} of wrong sign; "
        if errors
        else "no screened effect was looked at again; "
    )
    return Record(
        theme=THEME,
        claim=(
            f"within five minutes flatout's recipe reaches {MIDDLE:.0%} of the best known by hand "
            f"in the middle of {len(WORKLOADS)} workloads and {WORST:.0%} in the worst"
        ),
        holds=len(parts) == len(WORKLOADS)
        and is_near
        and is_right
        and is_signed
        and false_gains <= FALSE_GAINS * len(parts),
        finding=finding + f"{false_gains} false gains in {len(parts)} A/A",
        table=rows(parts, ablations),
        raw={"parts": list(parts)},
        ablations=ablations,
    )


def has_wrong_sign(case: Mapping[str, Any]) -> bool:
    """Return whether screen and pairs disagree on whether a technique makes it faster.

    >>> has_wrong_sign({"screen": {"ratio": 1.1}, "pairs": {"ratio": 0.9}})
    True
    >>> has_wrong_sign({"screen": {"ratio": 1.01}, "pairs": {"ratio": 0.9}})
    False
    """
    ratios = [case[side]["ratio"] for side in ("screen", "pairs")]
    return min(ratios) < 1 / SAME and max(ratios) > SAME


def rows(
    parts: Sequence[Mapping[str, Any]], ablations: Sequence[Ablation]
) -> list[tuple[str, ...]]:
    """Return one row for each workload."""
    table: list[tuple[str, ...]] = [
        ("workload", "flatout", "of the best", "95 % interval", "n", "a minute", "best known")
    ]
    for part, ablation in zip(parts, ablations, strict=True):
        pair = part["against_best"]
        own = ("the same recipe", "", "")
        if pair:
            own = cells(
                Comparison(ratio=pair["ratio"], interval=tuple(pair["interval"]), n=pair["n"])
            )
        gained = part["against_baseline"]
        shown = format_ratio(gained["ratio"]) if gained else "1.00x"
        pace = f"{judged_per_minute(ablation):.1f}"
        table.append((part["name"], shown, *own, pace, part["best"]))
    return table
