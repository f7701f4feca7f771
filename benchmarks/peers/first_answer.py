"""Seconds from nothing installed to an answer: flatout, TraceML, Scalene and ruff on one script.

    pip install --target TORCH torch==2.13.0
    python -m benchmarks.peers.first_answer TORCH

Each tool gets a fresh environment that has torch, and nothing of what the tool needs. nvitop shows
GPUs, and is left out where there is none.
"""

import argparse
import datetime
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import table
from benchmarks.bench import Record, TrialFailedError
from benchmarks.programs import Ended, ran
from benchmarks.record import RECORDS, write_record
from flatout.hardware.machine import read_machine

SCRIPTS = Path(__file__).parent.parent / "scripts" / "first_answer"
SOURCE = Path(__file__).parents[2]
ROUNDS = 3
LIMIT_S = 600.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Tool(NamedTuple):
    """What is typed to have an answer, and where the answer is in the output."""

    package: str
    script: str
    commands: tuple[tuple[str, ...], ...]
    answer: str
    """A part of the line that holds it."""


TOOLS = {
    "flatout": Tool(str(SOURCE), "train.py", (("flatout", "measure", "train.py"),), "of each step"),
    "TraceML": Tool(
        "traceml-ai", "with_traceml.py", (("traceml", "run", "with_traceml.py"),), "Verdict:"
    ),
    "Scalene": Tool(
        "scalene",
        "train.py",
        # Without --cpu-only version 2.4.0 ends here with a segmentation fault, torch's profiler on.
        (("scalene", "run", "--cpu-only", "train.py"), ("scalene", "view", "--cli")),
        "for k in range",
    ),
    "ruff": Tool("ruff", "train.py", (("ruff", "check", "train.py"),), "All checks passed"),
}


def main(arguments: list[str] | None = None) -> None:
    """Install and run each tool in turns, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torch", type=Path, help="a folder with torch and what that needs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args(arguments)
    machine, lines = read_machine(torch=False), []
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in TOOLS}
    for number in range(args.rounds):
        for name in TOOLS if number % 2 == 0 else reversed(TOOLS):
            seen[name].append(first_answer(TOOLS[name], args.torch.resolve()))
            lines.append(f"{name}: {seen[name][-1]['answer']}")
            print(lines[-1], flush=True)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    log = "\n".join(lines) + "\n"
    write_record(record_of(seen), machine, date=date, log=log, root=args.records)
    table.main() if args.records == RECORDS else None


def first_answer(tool: Tool, torch: Path) -> dict[str, Any]:
    """Return what installing and asking one tool took, and its answer."""
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        work = Path(name)
        shutil.copy(SCRIPTS / tool.script, work)
        ran([sys.executable, "-m", "venv", "tool"], cwd=work, check=True)
        (found,) = (work / "tool" / "lib").glob("python*/site-packages")
        (found / "torch.pth").write_text(f"{torch}\n", encoding="utf-8")
        pip = (str(work / "tool/bin/pip"), "install", "--quiet", "--no-cache-dir", tool.package)
        began = time.monotonic()
        ran(pip, cwd=work, check=True, timeout=LIMIT_S)
        installed = time.monotonic()
        ends = [asked(words, work) for words in tool.commands]
        ended = time.monotonic()
    output = COLOURS.sub("", "\n".join(f"{end.stdout}\n{end.stderr}" for end in ends))
    output = output.replace(str(work), ".").replace(str(torch), "TORCH")
    shown = [line.strip(" |│") for line in output.splitlines() if tool.answer in line]
    if not shown:
        raise TrialFailedError(f"{tool.package}: no line with {tool.answer!r}: {output[-1_000:]}")
    return {
        "install_s": installed - began,
        "ask_s": ended - installed,
        "answer": " ".join(shown[0].split())[:120],
        "output": output[-20_000:],
    }


def asked(words: tuple[str, ...], work: Path) -> Ended:
    """Return one command of a tool that has ended."""
    return ran([work / "tool/bin" / words[0], *words[1:]], cwd=work, timeout=LIMIT_S)


def record_of(seen: dict[str, list[dict[str, Any]]]) -> Record:
    """Return the record of all rounds."""
    middle = {
        name: tuple(median(one[key] for one in rounds) for key in ("install_s", "ask_s"))
        for name, rounds in seen.items()
    }
    rows = [("", "commands", "lines edited", "installing", "asking", "together", "its answer")]
    for name, rounds in seen.items():
        install_s, ask_s = middle[name]
        together = f"{install_s + ask_s:.1f} s"
        count = str(1 + len(TOOLS[name].commands))
        times = f"{install_s:.1f} s", f"{ask_s:.1f} s", together
        rows.append((name, count, str(edits(name)), *times, f"`{rounds[0]['answer']}`"))
    whole = {name: sum(times) for name, times in middle.items()}
    rivals = [whole[name] for name in ("TraceML", "Scalene") if name in whole]
    return Record(
        theme="first_answer",
        claim="no other tool that runs the script has an answer sooner, installing included",
        holds=whole["flatout"] <= min(rivals),
        finding=", ".join(f"{name} {seconds:.0f} s" for name, seconds in whole.items()),
        table=rows,
        raw={"rounds": seen, "python": sys.version},
        repeat="python -m benchmarks.peers.first_answer TORCH",
        notes=(
            f"Middle of {len(next(iter(seen.values())))} rounds in turns; from a package registry "
            "near by, torch installed before, nothing cached by pip.",
            "The script trains for some twelve seconds. TraceML and Scalene answer when it has "
            "ended, however long it trains; flatout starts it three times, and ends it when it has "
            "seen enough.",
            "ruff reads the script and does not run it: it has nothing to say of where time goes. "
            "nvitop needs a GPU, and there is none.",
        ),
    )


def edits(name: str) -> int:
    """Return the lines that a tool's script has more than, or differently from, the plain one."""
    plain, own = (
        [line.strip() for line in (SCRIPTS / script).read_text(encoding="utf-8").splitlines()]
        for script in ("train.py", TOOLS[name].script)
    )
    return len([line for line in own if line not in plain])


if __name__ == "__main__":
    main()
