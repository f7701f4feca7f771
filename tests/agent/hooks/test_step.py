"""What is kept of the losses that a step goes backward from."""

import pytest
import torch

from flatout.agent.hooks.step import MAX_LOSS_TERMS, _Backward
from flatout.agent.session import Session
from flatout.records.trial_spec import TrialSpec


@pytest.mark.parametrize("parts", [1, MAX_LOSS_TERMS, 2 * MAX_LOSS_TERMS])
def test_the_parts_of_a_loss_add_up_however_many_they_are(parts):
    session = Session(TrialSpec())
    backward = _Backward(session)

    for _ in range(parts):
        backward.saw_loss(torch.tensor(6.0) / parts)

    assert sum(session.segment.losses) == pytest.approx(6.0)
    assert len(session.segment.losses) <= MAX_LOSS_TERMS


def test_a_real_run_counts_its_backwards_and_reads_no_loss():
    session = Session(TrialSpec(mode="run"))
    segment = session.segment
    segment.calls, segment.called, segment.called_most = [2], 16, 8  # two views of one batch
    backward = _Backward(session).listen(torch.autograd.backward)

    backward(torch.ones((), requires_grad=True) * 2)

    assert (segment.called_with, segment.losses) == (8, [])


@pytest.mark.parametrize("loss", [torch.ones(2), torch.tensor(1 + 2j)])
def test_what_is_no_real_scalar_is_no_loss_and_that_is_said(loss):
    session = Session(TrialSpec())

    _Backward(session).saw_loss(loss)

    assert session.segment.losses == []
    assert session.errors == ["backward on a tensor that is no real scalar: no loss recorded"]
