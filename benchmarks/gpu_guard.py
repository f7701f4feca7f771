"""The guard on a GPU: every technique once in a real training, and scripts against themselves.

The sweep makes each technique act in a training that offers it something, and asks the guard what
became of the numbers: applied, refused or crashed. Several trainings run side by side, since
nothing is timed. The A/A asks the guard about the unchanged ResNet-50 and GPT-2: cuDNN's weight
gradients are not summed in one order, and that may not count as a fault. Its power on faulty
trainings is a test marked gpu. Written without a GPU; parts of it have
run on one.
"""

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import ladder
from benchmarks.bench import Bench, brief, open_lab
from flatout.agent.guard.record import find_records
from flatout.records import catalogue
from flatout.records.ablation import LossCheck
from flatout.records.machine import Device, Machine
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.demo import scenarios

SCRIPTS = Path(__file__).parent / "scripts"
AT_ONCE = 8
"""Trainings side by side: most of their time is importing and compiling, on two cores each."""
LEFT_OUT = ("parallel",)
"""Families of the techniques that need more than one device."""
LAST_S = 40.0
"""Before the stage's end nothing further is begun: a technique takes one guard trial or two."""
TRIAL_S, SMOKE_TRIAL_S = 100.0, 600.0
"""One trial at most; of one that is tried out on a busy machine much more."""
REPEATS, SMOKE_REPEATS = 2, 1
"""Times that the unchanged script is judged as if it were a recipe."""
CONVOLUTIONS = (
    ("channels_last",),
    ("cudnn_autotune",),
    ("bf16_autocast", "channels_last"),
    ("bf16_autocast", "channels_last", "torch_compile"),
)
HONEST: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gpt2": (("sdpa_attention",), ("bf16_autocast", "sdpa_attention", "torch_compile")),
    "resnet50": CONVOLUTIONS,
    "cifar": CONVOLUTIONS,
}
"""Recipes that train the same thing, by the script; networks with BatchNorm amplify rounding."""
CPU = Device(kind="cpu", name="a CPU", memory_bytes=2**36)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A training on which techniques are tried."""

    name: str
    target: Path
    arguments: tuple[str, ...]
    smoke: tuple[str, ...]
    families: tuple[str, ...] = ()
    """Families whose techniques are tried on it where it offers them nothing to act on."""


SUBJECTS = (
    Subject(
        name="decoder",
        target=SCRIPTS / "naive_gpt2.py",
        arguments=(
            *("--batch-size", "8", "--context", "256", "--vocabulary", "8192"),
            *("--layers", "4", "--width", "256", "--heads", "4"),
        ),
        smoke=ladder.SMALL_GPT,
        families=("compile", "compute", "memory", "model", "optimizer", "precision", "batch"),
    ),
    Subject(
        name="convolutions",
        target=SCRIPTS / "naive_images.py",
        arguments=(
            *("--model", "resnet18", "--side", "64", "--classes", "10"),
            *("--batch-size", "64", "--batches", "40"),
        ),
        smoke=("--model", "resnet18", "--side", "16", "--batch-size", "2", "--classes", "10"),
    ),
    Subject(
        name="photographs",
        target=scenarios() / "starved_images" / "train.py",
        arguments=(
            *("--batch-size", "32", "--image-size", "96", "--width", "32"),
            *("--epochs", "1000"),
        ),
        smoke=("--batch-size", "4", "--image-size", "32", "--width", "8", "--epochs", "1000"),
        families=("data",),
    ),
)
SMOKE_SUBJECTS = ("decoder",)
"""What a sweep that is tried out plays: two techniques on one of them."""
SMOKE_TECHNIQUES = ("fused_optimizer", "tf32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A subject that was timed and compared with itself, so that techniques can be judged on it."""

    subject: Subject
    profile: Profile
    referee: GuardChecker


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One technique with its settings on one subject."""

    choice: Choice
    subject: str
    is_offered: bool
    is_first: bool
    """Whether it is the first setting of its technique: those have to be tried all."""


def sweep(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Let each technique act once, under the guard."""
    deadline = time.monotonic() + seconds - (0.0 if smoke else LAST_S)
    rows: list[dict[str, Any]] = []
    subjects = [x for x in SUBJECTS if not smoke or x.name in SMOKE_SUBJECTS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda one: _ground(one, bench, smoke=smoke), subjects))
    grounds = {one.subject.name: one for one in found if isinstance(one, Ground)}
    failed = [one for one in found if not isinstance(one, Ground)]
    tasks = tasks_for(grounds, bench.machine)
    if smoke:
        tasks = [task for task in tasks if task.choice.technique in SMOKE_TECHNIQUES]
    lock = threading.Lock()
    missed: list[str] = []

    def play(task: Task) -> None:
        if time.monotonic() > deadline:
            with lock:
                missed.extend([task.choice.label] if task.is_first else [])
            return
        row = tried(task, grounds[task.subject], bench)
        with lock:
            rows.append(row)
            bench.say(f"  {row_words(row)}")
            bench.note({"rows": rows, "missed": missed, "subjects": failed})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(play, tasks))
    return {"rows": rows, "missed": missed, "subjects": failed}


