"""Single techniques, as in `levers`, on large photographs and on samples that are not cached."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.bench import Bench, Record, trials_in
from benchmarks.suites.levers import Subject, Techniques, measured, record_of
from flatout.data.packed_store import evict
from flatout.workflow.demo import make_job

THEME = "levers_storage"
ROUNDS = 3
PHOTOGRAPHS, SAMPLES = (
    Path(__file__).parent.parent / "scripts" / f"naive_{name}.py"
    for name in ("photographs", "samples")
)
LARGE = (1600, 1200)
LARGE_COUNT = 120
NOISE = 6.0
"""Standard deviation of the noise on large photographs: smooth ones would be decoded too fast."""
COUNT, SAMPLE_BYTES = 8192, 100_000
"""Two windows of the block order's least; as large as photographs."""
CLASSES = 10
ON_LARGE: Techniques = {
    "region_decode": {},
    "fast_resize": {},
    "fast_decode": {},
    "scaled_decode": {},
}
ON_FILES: Techniques = {"read_ahead": {}, "block_order": {}}


def run(bench: Bench, rounds: int = ROUNDS) -> Record:
    """Run every arm of every script, round by round."""
    found = [measured(subject, bench, rounds) for subject in subjects(bench)]
    return record_of(THEME, found, trials_in(bench.work))


def subjects(bench: Bench) -> list[Subject]:
    """Make the data and return the scripts, each with the techniques that have something to do."""
    large = make_large(bench.work)
    samples, store = make_samples(bench.work)
    return [
        Subject(
            name=f"photographs of {LARGE[0]} x {LARGE[1]}",
            workload=bench.workload(PHOTOGRAPHS, "--data", str(large)),
            levers=ON_LARGE,
        ),
        Subject(
            name="files that are not cached, 1 worker",
            workload=bench.workload(SAMPLES, "--data", str(samples)),
            levers=ON_FILES,
        ),
        Subject(
            name="a store that is not cached, 1 worker",
            workload=bench.workload(SAMPLES, "--store", str(store)),
            levers=ON_FILES,
        ),
    ]


def make_large(work: Path) -> Path:
    """Make large photographs from those of the demo's job; return their folder."""
    job = make_job(work)
    draw = np.random.default_rng(0)
    folder = work / "large"
    for path in sorted((job.folder / "photographs").glob("*/*.jpg"))[:LARGE_COUNT]:
        image = Image.open(path).convert("RGB").resize(LARGE, Image.Resampling.BICUBIC)
        noise = draw.normal(0, NOISE, (*LARGE[::-1], 1)).astype(np.float32)
        pixels = (np.asarray(image, np.float32) + noise).clip(0, 255).astype(np.uint8)
        target = folder / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target, quality=90)
    return folder


def make_samples(work: Path) -> tuple[Path, Path]:
    """Make samples of noise as files, and the same in a packed store; return both folders.

    Files are written class by class, as those of most folders are.
    """
    draw = np.random.default_rng(0)
    files, store = work / "samples", work / "samples.packed"
    whole = draw.integers(0, 256, (COUNT, SAMPLE_BYTES), dtype=np.uint8)
    for number in sorted(range(COUNT), key=lambda number: number % CLASSES):
        folder = files / f"{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{number:05d}.npy", whole[number])
    np.savez(work / "samples.npz", x=whole, label=np.arange(COUNT) % CLASSES)
    words = ["pack", str(work / "samples.npz"), str(store)]
    subprocess.run([sys.executable, "-m", "flatout", *words], check=True, capture_output=True)
    (work / "samples.npz").unlink()
    for path in (*files.rglob("*.npy"), *store.iterdir()):
        evict(path)  # written first: only clean pages can be forgotten
    return files, store
