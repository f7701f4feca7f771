"""The verb on real scripts, with made-up peaks: real ones take seconds."""

import sys
from dataclasses import replace

import pytest

from flatout.hardware.machine import read_machine
from flatout.hardware.peaks import Peaks
from flatout.records.errors import UserError
from flatout.records.trial import Workload
from flatout.records.units import format_ratio
from flatout.reporting.roofline import render_roofline
from flatout.workflow import roofline as verb
from flatout.workflow.roofline import roofline
from tests.support.probed import SCRIPTS

PEAKS = Peaks(
    dtype="float32",
    gemm_flops_per_s=1e9,
    memory_bytes_per_s=1e10,
    copy_bytes_per_s=1e10,
    threads=1,
    triad_bytes_per_s=2e10,
)


@pytest.fixture
def machine():
    return read_machine(torch=False)


@pytest.fixture
def made_up_peaks(monkeypatch):
    asked = []

    def read(wanted, _cache, _python):
        asked.append(wanted)
        if wanted.dtype == "bfloat16":
            raise ValueError("no such product")
        return replace(PEAKS, dtype=wanted.dtype)

    monkeypatch.setattr(verb, "read_peaks", read)
    return asked


def workload(tmp_path, script, *arguments):
    return Workload(target=str(script), arguments=arguments, folder=tmp_path, python=sys.executable)


@pytest.mark.slow
def test_a_script_s_products_are_timed_against_the_device(tmp_path, machine, made_up_peaks):
    job = workload(tmp_path, SCRIPTS / "multiplied.py", "plain")

    found = roofline(job, machine=machine, limit_s=120.0)

    assert len(found.products) >= 5
    assert all(product.ms and product.n_timed for product in found.products)
    assert found.step_ms > 0
    assert found.ceilings.memory_bytes_per_s == 2e10
    assert found.ceilings.missing == {"bfloat16": "no such product"}
    plain = found.to_json()
    assert plain["schema"] == "flatout.roofline/1"
    assert (
        plain["products"][0]["reachable_flops_per_s"]
        <= plain["ceilings"]["gemm_flops_per_s"]["float32"]
    )
    shares = [row["step_ms"] for row in plain["products"]]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.slow
def test_what_is_foreseen_for_a_script_s_products_is_measured_beside_it(
    tmp_path, machine, monkeypatch
):
    rates = {"float32": 1e9, "bfloat16": 1e10}
    monkeypatch.setattr(
        verb,
        "read_peaks",
        lambda wanted, *_: replace(PEAKS, dtype=wanted.dtype, gemm_flops_per_s=rates[wanted.dtype]),
    )
    job = workload(tmp_path, SCRIPTS / "multiplied.py", "plain")

    found = roofline(job, machine=machine, limit_s=120.0)

    (advice,) = [each for each in found.advice if each.kind == "precision"]
    assert advice.predicted_ratio > 1.5
    assert advice.measured_ratio > 0
    text = render_roofline(found)
    assert f"{format_ratio(advice.predicted_ratio)} foreseen" in " ".join(text.split())
    assert f"{format_ratio(advice.measured_ratio)} measured alone" in " ".join(text.split())


@pytest.mark.slow
def test_a_compiled_script_is_seen_as_it_is_without(tmp_path, machine, made_up_peaks):
    job = workload(tmp_path, SCRIPTS / "multiplied.py", "compiled")

    found = roofline(job, machine=machine, limit_s=120.0)

    assert found.products
    assert any("is compiled" in note for note in found.notes)


def test_ceilings_depend_on_the_stack(machine, made_up_peaks):
    roofline(machine=machine)

    assert {wanted.torch_version for wanted in made_up_peaks} == {machine.torch_version}
    assert [wanted.dtype for wanted in made_up_peaks] == ["float32", "bfloat16"]


def test_a_device_that_cannot_be_measured_is_a_user_s_error(machine, monkeypatch):
    def refuse(*_):
        raise ValueError("it is broken")

    monkeypatch.setattr(verb, "read_peaks", refuse)

    with pytest.raises(UserError, match="it is broken"):
        roofline(machine=machine)


@pytest.mark.slow
def test_a_script_without_steps_says_why(tmp_path, machine, made_up_peaks):
    script = tmp_path / "idle.py"
    script.write_text("import torch\n")

    with pytest.raises(UserError, match=r"showed no steady step: .*no training step was seen"):
        roofline(workload(tmp_path, script), machine=machine, limit_s=60.0)


def test_a_limit_of_nothing_is_refused(machine):
    with pytest.raises(UserError, match="leaves no time"):
        roofline(machine=machine, limit_s=0.0)
