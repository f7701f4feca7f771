"""The minutes that a tuning foretells for a whole training, those that it takes, what it learns.

Five seeds are trained to their end, unchanged and with the recipe, in turns: some forty minutes on
two cores after the tuning. What is done is kept in `whole_training_parts` next to the records, and
the same command goes on there; `--only 0,1` trains these seeds alone.
"""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError, trials_in
from flatout.records.ablation import Ablation, ablation_from_json
from flatout.records.errors import UserError
from flatout.records.statistics import student_quantile
from flatout.records.trial import Workload
from flatout.records.units import format_duration, format_share
from flatout.reporting.tuning.staged import training_s
from flatout.workflow.demo import make_job
from flatout.workflow.recipe_files import write_recipe
from flatout.workflow.tune import TuneOptions, tune

THEME = "whole_training"
MOST_OFF = 0.10
"""Share by which the foretold minutes may differ from those that the training took."""
SEEDS = 5
PLAIN, TUNED = "unchanged", "with the recipe"
ARMS = (PLAIN, TUNED)
METRICS = re.compile(r"validation loss ([0-9.]+|nan) accuracy ([0-9.]+)")
LEARNT = ("accuracy", "validation_loss")
CONFIDENCE = 0.95


def run(bench: Bench) -> Record:
    """Tune the demo's job, then train it to its end with each seed, without and with the recipe."""
    parts = bench.parts or bench.work / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    ablation = tuned(bench, parts)
    wanted = [(seed, arm) for seed in seeds_of(bench.only) for arm in ARMS[:: 1 - 2 * (seed % 2)]]
    missing = [(seed, arm) for seed, arm in wanted if not part_of(parts, seed, arm).is_file()]
    if missing:
        job = make_job(bench.work)
        write_recipe(ablation.recipe, bench.work / "recipe.toml")
    for seed, arm in missing:
        took = train(command_of(job, arm, seed, bench.work), job, bench.work / f"{arm}.log")
        bench.say(f"  seed {seed}, {arm}: took {format_duration(took['took_s'])}")
        row = {"arm": arm, "seed": seed, **took}
        part_of(parts, seed, arm).write_text(json.dumps(row), encoding="utf-8")
        bench.note({"trainings": trainings_in(parts)})
    trainings = trainings_in(parts)
    if len(trainings) == SEEDS * len(ARMS):
        shutil.rmtree(parts)  # all is in the record: the next run measures again
    return record_of(ablation, trainings, trials_in(bench.work))


def tuned(bench: Bench, parts: Path) -> Ablation:
    """Return the tuning of the demo's job: the one that trainings were made for, or a new one."""
    kept = parts / "ablation.json"
    if kept.is_file():
        bench.say(f"  going on with the tuning in {parts}")
        return ablation_from_json(json.loads(kept.read_text(encoding="utf-8")))
    for path in parts.glob("*.json"):
        path.unlink()  # trainings of a tuning that is gone
    options = TuneOptions(out=bench.work, budget_s=bench.budget_s, accepts_load=True)
    ablation = tune(make_job(bench.work), options, bench.tell)
    if not ablation.recipe.choices:
        raise TrialFailedError("the tuning kept nothing: there is no recipe to train with")
    if None in foretold(ablation).values():
        raise TrialFailedError("the tuning predicted no time for the whole training")
    kept.write_text(json.dumps(ablation.to_json()), encoding="utf-8")
    return ablation


def seeds_of(only: Sequence[str]) -> list[int]:
    """Return the seeds to train: those that were asked for, else all.

    >>> seeds_of(("3", "1")), seeds_of(())
    ([1, 3], [0, 1, 2, 3, 4])
    """
    known = [str(seed) for seed in range(SEEDS)]
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise UserError(f"no seed {', '.join(unknown)}; there are {', '.join(known)}")
    return sorted(map(int, only or known))


def foretold(ablation: Ablation) -> dict[str, float | None]:
    """Return the seconds of a whole training in the first and the last row of the staged table."""
    if len(ablation.stages) < 2:
        return dict.fromkeys(ARMS)
    rows = (ablation.stages[0], ablation.stages[-1])
    return {arm: training_s(ablation, row) for arm, row in zip(ARMS, rows, strict=True)}


def part_of(parts: Path, seed: int, arm: str) -> Path:
    """Return where one training's result is kept."""
    return parts / f"seed_{seed}_{'plain' if arm == PLAIN else 'tuned'}.json"


def trainings_in(parts: Path) -> list[dict[str, Any]]:
    """Return the trainings that are done, by seed."""
    paths = [part_of(parts, seed, arm) for seed in range(SEEDS) for arm in ARMS]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def command_of(job: Workload, arm: str, seed: int, work: Path) -> list[str]:
    """Return what trains the job to its end."""
    script = [job.target, *job.arguments, "--seed", str(seed)]
    if arm == PLAIN:
        return [sys.executable, *script]
    recipe = str(work / "recipe.toml")
    return [sys.executable, "-m", "flatout", "run", "--with", recipe, *script]