def _workload(subject: Subject, bench: Bench, *, smoke: bool) -> Workload:
    arguments = subject.smoke if smoke else subject.arguments
    if subject.target.parent.name == "starved_images":
        arguments = (*arguments, "--data", str(bench.work / "photographs"))
    return bench.workload(subject.target, *arguments, name=f"work/sweep-{subject.name}")


def _ground(subject: Subject, bench: Bench, *, smoke: bool) -> "Ground | dict[str, Any]":
    """Time a subject once and run its guard's reference; return why that failed otherwise."""
    try:
        lab = open_lab(bench, _workload(subject, bench, smoke=smoke), f"sweep/{subject.name}")
        lab.limit_s = SMOKE_TRIAL_S if smoke else TRIAL_S
        lab.history.accepts_load = True
        trial = lab.time(Recipe())
        if trial.profile is None:
            return {"subject": subject.name, **brief(trial)}
        ladder.check_device(trial, bench.machine)
        referee = GuardChecker(lab, lambda line: bench.say(f"    {subject.name}: {line}"))
        referee.check(Recipe())
        return Ground(subject=subject, profile=trial.profile, referee=referee)
    except Exception as error:  # noqa: BLE001  one subject must not take the others down
        return {"subject": subject.name, "message": f"{type(error).__name__}: {error}"}


def tasks_for(grounds: Mapping[str, Ground], machine: Machine) -> list[Task]:
    """Return what is tried: first each technique once, those that only a GPU offers before others.

    Then their other settings (modes of the compiler, backends of attention).
    """
    first: list[tuple[bool, Task]] = []
    later: list[Task] = []
    for name in catalogue.names():
        kind = catalogue.technique_class(name)
        if kind.family in LEFT_OUT:
            continue
        offers = {
            ground: list(kind.candidates(one.profile, machine)) for ground, one in grounds.items()
        }
        found = list(_tasks_of(name, offers, grounds))
        if not found:
            continue
        on_cpu = any(
            kind.candidates(replace(one.profile, device_kind="cpu"), replace(machine, device=CPU))
            for one in grounds.values()
        )
        first.append((not (found[0].is_offered and not on_cpu), found[0]))
        later += found[1:]
    first.sort(key=lambda pair: pair[0])
    return [task for _, task in first] + later


def _tasks_of(
    name: str, offers: Mapping[str, Sequence[Any]], grounds: Mapping[str, Ground]
) -> Iterator[Task]:
    """Yield a technique's settings on the first subject that offers it; else with its defaults."""
    for ground, candidates in offers.items():
        for number, technique in enumerate(candidates):
            yield Task(
                choice=Choice(technique=name, settings=technique.settings()),
                subject=ground,
                is_offered=True,
                is_first=number == 0,
            )
        if candidates:
            return
    family = catalogue.technique_class(name).family
    at_home = [x for x, one in grounds.items() if family in one.subject.families]
    for ground in at_home or list(grounds)[:1]:
        choice = Choice(technique=name)
        yield Task(choice=choice, subject=ground, is_offered=False, is_first=True)


@dataclass(slots=True)
class Watched:
    """Runs trials and keeps the last one that had a technique."""

    machine: Machine
    seen: list[Trial] = field(default_factory=list)

    def __call__(
        self, workload: Workload, recipe: Recipe, machine: Machine, options: TrialOptions
    ) -> Trial:
        """Run a trial."""
        trial = run_trial(workload, recipe, machine, options)
        if recipe.choices:
            self.seen.append(trial)
        return trial


def tried(task: Task, ground: Ground, bench: Bench) -> dict[str, Any]:
    """Return what became of a technique and of the numbers."""
    recipe = Recipe(choices=(task.choice,))
    watched = Watched(bench.machine)
    out = bench.work / "sweep" / f"{task.subject}-{task.choice.label}".replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    lab = ground.referee.lab
    # A judge of its own: the reference trials are shared, what this technique needs is not.
    referee = copy.copy(ground.referee)
    referee.lab = TrialRunner(
        workload=lab.workload, machine=lab.machine, out=out, limit_s=lab.limit_s, runner=watched
    )
    referee._verdicts = {}
    began = time.monotonic()
    row: dict[str, Any] = {
        "technique": task.choice.technique,
        "settings": dict(task.choice.settings),
        "subject": task.subject,
        "is_offered": task.is_offered,
    }
    try:
        check = referee.check(recipe)
    except Exception as error:  # noqa: BLE001  one technique must not take the others down
        return row | {"became": "failed", "why": f"{type(error).__name__}: {error}"[:500]}
    trial = watched.seen[0] if watched.seen else None
    applied = [x for x in trial.applied if x.technique == task.choice.technique] if trial else []
    became = applied[0].status if applied else "crashed"
    if trial is not None and trial.outcome.value not in ("ok", "too_short"):
        became = "crashed"
    return row | {
        "became": became,
        "why": (applied[0].why if applied else "") or (trial.message if trial else check.why),
        "guard": check.status,
        "promise": check.promise or catalogue.technique_class(task.choice.technique).numerics.value,
        "guard_why": check.why,
        "worst": dict(check.worst),
        "trial": brief(trial) if trial is not None and became == "crashed" else None,
        "took_s": round(time.monotonic() - began, 1),
    }


