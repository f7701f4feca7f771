"""The rules on source: what they find in labelled scripts, and how findings were judged.

A rule's page has an example that is wrong and one that is right. Each is checked in several
spellings that change no meaning. The judgements are of public trainings, read by hand; their code
is not kept here, only the place, the verdict and the reason.
"""

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
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
    kept = [each for each in judged["judged"] if each["still_reported"]]
    speed = cpu_seconds(bench.work)
    files = sum(judged["files"].values())
    drawn = [each for each in kept if "random" in each["sample"]]
    wrong = sum(each["verdict"] == "false" for each in drawn)
    reported = sum(count for name, count in judged["findings"].items() if "after" in name)
    rate = wrong / max(1, len(drawn)) * reported / files
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
        f"{wrong} of {len(drawn)} drawn at random are wrong; "
        f"{speed['cpu_s_per_1000']:.1f} s of CPU time for 1,000 files",
        table=[
            ("rule", "recall", "false in right ones", "judged", "right", "minor", "wrong", "fixed"),
            *(row(rule, seen, judged["judged"]) for rule, seen in rules.items()),
        ],
        raw={"labelled": rules, "speed": speed, **judged},
        repeat=f"python -m benchmarks.run {THEME}",
        notes=(
            f"The judgements are of {len(judged['judged'])} findings in {files} files of "
            f"{len(judged['repositories'])} public repositories at the commits in `result.json`, "
            "each read in its context. Minor: true, and of no consequence. Fixed: wrong, no longer "
            "reported; most rules were corrected after the first sample, DL21 after the second.",
            "A rule without judgements had no finding in the samples.",
            f"Timed on {speed['files']} installed files that import torch, load average "
            f"{speed['load']:.1f} on {os.cpu_count()} cores: CPU time counts, not the clock.",
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


def cpu_seconds(work: Path) -> dict[str, float]:
    """Return the CPU time of one check of the installed files that import torch, cache empty."""
    folder = work / "files"
    folder.mkdir()
    count = 0
    for name in ("accelerate", "lightning", "peft", "torch", "transformers"):
        spec = importlib.util.find_spec(name)
        for path in sorted(Path(spec.origin or "").parent.rglob("*.py")) if spec else ():
            if any(word in path.read_bytes() for word in ABOUT) and count < 1000:
                (folder / f"{count}.py").write_bytes(path.read_bytes())
                count += 1
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "flatout", "check", str(folder)],
        env={**os.environ, "XDG_CACHE_HOME": str(work / "cache")},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    per_1000 = 1000 * cpu_s / max(1, count)
    return {"files": count, "cpu_s": cpu_s, "cpu_s_per_1000": per_1000, "load": os.getloadavg()[0]}
