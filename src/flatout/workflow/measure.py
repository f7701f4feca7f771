"""The verb `measure`: where the time and the memory of a training step go."""

from pathlib import Path

from flatout import rules
from flatout.core.errors import UserError
from flatout.core.machine import Machine
from flatout.core.recipe import Recipe
from flatout.core.trial import Trial
from flatout.core.workload import Workload
from flatout.hardware.machine import read_machine
from flatout.profiling.regime import with_regime
from flatout.seams.process import mend_leftovers
from flatout.workflow import passes
from flatout.workflow.passes import PassRunner, Tell
from flatout.workflow.passes.trace import check_target

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
) -> Trial:
    """Run the workload until it has shown its steady step; return the trial with findings.

    Every ending of the script is a result; look at `Trial.outcome`.

    Args:
        workload: What to run.
        recipe: Levers to measure it with.
        limit_s: Wall time for all passes together.
        machine: What the hardware can do; read when it is not given.
        closer: Further passes, of `flatout.workflow.passes.NAMES`.
        trace: Where a trace of a few steps goes: a file, or a folder for TensorBoard.
        tell: Called with what is being done.
    """
    if limit_s <= 0:
        raise UserError(f"a limit of {limit_s} s leaves no time to measure; give a positive one")
    if trace is not None:
        check_target(trace)
    mend_leftovers()
    machine = machine or read_machine(torch=False)
    runner = PassRunner(
        workload=workload,
        recipe=recipe,
        machine=machine,
        limit_s=limit_s,
        tell=tell,
        trace_path=trace,
    )
    # The limit alone ends the first pass: preparing data may be silent for minutes.
    trial = runner.run("the steps as they are", TIMED_PROBES, traces_kernels=True)
    if trial.profile is None:
        return trial
    names = closer if trace is None else (*closer, "trace")
    profile = with_regime(passes.add_all(trial.profile, runner, names))
    return trial.with_profile(profile.with_findings(rules.findings(profile, machine)))
