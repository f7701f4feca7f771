"""The rules on source: what they find in labelled scripts, and how findings were judged.

A rule's page has an example that is wrong and one that is right. Each is checked in several
spellings that change no meaning. The judgements are of public trainings, read by hand; their code
is not kept here, only the place, the verdict and the reason. What counts is the last draw, from
repositories that no rule was changed for; its findings are judged by code, at most six of each but
twenty of AMP01 and AMP02, so a verdict weighs as much as its code has findings.
"""

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record
from flatout.rules import source

THEME = "check"
ROOT = Path(__file__).parents[2]
JUDGED = ROOT / "benchmarks/judged_findings.json"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_FALSE = 0.1
"""Findings of a wrong kind in a file, of those that are still reported."""
MOST_CPU_S = 40.0
"""For 1,000 files: 20 s on two cores that have nothing else to do."""
PEER = "torchfix on the same files: `torchfix.md`, by `python -m benchmarks.peers.torchfix`."
ABOUT = (b"import torch", b"from torch")


def in_function(text: str) -> str:
    """Return a script whose statements after the imports are in a function that is called."""
    lines = text.splitlines(keepends=True)
    last = max(
        (i for i, line in enumerate(lines) if line.startswith(("import", "from"))), default=-1
    )
    body = "".join(lines[last + 1 :])
    if not body.strip() or "class " in body or "def " in body:
        return text
    head = "".join(lines[: last + 1])
    return f"{head}\n\ndef main():\n{textwrap.indent(body, '    ')}\n\nmain()\n"


def under_alias(text: str) -> str:
    """Return a script that imports torch under another name."""
    lines = [
        line.replace("import torch\n", "import torch as th\n")
        if line.startswith(("import", "from"))
        else re.sub(r"\btorch\.", "th.", line)
        for line in text.splitlines(keepends=True)
    ]
    return "".join(lines) if "import torch\n" in text else text


SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "as written": lambda text: text,
    "tabs and CRLF": lambda text: text.replace("    ", "\t").replace("\n", "\r\n"),
    "in a function": in_function,
    "torch as th": under_alias,
}
"""What changes no meaning, by what it does."""


def run(bench: Bench) -> Record:
    """Check every labelled script, count the judgements, and time the installed files."""
    rules = {rule: labelled(rule) for rule in sorted(source.modules())}
    judged = json.loads(JUDGED.read_text(encoding="utf-8"))
    speed = cpu_seconds(bench.work)
    files = sum(judged["files"].values())
    drawn = [each for each in judged["judged"] if each["sample"] == "last"]
    wrong = sum(each["verdict"] == "false" for each in drawn)
    rate = expected_wrong(drawn, judged["by_code"]["last"]) / judged["files"]["last"]
    found = sum(sum(seen["wrong"].values()) for seen in rules.values())
    spoken = sum(sum(seen["right"].values()) for seen in rules.values())
    labels = len(SPELLINGS) * len(rules)
    return Record(
        theme=THEME,
        claim="every wrong example of a rule is found and no right one, in every spelling; of "
        f"judged findings fewer than {10 * MOST_FALSE:.0f} in 10 public training files is of a "
        f"wrong kind; 1,000 files take less than {MOST_CPU_S:.0f} s of CPU time",
        holds=found == labels
        and spoken == 0
        and rate < MOST_FALSE
        and speed["cpu_s_per_1000"] < MOST_CPU_S,
        finding=f"{found} of {labels} found, {spoken} false in {labels}; "
        f"{wrong} of {len(drawn)} judged of the last draw are wrong, {10 * rate:.2f} in 10 files; "
        f"{speed['cpu_s_per_1000']:.1f} s of CPU time for 1,000 files",
        table=[
            ("rule", "recall", "false in right ones", "judged", "right", "minor", "wrong", "fixed"),
            *(row(rule, seen, judged["judged"]) for rule, seen in rules.items()),
        ],
        raw={"labelled": rules, "speed": speed, **judged},
        notes=(
            f"The judgements are of {len(judged['judged'])} findings in {files} files of "
            f"{len(judged['repositories'])} public repositories at the commits in `result.json`, "
            "each read in its context. Minor: true, and of no consequence. Fixed: wrong, no longer "
            "reported. Rules were corrected after each draw but the last (463 files of 31 "
            "repositories): its wrong findings are reported still.",
            "A rule without judgements had no finding in the samples.",
            f"Timed on {speed['files']} installed files that import torch, load average "
            f"{speed['load']:.1f} on {os.cpu_count()} cores: CPU time counts, not the clock. The "
            f"second run takes {speed['again_cpu_s']:.1f} s of it.",
            PEER,
        ),
    )


