"""What bounds the step, and what a technique could give at most."""

from dataclasses import replace

import pytest

from flatout.analysis.regime import (
    COMPUTE_CAUSES,
    addressable_ms,
    best_case,
    is_hopeless,
    is_product,
    regime_of,
    with_regime,
)
from flatout.records.readings import (
    IdleSplit,
    Limits,
    RankFacts,
    SyncPoint,
    TraceSummary,
)
from tests.techniques.facts import profile

RESOLUTION = 1.02


def trace(*, idle=0.0, products=0.0, rest=0.0):
    return TraceSummary(
        steps=3,
        step_ms=100.0,
        idle=IdleSplit(host_wait_share=idle, kernel_wait_share=0.0, other_share=0.0),
        product_share=products / (products + rest) if products else None,
    )


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("input", profile(phases_ms={"data_wait": 300.0})),
        ("input", profile(kind="cuda", phases_ms={"h2d": 300.0})),
        (
            "sync",
            profile(
                kind="cuda",
                device_busy_share=0.2,
                syncs=(SyncPoint(line="a.py:1", what="item", per_step=1, ms_per_step=70),),
            ),
        ),
        (
            "communication",
            profile(
                ranks=(
                    RankFacts(
                        rank=0,
                        step_ms=100,
                        phases_ms={},
                        samples_per_s=1,
                        exposed_communication_ms=60,
                    ),
                )
            ),
        ),
        ("launch", profile(kind="cuda", trace=trace(idle=0.8, products=1, rest=1))),
        ("gemm", profile(kind="cuda", trace=trace(products=80, rest=20))),
        ("bandwidth", profile(kind="cuda", trace=trace(products=20, rest=80))),
        ("gemm", profile(limits=Limits(least_step_ms=70.0))),
        ("compute", profile()),
    ],
)
def test_the_largest_share_names_the_regime(name, facts):
    regime = regime_of(facts)

    assert regime.name == name
    assert sum(regime.shares.values()) <= 1 + 1e-9


def test_waits_for_a_straggler_are_not_bound_by_communication():
    ranks = [
        RankFacts(rank=n, step_ms=100, phases_ms={}, samples_per_s=1, exposed_communication_ms=ms)
        for n, ms in enumerate((5.0, 60.0))
    ]

    regime = regime_of(profile(ranks=tuple(ranks)))

    assert regime.name == "compute"
    assert regime.shares["communication"] == 0.05


def test_what_is_not_known_is_said_with_what_would_tell():
    regime = regime_of(profile(kind="cuda"))

    assert "--trace" in regime.missing["launch"]
    assert "--quick" in regime.missing["sync"]
    assert "gemm" in regime.missing


def test_a_wait_for_a_device_that_is_busy_anyway_is_no_sync_bound_step():
    points = (SyncPoint(line="a.py:1", what="item", per_step=1, ms_per_step=90),)
    facts = profile(kind="cuda", syncs=points, trace=trace(products=90, rest=10))

    assert regime_of(facts).shares["sync"] == 0


def test_without_a_trace_too_waits_cost_at_most_what_the_device_was_idle():
    points = (SyncPoint(line="a.py:1", what="item", per_step=1, ms_per_step=90),)
    facts = profile(kind="cuda", device_busy_share=0.97, syncs=points)

    regime = regime_of(facts)

    assert regime.shares["sync"] == pytest.approx(0.03)
    assert regime.name == "compute"


def test_what_the_profiler_added_to_the_host_is_no_wait_for_launches():
    slowed = replace(trace(idle=0.5, products=60, rest=40), step_ms=200.0)

    assert regime_of(profile(kind="cuda", trace=slowed)).shares["launch"] == 0
    assert regime_of(profile(kind="cuda", trace=replace(slowed, step_ms=125.0))).shares[
        "launch"
    ] == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        ("sm80_xmma_dgrad_implicit_gemm_indexed", True),
        ("cudnn::cnn::conv2d_grouped_direct_kernel", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", True),
        ("mkldnn::_linear_pointwise", True),
        ("void cudnn::bn_fw_tr_1C11_singleread_specialized", False),
        ("aten::cudnn_batch_norm", False),
        ("void cudnn::ops::nchwToNhwcKernel<float>", False),
        ("convertTensor_kernel", False),
        ("aten::mul", False),
    ],
)
def test_products_are_told_by_their_names(name, expected):
    assert is_product(name) is expected


def test_six_percent_of_the_step_give_at_most_1_06():
    bound = best_case(profile(phases_ms={"optimizer": 6.4}), {"optimizer", "slow_optimizer"})

    assert bound.ratio == pytest.approx(1.064)
    assert bound.why == "optimizer is 6.0 % of the step: at most 1.06x"
    assert not is_hopeless(bound, RESOLUTION)


def test_a_technique_on_nearly_nothing_is_hopeless():
    bound = best_case(profile(phases_ms={"optimizer": 0.3}), {"optimizer"})

    assert is_hopeless(bound, RESOLUTION)


@pytest.mark.parametrize("share", [0.7, 1.0, 1.5, 2.0])
def test_a_bound_is_read_generously(share):
    facts = profile(phases_ms={"optimizer": share})

    assert not is_hopeless(best_case(facts, {"optimizer"}), RESOLUTION)


def test_a_technique_that_addresses_no_phase_is_never_hopeless():
    bound = best_case(profile(), {"memory_leak"})

    assert bound.ratio == float("inf")
    assert not is_hopeless(bound, RESOLUTION)


def test_a_cost_that_the_median_hides_counts():
    cheap, dear = (0.0, 0.0, 40.0, 60.0, 0.0, 0.0), (0.0, 0.0, 40.0, 60.0, 100.0, 0.0)
    facts = profile(steps_ms=(cheap,) * 9 + (dear,))

    assert best_case(facts, {"optimizer"}).ratio == pytest.approx(1.1)


def test_the_epochs_start_is_part_of_what_a_loader_technique_acts_on():
    facts = profile(epoch_start_ms=1000.0, epoch_steps=10)

    assert best_case(facts, {"data_wait"}).ratio == pytest.approx(2.0)


def test_a_profile_without_a_step_bounds_nothing():
    facts = profile(phases_ms={"forward": 0.0, "backward": 0.0})

    assert best_case(facts, {"optimizer"}).ratio == float("inf")


def test_techniques_for_kernels_are_promised_only_the_kernels():
    launching = with_regime(profile(kind="cuda", trace=trace(idle=0.75, products=1, rest=1)))

    assert addressable_ms(launching, ("forward", "backward"), COMPUTE_CAUSES) == pytest.approx(25)
    assert addressable_ms(profile(), ("forward",), COMPUTE_CAUSES) == 40.0
