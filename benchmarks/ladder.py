"""Naive scripts tuned by `flatout tune` alone, and under the defaults of the frameworks."""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bench import MOST_SAID, Bench, brief, trials_in
from benchmarks.programs import ran
from flatout.records import catalogue
from flatout.records.ablation import Ablation
from flatout.records.live import Progress
from flatout.records.machine import Machine
from flatout.records.recipe import Recipe
from flatout.records.trial import Trial, Workload
from flatout.records.units import format_rate
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.tune import BaselineFailedError, TuneOptions, tune

SCRIPTS = Path(__file__).parent / "scripts"
MARGIN_S = 15.0
"""What a tuning gets less than its stage: it ends on its own rather than by the stage's alarm."""
FRAMEWORKS = ("transformers", "lightning")
ON_DEVICE = "--on-device"
"""Made-up images are on the device, as in published rates: computing is what is compared. The
frameworks' own loaders cannot do that, so under them the images come from the host."""
PEER_STEPS, SMOKE_PEER_STEPS = 25, 8
"""The first of them are not counted."""
PEER_SPARE_S = 5.0
"""Left at the end of the stage, so that its alarm does not take the rows along."""
PEER_S = 75.0
"""One framework with one script, at most; half a minute is what it should take."""
LEAST_PEER_S = 10.0
"""With less time left none is begun."""
SMOKE_BUDGET_S = 20.0
"""Of a tuning that only shows that it works: what it began is still ended properly."""
OFF_TOPIC = ("data",)
"""Families of the techniques that are left out: the data are made up and are in memory, mostly on
the
device. The time goes to the techniques on the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One naive script with its sizes."""

    name: str
    script: str
    arguments: tuple[str, ...]
    unit: str
    part: str
    """The set that it belongs to."""
    most_s: float
    """Time for the tuning: enough to prove what helps, from what trials should take.
    `tests/benchmarks/test_gpu_time.py` plays that through."""
    off_topic: tuple[str, ...] = OFF_TOPIC
    """Families of the techniques that are not tried."""
    goal_per_s: float | None = None
    """On one of the GPUs that goals are for; None where there is none."""


GOALS_ARE_FOR = ("H100", "H200")
"""Parts of the names of GPUs. Both have the same units and the same peak in bf16, so that the
goals of the project's plan are the same; llm.c reports 468k tokens/s of GPT-2 124M on an H100."""
RUNGS = (
    Rung(
        name="gpt2",
        script="naive_gpt2",
        arguments=("--batch-size", "16", "--context", "1024"),
        unit="tokens",
        part="compute",
        most_s=500,
        goal_per_s=470_000,
    ),
    Rung(
        name="resnet50",
        script="naive_images",
        arguments=("--model", "resnet50", "--batch-size", "256", ON_DEVICE),
        unit="images",
        part="resnet50",
        most_s=500,
        goal_per_s=3_500,
    ),
    Rung(
        name="vit",
        script="naive_images",
        arguments=("--model", "vit", "--batch-size", "128", ON_DEVICE),
        unit="images",
        part="vit",
        most_s=500,
        goal_per_s=3_000,
    ),
    Rung(
        name="cifar",
        script="naive_images",
        arguments=(
            *("--model", "resnet18", "--side", "32", "--classes", "10"),
            *("--batch-size", "512", "--batches", "40", ON_DEVICE),
        ),
        unit="images",
        part="small",
        most_s=160,
        off_topic=(*OFF_TOPIC, "compile"),  # for which there is no time alongside the adapters
    ),
    Rung(
        name="lora",
        script="naive_lora",
        arguments=("--batch-size", "2", "--context", "1024"),
        unit="tokens",
        part="small",
        most_s=340,
    ),
)
"""GPT-2 124M, ResNet-50, ViT-B/16, ResNet-18 on images as small as CIFAR-10's, adapters on a
decoder of a billion parameters."""

