"""The report on a trial that did not give a measurement."""

import textwrap

from flatout.core.trial import Outcome, Trial
from flatout.core.units import format_duration
from flatout.reporting.tables import ascii_only, labelled, wrapped
from flatout.reporting.words import sentence

HEADLINES = {
    Outcome.OK: "The script ran",
    Outcome.OOM: "The script ran out of memory",
    Outcome.CRASH: "The script failed",
    Outcome.HANG: "The script stopped making steps",
    Outcome.NAN: "The loss is not a number any more",
    Outcome.TOO_SHORT: "The script ended before its steps were steady",
    Outcome.NO_STEPS: "The script ended without a training step",
}

NEXT = {
    Outcome.OK: "flatout tune {workload}",
    Outcome.OOM: "use a smaller batch, then: flatout measure {workload}",
    Outcome.CRASH: "mend the script until this works by itself: python {workload}",
    Outcome.HANG: "see where it waits: python {workload}",
    Outcome.NAN: "lower the learning rate or clip the gradients, then: flatout measure {workload}",
    Outcome.TOO_SHORT: "give it more data or epochs, then: flatout measure {workload}",
    Outcome.NO_STEPS: (
        "flatout counts a step when a torch optimizer steps after a backward; "
        "check that the script trains: python {workload}"
    ),
}
"""What to do next, by how the trial ended. For a failure under a recipe see `_next`."""


def render_failure(trial: Trial, *, workload: str = "train.py", width: int = 80) -> str:
    """Return the report: what happened, the script's own last words, what to do next.

    Args:
        trial: How it ended.
        workload: What the user would type after `python`.
        width: Columns of the terminal; the script's own output is never wrapped.
    """
    why = f": {trial.message}" if trial.message else ""
    lines = wrapped(sentence(HEADLINES[trial.outcome] + why), width)
    if trial.traceback.strip():
        own = textwrap.dedent(trial.traceback).strip("\n")
        lines += ["", "The script's own last output:", "", textwrap.indent(own, "  ")]
    lines += ["", *labelled("recipe", trial.recipe.label, width)]
    for item in trial.not_applied:
        why = f": {item.why}" if item.why else ""
        text = f"{item.technique} was {item.status.replace('_', ' ')}{why}"
        lines += labelled("      ", text, width)
    lines += labelled("ran   ", format_duration(trial.wall_s), width)
    lines += labelled("next  ", _next(trial, workload), width)
    return ascii_only("\n".join(lines)) + "\n"


def _next(trial: Trial, workload: str) -> str:
    if trial.recipe.choices and trial.outcome is not Outcome.OK:
        return f"see whether it is the recipe, measure without it: flatout measure {workload}"
    return NEXT[trial.outcome].format(workload=workload)
