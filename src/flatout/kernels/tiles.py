"""Which tiles a matrix product is worth trying with. Pure numbers: no torch, no Triton.

A tile is the part of the result that one program computes. A large one reads each operand fewer
times; a small one leaves more tiles to share among the processors. Nothing tells beforehand which
wins, so a handful that fits is timed.
"""

import math
from dataclasses import dataclass

SHARED_BYTES = 227 * 1024
"""Shared memory of one block on Hopper, at most (CUDA programming guide, compute capability 9.0);
less elsewhere: then Triton gives a tile up by itself."""
MOST_ACCUMULATED = 256 * 128
"""Elements of all accumulators of a block. 256 threads with 255 registers hold twice as many
numbers; the other half is for addresses and operands."""
MANY_TILES = 256
"""With so many of the largest tile every processor has more than one to work on, and less than half
of it is not tried: each tile takes seconds to compile. Chosen, not measured."""
SPLIT_TILE = 128
"""The tile that the number of parts along K is chosen for."""
LEAST_SPLIT_K = 512
"""A part shorter than this spends more time on adding up than it saves. Chosen, not measured."""
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One way to cut a product up."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    """Tiles of the operands that are on their way at once."""

    def shared_bytes(self, element_bytes: int, *, operands: int = 2) -> int:
        """Return the shared memory it needs; a product with two right sides has 3 operands."""
        columns = self.n * (operands - 1)
        return (self.m * self.k + self.k * columns) * element_bytes * self.stages


TILES = (
    Tile(m=128, n=256, k=64, warps=8, stages=3),
    Tile(m=256, n=128, k=64, warps=8, stages=3),
    Tile(m=128, n=128, k=64, warps=8, stages=4),
    Tile(m=128, n=128, k=32, warps=4, stages=4),
    Tile(m=128, n=64, k=64, warps=4, stages=4),
    Tile(m=64, n=128, k=64, warps=4, stages=4),
    Tile(m=64, n=64, k=64, warps=4, stages=4),
    Tile(m=32, n=64, k=64, warps=4, stages=5),
    Tile(m=64, n=32, k=64, warps=4, stages=5),
    Tile(m=16, n=64, k=128, warps=4, stages=4),
    Tile(m=16, n=128, k=64, warps=4, stages=4),
    Tile(m=16, n=16, k=64, warps=1, stages=4),
)
"""From 16, the least side that tensor cores multiply, to 256. As Triton's own tutorial on matrix
products has them, with tiles for few rows added."""


def tiles_worth_trying(
    m: int, n: int, element_bytes: int, *, right_sides: int = 1
) -> tuple[Tile, ...]:
    """Return the tiles that fit and are not mostly empty.

    Args:
        m: Rows of the result.
        n: Columns of the result.
        element_bytes: Of the operands.
        right_sides: 2 where the product has two right sides at once, as SwiGLU has.

    >>> [(tile.m, tile.n) for tile in tiles_worth_trying(16, 4096, 2)]
    [(16, 64), (16, 128), (16, 16)]
    """
    fitting = [
        tile
        for tile in TILES
        if tile.shared_bytes(element_bytes, operands=1 + right_sides) <= SHARED_BYTES
        and tile.m * tile.n * right_sides <= MOST_ACCUMULATED
    ]
    snug = [tile for tile in fitting if tile.m < 2 * max(m, 16) and tile.n < 2 * max(n, 16)]
    if min(m, n) < 64:
        return tuple(snug or fitting[-1:])
    # Where there is work for large tiles, those with few rows only cost tuning time.
    large = [tile for tile in snug if min(tile.m, tile.n) >= 64]
    largest = max(tile.m * tile.n for tile in large)
    least = largest // 2 if m * n >= MANY_TILES * largest else 0
    return tuple(tile for tile in large if tile.m * tile.n >= least)


def split_count(m: int, n: int, k: int, processors: int) -> int:
    """Return into how many parts K is cut so that every processor has a tile to work on.

    >>> split_count(128, 128, 65536, 132), split_count(8192, 8192, 8192, 132)
    (16, 1)
    """
    tiles = math.ceil(m / SPLIT_TILE) * math.ceil(n / SPLIT_TILE)
    parts = min(processors // max(tiles, 1), k // LEAST_SPLIT_K, MOST_SPLITS)
    return 1 << (parts.bit_length() - 1) if parts > 1 else 1
