"""What techniques say at the end, and what they put in place of a backward."""

import dataclasses

import pytest
import torch

from flatout.agent.hooks.step import _Backward
from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.technique import Numerics, Technique
from flatout.records.trial_spec import TrialSpec

NAME = __name__.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Late(Technique):
    addresses = frozenset({"forward"})
    numerics = Numerics.EXACT
    ending: object = "all well"

    @classmethod
    def candidates(cls, profile, machine):
        return ()

    def predict(self, profile, machine):
        raise NotImplementedError

    def backward(self, call):
        def doubled(tensors, *args, **kwargs):
            return call(2 * tensors, *args, **kwargs)

        return doubled

    def end(self):
        if isinstance(self.ending, Exception):
            raise self.ending
        return self.ending


def session_of(technique):
    return Session(TrialSpec(mode="measure", folder=""), (technique,))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("3 graphs", ("applied", "3 graphs")),
        (NotApplicable("torch gave up"), ("not_applicable", "torch gave up")),
        (RuntimeError("oh"), ("failed", "RuntimeError: oh")),
    ],
)
def test_a_technique_that_was_applied_has_the_last_word(ending, status):
    technique = Late(ending=ending)
    session = session_of(technique)
    session.note_status(technique, "applied")

    session.conclude()

    assert session.status[NAME] == status


def test_one_that_never_was_applied_is_not_asked():
    technique = Late(ending=RuntimeError("asked"))
    session = session_of(technique)
    session.note_status(technique, "not_applicable", "no module")

    session.conclude()

    assert session.status[NAME] == ("not_applicable", "no module")


def test_every_outermost_backward_goes_through_the_technique(monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.autograd, "grad", torch.autograd.grad)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    session = session_of(Late())
    _Backward(session).install()
    x = torch.ones(3, requires_grad=True)

    x.sum().backward()
    x.sum().backward()

    assert x.grad.tolist() == [4.0] * 3
    assert session.status[NAME][0] == "applied"
