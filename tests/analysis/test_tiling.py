"""The formulas against worked examples of their sources, and against counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.analysis.products import aligned_bytes, tile_share, wave_share

SIZES = st.integers(min_value=1, max_value=5000)


def test_one_column_more_than_a_tile_costs_another_tile():
    # NVIDIA's guide, tile quantization: the same time for 257 as for 512 columns.
    assert tile_share(2048, 256) == 1.0
    assert tile_share(2048, 257) == pytest.approx(257 / 512)


def test_one_tile_more_than_processors_costs_another_wave():
    # NVIDIA's guide, wave quantization, on an A100: 9 by 12 tiles fill 108 processors.
    rows, columns = 9 * 128, 12 * 256

    assert wave_share(rows, columns, 108) == 1.0
    assert wave_share(rows + 1, columns, 108) == pytest.approx(120 / 216)


def test_a_batch_fills_the_waves():
    assert wave_share(64, 64, 132) == pytest.approx(1 / 132)
    assert wave_share(64, 64, 132, batch=132) == 1.0


@given(SIZES, SIZES)
def test_shares_are_parts(m, n):
    assert 0 < tile_share(m, n) <= 1
    assert 0 < wave_share(m, n, 132) <= 1


@pytest.mark.parametrize(
    ("sizes", "layout", "width", "expected"),
    [
        ((4096, 50257, 768), "NT", 2, 2),
        ((4096, 50304, 768), "NT", 2, 128),
        ((4096, 12, 768), "NN", 2, 8),
        # A left operand by columns is fetched M numbers at a time.
        ((4095, 768, 4096), "TN", 4, 4),
        ((4095, 768, 4096), "NN", 4, 128),
    ],
)
def test_alignment_is_that_of_the_worst_row(sizes, layout, width, expected):
    assert aligned_bytes(*sizes, layout, width) == expected
