from flatout.rules.runtime.evaluation_graph import check
from tests.techniques.facts import machine, model, profile


def evaluating(calls=5, eval_ms=10.0, **changes):
    return profile(models=(model(eval_graph_calls=calls),), eval_ms=eval_ms, **changes)


def test_calls_that_build_graphs_are_counted():
    finding = check(evaluating(), machine())

    assert finding.share == 0.1
    assert "5 were seen" in finding.because


def test_evaluation_in_steps_that_are_left_out_is_a_share_of_the_run():
    # Every fourth step evaluated with graphs, 392 calls in 16 % of the run: nothing was said.
    finding = check(evaluating(calls=392, eval_ms=0.0, eval_share=0.16), machine())

    assert (finding.share, finding.of, finding.is_bound) == (0.16, "run", False)
    assert finding.because == (
        "calls in evaluation mode build graphs, 392 were seen: evaluation takes 16 % of the run"
    )


def test_it_is_silent_without_graphs_and_where_something_goes_back_through_them():
    assert check(evaluating(calls=0), machine()) is None
    assert check(evaluating(eval_ms=0.0), machine()) is None
    assert check(evaluating(backwards_per_step=2.0), machine()) is None
