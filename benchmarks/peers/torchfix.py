"""Check the same files with flatout and with torchfix, and write CPU seconds and findings.

python -m benchmarks.peers.torchfix /path/of/torchfix FOLDER_OF_THE_RECORD

torchfix needs libcst, so it is installed in an environment of its own.
"""

import argparse
import os
import random
import re
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import ran
from benchmarks.record import markdown_table
from benchmarks.suites.check import installed_files
from flatout.reporting.documents import write_json, write_text

TOOLS = ("flatout", "torchfix")
FOUND = {"torchfix": re.compile(r":\d+:\d+: (TOR\d+)"), "flatout": re.compile(r'"code": "(\w+)"')}
SEED = 26


def main(arguments: Sequence[str] | None = None) -> None:
    """Check a draw of the files of the speed test, one process for each file and tool."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torchfix", help="its executable")
    parser.add_argument("out", type=Path, help="folder in which torchfix.md and .json are written")
    parser.add_argument("--files", type=int, default=40, help="drawn at random from the 1,000")
    parser.add_argument("--limit-s", type=int, default=60, help="of CPU time, for one file")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        files = installed_files(work)
        drawn = random.Random(SEED).sample(files, min(args.files, len(files)))
        (work / "empty.py").write_text("import torch\n", encoding="utf-8")
        start = {tool: checked(tool, args, work / "empty.py") for tool in TOOLS}
        rows = [
            {
                "lines": path.read_bytes().count(b"\n"),
                **{tool: checked(tool, args, path) for tool in TOOLS},
            }
            for path in drawn
        ]
        together = work / "drawn"
        together.mkdir()
        for path in drawn:
            (together / path.name).write_bytes(path.read_bytes())
        at_once = {tool: checked(tool, args, together, len(drawn)) for tool in TOOLS}
    version = ran([args.torchfix, "--version"])
    found = {
        "torchfix": version.stdout.strip(),
        "limit_s": args.limit_s,
        "start": start,
        "at_once": at_once,
    }
    write_json({**found, "files": rows}, args.out / "torchfix.json")
    write_text(page({**found, "files": rows}), args.out / "torchfix.md")


def checked(tool: str, args: argparse.Namespace, path: Path, count: int = 1) -> dict[str, Any]:
    """Return the CPU time of one tool on some files, its findings by code, and whether it ended."""
    command = {
        "flatout": [sys.executable, "-m", "flatout", "check", "--output", "json", str(path)],
        "torchfix": [args.torchfix, "--select", "ALL", "--jobs", "1", str(path)],
    }[tool]
    limited = ["sh", "-c", f'ulimit -t {count * args.limit_s}; exec "$@"', "sh", *command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        done = ran(limited, env={**os.environ, "XDG_CACHE_HOME": cache})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "found": dict(sorted(Counter(FOUND[tool].findall(done.stdout)).items())),
        "ended": done.returncode >= 0,
    }


def page(found: dict[str, Any]) -> str:
    """Return what was found as a page."""
    files = found["files"]
    both = [each for each in files if all(each[tool]["ended"] for tool in TOOLS)]
    seconds = {tool: sum(each[tool]["cpu_s"] for each in both) for tool in TOOLS}
    table = [
        ("", *TOOLS),
        ("files finished", *(str(sum(e[tool]["ended"] for e in files)) for tool in TOOLS)),
        ("CPU time of those that both finished", *(f"{seconds[tool]:.1f} s" for tool in TOOLS)),
        ("the longest", *(f"{max(e[tool]['cpu_s'] for e in both):.1f} s" for tool in TOOLS)),
        ("a file with one import", *(f"{found['start'][tool]['cpu_s']:.2f} s" for tool in TOOLS)),
        ("all in one process", *(at_once(found["at_once"][tool]) for tool in TOOLS)),
        ("findings", *(str(sum(_codes(both, tool).values())) for tool in TOOLS)),
    ]
    lines = sum(each["lines"] for each in both)
    listed = [
        f"- {tool}: "
        + (", ".join(f"{c} {n}" for c, n in _codes(both, tool).most_common()) or "none")
        for tool in TOOLS
    ]
    return "\n".join(
        [
            "# flatout check and torchfix on the same files",
            "",
            f"{len(files)} files drawn at random from those of the speed test, {lines:,} lines in "
            f"those that both finished. A process for each file, the cache empty, at most "
            f"{found['limit_s']} s of CPU time for a file; torchfix {found['torchfix']} with "
            "`--select ALL --jobs 1`. The machine did other work: CPU time counts, not the clock.",
            "",
            *markdown_table(table),
            "",
            "Findings by code:",
            "",
            *listed,
            "",
            "The two look for different things: torchfix for 12 kinds of calls that are outdated, "
            "unsafe or have a better form, flatout for what makes a training slow, large or wrong. "
            "The files are of libraries, not trainings. torchfix takes its time in libcst, which "
            "builds the metadata of every node in Python, and in a second pass over all nodes for "
            "imports.",
            "",
            "```sh",
            "pip install torchfix  # in an environment of its own",
            "python -m benchmarks.peers.torchfix PATH_OF_TORCHFIX FOLDER",
            "```",
            "",
        ]
    )


def at_once(seen: dict[str, Any]) -> str:
    """Return the CPU time of a run over all files, where it ended."""
    return f"{seen['cpu_s']:.1f} s" if seen["ended"] else "did not end"


def _codes(files: Sequence[dict[str, Any]], tool: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in files:
        total.update(each[tool]["found"])
    return total


if __name__ == "__main__":
    main()
