from dataclasses import replace

import pytest

from flatout.rules.runtime.slow_optimizer import check
from tests.techniques.facts import machine, optimizer, profile


def updating(optimizer_ms, **facts):
    return profile(
        phases_ms={"optimizer": optimizer_ms, "forward": 20.0, "backward": 50.0},
        optimizers=(optimizer(parameter_tensors=150, **facts),),
    )


def test_a_long_update_is_reported_with_its_numbers():
    finding = check(updating(30.0), machine())

    assert finding.share == 0.3
    assert finding.because == "AdamW (not fused, 150 tensors) takes 30.0 ms of 100 ms (30 %, n=20)"
    assert finding.next.endswith("flatout tune --only fused_optimizer train.py")


def test_it_is_silent_below_a_tenth():
    assert check(updating(5.0), machine()) is None


def test_a_fused_update_is_not_told_to_fuse():
    finding = check(updating(30.0, is_fused=True), machine())

    assert "(fused, 150 tensors)" in finding.because
    assert "fused_optimizer" not in finding.next


@pytest.mark.parametrize(
    ("kind", "is_foreach", "said"),
    [
        ("cpu", None, "flatout tune --only foreach_optimizer train.py"),
        ("cpu", True, "nothing faster is left"),
        ("cuda", None, "nothing faster is left"),
        ("cuda", False, "foreach=False updates one tensor after the other"),
    ],
)
def test_without_a_fused_one_groups_of_tensors_are_advised_where_torch_does_not_make_them(
    kind, is_foreach, said
):
    facts = updating(30.0, has_fused_option=False, has_foreach_option=True, is_foreach=is_foreach)

    assert said in check(replace(facts, device_kind=kind), machine()).next


def test_an_optimizer_that_goes_from_tensor_to_tensor_only_cannot_be_helped():
    finding = check(updating(30.0, has_fused_option=False), machine())

    assert "nothing faster is left" in finding.next


def test_a_script_without_an_optimizer_is_reported_too():
    finding = check(profile(phases_ms={"optimizer": 100.0}), machine())

    assert finding.because.startswith("the optimizer takes 100 ms of 200 ms")


def test_optimizers_of_a_kind_are_counted():
    one = updating(30.0)

    several = check(replace(one, optimizers=one.optimizers * 2), machine())

    assert several.because.startswith("2x AdamW (not fused, 150 tensors) take 30.0 ms of")
