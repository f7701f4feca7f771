"""The minutes that a tuning foretells for a whole training, and those that it then takes."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError, trials_in
from flatout.records.trial import Workload
from flatout.records.units import format_duration, format_share
from flatout.reporting.tuning.staged import training_s
from flatout.workflow.demo import demo, make_job
from flatout.workflow.recipe_files import write_recipe

THEME = "whole_training"
MOST_OFF = 0.10
"""Share by which the foretold minutes may differ from those that the training took."""
METRIC = re.compile(r"accuracy ([0-9.]+)")


def run(bench: Bench) -> Record:
    """Tune the demo's job, then train it to its end, as it is and with the recipe."""
    ablation = demo(bench.work, bench.budget_s, bench.tell)
    if not ablation.recipe.choices:
        raise TrialFailedError("the tuning kept nothing: there is no recipe to train with")
    job, recipe = make_job(bench.work), bench.work / "recipe.toml"
    write_recipe(ablation.recipe, recipe)
    flatout = [sys.executable, "-m", "flatout", "run", "--with", str(recipe)]
    script = [job.target, *job.arguments]
    found = []
    for name, stage, command in (
        ("unchanged", ablation.stages[0], [sys.executable, *script]),
        ("with the recipe", ablation.stages[-1], [*flatout, *script]),
    ):
        foretold_s = training_s(ablation, stage)
        if foretold_s is None:
            raise TrialFailedError("the tuning foretold no time for the whole training")
        bench.say(f"  {name}: foretold {format_duration(foretold_s)}")
        took_s, metric = train(command, job, bench.work / f"{name}.log")
        bench.say(f"  {name}: took {format_duration(took_s)}")
        found.append({"name": name, "foretold_s": foretold_s, "took_s": took_s, "accuracy": metric})
        bench.note({"trainings": found})
    return Record(
        theme=THEME,
        claim=f"the minutes of the staged table are within {format_share(MOST_OFF)} of those that "
        "the whole training takes, unchanged and with the recipe",
        holds=holds(found),
        finding=", ".join(f"{row['name']} {off(row):+.1%}" for row in found),
        table=rows(found),
        raw={"trainings": found, "ablation": ablation.to_json(), "trials": trials_in(bench.work)},
        repeat=f"python -m benchmarks.run {THEME} --budget-s 300",
        recipe=ablation.recipe,
        ablations=[ablation],
        notes=["one training each; the time is that of the whole process"],
    )


def train(command: Sequence[str], job: Workload, log: Path) -> tuple[float, float | None]:
    """Run a training to its end; return its seconds and the last accuracy that it printed."""
    started = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(command, cwd=job.folder, stdout=out, stderr=subprocess.STDOUT)
    took_s = time.monotonic() - started
    text = log.read_text(errors="replace")
    if done.returncode != 0:
        raise TrialFailedError(f"the training ended with {done.returncode}: {text[-500:]}")
    printed = METRIC.findall(text)
    return took_s, float(printed[-1]) if printed else None


def off(row: Mapping[str, Any]) -> float:
    """Return by what share of the time that it took the foretold one is too long."""
    return row["foretold_s"] / row["took_s"] - 1


def holds(found: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether both times were foretold well enough."""
    return len(found) == 2 and all(abs(off(row)) <= MOST_OFF for row in found)


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row a training."""
    return [
        ("training", "foretold", "took", "off by", "accuracy at the end"),
        *(
            (
                row["name"],
                format_duration(row["foretold_s"]),
                format_duration(row["took_s"]),
                f"{off(row):+.1%}",
                "" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            )
            for row in found
        ),
    ]
