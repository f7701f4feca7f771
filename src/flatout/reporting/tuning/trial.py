"""The report on a trial that did not give a measurement."""

import textwrap
from collections.abc import Iterator

from flatout.records.messages import ENGLISH, Messages, Sentence, messages, named, recognised
from flatout.records.trial import Outcome, Trial
from flatout.records.units import format_duration
from flatout.reporting.blocks import label_cell, safe
from flatout.reporting.tables import labelled, sentence, wrapped

COMMANDS = {
    Outcome.OK: "flatout tune",
    Outcome.OOM: "flatout tune",
    Outcome.CRASH: "python",
    Outcome.HANG: "python",
    Outcome.NO_STEPS: "python",
}
"""What to type before the script, by how the trial ended; else `flatout measure`."""
LIMIT = "limit"
"""Why a process ended that was still alive when its time was up, and the advice that fits."""
MORE_TIME = 3
TRACEBACK = "Traceback (most recent call last):"
"""What an error of Python's begins with."""
RANKS = "ranks"
"""The advice where a script was started on its own that several processes run."""
DEVICE = "device"
"""The advice where a script asks for a device that torch does not find: no edit makes one."""
NO_DATA = "empty_data"
"""The fault of a loader that had no batch to give, and the advice that fits."""
OF_SCRIPT = ("trial.", "failure.head_", "fault.no_device")
"""What the messages begin with that say what became of the script."""
FIRST = {"joint.and": "one", "rescue.again": "message"}
"""Messages that begin with another one, by the field that it is in."""
LABELS = "failure.label_"

CRASHES = (
    ("torch finds none here", DEVICE),
    ("environment variable RANK expected", RANKS),
    ("environment variable WORLD_SIZE expected", RANKS),
    ("KeyError: 'RANK'", RANKS),
    ("KeyError: 'LOCAL_RANK'", RANKS),
    ("KeyError: 'WORLD_SIZE'", RANKS),
    ("does not require grad and does not have a grad_fn", "no_gradient"),
    ("EOF when reading a line", "answers"),
    ("the following arguments are required", "arguments"),
    ("error: unrecognized arguments", "usage"),
    ("error: argument -", "usage"),
    ("No module named", "module"),
    ("Name or service not known", "download"),
    ("Temporary failure in name resolution", "download"),
    ("Max retries exceeded", "download"),
    ("urlopen error", "download"),
    ("couldn't connect to", "download"),
)
"""Words of Python's, torch's and the hub clients' errors, and the advice that fits: to each of
these scripts something is missing that it has elsewhere."""


def render_failure(
    trial: Trial, *, workload: str = "train.py", width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: what happened, the script's last output unwrapped, what to do next."""
    say = messages(language)
    lines = wrapped(_headline(trial, say), width)
    if trial.traceback.strip():
        own = textwrap.dedent(trial.traceback).strip("\n")
        lines += ["", say("failure.last_output"), "", textwrap.indent(own, "  ")]
    lines.append("")
    for label, text in _rows(trial, say):
        lines += labelled(label_cell(label, say, LABELS), text, width)
    lines.append(f"{label_cell('next', say, LABELS)}  {_command(trial, workload)}")
    return safe("\n".join(lines), say) + "\n"


def _command(trial: Trial, workload: str) -> str:
    """Return what to type next."""
    advice = _advice(trial)
    if advice == DEVICE:
        return "flatout doctor"
    if advice == RANKS:
        return f"flatout measure -m torch.distributed.run --nproc-per-node 2 {workload}"
    if advice == LIMIT:
        limit_s = MORE_TIME * max(1, round(trial.wall_s))
        return f"flatout measure --limit {limit_s} {workload}"
    known = {} if _blames_recipe(trial) else COMMANDS
    return f"{known.get(trial.outcome, 'flatout measure')} {workload}"


def _rows(trial: Trial, say: Messages) -> Iterator[tuple[str, str]]:
    yield "outcome", say(f"failure.outcome_{trial.outcome.value}")
    yield "recipe", trial.recipe.label
    for item in trial.not_applied:
        status = say.text(named("failure", f"status_{item.status}"))
        what = say("failure.not_applied", technique=item.technique, status=status)
        yield "", f"{what}: {say.text(item.why)}" if item.why else what
    yield "ran", format_duration(trial.wall_s)
    yield "do", say(f"failure.do_{_advice(trial)}")


def _advice(trial: Trial) -> str:
    """Return which advice fits, by what the script itself said where that is known."""
    if _blames_recipe(trial):
        return "recipe"
    if trial.outcome is Outcome.HANG and trial.details.get("why") == LIMIT:
        return LIMIT
    if trial.outcome is Outcome.NO_STEPS and trial.details.get("fault") == NO_DATA:
        return NO_DATA
    if trial.outcome is not Outcome.CRASH:
        return str(trial.outcome.value)
    # The error's part of what it wrote last: libraries warn of what they can miss.
    error = trial.traceback.partition(TRACEBACK)[2] or trial.traceback
    said = f"{trial.message}\n{error}"
    return next((name for word, name in CRASHES if word in said), "crash")


def _blames_recipe(trial: Trial) -> bool:
    return bool(trial.recipe.choices) and trial.outcome is not Outcome.OK


def _is_of_script(text: str) -> bool:
    """Return whether a message says in its first words what became of the script."""
    known = recognised(text)
    if not isinstance(known, Sentence):
        return False
    if known.code in FIRST:
        return _is_of_script(str(known.fields[FIRST[known.code]]))
    return known.code.startswith(OF_SCRIPT)


def _headline(trial: Trial, say: Messages) -> str:
    said = say.text(trial.message)
    # What a trial says of the script is the headline; what torch or Python said is behind one.
    if not _is_of_script(trial.message):
        headline = say(f"failure.head_{trial.outcome.value}")
        said = ": ".join(part for part in (headline, said) if part)
    return sentence(said[:1].upper() + said[1:])
