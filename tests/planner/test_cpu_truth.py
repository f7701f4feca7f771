"""The tracer against the truth: torch.profiler's memory events of real runs on the CPU."""

import contextlib
import functools
import importlib.util
import statistics

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flatout.planner.tracing.training_step import TrainingStep
from tests.planner.some_at_once import SOME_AT_ONCE
from tests.support.host_kernels import trace_host
from tests.support.truth_models import MODELS

WORST = 0.005
MEDIAN = 0.001
EXTRAS = {"bert": "transformers", "gpt2": "transformers", "vit": "transformers", "lora": "peft"}


def is_there(name: str) -> bool:
    return name not in EXTRAS or importlib.util.find_spec(EXTRAS[name]) is not None


def run(subject: TrainingStep, steps: int) -> None:
    """Train for real: the loop that a Subject stands for."""
    model = subject.model().train()
    optimizer = subject.optimizer(model)
    dtype = getattr(torch, subject.autocast) if subject.autocast else None
    for _ in range(steps):
        for _ in range(subject.accumulate):
            batch = subject.batch(subject.batch_size, torch.device("cpu"))
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = subject.loss(model, batch)
            if subject.accumulate > 1:
                loss = loss / subject.accumulate
            loss.backward()
            del loss, batch
        if subject.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), subject.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measured_peak(subject: TrainingStep, steps: int = 2) -> int:
    """Return the most bytes that torch's allocator had given out at any moment of a real run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(subject, steps)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@functools.cache
def error_of(name: str) -> float:
    subject = MODELS[name]
    predicted = max(trace_host(subject).alive())
    torch.manual_seed(0)
    measured = measured_peak(subject)
    return predicted / measured - 1


@contextlib.contextmanager
def _quiet_peft():
    """Peft looks for packages that may be there and broken; that is theirs."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_predicts_the_peak_of_a_real_run(name: str) -> None:
    if not is_there(name):
        pytest.skip(f"needs {EXTRAS[name]}")

    with _quiet_peft():
        error = error_of(name)

    assert abs(error) <= WORST


@pytest.mark.slow
def test_predicts_most_peaks_to_a_thousandth() -> None:
    with _quiet_peft():
        errors = [abs(error_of(name)) for name in MODELS if is_there(name)]

    assert len(errors) >= 12
    assert statistics.median(errors) <= MEDIAN


def test_a_wrong_prediction_would_be_seen() -> None:
    subject = MODELS["gpt"]

    half = max(trace_host(subject, batch=subject.batch_size // 2).alive())

    assert abs(half / measured_peak(subject) - 1) > WORST
