from dataclasses import replace

import pytest

from flatout.records.readings import TraceSummary
from flatout.rules.device.tf32_off import check
from tests.techniques.facts import gpu, machine, model, profile

AMPERE = machine(device=gpu((8, 0)))


def known(kind="cuda", precision="highest", **changes):
    facts = model(**{"dtypes": ("float32",)} | changes)
    return profile(kind=kind, models=(facts,), environment={"fp32_matmul": precision})


def test_fp32_products_on_a_device_with_tf32_are_found():
    finding = check(known(), AMPERE)

    assert "may not use TF32" in finding.because
    assert "--only tf32" in finding.next
    assert finding.is_bound


def traced(on_tensor_cores):
    trace = TraceSummary(
        steps=3, step_ms=100.0, product_share=0.8, tensor_core_share=on_tensor_cores
    )
    return replace(known(), trace=trace, device_busy_share=0.5)


def test_kernels_that_multiply_in_full_fp32_are_what_counts():
    finding = check(traced(0.1), AMPERE)

    assert finding.share == pytest.approx(0.35)
    assert not finding.is_bound


def test_it_is_silent_where_the_products_run_on_tensor_cores_already():
    # As cuDNN's convolutions do: torch lets them use TF32 unless told otherwise.
    assert check(traced(0.75), AMPERE) is None


@pytest.mark.parametrize(
    ("silent", "where"),
    [
        (known(precision="high"), AMPERE),
        (known(precision=""), AMPERE),
        (known(used_autocast=True), AMPERE),
        (known(dtypes=("bfloat16",)), AMPERE),
        (known(), machine(device=gpu((7, 5)))),
        (known(kind="cpu"), machine()),
    ],
    ids=["allowed", "not known", "autocast", "bf16", "Turing", "CPU"],
)
def test_it_is_silent_where_it_is_on_or_would_do_nothing(silent, where):
    assert check(silent, where) is None
