from flatout.rules.runtime.math_attention import check
from tests.techniques.facts import machine, model, profile

TURNS = {"next": {"precision": "lower"}}


def running_on(backend, why=""):
    return profile(
        phases_ms={"data_wait": 100.0},
        models=(model(attention_backend=backend, attention_why=why),),
    )


def test_attention_on_the_slow_backend_is_reported_with_torch_s_own_reason():
    finding = check(running_on("math", "Expected query to be Half"), machine())

    assert finding.share == 0.5
    assert finding.because.startswith(
        "the attention of Net runs on torch's math backend: Expected query to be Half; "
    )
    assert "is_causal" in finding.next


def test_its_share_is_a_bound_and_small_ones_are_left_out():
    slow = (model(attention_backend="math"),)

    assert check(running_on("math"), machine()).is_bound
    assert check(profile(phases_ms={"data_wait": 1000.0}, models=slow), machine()) is None


def test_it_is_silent_for_fused_kernels_and_where_nothing_is_known():
    assert check(running_on("flash"), machine()) is None
    assert check(running_on(""), machine()) is None
