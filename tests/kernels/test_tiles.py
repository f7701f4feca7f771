from itertools import product

import pytest

from examples.gemm.launch import (
    MOST_ACCUMULATED,
    SHARED_BYTES,
    TILES,
    Tile,
    tiles_worth_trying,
)


@pytest.mark.parametrize("shape", list(product((1, 16, 100, 4096), repeat=2)))
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("sides", [1, 2])
def test_every_product_has_tiles_that_fit(shape, element_bytes, sides):
    found = tiles_worth_trying(*shape, element_bytes, right_sides=sides)

    assert found
    for tile in found:
        assert tile.shared_bytes(element_bytes, operands=1 + sides) <= SHARED_BYTES
        assert tile.m * tile.n * sides <= MOST_ACCUMULATED


def test_tiles_are_multiples_of_what_tensor_cores_multiply():
    sides = [side for tile in TILES for side in (tile.m, tile.n, tile.k)]

    assert min(sides) == 16
    assert max(sides) == 256
    assert all(side & (side - 1) == 0 for side in sides)


def test_a_tall_tile_is_not_tried_on_few_rows():
    assert max(tile.m for tile in tiles_worth_trying(16, 4096, 2)) == 16


@pytest.mark.parametrize("sides", [1, 2])
def test_small_tiles_are_not_tried_where_there_are_many_large_ones(sides):
    many = tiles_worth_trying(4096, 4096, 2, right_sides=sides)
    few = tiles_worth_trying(512, 512, 2, right_sides=sides)

    areas = [tile.m * tile.n for tile in many]
    assert len(many) == 4
    assert min(areas) * 2 >= max(areas) == MOST_ACCUMULATED // sides
    assert set(many) < set(few)


def test_shared_memory_counts_both_operands_and_all_stages():
    tile = Tile(m=128, n=64, k=32, warps=4, stages=3)

    assert tile.shared_bytes(2) == (128 * 32 + 32 * 64) * 2 * 3
    assert tile.shared_bytes(2, operands=3) == (128 * 32 + 2 * 32 * 64) * 2 * 3
