"""The counters of a device that is not here, laid on the window of a trial."""

import json
from types import SimpleNamespace

import pytest

from flatout.hardware.counters import CounterSample, CounterSampler, Sources
from flatout.records.json_records import from_plain
from flatout.records.phase_clock import NAMES
from flatout.records.profile import profile_from_json
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial
from flatout.records.trial_result import TrialResult
from flatout.tuning.trials import with_counters
from tests.paths import ROOT
from tests.support.trial_runs import machine

DATA = ROOT / "tests/reporting/data"
STEPS = 20
STEP_S = 0.1


def result_of(kind):
    """Return what a training process writes after steps of one length."""
    seconds = [0.0] * len(NAMES)
    seconds[NAMES.index("forward")] = STEP_S
    counts = {"batches": 1, "samples": 1, "backwards": 1}
    rows = [
        {"who": 0, "seconds": seconds, "end": 100 + STEP_S * (i + 1), "losses": [1.0]}
        | {"evals": 0, "loader_starts": 0, "communication": []}
        | counts
        for i in range(STEPS)
    ]
    device = {"kind": kind, "uuid": "5a1f"}
    return from_plain(TrialResult, {"segments": rows, "device": device})


@pytest.fixture
def counters():
    """A sampler that saw an idle device before the steps and a hot one during them."""
    sampler = CounterSampler(Sources(found=(SimpleNamespace(uuid="GPU-5a1f"),)))
    sampler.pids_before = (frozenset({99}),)
    sampler.own_pids = {7}
    hot = frozenset({"hardware thermal slowdown"})
    sampler.samples[0].append(CounterSample(at_s=90.0, values={"util_share": 0.0}))
    sampler.samples[0].extend(
        CounterSample(
            at_s=100 + at, values={"util_share": 0.9}, throttle=hot, pids=frozenset({7, 99})
        )
        for at in (0.5, 1.0, 1.5)
    )
    return sampler


@pytest.fixture
def trial():
    stored = profile_from_json(json.loads((DATA / "profile_starved.json").read_text()))
    return Trial(recipe=Recipe(), outcome=Outcome.OK, profile=stored, details={"load": {}})


def test_a_trial_on_a_gpu_carries_its_counters_and_why_it_is_invalid(trial, counters):
    profile = with_counters(trial, [result_of("cuda")], counters, machine()).profile

    assert (profile.gpu_util_share, profile.gpu.samples) == (pytest.approx(0.9), 3)
    assert profile.invalid == (
        "the GPU lowered its clocks in 100 % of the samples: hardware thermal slowdown",
        "another process computes on the same GPU",
    )
    assert profile_from_json(json.loads(json.dumps(profile.to_json()))).gpu == profile.gpu


def test_a_trial_on_the_cpu_has_no_counters_of_a_gpu(trial, counters):
    profile = with_counters(trial, [result_of("cpu")], counters, machine()).profile

    assert (profile.gpu, profile.gpu_util_share, profile.invalid) == (None, None, ())
