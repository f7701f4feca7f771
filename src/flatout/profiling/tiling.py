"""How well a product's sizes suit a GPU: whole tiles, whole waves, aligned rows. Pure numbers.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization,
alignment of 16 bytes for tensor cores); S. Bekman, "Machine Learning Engineering", chapter on
performance (the staircase of a growing dimension).
"""

import math

TILE = (128, 256)
"""Rows and columns that one processor computes at a time: cuBLAS's most efficient tile, by
NVIDIA's guide. Products with a shorter side get `SMALL_TILE`."""
SMALL_TILE = (64, 64)
MOST_ALIGNED_BYTES = 128
"""A line of the caches: aligned to more is no better."""
TENSOR_CORE_BYTES = 16
"""Rows that are no multiple of it cannot be fetched at full width (NVIDIA's guide)."""


def tile_for(m: int, n: int) -> tuple[int, int]:
    """Return the tile that the formulas assume for a result.

    >>> tile_for(4096, 4096), tile_for(4096, 100)
    ((128, 256), (64, 64))
    """
    return TILE if m >= TILE[0] and n >= TILE[0] else SMALL_TILE


def tile_share(m: int, n: int, tile: tuple[int, int] | None = None) -> float:
    """Return which part of the tiles that cover the result is the result.

    >>> tile_share(256, 256), round(tile_share(257, 256), 3)
    (1.0, 0.669)
    """
    rows, columns = tile or tile_for(m, n)
    covered = math.ceil(m / rows) * rows * math.ceil(n / columns) * columns
    return m * n / covered


def wave_share(
    m: int, n: int, processors: int, *, batch: int = 1, tile: tuple[int, int] | None = None
) -> float:
    """Return which part of the processors' turns is used: the last wave is seldom full.

    132 processors do 132 tiles in one turn and 133 in two:

    >>> wave_share(128, 256 * 132, 132), round(wave_share(128, 256 * 133, 132), 3)
    (1.0, 0.504)
    """
    rows, columns = tile or tile_for(m, n)
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    return tiles / (processors * math.ceil(tiles / processors))


def aligned_bytes(m: int, n: int, k: int, layout: str, element_bytes: int) -> int:
    """Return the largest power of two, up to a cache line, that divides every row fetched.

    A row is what lies together in memory: K numbers of a left operand by rows, M by columns.

    >>> aligned_bytes(8192, 50304, 768, "NT", 2), aligned_bytes(8192, 50257, 768, "NT", 2)
    (128, 2)
    """
    left, right = layout[0], layout[-1]
    extents = [m if left == "T" else k, k if right == "T" else n, n]
    common = math.gcd(*extents) * element_bytes
    return min(common & -common, MOST_ALIGNED_BYTES)
