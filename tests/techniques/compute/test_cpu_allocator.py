import os
import platform

import pytest

from flatout.hardware.accelerator import find_tcmalloc
from flatout.records.errors import NotApplicable
from flatout.techniques.compute.cpu_allocator import GLIBC_VARIABLES, CpuAllocator
from tests.support.programs import python
from tests.techniques.facts import gpu, machine, profile

PROMISE = ("naive_gpt.py", {"library": "glibc"})

ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="looks at glibc")
CHURN = """
import resource, sys, torch
from flatout.techniques.compute.cpu_allocator import CpuAllocator
if len(sys.argv) > 1:
    CpuAllocator(library=sys.argv[1]).start()
torch.set_num_threads(2)
def steps(n):
    return sum(torch.ones(10_000_000).mul(2).sum().item() for _ in range(n))
total = steps(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
total += steps(20)
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Allocates twice 40 MB a step: above 32 MiB glibc maps and unmaps whatever it has learned."""


def run(*library, environment):
    """Return the sum of all steps and the page faults of the last twenty."""
    done = python(["-c", CHURN, *library], env=dict(environment), check=True)
    total, faults = done.stdout.split()
    return float(total), int(faults)


def plain_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "LD_PRELOAD"))}


@ON_GLIBC
def test_the_glibc_settings_end_the_page_faults_and_change_no_number():
    plain = plain_environment()
    changed = CpuAllocator(library="glibc").environment(plain)

    expected, faults = run(environment=plain)
    total, faults_left = run("glibc", environment=changed)

    assert total == expected
    assert faults_left < faults / 2


@pytest.mark.skipif(find_tcmalloc() is None, reason="tcmalloc is not installed")
def test_tcmalloc_is_preloaded_where_it_is_installed():
    changed = CpuAllocator(library="tcmalloc").environment(plain_environment())

    total, _faults = run("tcmalloc", environment=changed)

    assert total == 40 * 8_000_000


@ON_GLIBC
def test_a_process_that_started_without_says_so(monkeypatch):
    for name in GLIBC_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(NotApplicable, match="started without MALLOC_MMAP_MAX_"):
        CpuAllocator(library="glibc").start()
    with pytest.raises(NotApplicable, match="not preloaded; install it"):
        CpuAllocator(library="tcmalloc").start()


def test_page_faults_decide_what_is_predicted():
    facts = profile(minor_faults_per_step=40_000.0)

    found = CpuAllocator.candidates(facts, machine(tcmalloc_path="/usr/lib/libtcmalloc.so"))

    effects = {one.library: one.predict(facts, machine()).step_ms for one in found}
    assert effects["tcmalloc"] == pytest.approx(-18.0)
    assert set(effects) - {"tcmalloc"} == ({"glibc"} if platform.libc_ver()[0] else set())


@pytest.mark.parametrize(
    "facts",
    [profile(), profile(kind="cuda", minor_faults_per_step=40_000.0)],
)
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert CpuAllocator.candidates(facts, machine(device=gpu())) == ()
