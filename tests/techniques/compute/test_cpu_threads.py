import os

import pytest

from flatout.techniques.compute.cpu_threads import CpuThreads
from tests.support.programs import python
from tests.techniques.facts import loader, machine, profile

PROMISE = ("naive_gpt.py", {"threads": 1})


def threads_of(candidates):
    return [candidate.threads for candidate in candidates]


def test_a_process_starts_with_the_threads_and_torch_computes_with_them():
    technique = CpuThreads(threads=1)
    code = (
        "import os, torch; from flatout.techniques.compute.cpu_threads import CpuThreads\n"
        "CpuThreads(threads=1).start(); print(torch.get_num_threads(),"
        "os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    )

    done = python(["-c", code], env=dict(technique.environment(os.environ)), check=True)

    assert done.stdout.split() == ["1", "1", "1"]


def test_idle_cores_are_offered():
    facts = profile(cpu_threads=1)

    (found,) = CpuThreads.candidates(facts, machine(usable_cores=2))

    assert found.threads == 2
    assert found.predict(facts, machine(usable_cores=2)).step_ms == pytest.approx(-50.0)


def test_threads_that_wait_for_cores_are_offered_fewer():
    facts = profile(cpu_threads=16, delay_share=4.0)

    (found,) = CpuThreads.candidates(facts, machine())

    assert found.threads == 8
    assert found.predict(facts, machine()).step_ms == pytest.approx(-25.0)


def test_fewer_threads_that_wait_for_no_core_are_a_loss():
    facts = profile(cpu_threads=2, delay_share=0.01)

    lost_ms = CpuThreads(threads=1).predict(facts, machine(usable_cores=2)).step_ms

    assert lost_ms == pytest.approx(
        facts.step_ms.median * facts.share("forward", "backward", "optimizer")
    )


def test_loader_workers_that_wait_for_cores_are_offered_some():
    busy = (loader(effective_workers=1),)
    facts = profile(cpu_threads=2, delay_share=0.6, loaders=busy)

    assert threads_of(CpuThreads.candidates(facts, machine(usable_cores=2))) == [1]


@pytest.mark.parametrize(
    "facts",
    [
        profile(cpu_threads=8, delay_share=0.6),
        profile(cpu_threads=16),
        profile(cpu_threads=0),
        profile(kind="cuda", cpu_threads=1),
    ],
)
def test_it_is_not_offered_where_nothing_speaks_for_it(facts):
    assert not CpuThreads.candidates(facts, machine())