SMALL_GPT = (
    *("--batch-size", "2", "--context", "16", "--vocabulary", "101"),
    *("--layers", "2", "--width", "32", "--heads", "2"),
)
SMOKE = {
    "gpt2": SMALL_GPT,
    "resnet50": (
        *("--model", "resnet50", "--side", "32", "--batch-size", "2", "--classes", "10"),
        ON_DEVICE,
    ),
    "vit": (
        *("--model", "vit", "--side", "32", "--batch-size", "2", "--classes", "10"),
        *("--width", "64", "--layers", "2"),
    ),
    "cifar": ("--model", "resnet18", "--side", "16", "--batch-size", "2", "--classes", "10"),
    "lora": (
        *("--batch-size", "2", "--context", "16", "--vocabulary", "101"),
        *("--layers", "2", "--width", "96", "--heads", "2", "--rank", "4"),
    ),
}
"""Arguments that make every script run on a CPU in seconds: nothing is to be learnt from them."""


def workload(bench: Bench, rung: Rung, *, smoke: bool) -> Workload:
    """Return the naive script in a folder of its own."""
    arguments = arguments_of(rung, smoke=smoke)
    return bench.workload(SCRIPTS / f"{rung.script}.py", *arguments, name=f"work/{rung.name}")


def tuned(seconds: float, bench: Bench, rung: Rung, *, smoke: bool = False) -> dict[str, Any]:
    """Tune one script; what it reached is alongside what it began with."""
    out = bench.work / "tune" / f"ladder-{rung.name}"
    budget_s = SMOKE_BUDGET_S if smoke else max(seconds - MARGIN_S, seconds / 2)
    options = TuneOptions(
        out=out,
        budget_s=budget_s,
        skip=left_out(rung),
        accepts_load=True,
        confirm_pairs=2,
        runner=run_on_device,
    )
    ablation = tune_noted(workload(bench, rung, smoke=smoke), options, bench)
    has_goal = any(name in bench.machine.device.name for name in GOALS_ARE_FOR)
    aimed = rung if has_goal else replace(rung, goal_per_s=None)
    return reached(ablation, aimed, per_sample(arguments_of(rung, smoke=smoke))) | {
        "ablation": ablation.to_json(),
        "trials": trials_in(out),
    }


class BaselineTracebackError(Exception):
    """The unchanged script failed: its own last words stand below the first line."""


class WrongDeviceError(Exception):
    """A script trained alongside the device that everything here is about."""


def tune_noted(workload: Workload, options: TuneOptions, bench: Bench) -> Ablation:
    """Tune, and note all trials so far again and again: a stage that is killed leaves those."""
    failed: list[dict[str, Any]] = []
    """A baseline that gave no measurement: the tuning leaves no journal of it."""

    def tell(progress: Progress) -> None:
        bench.tell(progress)
        note()

    def note() -> None:
        bench.note({"trials": trials_in(options.out) or failed})

    try:
        return tune(workload, options, tell, bench.machine)
    except BaselineFailedError as error:
        failed.append(brief(error.trial))
        last = error.trial.traceback[-MOST_SAID:]
        raise BaselineTracebackError(f"{error}\n{last}") from None
    finally:
        note()


def run_on_device(
    workload: Workload, recipe: Recipe, machine: Machine, options: TrialOptions
) -> Trial:
    """Run a trial as ever; where there is a CUDA device, it has to have trained on one."""
    trial = run_trial(workload, recipe, machine, options)
    check_device(trial, machine)
    return trial


def check_device(trial: Trial, machine: Machine) -> None:
    """Make sure that what was measured is the device."""
    if trial.profile is None or machine.device.kind != "cuda":
        return
    if trial.profile.device_kind != "cuda":
        raise WrongDeviceError(
            f"the script trained on {trial.profile.device_kind} ({trial.profile.device_name}), "
            f"not on {machine.device.name}, with {trial.recipe.label or 'no lever'}\n"
            f"{trial.profile.step_ms.median:.0f} ms a step"
        )


def left_out(rung: Rung) -> tuple[str, ...]:
    """Return the techniques that are not tried."""
    kinds = {name: catalogue.technique_class(name) for name in catalogue.names()}
    return tuple(name for name, kind in kinds.items() if kind.family in rung.off_topic)


def arguments_of(rung: Rung, *, smoke: bool) -> tuple[str, ...]:
    """Return what the script is called with."""
    return SMOKE[rung.name] if smoke else rung.arguments