def labelled(rule: str) -> dict[str, dict[str, bool]]:
    """Return by label and spelling whether a rule speaks about its page's examples."""
    page = (ROOT / f"docs/rules/{rule}.md").read_text(encoding="utf-8")
    texts = dict(zip(("wrong", "right"), EXAMPLE.findall(page), strict=True))
    code = source.code_of(rule)
    return {
        label: {
            name: any(found.code == code for found in source.check_text(spelled(text))[0])
            for name, spelled in SPELLINGS.items()
        }
        for label, text in texts.items()
    }


def row(
    rule: str, seen: Mapping[str, Mapping[str, bool]], judged: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return a rule's row of the table."""
    mine = [each for each in judged if each["code"] == source.code_of(rule)]
    kept = Counter(each["verdict"] for each in mine if each["still_reported"])
    fixed = sum(each["verdict"] == "false" and not each["still_reported"] for each in mine)
    shown = (len(mine), kept["right"], kept["minor"], kept["false"], fixed)
    return (
        rule,
        f"{sum(seen['wrong'].values())}/{len(SPELLINGS)}",
        f"{sum(seen['right'].values())}/{len(SPELLINGS)}",
        *(str(count) for count in shown),
    )


def installed_files(work: Path) -> list[Path]:
    """Return copies of at most 1,000 installed files that import torch."""
    folder = work / "files"
    folder.mkdir()
    paths: list[Path] = []
    for name in ("accelerate", "lightning", "peft", "torch", "transformers"):
        spec = importlib.util.find_spec(name)
        for path in sorted(Path(spec.origin or "").parent.rglob("*.py")) if spec else ():
            if any(word in path.read_bytes() for word in ABOUT) and len(paths) < 1000:
                paths.append(folder / f"{len(paths)}.py")
                paths[-1].write_bytes(path.read_bytes())
    return paths


def cpu_seconds(work: Path) -> dict[str, float]:
    """Return the CPU time of one check of the installed files that import torch, cache empty."""
    count = len(installed_files(work))
    flatout = [sys.executable, "-m", "flatout", "check"]
    began_s = time.monotonic()
    cpu_s = cpu_of([*flatout, str(work / "files")], work / "cache")
    found = {"files": count, "cpu_s": cpu_s, "wall_s": time.monotonic() - began_s}
    found["again_cpu_s"] = cpu_of([*flatout, str(work / "files")], work / "cache")
    per_1000 = 1000 * cpu_s / max(1, count)
    return {**found, "cpu_s_per_1000": per_1000, "load": os.getloadavg()[0]}


def cpu_of(command: Sequence[str], cache: Path) -> float:
    """Return the CPU time of a command with a cache of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def expected_wrong(drawn: Sequence[Mapping[str, Any]], by_code: Mapping[str, int]) -> float:
    """Return how many of all findings of a draw are wrong, from the verdicts on some of each code.

    >>> judged = [{"code": "DL02", "verdict": "false"}, {"code": "DL02", "verdict": "right"}]
    >>> expected_wrong(judged, {"DL02": 10})
    5.0
    """
    total = 0.0
    for code, count in by_code.items():
        mine = [each["verdict"] == "false" for each in drawn if each["code"] == code]
        total += count * sum(mine) / len(mine)
    return total
