import subprocess
import sys

import pytest
from flatout.techniques.compute.flush_denormals import (
    FlushDenormals,
    flush_denormals,
    is_flushing,
)

from flatout.records.errors import NotApplicable
from tests.techniques.facts import gpu, machine, model, profile

PROMISE = ("naive_gpt.py", {})

THREADS = """
import torch
from flatout.techniques.compute.flush_denormals import FlushDenormals
torch.set_num_threads(2)
if {is_on}:
    FlushDenormals().bind().start()
small = torch.full((4_000_000,), 2.0**-126)
print(int((small * 0.5 == 0).sum()))
"""


@pytest.fixture(autouse=True)
def thread_as_it_was():
    yield
    flush_denormals(is_on=False)


def test_small_numbers_become_zero_and_stay_what_they_are_afterwards():
    technique = FlushDenormals().bind()

    technique.start()
    while_on = is_flushing()
    technique.end()

    assert while_on
    assert not is_flushing()


@pytest.mark.parametrize(("is_on", "zeros"), [(True, 4_000_000), (False, 0)])
def test_all_threads_of_an_operation_do_the_same(is_on, zeros):
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(is_on=is_on)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert int(done.stdout) == zeros


def test_a_process_that_flushes_already_is_left_alone():
    flush_denormals()

    with pytest.raises(NotApplicable, match="already"):
        FlushDenormals().bind().start()


def test_a_cpu_that_cannot_says_so(monkeypatch):
    monkeypatch.setattr("torch.set_flush_denormal", lambda _is_on: False)

    with pytest.raises(NotApplicable, match="this CPU cannot"):
        FlushDenormals().bind().start()


def test_it_is_offered_to_fp32_models_on_the_cpu_with_little_hope():
    facts = profile(models=(model(),))

    (found,) = FlushDenormals.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-100 * (1 - 1 / 1.02))


@pytest.mark.parametrize(
    "facts",
    [
        profile(),
        profile(models=(model(dtypes=("bfloat16",)),)),
        profile(models=(model(used_autocast=True),)),
        profile(kind="cuda", models=(model(),)),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert FlushDenormals.candidates(facts, machine(device=gpu())) == ()
