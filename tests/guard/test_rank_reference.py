"""Each rank's updates are held against what the same rank did in the baseline."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.agent.guard.record import find_records
from flatout.agent.guard.recorder import GuardRecorder
from flatout.guard.judge import judge
from flatout.guard.obstacles import Trials
from flatout.records.technique import Numerics
from tests.guard import loop
from tests.guard.loop import FakeSession

STEPS = 4
RATES = (0.1, 0.01)
"""Each rank has an optimizer of its own, too."""


def train_stage(rank: int, path: Path, reference: Path | None) -> None:
    """Train one rank's part of a model, under a name that no other rank has."""
    torch.manual_seed(rank)
    session = FakeSession()
    model = nn.Sequential(OrderedDict({f"stage{rank}": nn.Linear(32, 10)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[rank])
    session.optimizers.append(optimizer)
    GuardRecorder(session, {"reference": str(reference) if reference else None}, path)
    with session.hooked():
        for step in range(STEPS):
            x, y = batch = loop.vectors(step)
            session.fire("batch", batch, "loader")
            optimizer.zero_grad()
            session.backward(F.cross_entropy(session.forward(model, x), y))
            optimizer.step()
    session.fire("stop")


@pytest.fixture
def both_ranks(monkeypatch: pytest.MonkeyPatch):
    """Return what runs a trial of two ranks, one after the other."""

    def run(path: Path, reference: Path | None = None) -> Path:
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            train_stage(rank, path, reference)
        return path

    return run


def test_ranks_that_hold_different_parameters_are_compared_each_with_itself(both_ranks, tmp_path):
    baseline = both_ranks(tmp_path / "baseline.json")
    candidate = both_ranks(tmp_path / "candidate.json", baseline)

    pairs = list(zip(find_records(baseline), find_records(candidate), strict=True))
    checks = [
        judge(Trials(baseline=own, candidate=other, repeat=other, promise=Numerics.EXACT))
        for own, other in pairs
    ]

    assert [check.status for check in checks] == ["same", "same"], [c.why for c in checks]
    assert [len(other.updates) for _, other in pairs] == [3, 3]
    assert [other.update_gaps for _, other in pairs] == [(), ()]


def test_a_rank_whose_baseline_left_no_record_is_not_compared_with_another_one_s(
    both_ranks, tmp_path
):
    baseline = both_ranks(tmp_path / "baseline.json")
    (tmp_path / "baseline-rank1.json").unlink()

    first, second = find_records(both_ranks(tmp_path / "candidate.json", baseline))

    assert first.updates
    assert second.updates == ()
    assert "the baseline's record cannot be read" in second.update_gaps[0]
