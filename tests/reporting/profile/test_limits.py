from dataclasses import replace

import pytest

from flatout.records.profile import Ceilings
from flatout.records.readings import Limits
from flatout.reporting.profile.limits import find_least_copy_ms, limits_lines
from tests.rules.rank_facts import rank

LIMITS = Limits(
    flops_per_step=3.1e9,
    gemm_flops_per_s=250e9,
    gemm_dtype="bfloat16",
    copy_bytes_per_s=1e9,
    loader_samples_per_s=377.5,
    least_step_ms=12.4,
)


def text_of(profile, width=1000):
    return "\n".join(limits_lines(profile, width))


def test_is_silent_where_nothing_was_measured(starved):
    assert limits_lines(starved, 80) == []


def test_the_loader_alone_is_held_against_what_the_training_takes(starved):
    text = text_of(replace(starved, samples_per_s=151.0, limits=LIMITS))

    assert "at most 378 samples/s, 2.50x what the training takes now" in text


def test_one_rank_s_loader_is_held_against_one_rank_s_training(starved):
    ranks = (rank(0), rank(1))

    text = text_of(replace(starved, samples_per_s=302.0, limits=LIMITS, ranks=ranks))

    assert "at most 378 samples/s, 2.50x what one of the ranks takes now" in text


def test_the_least_step_names_its_peak_and_the_mfu(starved):
    text = text_of(replace(starved, limits=LIMITS, mfu=12.4 / starved.step_ms.median))

    assert "12.4 ms: 3.10 GFLOP at 250 GFLOP/s, the measured GEMM peak in bfloat16" in text
    assert "MFU 6 %, so at most 17.1x" in text


def test_a_step_without_products_to_speak_of_says_so(starved):
    text = text_of(replace(starved, limits=replace(LIMITS, least_step_ms=0.01)))

    assert "not about matrix products" in text
    assert "so at most" not in text


def test_measured_ceilings_are_told_from_computed_ones(starved):
    measured = replace(starved, ceilings=Ceilings(free_data=2.0, is_measured=True))

    assert "measured     ceilings" in text_of(measured)


def test_what_is_missing_says_why(starved):
    missing = {"flops_per_step": "the counter failed in this script", "unknown": "no word"}

    text = text_of(replace(starved, limits=Limits(missing=missing)))

    assert " ".join(text.split()) == (
        "not known operations of a step: the counter failed in this script"
    )


def test_copies_have_a_least_time_on_a_gpu_only(starved):
    loader = replace(starved.training_loaders[0], batch_bytes=2_000_000)
    fed = replace(starved, loaders=(loader,), batches_per_step=4.0, limits=LIMITS)

    assert find_least_copy_ms(fed, LIMITS) is None
    assert find_least_copy_ms(replace(fed, device_kind="cuda"), LIMITS) == pytest.approx(8.0)


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_wider_than_the_terminal(starved, width):
    measured = Ceilings(free_data=2.0, is_measured=True)

    lines = limits_lines(replace(starved, limits=LIMITS, mfu=0.06, ceilings=measured), width)

    assert max(map(len, lines)) <= width


def test_a_loader_that_is_slower_alone_is_not_called_a_limit(starved):
    text = text_of(replace(starved, samples_per_s=400.0, limits=LIMITS))

    assert "alone 378 samples/s, no faster than the training takes them now (400)" in text
    assert "378 samples/s, 0." not in text


def test_a_step_below_its_least_time_is_not_promised_to_be_slower(starved):
    limits = replace(LIMITS, least_step_ms=2 * starved.step_ms.median)
    text = text_of(replace(starved, limits=limits))

    assert "at most 0.50x" not in text
    assert "faster than that" in text
