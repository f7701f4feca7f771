"""Overhead on short steps: what listening and the timed pass's probes add where it shows most."""

from pathlib import Path

from benchmarks.bench import Bench, Record
from benchmarks.suites.overhead import Job, record_of

THEME = "overhead_fast"
SCRIPT = Path(__file__).parents[1] / "scripts" / "steps.py"
JOBS = (
    Job(
        name="20 ms step",
        target=SCRIPT,
        arguments=("--width", "1024", "--layers", "5", "--batch-size", "96", "--steps", "1400"),
        block=10,
        most_share=0.01,
        processes=16,
    ),
    Job(
        name="2 ms step",
        target=SCRIPT,
        arguments=("--width", "384", "--layers", "4", "--batch-size", "80", "--steps", "4000"),
        block=30,
        most_share=0.03,
        processes=8,
    ),
)


def run(bench: Bench) -> Record:
    """Train both jobs in both states and compare the steps."""
    return record_of(bench, THEME, JOBS)
