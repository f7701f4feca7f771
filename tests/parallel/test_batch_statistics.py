"""What is said of batch normalisation over ranks."""

import pytest
from torch import nn

from flatout.parallel import engines


@pytest.mark.parametrize(("is_frozen", "said"), [(True, 0), (False, 1)])
def test_a_frozen_batch_norm_takes_no_statistics(monkeypatch, is_frozen, said):
    told = []
    monkeypatch.setattr(engines, "say_once", told.append)
    model = nn.Sequential(nn.BatchNorm1d(4).train(not is_frozen), nn.Linear(4, 1))

    engines.warn_of_batch_statistics(model)

    assert len(told) == said
