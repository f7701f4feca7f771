"""What is found in a small script that runs in a process of its own."""

from flatout.records.trial import Outcome
from flatout.workflow.measure import measure
from tests.support.programs import workload_of


def findings_of(folder, text, *arguments):
    """Return the findings by code of a script that is written to a folder and measured."""
    (folder / "train.py").write_text(text)
    workload = workload_of(folder, "train.py", *arguments)
    trial = measure(workload)
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    return {finding.code: finding for finding in trial.profile.findings}