PASSED = ("same", "within", "on_purpose")
"""What the guard says of a recipe that trains the same, or on purpose another, thing."""


def sweep_is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether each technique was tried, none crashed, and all that acted passed the guard.

    One that is offered for a training has to act there; one that is not may refuse.
    """
    rows = result["rows"]
    if not rows or result["missed"] or result["subjects"]:
        return False
    return all(
        row["guard"] in PASSED
        if row["became"] == "applied"
        else row["became"] == "not_applicable" and not row["is_offered"]
        for row in rows
    )


def row_words(row: Mapping[str, Any]) -> str:
    """Return one technique in a line."""
    settings = " ".join(f"{name}={value}" for name, value in row["settings"].items())
    name = f"{row['technique']} {settings}".strip()
    if row["became"] == "applied":
        ends = f": {row['guard_why']}" if row["guard"] not in PASSED else ""
        return f"{name} on {row['subject']}: applied, guard {row['guard']}{ends}"
    return f"{name} on {row['subject']}: {row['became']}: {row['why'][:120]}"


def sweep_words(result: Mapping[str, Any]) -> str:
    """Return the sweep in a line: how many, and each that is not as it should be."""
    rows = result["rows"]
    applied = [row for row in rows if row["became"] == "applied"]
    passed = [row for row in applied if row["guard"] in PASSED]
    odd = [
        row_words(row)
        for row in rows
        if row not in passed and (row["is_offered"] or row["became"] != "not_applicable")
    ]
    words = [f"{len(applied)} of {len(rows)} applied, {len(passed)} of these passed the guard"]
    words += [f"missed: {', '.join(result['missed'])}"] if result["missed"] else []
    words += [
        f"no baseline: {one['subject']} ({one['message'][:100]})" for one in result["subjects"]
    ]
    return "; ".join(chain(words, odd))


def aa(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Ask the guard about unchanged scripts, several at once."""
    deadline = time.monotonic() + seconds - (0.0 if smoke else LAST_S)
    rows: list[dict[str, Any]] = [{"script": name, "checks": [], "why": ""} for name in HONEST]

    def judged(row: dict[str, Any]) -> None:
        (rung,) = (rung for rung in ladder.RUNGS if rung.name == row["script"])
        try:
            lab = open_lab(bench, ladder.workload(bench, rung, smoke=smoke), f"aa-{rung.name}")
            lab.limit_s = SMOKE_TRIAL_S if smoke else TRIAL_S
            referee = GuardChecker(lab, lambda line: bench.say(f"    {rung.name}: {line}"))
            own = referee.check(Recipe())
            row["aa"] = referee.aa_check.status if referee.aa_check else own.status
            recipes = [
                Recipe(choices=tuple(Choice(technique=name) for name in names))
                for names in (() if smoke else HONEST[rung.name])
            ]
            for number in range(-(SMOKE_REPEATS if smoke else REPEATS), len(recipes)):
                if time.monotonic() > deadline:
                    row["why"] = "no time left"
                    return
                asked = Recipe() if number < 0 else recipes[number]
                check = again(referee, -number) if number < 0 else referee.check(asked)
                row["checks"].append(
                    {"recipe": asked.label, "status": check.status, "why": check.why}
                )
                bench.note({"rows": rows})
        except Exception as error:  # noqa: BLE001  one script must not take the other down
            row["why"] = f"{type(error).__name__}: {error}"[:500]

    with ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(judged, rows))
    return {"rows": rows}


def again(referee: GuardChecker, number: int) -> LossCheck:
    """Return what the judge says of the n-th more run of the unchanged script: no fault."""
    first = referee.check(referee.floor)
    if not referee._baseline:
        return first
    trial = referee._trial(referee.floor, f"again-{number}")
    ran = trial.outcome in (Outcome.OK, Outcome.TOO_SHORT)
    records = find_records(trial.guard_path) if ran else ()
    return referee._compare_as(Numerics.ROUNDING, referee.floor, records)


def aa_is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether each script was judged as often as planned, always as the same training."""
    rows = result["rows"]
    return len(rows) == len(HONEST) and all(
        len(row["checks"]) == REPEATS + len(HONEST[row["script"]])
        and all(check["status"] in ("same", "within") for check in row["checks"])
        for row in rows
    )


def aa_words(result: Mapping[str, Any]) -> str:
    """Return the A/A in a line."""
    return "; ".join(
        f"{row['script']}: {', '.join(check['status'] for check in row['checks']) or 'nothing'}"
        + (f" ({row['why']})" if row["why"] else "")
        for row in result["rows"]
    )
