"""The reports on this machine: `doctor`, earlier tunings, all techniques, and the Dockerfile."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from flatout.records.finding import BAD, WARN, Check
from flatout.records.machine import ARCHIVES, Machine, Stack
from flatout.records.messages import ENGLISH, Text, messages, named, words
from flatout.records.technique import EarlierResult, Technique
from flatout.records.units import format_ratio
from flatout.reporting.blocks import Facts, Next, Table, report
from flatout.reporting.tables import ascii_only
from flatout.reporting.templates import render

DEVICES = {
    "cpu": "",
    "cuda": "--gpus all ",
    # As AMD's documentation has it: the two device files, and the groups that may open them.
    "rocm": "--device=/dev/kfd --device=/dev/dri --group-add video --group-add render ",
}
"""What hands the devices into a container."""
FORGET = "flatout techniques --forget-history"


def dockerfile(stack: Stack) -> str:
    """Return the Dockerfile; its first lines say how to build and to run it."""
    script = shlex.quote(" ".join(stack.script.split()))
    run = (
        f"docker run --rm {DEVICES[stack.kind]}--shm-size={stack.shm_gib}g "
        '--ulimit memlock=-1 --user "$(id -u):$(id -g)" '
        f'-v "$PWD":/work -v flatout-cache:/cache training {script}'
    )
    # pip wants a wheel's own name.
    name = PurePosixPath(stack.source).name
    copied = f"/opt/{name if name.endswith(ARCHIVES) else 'flatout'}"
    extras = f"[{','.join(stack.extras)}]" if stack.extras else ""
    is_copied = bool(stack.source) and "://" not in stack.source
    wanted = f"{copied}{extras}" if is_copied else f"flatout{extras} @ {stack.source}"
    values = {"stack": stack, "run": ascii_only(run), "requirement": wanted}
    return render("Dockerfile.j2", values | {"copied": copied if is_copied else ""})


def render_doctor(
    machine: Machine, checks: Sequence[Check], *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: the answer, every check with what to do, what to type next."""
    bad = sum(check.status == BAD for check in checks)
    warned = sum(check.status == WARN for check in checks)
    name = "bad" if bad else "warn" if warned else "ok"
    counts = {"bad": str(bad), "warned": str(warned), "n": str(len(checks))}
    device = machine.device
    head = words(f"doctor.headline_{name}", device=device.name, kind=device.kind, **counts)
    rows: list[tuple[str, Text]] = []
    for check in checks:
        advice = words("doctor.do", next=check.next) if check.next else ""
        rows += [(check.status, check.what), ("", check.why), ("", advice)]
    found = Facts(rows=tuple(rows), labels="doctor.mark_")
    then = Next(command="flatout measure train.py")
    return report((head, found, then), messages(language), width)


def render_history(
    results: Sequence[EarlierResult], path: Path, *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return what earlier tunings on this machine found, the latest last."""
    say = messages(language)
    if not results:
        none = words("listing.no_history", path=str(path))
        return report((none, Next(command="flatout tune train.py")), say, width)
    listing = Table(
        columns=("when", "script", "technique", "predicted", "measured_ratio", "pairs", "verdict"),
        rows=tuple(
            (
                one.at[:10],
                one.script,
                one.technique,
                format_ratio(one.predicted),
                format_ratio(one.ratio),
                str(one.n),
                named("trying", f"verdict_{one.verdict}"),
            )
            for one in results
        ),
    )
    found = words("listing.history", n=str(len(results)), path=str(path))
    then = Next(command=say("listing.forget", command=FORGET))
    return report((found, listing, then), say, width)


def render_techniques(
    classes: Mapping[str, type[Technique]], *, width: int = 80, language: str = ENGLISH
) -> str:
    """Return the techniques with what each addresses, its promise and its one-line summary."""
    order = sorted(classes.items(), key=lambda item: (item[1].numerics.rank, item[0]))
    listing = Table(
        columns=("technique", "promise", "addresses"),
        rows=tuple(
            (name, kind.numerics.value, ", ".join(sorted(kind.addresses))) for name, kind in order
        ),
        details=tuple((kind.__doc__ or "").partition("\n")[0] for _name, kind in order),
    )
    count = words("listing.techniques", n=str(len(classes)))
    then = Next(command="flatout tune train.py")
    return report((count, listing, then), messages(language), width)
