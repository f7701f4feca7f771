"""The command `measure`: where the time and the memory of a training step go."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from flatout import rules
from flatout.agent.step_sampler import SHORT_STEP_S
from flatout.analysis.regime import with_regime
from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import clean_up_stale_trials
from flatout.records.errors import UserError
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import Trial, Workload
from flatout.tuning import passes, script_files
from flatout.tuning.passes import PassRunner, Tell
from flatout.tuning.passes.trace import check_target
from flatout.tuning.staged import length_of
from flatout.workflow.check import check

MOST_CHECKED = 50
"""Files of the project, the nearest to the script first: a large one would take a minute."""
PYTHON = (".py", ".pyw")
TIMED_PROBES: dict[str, dict[str, object]] = {"journey": {}}
"""Probes cheap enough for the timed pass, with their options."""


def measure(  # noqa: PLR0913  one keyword for each thing a caller may choose
    workload: Workload,
    *,
    recipe: Recipe = Recipe(),
    limit_s: float = 300.0,
    machine: Machine | None = None,
    closer: tuple[str, ...] = (),
    trace: Path | None = None,
    tell: Tell = lambda _: None,
    runs: int = 1,
) -> Trial:
    """Run the workload until it has shown its steady step; return the trial with findings.

    Every ending of the script is a result; look at `Trial.outcome`.

    Args:
        workload: What to run.
        recipe: Techniques to measure it with.
        limit_s: Wall time for all passes together.
        machine: What the hardware can do; read when it is not given.
        closer: Further passes, of `flatout.tuning.passes.NAMES`.
        trace: Where a trace of a few steps goes: a file, or a folder for TensorBoard.
        tell: Called with what is being done.
        runs: Fresh processes to time; the middle one is shown, and with two or more `compare` gives
            an interval.
    """
    if limit_s <= 0:
        raise UserError(f"a limit of {limit_s} s leaves no time to measure; give a positive one")
    if runs < 1:
        raise UserError(f"{runs} runs measure nothing; give at least 1")
    if trace is not None:
        check_target(trace)
    clean_up_stale_trials()
    machine = machine or read_machine(torch=False)
    runner = PassRunner(
        workload=workload,
        recipe=recipe,
        machine=machine,
        limit_s=limit_s,
        tell=tell,
        trace_path=trace,
    )
    trial = _time(runner, runs)
    if trial.profile is None:
        return trial
    names = closer if trace is None else (*closer, "trace")
    profile = with_regime(passes.add_all(trial.profile, runner, names))
    length = length_of(workload, profile)
    profile = replace(profile, planned_steps=length.steps if length else None)
    in_use = {item.technique for item in trial.applied if item.status == "applied"}
    profile = rules.add_findings(profile, machine, in_use)
    return replace(trial, profile=add_places(profile, workload) if profile.findings else profile)


def add_places(profile: Profile, workload: Workload) -> Profile:
    """Return the profile with the lines of the user's files that its findings come from.

    The files are read, never imported. What hinders the check hinders no measurement.
    """
    folder = script_files.script_folder(workload)
    paths = (path for path, _ in islice(script_files.files_of(workload), MOST_CHECKED))
    files = {str(path): path.resolve() for path in paths if path.suffix in PYTHON}
    try:
        checked = check([Path(path) for path in files])
    except UserError as error:
        return passes.with_note(profile, words("note.not_checked", error=str(error)))
    found = []
    for checked_path, finding in checked.findings():
        file = files[checked_path]
        near = file.relative_to(folder).as_posix() if file.is_relative_to(folder) else ""
        name = script_files.shown(file, workload)
        found.append(rules.FoundInFile(name, {near, str(file)}, finding))
    return rules.add_places(profile, found)


def _time(runner: PassRunner, runs: int) -> Trial:
    """Return the middle one of some timed runs, with the steps of all of them.

    The first that gives no measurement ends it, and is returned.
    """
    trials: list[Trial] = []
    steps_ms: list[float] = []
    for number in range(runs):
        if number and runner.left_s < runner.last_wall_s:
            break
        # The limit alone ends such a run: preparing data may be silent for minutes.
        trial = runner.run(
            words("progress.plain"), TIMED_PROBES, traces_kernels=True, skips_below_s=SHORT_STEP_S
        )
        if trial.profile is None:
            return trial
        trials.append(trial)
        steps_ms.append(trial.profile.whole_step_ms)
    middle = trials[steps_ms.index(sorted(steps_ms)[len(steps_ms) // 2])]
    assert middle.profile is not None
    profile = replace(middle.profile, process_steps_ms=tuple(steps_ms))
    if len(steps_ms) < runs:
        note = words("note.fewer_runs", n=str(len(steps_ms)), of=str(runs))
        profile = passes.with_note(profile, note)
    return replace(middle, profile=profile)
