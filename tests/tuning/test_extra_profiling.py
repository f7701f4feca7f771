"""What a tuning looks at once beside the timed steps, and how long that holds."""

import sys
from dataclasses import dataclass, field, replace

import pytest

from flatout.analysis import profile as summary
from flatout.records.journey import Journey
from flatout.records.json_records import from_plain
from flatout.records.memory import MemoryStory
from flatout.records.readings import TraceSummary
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Applied, Outcome, Trial, Workload
from flatout.records.trial_result import DeviceSeen
from flatout.techniques.data.worker_threads import WorkerThreads
from flatout.tuning import trials
from flatout.tuning.extra_profiling import MOST_SHARE, Looks, look_closer, wanted_probes
from flatout.tuning.ranking import Search
from flatout.tuning.trials import run_trial
from flatout.workflow.tune import TuneOptions, tune
from tests.support.results import kernel, traced
from tests.techniques.facts import gpu, machine, model, profile, starved
from tests.tuning.test_trial_runner import lab_of

STORY = MemoryStory(peak_bytes=0, peak_phase="", by_phase={}, by_module={}, fragmentation_share=0.3)
SEEN = Looks(
    journey=Journey(legs=()),
    memory=STORY,
    operators=TraceSummary(steps=2, step_ms=100.0, product_share=0.9),
)


def search(*only, ceiling=Numerics.PRECISION, **on):
    return Search(machine=machine(**on), ceiling=ceiling, only=only)


def test_what_was_seen_is_part_of_each_later_profile_and_of_its_regime():
    found = SEEN.added_to(profile(kind="cuda"), ("fused_optimizer", "pinned_memory"))

    assert found.memory is STORY
    assert found.regime.shares["gemm"] == pytest.approx(0.9)


def test_a_profile_with_kernels_of_its_own_keeps_them():
    own = TraceSummary(steps=3, step_ms=100.0, product_share=0.1)

    assert SEEN.added_to(profile(kind="cuda", trace=own), ()).trace is own


@pytest.mark.parametrize(
    ("technique", "lost"),
    [("empty_cache_steps", "memory"), ("bf16_autocast", "trace"), ("loader_workers", "journey")],
)
def test_what_a_technique_changes_is_not_taken_from_the_unchanged_script(technique, lost):
    found = SEEN.added_to(profile(kind="cuda"), (technique,))

    seen = {"journey", "memory", "trace"}
    assert {name for name in seen if getattr(found, name)} == seen - {lost}


def test_what_the_script_needs_to_run_was_looked_at_with_it():
    floor = ("expandable_segments",)

    assert SEEN.added_to(profile(kind="cuda"), floor, floor).memory is STORY


def test_only_probes_that_a_technique_needs_are_asked_for():
    compilable = profile(models=(model(),))

    assert set(wanted_probes(search(), profile(kind="cuda"))) == {"memory"}
    assert wanted_probes(search("bf16_autocast"), profile(kind="cuda")) == {}
    assert set(wanted_probes(search(), compilable)) == {"operator_times"}
    assert wanted_probes(search(ceiling=Numerics.EXACT), compilable) == {}
    assert wanted_probes(search(), profile(models=(model(is_compiled=True),))) == {}
    assert set(wanted_probes(search("worker_threads"), starved())) == {"journey"}
    assert wanted_probes(search("worker_threads"), starved(wait_ms=1.0)) == {}


@dataclass
class Counting:
    """Counts its trials; what they show is not looked at."""

    asked: list = field(default_factory=list)

    def __call__(self, workload, recipe, machine, options):
        self.asked.append(options)
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no")


@pytest.mark.parametrize(("wall_s", "runs"), [(4.9, 1), (5.1, 0)])
def test_the_look_takes_a_small_part_of_the_time_or_is_left_out(tmp_path, wall_s, runs):
    runner = Counting()
    lab = lab_of(tmp_path, runner)
    steps = profile(kind="cuda")
    first = Trial(recipe=Recipe(), outcome=Outcome.OK, profile=steps, wall_s=wall_s)

    found = lab.drive(look_closer(lab.history, search(), Recipe(), first, left_s=5.0 / MOST_SHARE))

    assert found == Looks()  # a run that fails shows nothing
    assert len(runner.asked) == runs