def per_sample(arguments: Sequence[str]) -> int:
    """Return how many tokens a sample of the loader has; an image counts as one.

    >>> per_sample(("--batch-size", "16", "--context", "1024")), per_sample(("--side", "32"))
    (1024, 1)
    """
    words = dict(pairwise(arguments))
    return int(words.get("--context", 1))


def reached(ablation: Ablation, rung: Rung, per_sample: int) -> dict[str, Any]:
    """Return the rates before and after in the rung's unit."""
    final = ablation.final or ablation.baseline
    pair = ablation.confirmation if ablation.recipe.choices else None
    is_proven = pair is not None and ablation.final is not None
    rates = {
        name: profile.samples_per_s * per_sample
        for name, profile in (("naive_per_s", ablation.baseline), ("tuned_per_s", final))
    }
    return {
        **rates,
        "unit": rung.unit,
        "goal_per_s": rung.goal_per_s,
        "recipe": ablation.recipe.label,
        "ratio": pair.ratio if pair else 1.0,
        "is_proven": is_proven,
        "stopped": ablation.stopped,
    }


def is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether a recipe was found and confirmed, and the goal reached, where there is one."""
    return bool(result["is_proven"]) and result["tuned_per_s"] >= (result["goal_per_s"] or 0.0)


def rung_words(result: Mapping[str, Any]) -> str:
    """Return one rung as a line."""
    naive, best = (format_rate(result[name]) for name in ("naive_per_s", "tuned_per_s"))
    goal = f", goal {format_rate(result['goal_per_s'])}" if result["goal_per_s"] else ""
    recipe = result["recipe"] if result["is_proven"] else "nothing proven"
    return f"{naive} -> {best} {result['unit']}/s{goal} ({recipe})"


def peers(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Train the naive scripts under the frameworks' defaults, as far as those are installed."""
    deadline = time.monotonic() + seconds - PEER_SPARE_S
    rows: list[dict[str, Any]] = []
    for rung in RUNGS:
        for framework in FRAMEWORKS:
            row: dict[str, Any] = {"script": rung.name, "framework": framework}
            left_s = deadline - time.monotonic()
            if importlib.util.find_spec(framework) is None:
                row["why"] = "not installed"
            elif left_s < LEAST_PEER_S:
                row["why"] = "no time was left"
            else:
                most_s = left_s if smoke else min(left_s, PEER_S)
                row |= _peer(framework, rung, most_s, smoke=smoke)
            rows.append(row)
            bench.say(f"  {peer_words([row])}")
            bench.note({"rows": rows})
    return {"rows": rows}


def _peer(framework: str, rung: Rung, seconds: float, *, smoke: bool) -> dict[str, Any]:
    arguments = arguments_of(rung, smoke=smoke)
    command = [sys.executable, str(SCRIPTS / "framework_defaults.py"), "--framework", framework]
    own = [word for word in arguments if word != ON_DEVICE]
    steps = SMOKE_PEER_STEPS if smoke else PEER_STEPS
    command += ["--script", rung.script, "--", *own, "--steps", str(steps)]
    try:
        done = ran(command, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        # Bytes, whatever was asked for.
        said = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
        return {"why": f"not done within {seconds:.0f} s", "stderr": said[-MOST_SAID:]}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"why": last[0][:300], "stderr": done.stderr[-MOST_SAID:]}
    seen = json.loads(done.stdout.splitlines()[-1])
    step_s = statistics.median(seen["steps_ms"]) / 1e3
    per_s = seen["batch_size"] * per_sample(arguments) / step_s
    return {"per_s": per_s, "unit": rung.unit, "steps_ms": seen["steps_ms"]}


def all_ran(result: Mapping[str, Any]) -> bool:
    """Return whether every script trained under every framework."""
    rows = result["rows"]
    return len(rows) == len(RUNGS) * len(FRAMEWORKS) and all("per_s" in row for row in rows)


def peer_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the frameworks reached as a line."""
    return "; ".join(
        f"{row['script']} {row['framework']} "
        + (f"{format_rate(row['per_s'])} {row['unit']}/s" if "per_s" in row else row["why"])
        for row in rows
    )
