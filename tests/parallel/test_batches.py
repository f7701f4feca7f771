"""Each rank's part of every batch."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from flatout.data.proof.random_streams import Streams
from flatout.parallel.batches import (
    Feed,
    Feeds,
    Part,
    Share,
    SharedBatches,
    SharedStreams,
    leading,
    part_of_batch,
)

Pair = namedtuple("Pair", "x y")


class NoStreams:
    """Streams of a training that draws nothing."""

    def drawing(self):
        return torch.no_grad()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 2, 5, 8, 61])
def test_the_parts_are_the_batch_and_their_weights_are_one(samples, ranks):
    parts = [Part(rank, ranks) for rank in range(ranks)]
    rows = list(range(samples))

    together = [row for part in parts for row in rows[part.of(samples)]]
    sizes = [len(rows[part.of(samples)]) for part in parts]

    assert together == rows
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.weight(samples) for part in parts) == pytest.approx(1)


def test_a_rank_without_a_sample_of_its_own_takes_one_that_weighs_nothing():
    part = Part(3, 4)

    assert part.take([7, 8, 9]) == [7]
    assert part.weight(3) == 0


def test_batches_are_shared_out_only_once_they_are_known_to_feed_the_training():
    feed = Feed(Part(1, 2), cuts_batches=False)
    chosen = iter(SharedBatches([[0, 1, 2], [3, 4, 5]], feed, NoStreams()))

    first = next(chosen)
    feed.shares = True
    second = next(chosen)

    assert (first, second) == ([0, 1, 2], [5])
    assert list(feed.sizes) == [(3, 3), (3, 1)]


class Drawn:
    """A loader's iterator of which the latest batches are these."""

    def __init__(self, *shares):
        self.latest = shares


@pytest.mark.parametrize(
    ("rows_of_a_whole_batch", "rows", "own"),
    [
        (64, 32, 32),
        (64, 64, 64),  # drawn one batch ahead
        (128, 64, 32),  # two views
        (64 * 7, 64 * 7, 32),  # rows of time, which no rank has fewer of
    ],
)
def test_the_batch_worked_on_is_found_by_the_rows_that_the_model_is_called_with(
    rows_of_a_whole_batch, rows, own
):
    whole, part = Share(64, 0.5, is_part=False), Share(32, 0.5, is_part=True)
    feeds = Feeds(Part(0, 2))
    feeds.drawn[0], feeds.worked_on = Drawn(whole), rows_of_a_whole_batch
    assert feeds.share() == whole

    feeds.drawn[0], feeds.worked_on = Drawn(whole, part), rows

    assert feeds.share().own == own


def test_ranks_draw_alike_between_epochs_and_apart_within():
    before, drawn = Streams(), []
    for rank in range(2):
        torch.manual_seed(1)
        streams = SharedStreams(Part(rank, 2))
        streams.split()
        draws = [float(torch.rand(()))]
        for is_over in (True, False):
            (streams.end_epoch if is_over else streams.begin_epoch)()
            draws.append(float(torch.rand(())))
        with streams.drawing():
            draws.append(float(torch.rand(())))
        drawn.append(draws)
    before.set_back()

    assert [one == other for one, other in zip(*drawn, strict=True)] == [False, True, False, True]
    assert drawn[0][1] != drawn[0][3]  # it goes on


def test_a_whole_batch_is_cut_in_all_its_rows_and_nowhere_else():
    batch = {
        "x": torch.arange(6).reshape(3, 2),
        "pair": Pair(np.arange(3), ["a", "b", "c"]),
        "scale": torch.tensor(2.0),
        "side": torch.zeros(5),
    }

    mine = part_of_batch(batch, Part(1, 2), 3)

    assert mine["x"].tolist() == [[4, 5]]
    assert mine["pair"].x.tolist() == [2]
    assert mine["pair"].y == ["c"]
    assert mine["scale"] == 2.0
    assert len(mine["side"]) == 5


@pytest.mark.parametrize("batch", [{"x": object(), "y": torch.zeros(3)}, {"x": torch.zeros(())}])
def test_a_batch_that_cannot_be_cut_is_refused(batch):
    with pytest.raises(ValueError, match="batch"):
        part_of_batch(batch, Part(0, 2), 3)


def test_inputs_that_share_a_first_dimension_are_a_batch():
    assert leading([torch.zeros(4, 2), torch.zeros(4), 3, None]) == 4
    assert leading([torch.zeros(4, 2), torch.zeros(3)]) == 0