@dataclass
class Pretended:
    """Runs the real script and its real probes on the CPU, and says that it was a GPU."""

    fragmentation: float | None = None
    retries: int = 0
    held_gib: int = 60
    """Of 80."""
    asked: list[str] = field(default_factory=list)
    known: dict = field(default_factory=dict)

    def __call__(self, workload, recipe, machine, options):
        if recipe.choices:  # what is not on a device refuses anyway
            self.asked.append(recipe.label)
            missed = Applied(technique=recipe.names[-1], status="not_applicable", why="no device")
            return Trial(recipe=recipe, outcome=Outcome.REFUSED, applied=(missed,))
        key = tuple(options.probes)
        if key not in self.known:
            self.known[key] = run_trial(workload, recipe, machine, options)
            assert self.known[key].outcome is Outcome.OK, self.known[key].traceback
        trial = self.known[key]
        return replace(trial, details=trial.details | {"probes": self.seen(trial)})

    def seen(self, trial):
        """Return what the real probes saw, with what only a device and its allocator know."""
        probes = dict(trial.details["probes"])
        if "memory" in probes:
            probes["memory"] |= {
                "fragmentation_share": self.fragmentation,
                "allocation_retries": self.retries,
            }
        return probes


READS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = 0.0
for step in range(100_000):
    loss = model(torch.randn(512, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
"""


def tuned(pretended, technique, folder, monkeypatch):
    """Return the labels that a tuning tried, with profiles from a real process's own results."""
    busy = [kernel("gemm", at, 5_000.0, launched=at - 1) for at in range(0, 30_000, 10_000)]
    facts = traced(*busy, segments=3, lasted_us=30_000.0)
    held = pretended.held_gib * 2**30
    peak = {"allocated": held, "reserved": held, "device": held}
    device = {"kind": "cuda", "name": "a GPU", "peak": peak} | facts

    def on_device(result, machine):
        seen = from_plain(DeviceSeen, device)
        return summary.summarise(replace(result, device=seen), machine)

    monkeypatch.setattr(trials, "summarise", on_device)
    (folder / "train.py").write_text(READS)
    workload = Workload(target="train.py", folder=folder, python=sys.executable)
    options = TuneOptions(
        out=folder / "out", budget_s=600.0, only=(technique,), accepts_load=True, runner=pretended
    )
    tune(workload, options, lambda _: None, machine(device=gpu()))
    return pretended.asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "device"),
    [
        ("empty_cache_steps", {"fragmentation": 0.3, "held_gib": 70}),
        ("empty_cache_steps", {"fragmentation": 0.05, "retries": 2}),
        ("expandable_segments", {"retries": 1}),
    ],
)
def test_techniques_for_a_device_are_tried_where_the_look_shows_what_they_need(
    technique, device, tmp_path, monkeypatch
):
    assert tuned(Pretended(**device), technique, tmp_path, monkeypatch)[0].startswith(technique)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "device"),
    [
        ("empty_cache_steps", {"fragmentation": 0.05, "held_gib": 70}),
        ("empty_cache_steps", {"fragmentation": 0.3, "held_gib": 40}),
        ("expandable_segments", {}),
    ],
)
def test_they_are_not_tried_where_it_does_not(technique, device, tmp_path, monkeypatch):
    assert tuned(Pretended(**device), technique, tmp_path, monkeypatch) == []


WAITS = """
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        time.sleep(0.01)
        return torch.randn(8)


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Samples(), batch_size=2, num_workers=1):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_techniques_that_read_the_journey_know_it_in_a_tuning(tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    lab = lab_of(tmp_path)
    first = lab.time(Recipe())
    assert first.outcome is Outcome.OK, first.traceback

    looks = lab.drive(
        look_closer(lab.history, search("worker_threads"), Recipe(), first, left_s=1e6)
    )

    workers = [x for x in looks.journey.workers if x.number >= 0]
    assert len(workers) == 1
    assert {leg.where for leg in looks.journey.legs} == {"training", "workers"}
    # What threads of a library would show: the worker sleeps here.
    threads = tuple(replace(x, user_share=2.0 * x.busy_share) for x in workers)
    spinning = replace(looks, journey=replace(looks.journey, workers=threads))
    assert WorkerThreads.candidates(looks.added_to(first.profile, ()), machine()) == ()
    assert WorkerThreads.candidates(spinning.added_to(first.profile, ()), machine()) != ()


@pytest.mark.slow
@pytest.mark.measures
def test_a_cpu_whose_time_goes_into_products_is_promised_little_by_the_compiler(tmp_path):
    script = READS.replace("64, 64", "1024, 1024").replace("512, 64", "512, 1024")
    (tmp_path / "train.py").write_text(script.replace("Linear(64, 1)", "Linear(1024, 1)"))
    lab = lab_of(tmp_path)
    first = lab.time(Recipe())
    assert first.outcome is Outcome.OK, first.traceback

    looks = lab.drive(look_closer(lab.history, search(), Recipe(), first, left_s=1e6))

    assert looks.operators.product_share > 0.5
    whole = looks.added_to(first.profile, ())
    assert whole.regime.shares["gemm"] > 0.5 * whole.share("forward", "backward")
    assert whole.trace is looks.operators
