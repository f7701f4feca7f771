"""What is found in a small script that runs in a process of its own."""

import sys

from flatout.records.trial import Outcome, Workload
from flatout.workflow.measure import measure


def findings_of(folder, text, *arguments):
    """Return the findings by code of a script that is written to a folder and measured."""
    (folder / "train.py").write_text(text)
    workload = Workload(
        target="train.py", arguments=arguments, folder=folder, python=sys.executable
    )
    trial = measure(workload)
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    return {finding.code: finding for finding in trial.profile.findings}
