"""Every technique on its own: what it does to the step and to the memory of a script, kept or not.

No claim about a technique is made here beyond that its trial works; the pages of the techniques
take their numbers from this record. What each technique's `predict` says of the unchanged script
is alongside what was measured. All arms of a script run once per round, each in a process of
its own; whoever cannot act on this machine is named with the reason.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import Arm, Bench, Record, cells, comparison, open_lab, trials_in
from benchmarks.foretold import Foretold, foresee, foretold, summary, table
from flatout.records import catalogue
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.records.units import format_ms, format_ratio
from flatout.tuning.ranking import Candidate
from flatout.workflow.demo import make_job, scenarios

THEME = "levers"
ROUNDS = 3
IMAGES = Path(__file__).parent.parent / "scripts" / "naive_images.py"
GPT = scenarios() / "naive_attention" / "train.py"
RESNET = (
    *("--model", "resnet18", "--side", "32", "--classes", "10", "--batch-size", "16"),
    *("--batches", "64"),  # an epoch of 32 steps with the batch doubled
)
Techniques = Mapping[str, Mapping[str, Any]]
"""Technique to settings."""
STORE = "photographs.packed"
"""Alongside the photographs, in the folder where the job runs."""
ON_GPT: Techniques = {
    "bf16_autocast": {},
    "sdpa_attention": {},
    "torch_compile": {},
    "regional_compile": {},
    "foreach_optimizer": {},
    "fused_optimizer": {},
    "scheduled_gc": {},
    "activation_checkpointing": {},
    "optimizer_in_backward": {},
    "adafactor": {},
    "eight_bit_optimizer": {},
}
ON_RESNET: Techniques = {
    "channels_last": {},
    "cpu_allocator": {"library": "glibc"},
    "cpu_threads": {"threads": 1},
    "batch_size": {"samples": 32, "instead_of": 16},
}
ON_PHOTOGRAPHS: Techniques = {
    "loader_workers": {"num_workers": 8},
    "device_preprocess": {},
    "fast_decode": {},
    "fast_resize": {},
    "region_decode": {},
    "packed_data": {"path": STORE},
}


@dataclass(slots=True, kw_only=True)
class Subject:
    """One script and the techniques that are tried on it."""

    name: str
    workload: Workload
    levers: Techniques
    arms: list[Arm] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why a technique could not act."""
    candidates: dict[str, Candidate] = field(default_factory=dict)
    """What each technique predicts of the unchanged script."""


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Run every arm of every script, round by round."""
    found = [measured(subject, bench, rounds) for subject in subjects(bench)]
    return record_of(THEME, found, trials_in(bench.work))


def subjects(bench: Bench) -> list[Subject]:
    """Return the scripts, each with the techniques that have something to do there."""
    job = make_job(bench.work)
    pack(job)
    return [
        Subject(name="GPT", workload=bench.workload(GPT), levers=ON_GPT),
        Subject(name="ResNet-18", workload=bench.workload(IMAGES, *RESNET), levers=ON_RESNET),
        Subject(name="photographs", workload=job, levers=ON_PHOTOGRAPHS),
    ]


def pack(job: Workload) -> None:
    """Pack the job's photographs as pixels, as a user would, alongside them."""
    words = ["pack", "photographs", STORE, "--encode", "raw"]
    subprocess.run(
        [sys.executable, "-m", "flatout", *words], cwd=job.folder, check=True, capture_output=True
    )


def measured(subject: Subject, bench: Bench, rounds: int) -> Subject:
    """Run the script as it is and under each technique, in turns."""
    lab = open_lab(bench, subject.workload, subject.name)
    recipes = {name: Recipe(choices=(choice(name, of),)) for name, of in subject.levers.items()}
    subject.arms = [
        Arm(name="baseline", lab=lab),
        *(Arm(name=name, lab=lab, recipe=recipe) for name, recipe in recipes.items()),
    ]
    for number in range(rounds):
        for arm in subject.arms if number % 2 == 0 else subject.arms[::-1]:
            if arm.name not in subject.refused:
                run_once(arm, subject.refused)
        bench.say(f"  {subject.name}: round {number + 1} of {rounds}")
    if subject.arms[0].profiles:
        subject.candidates = foresee(lab, subject.arms[0].profiles[0], subject.levers)
    return subject


def choice(name: str, settings: Mapping[str, Any]) -> Choice:
    """Return a technique with its settings."""
    return Choice(technique=name, settings=dict(settings))


def run_once(arm: Arm, refused: dict[str, str]) -> None:
    """Run one trial; note why where the technique could not act."""
    trial = arm.lab.time(arm.recipe)
    if trial.outcome is Outcome.OK and trial.profile is not None and not trial.not_applied:
        arm.profiles.append(trial.profile)
        return
    reasons = [f"{lever.status}: {lever.why}" for lever in trial.not_applied]
    refused[arm.name] = "; ".join(reasons) or f"{trial.outcome.value}: {trial.message}"


def record_of(theme: str, found: Sequence[Subject], trials: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record: a row for each technique that acted."""
    acted = [(subject, arm) for subject in found for arm in subject.arms[1:] if arm.profiles]
    told = predictions(acted)
    failed = {
        f"{subject.name}, {name}": why
        for subject in found
        for name, why in subject.refused.items()
        if not why.startswith(("not_applicable", "skipped", "unseen"))
    }
    return Record(
        theme=theme,
        claim="every technique that this machine allows runs alone on a script it is made for",
        holds=not failed and all(subject.arms[0].profiles for subject in found),
        finding=f"{len(acted)} techniques measured by themselves",
        table=[
            (
                "script",
                "technique",
                "promise",
                "step",
                "ratio",
                "95 % interval",
                "n",
                "peak memory",
            ),
            *(row(subject, arm) for subject in found for arm in subject.arms if arm.profiles),
        ],
        raw={
            "rounds_s": {s.name: {arm.name: arm.times_s for arm in s.arms} for s in found},
            "refused": {s.name: s.refused for s in found},
            "trials": list(trials),
        },
        calibration=table(told),
        notes=[
            "A ratio below 1: the technique slows this script down here, as those for memory may. "
            "The memory is that of the whole process.",
            *(f"{name}: {why}" for s in found for name, why in s.refused.items()),
            *summary(told),
        ],
    )


def predictions(acted: Sequence[tuple[Subject, Arm]]) -> list[Foretold]:
    """Return what was predicted of each technique that has an interval."""
    return [
        foretold(
            subject.name,
            subject.candidates[arm.name],
            subject.arms[0].profiles[0],
            comparison(subject.arms[0], arm),
            peak(arm) / max(1.0, peak(subject.arms[0])),
        )
        for subject, arm in acted
        if arm.name in subject.candidates and len(arm.profiles) > 1
    ]


def row(subject: Subject, arm: Arm) -> tuple[str, ...]:
    """Return one arm's row."""
    base = subject.arms[0]
    if arm is base:
        return (subject.name, "baseline", "", format_ms(arm.median_ms), "1.00x", "", "", "1.00x")
    pair = comparison(base, arm)
    promise = catalogue.technique_class(arm.name).numerics.value
    memory = format_ratio(peak(arm) / max(1.0, peak(base)))
    return (
        *(subject.name, arm.recipe.label, promise, format_ms(arm.median_ms)),
        *(cells(pair) if len(arm.profiles) > 1 else (format_ratio(pair.ratio), "", "1")),
        memory,
    )


def peak(arm: Arm) -> float:
    """Return the median of the process's peak, in bytes."""
    peaks = sorted(profile.peak_bytes.device for profile in arm.profiles)
    return float(peaks[len(peaks) // 2])
