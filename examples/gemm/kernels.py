# mypy: ignore-errors
# What Triton compiles is no Python that a type checker could follow.
"""The kernels of the product, in Triton: tiles in groups, descriptors on Hopper.

`examples.gemm.launch` runs them. Names in capitals are known when a kernel is compiled.

Legend: M rows of the result, N its columns, K what is summed over; `before` is what goes into the
activation: M by N, or M by 2N for SwiGLU. `s_am` is the stride of `a` along M, and so on.
"""

import triton
import triton.language as tl

# fmt: off
# One argument a line would make lists of forty lines.


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return row and column of a tile: down a few rows first, then along."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    inside = tile % per_group
    return first + inside % rows, inside // rows


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDENS: tl.constexpr):
    if WIDENS:  # the interpreter multiplies the bits of bf16 as if they were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _before(
    total, rows, cols, inside, c, s_cm, s_cn, bias, alpha, beta,
    HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Return alpha * total + beta * c + bias; without HAS_C nothing of c is read."""
    total = alpha * total
    if HAS_C:
        spot = c + rows[:, None] * s_cm + cols[None, :] * s_cn
        total += beta * tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        spot = bias + tl.zeros_like(rows)[:, None] + cols[None, :]
        total += tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _finish(
    total, up, rows, cols, m, n,
    c, s_cm, s_cn, bias, residual, s_rm, s_rn, out, s_om, s_on, kept, s_km, s_kn, alpha, beta,
    ACTIVATION: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, KEEPS: tl.constexpr,
):
    """Do everything that follows the product while the tile is still in registers."""
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    total = _before(total, rows, cols, inside, c, s_cm, s_cn, bias, alpha, beta, HAS_C, HAS_BIAS)
    if KEEPS:
        spot = kept + rows[:, None] * s_km + cols[None, :] * s_kn
        tl.store(spot, total.to(kept.dtype.element_ty), mask=inside)
    if ACTIVATION == "gelu":
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    elif ACTIVATION == "swiglu":
        right = cols + n
        up = _before(up, rows, right, inside, c, s_cm, s_cn, bias, alpha, beta, HAS_C, HAS_BIAS)
        if KEEPS:
            spot = kept + rows[:, None] * s_km + right[None, :] * s_kn
            tl.store(spot, up.to(kept.dtype.element_ty), mask=inside)
        total = total * tl.sigmoid(total) * up
    if HAS_RESIDUAL:
        spot = residual + rows[:, None] * s_rm + cols[None, :] * s_rn
        total += tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    spot = out + rows[:, None] * s_om + cols[None, :] * s_on
    tl.store(spot, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tiled_kernel(
    a, b, c, bias, residual, out, kept, m, n, k,
    s_am, s_ak, s_bk, s_bn, s_cm, s_cn, s_rm, s_rn, s_om, s_on, s_km, s_kn, alpha, beta,
    ACTIVATION: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WIDENS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute one tile."""
    row, col = _place(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    step, beside = BLOCK_K, n
    if WIDE:
        rows, cols, ks = rows.to(tl.int64), cols.to(tl.int64), ks.to(tl.int64)
        step, beside = tl.cast(BLOCK_K, tl.int64), tl.cast(n, tl.int64)
    # Rows and columns beyond the end wrap round: read, multiplied, and never stored.
    a_tile = a + (rows % m)[:, None] * s_am + ks[None, :] * s_ak
    b_tile = b + ks[:, None] * s_bk + (cols % n)[None, :] * s_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        there = start + tl.arange(0, BLOCK_K) < k
        left = tl.load(a_tile, mask=there[None, :], other=0.0)
        right = tl.load(b_tile, mask=there[:, None], other=0.0)
        total = _dot(left, right, total, PRECISION, WIDENS)
        if ACTIVATION == "swiglu":
            right = tl.load(b_tile + beside * s_bn, mask=there[:, None], other=0.0)
            up = _dot(left, right, up, PRECISION, WIDENS)
        a_tile += step * s_ak
        b_tile += step * s_bk
    _finish(
        total, up, rows, cols, m, n,
        c, s_cm, s_cn, bias, residual, s_rm, s_rn, out, s_om, s_on, kept, s_km, s_kn,
        alpha, beta, ACTIVATION, HAS_C, HAS_BIAS, HAS_RESIDUAL, KEEPS,
    )


@triton.jit
def persistent_kernel(
    a, b, c, bias, residual, out, kept, m, n, k, s_a, s_b,
    s_cm, s_cn, s_rm, s_rn, s_om, s_on, s_km, s_kn, alpha, beta,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, PROGRAMS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, WIDENS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute every PROGRAMS-th tile; operands come by descriptors, which the hardware follows.

    A_TURNED and B_TURNED say that an operand's columns, not its rows, lie together in memory.
    """
    if A_TURNED:
        a_at = tl.make_tensor_descriptor(a, [k, m], [s_a, 1], [BLOCK_K, BLOCK_M])
    else:
        a_at = tl.make_tensor_descriptor(a, [m, k], [s_a, 1], [BLOCK_M, BLOCK_K])
    columns = n
    if ACTIVATION == "swiglu":
        columns = 2 * n
    if B_TURNED:
        b_at = tl.make_tensor_descriptor(b, [columns, k], [s_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_at = tl.make_tensor_descriptor(b, [k, columns], [s_b, 1], [BLOCK_K, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        row, col = _place(tile, tiles_m, tiles_n, GROUP_M)
        at_m, at_n = row * BLOCK_M, col * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at_k in range(0, k, BLOCK_K):
            if A_TURNED:
                left = a_at.load([at_k, at_m]).T
            else:
                left = a_at.load([at_m, at_k])
            if B_TURNED:
                right = b_at.load([at_n, at_k]).T
            else:
                right = b_at.load([at_k, at_n])
            total = _dot(left, right, total, PRECISION, WIDENS)
            if ACTIVATION == "swiglu":
                if B_TURNED:
                    right = b_at.load([at_n + n, at_k]).T
                else:
                    right = b_at.load([at_k, at_n + n])
                up = _dot(left, right, up, PRECISION, WIDENS)
        rows, cols = at_m + tl.arange(0, BLOCK_M), at_n + tl.arange(0, BLOCK_N)
        if WIDE:
            rows, cols = rows.to(tl.int64), cols.to(tl.int64)
        _finish(
            total, up, rows, cols, m, n,
            c, s_cm, s_cn, bias, residual, s_rm, s_rn, out, s_om, s_on, kept, s_km, s_kn,
            alpha, beta, ACTIVATION, HAS_C, HAS_BIAS, HAS_RESIDUAL, KEEPS,
        )
