import pytest

from flatout.analysis.regime import with_regime
from flatout.records.readings import IdleSplit, Limits, TraceSummary
from flatout.rules.runtime.fp32_on_fast_bf16 import check
from tests.techniques.facts import gpu, machine, model, profile

TURNS = {"next": {"precision": "lower"}}
FAST = {"cpu_features": frozenset({"amx_bf16"}), "cpu_name": "Xeon"}


def test_fp32_on_a_cpu_with_fast_bf16_is_reported_with_what_it_loses():
    facts = profile(phases_ms={"data_wait": 100.0}, models=(model(),))

    finding = check(facts, machine(**FAST))

    assert (finding.share, finding.is_bound) == (0.25, True)
    assert finding.because == (
        "fp32 computing in Net takes 100 ms of 200 ms (50 %, n=20); "
        "Xeon multiplies bf16 in hardware"
    )
    assert finding.next.endswith("flatout tune --only bf16_autocast train.py")


def test_products_far_below_the_peak_rate_may_still_be_the_step():
    facts = profile(models=(model(),), limits=Limits(least_step_ms=0.5))

    assert check(facts, machine(**FAST)) is not None


@pytest.mark.parametrize(("kind", "share"), [("cpu", 0.15), ("cuda", 0.5)])
def test_where_the_products_are_known_a_cpu_loses_no_more_than_they_take(kind, share):
    trace = TraceSummary(steps=3, step_ms=100.0, product_share=0.3)
    facts = with_regime(profile(kind=kind, models=(model(),), trace=trace))

    finding = check(facts, machine(device=gpu((9, 0)), **FAST))

    assert (finding.share, finding.is_bound) == (pytest.approx(share), False)


def test_fp32_on_an_ampere_gpu_is_reported():
    facts = profile(kind="cuda", models=(model(),))

    assert "a device multiplies bf16" in check(facts, machine(device=gpu((8, 0)))).because


@pytest.mark.parametrize("limits", [None, Limits(least_step_ms=0.05)])
def test_a_tiny_model_that_bf16_slows_down_is_left_alone(limits):
    # The technique's own page: an MLP of 1.2 ms a step ran at 0.81x. This one takes 4 ms.
    small = profile(phases_ms={"forward": 1.6, "backward": 2.4}, models=(model(),), limits=limits)

    assert check(small, machine(**FAST)) is None


def test_a_short_step_that_is_all_products_is_reported():
    short = profile(
        phases_ms={"forward": 2.0, "backward": 4.0},
        models=(model(),),
        limits=Limits(least_step_ms=2.0),
    )

    assert check(short, machine(**FAST)) is not None


def test_a_step_that_waits_for_launches_is_not_advised_lower_precision():
    idle = IdleSplit(host_wait_share=0.9, kernel_wait_share=0.0, other_share=0.0)
    trace = TraceSummary(steps=3, step_ms=100.0, idle=idle)
    launching = with_regime(profile(kind="cuda", models=(model(),), trace=trace))

    assert check(launching, machine(device=gpu((9, 0)))) is None


@pytest.mark.parametrize(
    ("facts", "host"),
    [
        (profile(models=(model(),)), machine()),
        (profile(models=()), machine(**FAST)),
        (profile(models=(model(used_autocast=True),)), machine(**FAST)),
        (profile(models=(model(dtypes=("bfloat16",)),)), machine(**FAST)),
        (profile(phases_ms={"data_wait": 500.0}, models=(model(),)), machine(**FAST)),
        (profile(kind="cuda", models=(model(),)), machine(device=gpu((7, 5)), **FAST)),
        (profile(models=(model(),), limits=Limits(least_step_ms=0.3)), machine(**FAST)),
    ],
)
def test_it_is_silent_where_bf16_could_not_help(facts, host):
    assert check(facts, host) is None
