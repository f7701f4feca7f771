import math
from random import Random

import numpy as np
import pytest

from benchmarks.peers.job import crop_box
from flatout.data.random_crops import FLIP, HEIGHT, LEFT, TOP, WIDTH, Crops, boxes, uniforms

MANY = 4000


def drawn_boxes(crops, height, width, *, epoch=0, count=MANY):
    numbers = np.arange(count)
    sides = np.full(count, height), np.full(count, width)
    return boxes(crops, uniforms(7, epoch, numbers), *sides)


def test_draws_are_a_function_of_seed_epoch_and_sample_alone():
    whole = uniforms(3, 2, np.arange(50))

    assert np.array_equal(uniforms(3, 2, [49, 7]), whole[[49, 7]])
    assert not np.any(uniforms(3, 1, np.arange(50)) == whole)
    assert not np.any(uniforms(4, 2, np.arange(50)) == whole)


def test_draws_are_uniform_and_do_not_go_together():
    drawn = uniforms(0, 0, np.arange(20_000))

    counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
    expected = drawn.size / 100
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 99 + 5 * math.sqrt(2 * 99)
    together = np.corrcoef(drawn, rowvar=False) - np.eye(drawn.shape[1])
    assert np.abs(together).max() < 5 / math.sqrt(len(drawn))
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 5 / math.sqrt(len(drawn))


@pytest.mark.parametrize("sides", [(256, 341), (341, 256)])
def test_boxes_lie_inside_and_are_spread_as_torchvision_draws_them(sides):
    height, width = sides
    random = Random(0)

    found = drawn_boxes(Crops(), height, width)

    assert (found[:, [TOP, LEFT]] >= 0).all()
    assert (found[:, TOP] + found[:, HEIGHT] <= height).all()
    assert (found[:, LEFT] + found[:, WIDTH] <= width).all()
    others = np.array([crop_box(random, width, height) for _ in range(MANY)])
    usual = {LEFT: others[:, 0], TOP: others[:, 1], WIDTH: others[:, 2], HEIGHT: others[:, 3]}
    for column, values in usual.items():
        deciles = np.quantile(values, np.linspace(0.1, 0.9, 9))
        assert np.allclose(
            (found[:, column, None] <= deciles).mean(0),
            (values[:, None] <= deciles).mean(0),
            atol=0.06,
        )
    assert 0.45 < found[:, FLIP].mean() < 0.55


def test_a_window_has_the_asked_size_and_reaches_every_place():
    found = drawn_boxes(Crops(side=4, scale=None, flip_share=1.0), 6, 7)

    assert {tuple(row) for row in found[:, [TOP, LEFT]].tolist()} == {
        (top, left) for top in range(3) for left in range(4)
    }
    assert (found[:, [HEIGHT, WIDTH]] == 4).all()
    assert found[:, FLIP].all()


def test_a_window_larger_than_its_picture_is_refused():
    with pytest.raises(ValueError, match="6 pixels high or wide, the crop 8"):
        drawn_boxes(Crops(side=8, scale=None), 6, 9, count=1)


def test_a_picture_that_no_box_fits_gives_its_middle_in_an_allowed_ratio():
    wide = drawn_boxes(Crops(scale=(1.0, 1.0)), 40, 300, count=5)
    tall = drawn_boxes(Crops(scale=(1.0, 1.0)), 300, 40, count=5)

    assert (wide[:, :FLIP] == [0, 123, 40, 53]).all()
    assert (tall[:, :FLIP] == [123, 0, 53, 40]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"side": 0},
        {"scale": (0.5, 0.2)},
        {"ratio": (0.0, 1.0)},
        {"flip_share": 2.0},
        {"mean": (0.5, 0.5, 0.5)},
        {"mean": (0.5, 0.5, 0.5), "std": (0.0, 1.0, 1.0)},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|neither"):
        Crops(**wrong)
