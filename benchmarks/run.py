"""Measure what flatout claims: `python -m benchmarks.run [SUITE ...]`, `make bench`.

Each suite leaves a folder under `benchmarks/records/`. The exit code is 1 when a claim does not
hold; its record is written all the same.
"""

import argparse
import datetime
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.record import RECORDS, write_record
from flatout.hardware.machine import read_machine
from flatout.records.errors import UserError
from flatout.records.machine import Machine
from flatout.tuning.experiments import MachineBusyError

SUITES = (
    "startup",
    "check",
    "aa",
    "turns",
    "overhead",
    "overhead_fast",
    "slow_compute",
    "ladder",
    "search",
    "ordinary",
    "whole_training",
    "levers",
    "levers_text",
    "levers_storage",
    "starved_images",
    "already_tuned",
    "ceilings",
    "tiling",
    "pack",
    "slow_storage",
    "loader_peers",
    "planner",
    "loader_settings",
    "input_pipeline",
    "fed",
    "parallel_cost",
    "plan_ranks",
    "spread_peers",
)


def main(arguments: Sequence[str]) -> int:
    """Run the chosen suites one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--budget-s", type=float, default=600.0, help="time for each tuning")
    parser.add_argument("--records", type=Path, default=RECORDS, help="where the records go")
    parser.add_argument("--only", default="", help="workloads of a suite of several: a,b")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.suites) - set(SUITES))
    if unknown:
        parser.error(f"there is no suite {', '.join(unknown)}; suites are {', '.join(SUITES)}")
    machine = read_machine(torch=False)
    held = []
    for name in args.suites or SUITES:
        suite = importlib.import_module(f"benchmarks.suites.{name}").run
        only = tuple(filter(None, args.only.split(",")))
        held.append(run_suite(suite, machine, budget_s=args.budget_s, root=args.records, only=only))
        # After each suite: a run that is cut short leaves no record that the page does not show.
        if args.records == RECORDS:
            table.main()
    return 0 if all(held) else 1


def run_suite(
    suite: Callable[[Bench], Record],
    machine: Machine,
    *,
    budget_s: float,
    root: Path,
    only: tuple[str, ...] = (),
) -> bool:
    """Run one suite, write its record, and return whether its claim holds."""
    name = suite.__module__.rpartition(".")[2]
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    started = time.monotonic()
    say(f"{name}: started")
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as work:
        bench = Bench(
            machine=machine,
            work=Path(work).resolve(),
            budget_s=budget_s,
            only=only,
            parts=root / f"{name}_parts",
            say=say,
        )
        try:
            record = suite(bench)
        except (MachineBusyError, TrialFailedError, UserError) as error:
            say(f"{name}: nothing measured: {error or 'other work keeps the machine busy'}")
            return False
    verdict = "holds" if record.holds else "DOES NOT HOLD"
    say(f"{name}: {record.claim}: {verdict} ({record.finding})")
    say(f"{name}: took {time.monotonic() - started:.0f} s")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    folder = write_record(record, machine, date=date, log="\n".join(lines) + "\n", root=root)
    print(f"{name}: {folder}", flush=True)
    return record.holds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
