"""Start-up: the command line answers at once and imports no torch."""

import statistics
import subprocess
import sys
import time

from benchmarks.bench import Bench, Record
from flatout.records.units import format_ms

THEME = "startup"
RUNS = 20
MOST_S = 0.2
HELP = "import sys; from flatout.cli import main; sys.argv = ['flatout', '--help']; main()"
IMPORTED = (
    "import sys; from flatout.cli import call; call(['--help']); sys.exit('torch' in sys.modules)"
)


def run(bench: Bench) -> Record:
    """Time the help and a bare interpreter in turns, and look for torch among the modules."""
    del bench
    command = [sys.executable, "-c", HELP]
    wall_s([sys.executable, "-c", HELP])  # the first run compiles the byte code
    bare, helped = [], []
    for _ in range(RUNS):
        bare.append(wall_s([sys.executable, "-c", "pass"]))
        helped.append(wall_s(command))
    has_torch = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True).returncode
    median_s = statistics.median(helped)
    return Record(
        theme=THEME,
        claim=f"flatout --help takes less than {MOST_S} s and imports no torch",
        holds=median_s < MOST_S and not has_torch,
        finding=f"{format_ms(1e3 * median_s)}, torch {'imported' if has_torch else 'not imported'}",
        table=[
            ("", "median", "slowest", "n"),
            ("bare interpreter", *_cells(bare)),
            ("flatout --help", *_cells(helped)),
        ],
        raw={"bare_s": bare, "help_s": helped, "imports_torch": bool(has_torch)},
    )


def wall_s(command: list[str]) -> float:
    """Return how long a command takes, its process's start included."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def _cells(times_s: list[float]) -> tuple[str, str, str]:
    return (
        format_ms(1e3 * statistics.median(times_s)),
        format_ms(1e3 * max(times_s)),
        str(len(times_s)),
    )
