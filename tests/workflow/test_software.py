import sysconfig
from pathlib import Path

import pytest

from flatout.records.machine import Device
from flatout.workflow.doctor import allocator, compiler, variables, versions
from tests.techniques.facts import machine as a_machine


def machine(*, torch_version="2.13.0", kind="cpu", tcmalloc=None, **facts):
    return a_machine(
        device=Device(kind=kind, name="A", memory_bytes=1),
        torch_version=torch_version,
        tcmalloc_path=tcmalloc,
        facts={"python": "3.11.7"} | facts,
    )


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.9.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0a1", "ok"), ("2.8.1", "bad"), ("", "bad")],
)
def test_torch_must_be_there_and_not_too_old(version, status):
    assert versions(machine(torch_version=version)).status == status


def test_a_missing_compiler_is_reported():
    check = compiler(machine(compiler=None))

    assert check.status == "warn"
    assert "g++" in check.next


def test_a_compiler_needs_the_headers_of_this_python():
    headers = Path(sysconfig.get_path("include")) / "Python.h"

    check = compiler(machine(compiler="/usr/bin/g++"))

    assert (check.status == "ok") == headers.is_file()


def test_tcmalloc_is_missed_on_the_cpu_only():
    assert allocator(machine()).status == "warn"
    assert allocator(machine(tcmalloc="/usr/lib/libtcmalloc.so.4")).status == "ok"
    assert allocator(machine(kind="cuda")) is None


def test_a_variable_that_slows_training_down_is_named():
    check = variables(machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}))

    assert check.status == "warn"
    assert check.next == "unset CUDA_LAUNCH_BLOCKING"


@pytest.mark.parametrize("found", [{}, {"CUDA_LAUNCH_BLOCKING": "0"}])
def test_a_calm_environment_is_not_mentioned(found):
    assert variables(machine(variables=found)) is None
