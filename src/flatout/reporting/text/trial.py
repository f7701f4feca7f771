"""The report on a trial that did not give a measurement."""

import textwrap

from flatout.core.trial import Outcome, Trial
from flatout.core.units import format_duration
from flatout.reporting.tables import ascii_only, labelled, wrapped
from flatout.reporting.words import sentence

HEADLINES = {
    Outcome.OK: "the script ran",
    Outcome.OOM: "the script ran out of memory",
    Outcome.CRASH: "the script failed",
    Outcome.HANG: "the script stopped making steps",
    Outcome.NAN: "the training diverged",
    Outcome.TOO_SHORT: "the script ended before its steps were steady",
    Outcome.NO_STEPS: "the script ended without a training step",
}
"""How a trial ended, where its own message does not begin with that."""

ADVICE = {
    Outcome.OK: ("see what would make it faster", "flatout tune"),
    Outcome.OOM: ("use a smaller batch, then measure again", "flatout measure"),
    Outcome.CRASH: ("mend the script until it works by itself", "python"),
    Outcome.HANG: ("see where it waits", "python"),
    Outcome.NAN: (
        "lower the learning rate or clip the gradients",
        "flatout measure",
    ),
    Outcome.TOO_SHORT: ("give it more data or epochs, then measure again", "flatout measure"),
    Outcome.NO_STEPS: (
        "a step counts when a torch optimizer steps after a backward: check that it trains",
        "python",
    ),
}
"""What to do and what to type before the script, by how the trial ended."""
ADVICE_UNDER_RECIPE = ("see whether it is the recipe: measure without it", "flatout measure")


def render_failure(trial: Trial, *, workload: str = "train.py", width: int = 80) -> str:
    """Return the report: what happened, the script's own last words, what to do next.

    Args:
        trial: How it ended.
        workload: What the user would type after `python`.
        width: Columns of the terminal; the script's own output is never wrapped.
    """
    lines = wrapped(_headline(trial), width)
    if trial.traceback.strip():
        own = textwrap.dedent(trial.traceback).strip("\n")
        lines += ["", "The script's own last output:", "", textwrap.indent(own, "  ")]
    lines += ["", *labelled("outcome", trial.outcome.value.replace("_", " "), width)]
    lines += labelled("recipe ", trial.recipe.label, width)
    for item in trial.not_applied:
        why = f": {item.why}" if item.why else ""
        text = f"{item.technique} was {item.status.replace('_', ' ')}{why}"
        lines += labelled("       ", text, width)
    lines += labelled("ran    ", format_duration(trial.wall_s), width)
    is_recipe = bool(trial.recipe.choices) and trial.outcome is not Outcome.OK
    advice, command = ADVICE_UNDER_RECIPE if is_recipe else ADVICE[trial.outcome]
    lines += labelled("do     ", advice, width)
    lines.append(f"next     {command} {workload}")
    return ascii_only("\n".join(lines)) + "\n"


def _headline(trial: Trial) -> str:
    said = trial.message
    if not said.startswith("the script"):
        said = ": ".join(part for part in (HEADLINES[trial.outcome], said) if part)
    return sentence(said[:1].upper() + said[1:])
