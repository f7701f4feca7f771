"""Counted operations against sums made by hand."""

import pytest

from flatout.analysis.regime import main_dtype
from flatout.analysis.steps import medians_by_step
from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed

pytestmark = pytest.mark.slow

LINEAR = 2 * 8 * 16 * 16
"""One product of a batch of 8 with 16 by 16 weights."""
CONVOLUTION = 2 * 8 * 2 * 2 * 2 * 3 * 3
"""8 images, 2 channels of 2 by 2 out, 3 by 3 taps."""
ATTENTION = 2 * (2 * 8 * 2 * 4 * 4 * 2)
"""Scores and values of 8 batches, 2 heads, 4 words of 2 numbers."""


def counted(kind):
    trial = probed(SCRIPTS / "counted.py", kind, probes={"flops": {}}, steps=4)
    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    return trial.details["probes"]["flops"]


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        # The input needs no gradient: one product forward, one backward.
        ("plain", 2 * LINEAR),
        ("compiled", 2 * LINEAR),
        ("accumulate", 4 * LINEAR),
        ("evaluates", 2 * LINEAR),
        # The input needs one: two backward. What is computed again does not count.
        ("checkpoint", 3 * LINEAR),
        ("reentrant", 3 * LINEAR),
        # The slope is one product; it depends on the output alone, so that its own is another.
        ("penalty", 4 * LINEAR),
        ("conv", 2 * CONVOLUTION),
        # Five products backward for two forward: the scores are computed again.
        ("attention", ATTENTION + 5 * ATTENTION / 2),
    ],
)
def test_operations_of_a_step_are_those_by_hand(kind, flops):
    seen = counted(kind)

    assert medians_by_step(seen["segments"], "by_dtype") == {"float32": flops}
    assert seen["uncounted"] == []


def test_operations_under_autocast_are_its_dtypes():
    assert main_dtype(medians_by_step(counted("autocast")["segments"], "by_dtype")) == "bfloat16"


def test_a_step_without_products_has_no_operations():
    assert main_dtype(medians_by_step(counted("scale_only")["segments"], "by_dtype")) == ""


def test_recurrent_layers_are_told_to_be_missing():
    assert any("rnn" in name or "lstm" in name for name in counted("recurrent")["uncounted"])