def train(command: Sequence[str], job: Workload, log: Path) -> dict[str, float]:
    """Run a training to its end; return its seconds and the last metrics that it printed."""
    started = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(command, cwd=job.folder, stdout=out, stderr=subprocess.STDOUT)
    took_s = time.monotonic() - started
    text = log.read_text(errors="replace")
    if done.returncode != 0:
        raise TrialFailedError(f"the training ended with {done.returncode}: {text[-500:]}")
    printed = METRICS.findall(text)
    if not printed:
        raise TrialFailedError(f"the training printed no accuracy: {text[-500:]}")
    loss, accuracy = map(float, printed[-1])
    return {"took_s": took_s, "validation_loss": loss, "accuracy": accuracy}


def of_arm(trainings: Sequence[Mapping[str, Any]], arm: str, what: str) -> list[float]:
    """Return what was measured of one arm, by seed."""
    return [row[what] for row in trainings if row["arm"] == arm]


def offs(ablation: Ablation, trainings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by what share the foretold time is too long for the middle training of each arm."""
    found = {}
    for arm, foretold_s in foretold(ablation).items():
        took = of_arm(trainings, arm, "took_s")
        if took and foretold_s is not None:
            found[arm] = foretold_s / statistics.median(took) - 1
    return found


def difference(
    trainings: Sequence[Mapping[str, Any]], what: str
) -> tuple[float, float, float] | None:
    """Return how much more there is with the recipe, and its interval, from pairs of one seed.

    None where fewer than two seeds were trained both ways.
    """
    by_seed = {(row["arm"], row["seed"]): row[what] for row in trainings}
    pairs = [
        by_seed[TUNED, seed] - by_seed[PLAIN, seed]
        for seed in range(SEEDS)
        if (TUNED, seed) in by_seed and (PLAIN, seed) in by_seed
    ]
    if len(pairs) < 2:
        return None
    mean = statistics.fmean(pairs)
    quantile = student_quantile((1 + CONFIDENCE) / 2, len(pairs) - 1)
    half = quantile * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return mean, mean - half, mean + half


def holds(ablation: Ablation, trainings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether both times were foretold well enough and no metric is shown to be worse."""
    found = offs(ablation, trainings)
    if len(trainings) < SEEDS * len(ARMS) or len(found) < len(ARMS):
        return False
    accuracy, loss = (difference(trainings, what) for what in LEARNT)
    is_worse = accuracy is None or loss is None or accuracy[2] < 0 or loss[1] > 0
    return not is_worse and all(abs(value) <= MOST_OFF for value in found.values())


def record_of(
    ablation: Ablation, trainings: Sequence[Mapping[str, Any]], trials: Sequence[Any]
) -> Record:
    """Judge what was trained."""
    words = [f"{arm} {value:+.1%}" for arm, value in offs(ablation, trainings).items()]
    pair = difference(trainings, "accuracy")
    if pair is not None:
        words.append(f"accuracy {pair[0]:+.3f} [{pair[1]:+.3f} to {pair[2]:+.3f}]")
    count = len({row["seed"] for row in trainings})
    return Record(
        theme=THEME,
        claim=f"the minutes of the staged table are within {format_share(MOST_OFF)} of those that "
        "the whole training takes, unchanged and with the recipe, and over "
        f"{SEEDS} seeds accuracy and validation loss are not shown to be worse",
        holds=holds(ablation, trainings),
        finding=", ".join([*words, f"{count} of {SEEDS} seeds"]),
        table=rows(ablation, trainings),
        raw={"trainings": list(trainings), "ablation": ablation.to_json(), "trials": list(trials)},
        repeat=f"python -m benchmarks.run {THEME} --budget-s 300",
        recipe=ablation.recipe,
        ablations=[ablation],
        notes=[
            "the time of a training is that of the whole process; of each seed both trainings have "
            "the same pictures held out and the same weights at first",
        ],
    )


def rows(ablation: Ablation, trainings: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row a training, then the middle of each arm and what differs."""
    told, found = foretold(ablation), offs(ablation, trainings)
    table: list[tuple[str, ...]] = [
        ("training", "took", "accuracy at the end", "validation loss at the end")
    ]
    for row in sorted(trainings, key=lambda row: (row["seed"], ARMS.index(row["arm"]))):
        name = f"seed {row['seed']}, {row['arm']}"
        learnt = [f"{row[what]:.3f}" for what in LEARNT]
        table.append((name, format_duration(row["took_s"]), *learnt))
    for arm, off in found.items():
        took = of_arm(trainings, arm, "took_s")
        words = f"foretold {format_duration(told[arm] or 0.0)}, {off:+.1%}"
        middles = [f"{statistics.median(of_arm(trainings, arm, what)):.3f}" for what in LEARNT]
        middle = format_duration(statistics.median(took))
        table.append((f"{arm}, middle of {len(took)}", f"{middle}; {words}", *middles))
    pairs = [difference(trainings, what) for what in LEARNT]
    if all(pairs):
        cells = [f"{pair[0]:+.3f} ({pair[1]:+.3f} to {pair[2]:+.3f})" for pair in pairs if pair]
        table.append(("with the recipe less unchanged, 95 % interval", "", *cells))
    return table
