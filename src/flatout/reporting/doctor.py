"""The reports on this machine: `doctor`, what earlier tunings found, the list of techniques.

`dockerfile` writes a stack as a Dockerfile.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.records.finding import BAD, WARN, Check
from flatout.records.machine import Machine, Stack
from flatout.records.messages import ENGLISH, Sentence, messages, named, words
from flatout.records.technique import EarlierResult, Technique
from flatout.records.units import format_ratio
from flatout.reporting.blocks import columns_of, safe
from flatout.reporting.tables import ascii_only, labelled, padded, table, wrapped
from flatout.reporting.templates import render

DEVICES = {
    "cpu": "",
    "cuda": "--gpus all ",
    # As AMD's documentation has it: the two device files, and the groups that may open them.
    "rocm": "--device=/dev/kfd --device=/dev/dri --group-add video --group-add render ",
}
"""What hands the devices into a container."""


def dockerfile(stack: Stack) -> str:
    """Return the Dockerfile; its first lines say how to build and to run it."""
    values = {"stack": stack, "run": ascii_only(run_command(stack))}
    return render("Dockerfile.j2", values)


def run_command(stack: Stack) -> str:
    """Return the command that trains in the container, with the folder it is typed in."""
    script = shlex.quote(" ".join(stack.script.split()))
    return (
        f"docker run --rm {DEVICES[stack.kind]}--shm-size={stack.shm_gib}g "
        '--ulimit memlock=-1 --user "$(id -u):$(id -g)" '
        f'-v "$PWD":/work -v flatout-cache:/cache training {script}'
    )


MARK_WIDTH = 4
FORGET = "flatout techniques --forget-history"


def render_doctor(
    machine: Machine, checks: Sequence[Check], *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: the answer, every check with what to do, what to type next."""
    say = messages(language)
    lines = [*wrapped(say.text(_headline(machine, checks)), width), ""]
    for check in checks:
        mark = padded(say(f"doctor.mark_{check.status}"), MARK_WIDTH)
        lines += labelled(mark, say.text(check.what), width)
        advice = words("doctor.do", next=check.next) if check.next else ""
        for text in (check.why, advice):
            lines += wrapped(say.text(text), width, indent=" " * (MARK_WIDTH + 2))
    lines += ["", f"{say('label.next')}  flatout measure train.py"]
    return safe("\n".join(lines), say) + "\n"


def _headline(machine: Machine, checks: Sequence[Check]) -> Sentence:
    bad = sum(check.status == BAD for check in checks)
    warned = sum(check.status == WARN for check in checks)
    name = "bad" if bad else "warn" if warned else "ok"
    return words(
        f"doctor.headline_{name}",
        device=machine.device.name,
        kind=machine.device.kind,
        bad=str(bad),
        warned=str(warned),
        n=str(len(checks)),
    )


def render_history(
    results: Sequence[EarlierResult], path: Path, *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return what earlier tunings on this machine found, the latest last."""
    say = messages(language)
    if not results:
        shown = wrapped(say("listing.no_history", path=path), width)
        shown += ["", f"{say('label.next')}  flatout tune train.py"]
        return safe("\n".join(shown), say) + "\n"
    columns = columns_of(("when", "script", "technique", "predicted"), say)
    columns += columns_of(("measured_ratio", "pairs", "verdict"), say)
    cells = [
        [
            one.at[:10],
            one.script,
            one.technique,
            format_ratio(one.predicted),
            format_ratio(one.ratio),
            str(one.n),
            say.text(named("trying", f"verdict_{one.verdict}")),
        ]
        for one in results
    ]
    shown = [
        *wrapped(say("listing.history", n=len(results), path=path), width),
        *wrapped(say("listing.history_use"), width),
        "",
        *table(columns, cells),
        "",
        f"{say('label.next')}  {say('listing.forget', command=FORGET)}",
    ]
    return safe("\n".join(shown), say) + "\n"


def render_techniques(
    classes: Mapping[str, type[Technique]], *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return the techniques with what each addresses, its promise and its one-line summary."""
    say = messages(language)
    order = sorted(classes.items(), key=lambda item: (item[1].numerics.rank, item[0]))
    columns = columns_of(("technique", "promise", "addresses"), say)
    cells = [[name, kind.numerics.value, ", ".join(sorted(kind.addresses))] for name, kind in order]
    lines = table(columns, cells)
    head = len(lines) - len(cells)
    shown = [
        *wrapped(say("listing.techniques", n=len(classes)), width),
        "",
        *lines[:head],
    ]
    for line, (_name, kind) in zip(lines[head:], order, strict=True):
        summary = (kind.__doc__ or "").partition("\n")[0]
        shown += [line, *wrapped(say.text(summary), width, indent="  ")]
    shown += ["", f"{say('label.next')}  flatout tune train.py"]
    return safe("\n".join(shown), say) + "\n"
