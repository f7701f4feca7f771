"""One training in two ranks: unedited under flatout, edited for Accelerate and for Lightning."""

import difflib
import os
import re
import sys
from pathlib import Path
from statistics import median

import torch

from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.programs import ran
from flatout.records.statistics import compare, gather
from flatout.records.units import format_interval, format_ratio

THEME = "spread_peers"
SCRIPTS = Path(__file__).parent.parent / "scripts" / "spread"
BIN = Path(sys.executable).parent
ROUNDS, SMOKE_ROUNDS = 8, 1
STEPS, SMOKE_STEPS = 400, 40
SMOKE_S = 30.0
LIMIT_S = 300.0
MOST_APART = 5.0
"""Times as far from the weights of one process as those of another one process, whose matrix
products round in another order: how far rounding leads depends on the processor, and AdamW makes
it larger."""
LEAST_ROUNDED = 1e-5
"""Of the weights, relative to the largest, where that order changes nothing."""
OTHER_ORDER = {"MKL_CBWR": "COMPATIBLE"}
"""Lets Intel's library multiply as it does on the oldest of processors."""
ROUNDED = "one process, other rounding"
SPOKEN = re.compile(r"([\d.]+) ms a step")
COMMANDS = {
    "one process": (sys.executable, SCRIPTS / "plain.py"),
    "flatout": (BIN / "flatout", "run", "--ranks", "2", SCRIPTS / "plain.py"),
    "accelerate": (BIN / "torchrun", "--nproc-per-node", "2", SCRIPTS / "with_accelerate.py"),
    "lightning": (sys.executable, SCRIPTS / "with_lightning.py"),
}


def run(bench: Bench) -> Record:
    """Train each way in turns, and compare the weights with those of one process."""
    is_smoke = bench.budget_s < SMOKE_S
    steps, rounds = (SMOKE_STEPS, SMOKE_ROUNDS) if is_smoke else (STEPS, ROUNDS)
    step_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds):
        bench.say(f"round {number + 1} of {rounds}")
        for name in COMMANDS if number % 2 == 0 else reversed(COMMANDS):
            step_s[name].append(trained(name, steps, bench.work))
    trained(ROUNDED, steps, bench.work)
    plain = weights(bench.work / "one process.pt")
    apart = {
        name: float((weights(bench.work / f"{name}.pt") - plain).abs().max() / plain.abs().max())
        for name in (*COMMANDS, ROUNDED)
    }
    rounded = max(LEAST_ROUNDED, apart.pop(ROUNDED))
    pairs = {name: compare(gather(step_s[name], step_s["flatout"])) for name in COMMANDS}
    holds = max(apart.values()) < MOST_APART * rounded and not edits("flatout")
    rows = [
        (
            name,
            str(edits(name)),
            f"{apart[name]:.1e}",
            f"{1e3 * median(step_s[name]):.2f} ms",
            *(
                ("", "")
                if name == "flatout"
                else (format_ratio(pairs[name].ratio), format_interval(*pairs[name].interval))
            ),
        )
        for name in COMMANDS
    ]
    return Record(
        theme=THEME,
        claim="flatout trains an unedited script in two ranks to the weights of one process",
        holds=holds,
        finding=f"0 lines edited against {edits('accelerate')} for Accelerate and "
        f"{edits('lightning')} for Lightning; weights of all within {max(apart.values()):.0e}, "
        f"of one process that rounds in another order {rounded:.0e}",
        table=[
            ("way", "lines edited", "weights apart", "step", "flatout is faster by", "interval"),
            *rows,
        ],
        raw={"step_s": step_s, "apart": apart, "steps": steps},
        notes=(
            "Lines edited: those of the script that are not in the plain one. Weights apart: the "
            "largest difference from one process, over the largest weight.",
            "Two ranks share two cores here, so that none of them is faster than one process need "
            "be; the step is the script's own clock over the last three quarters.",
        ),
    )


def trained(name: str, steps: int, work: Path) -> float:
    """Train one way in a process of its own; return the seconds of a step."""
    command = COMMANDS["one process" if name == ROUNDED else name]
    words = [*map(str, command), "--steps", str(steps), "--save", str(work / f"{name}.pt")]
    environment = {**os.environ, **(OTHER_ORDER if name == ROUNDED else {})}
    done = ran(words, cwd=work, timeout=LIMIT_S, env=environment)
    found = SPOKEN.search(done.stdout)
    if done.returncode or found is None:
        raise TrialFailedError(f"{name}: {done.stderr[-2_000:]}")
    return float(found[1]) / 1e3


def weights(path: Path) -> torch.Tensor:
    """Return all weights that were saved, as one row."""
    saved = torch.load(path, weights_only=True)
    return torch.cat([saved[key].flatten() for key in sorted(saved)])


def edits(name: str) -> int:
    """Return how many lines of a way's script are not in the plain one."""
    plain, edited = (
        path.read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for path in (SCRIPTS / "plain.py", Path(COMMANDS[name][-1]))
    )
    return sum(
        line.startswith("+ ") and line.strip() != "+" for line in difflib.ndiff(plain, edited)
    )
