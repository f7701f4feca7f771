"""Techniques on their own, as in `techniques`, on language models and texts of many lengths."""

from pathlib import Path

from benchmarks.bench import Bench, Record, trials_in
from benchmarks.suites.levers import Subject, Techniques, measured, record_of

THEME = "levers_text"
ROUNDS = 3
TEXTS, LANGUAGE = (
    Path(__file__).parent.parent / "scripts" / f"naive_{name}.py" for name in ("texts", "language")
)
NARROW = ("--width", "16", "--batch-size", "64")
SHORT_EPOCHS = ("--workers", "2", "--texts", "200", "--pad", "longest")
ON_LANGUAGE: Techniques = {
    "chunked_cross_entropy": {},
    "pad_vocabulary": {},
    "microbatching": {"chunks": 2},
    "lora": {},
    "fp16_autocast": {},
    "pure_bf16": {},
}
ON_EXPERTS: Techniques = {"grouped_experts": {}}
ON_FIXED: Techniques = {
    "dynamic_padding": {},
    "sequence_packing": {},
}
ON_LONGEST: Techniques = {"length_buckets": {}}
ON_NARROW: Techniques = {"ram_cache": {}}
ON_SHORT_EPOCHS: Techniques = {
    "persistent_workers": {},
    "worker_threads": {},
}


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Run every arm of every script, round by round."""
    found = [measured(subject, bench, rounds) for subject in subjects(bench)]
    return record_of(THEME, found, trials_in(bench.work))


def subjects(bench: Bench) -> list[Subject]:
    """Return the scripts, each with the techniques that have something to do there."""
    return [
        Subject(name="language", workload=bench.workload(LANGUAGE), levers=ON_LANGUAGE),
        Subject(
            name="language, 8 experts",
            workload=bench.workload(LANGUAGE, "--experts", "8", "--vocabulary", "2000"),
            levers=ON_EXPERTS,
        ),
        Subject(name="texts, fixed width", workload=bench.workload(TEXTS), levers=ON_FIXED),
        Subject(
            name="texts, to the longest",
            workload=bench.workload(TEXTS, "--pad", "longest"),
            levers=ON_LONGEST,
        ),
        Subject(
            name="texts, narrow model",
            workload=bench.workload(TEXTS, "--pad", "longest", *NARROW),
            levers=ON_NARROW,
        ),
        Subject(
            name="texts, 2 workers, epochs of 25 steps",
            workload=bench.workload(TEXTS, *SHORT_EPOCHS),
            levers=ON_SHORT_EPOCHS,
        ),
    ]
