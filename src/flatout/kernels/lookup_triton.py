# mypy: ignore-errors
# What Triton compiles is no Python that a type checker could follow.
"""One pass over bytes in Triton: cut out, mirrored, and each replaced by its value in a table.

`flatout.kernels.lookup` runs it. Names in capitals are known when it is compiled.

Legend: the result is (n, i, j, k), in the order in which it is in memory, n being mostly the
picture. `s_n` is the stride of the source along n, `o_n` that of the result, and so on. Values are
moved as whole numbers of their size, so a float arrives as it is in the table.
"""

import triton
import triton.language as tl

# fmt: off
# One argument a line would make lists of forty lines.


@triton.jit
def lookup_kernel(
    source, rows, boxes, table, out, count_j, count_k, inner, blocks,
    s_n, s_i, s_j, s_k, o_n, o_i, o_j, o_k, last_across,
    CHANNEL: tl.constexpr, HAS_BOXES: tl.constexpr, COLUMNS: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, FLIP: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Look up one block of one n.

    CHANNEL is the place of the channels among n, i, j, k; -1 where all have the same values. With
    HAS_BOXES i is down, j across, and `rows` says which picture of the source each n is of.
    """
    n = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = place < inner
    k = (place % count_k).to(tl.int64)
    above = place // count_k
    j = (above % count_j).to(tl.int64)
    i = (above // count_j).to(tl.int64)
    if HAS_BOXES:
        box = boxes + n * COLUMNS
        mirrored = tl.load(box + FLIP) != 0
        across = tl.where(mirrored, last_across - j, j) + tl.load(box + LEFT)
        first = tl.load(rows + n) * s_n + tl.load(box + TOP) * s_i
        spot = source + first + i * s_i + across * s_j + k * s_k
    else:
        spot = source + n * s_n + i * s_i + j * s_j + k * s_k
    level = tl.load(spot, mask=inside, other=0).to(tl.int32)
    if CHANNEL == 0:
        level += n.to(tl.int32) * LEVELS
    elif CHANNEL == 1:
        level += i.to(tl.int32) * LEVELS
    elif CHANNEL == 2:
        level += j.to(tl.int32) * LEVELS
    elif CHANNEL == 3:
        level += k.to(tl.int32) * LEVELS
    value = tl.load(table + level, mask=inside, other=0)
    tl.store(out + n * o_n + i * o_i + j * o_j + k * o_k, value, mask=inside)
