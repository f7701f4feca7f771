"""The verb `measure`: where the time and the memory of a training step go."""

from flatout import rules
from flatout.core.errors import UserError
from flatout.core.machine import Machine
from flatout.core.recipe import Recipe
from flatout.core.trial import Trial
from flatout.core.workload import Workload
from flatout.hardware.machine import read_machine
from flatout.seams.process import mend_leftovers
from flatout.workflow.trials import TrialOptions, run_trial


def measure(
    workload: Workload,
    *,
    recipe: Recipe = Recipe(),
    limit_s: float = 300.0,
    machine: Machine | None = None,
) -> Trial:
    """Run the workload until it has shown its steady step; return the trial with findings.

    Every ending of the script is a result; look at `Trial.outcome`.
    """
    if limit_s <= 0:
        raise UserError(f"a limit of {limit_s} s leaves no time to measure; give a positive one")
    mend_leftovers()
    machine = machine or read_machine(torch=False)
    # One trial only, so the limit alone ends it: preparing data may be silent for minutes.
    options = TrialOptions(limit_s=limit_s, hang_s=limit_s, traces_kernels=True)
    trial = run_trial(workload, recipe, machine, options)
    if trial.profile is None:
        return trial
    found = rules.findings(trial.profile, machine)
    return trial.with_profile(trial.profile.with_findings(found))
