"""How the kernels of the product are run: which one, with which tile, over how many programs.

Needs Triton; `examples.gemm` decides when `run` is used. The interpreter of Triton
(`TRITON_INTERPRET=1`) runs the same kernels on the CPU, which proves the indexing and nothing about
speed. `tiles_worth_trying` is pure numbers. Right on an H200; its speed was not measured there yet.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from examples.gemm.kernels import persistent_kernel, tiled_kernel

SHARED_BYTES = 227 * 1024
"""Shared memory of one block on Hopper, at most (CUDA programming guide, compute capability 9.0);
less elsewhere: then Triton gives a tile up on its own."""
MOST_ACCUMULATED = 256 * 128
"""Elements of all accumulators of a block. 256 threads with 255 registers hold twice as many
numbers; the other half is for addresses and operands."""
MANY_TILES = 256
"""With so many of the largest tile every processor has more than one to work on, and less than half
of it is not tried: each tile takes seconds to compile. Chosen, not measured."""


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

    A tile is the part of the result that one program computes. A large one reads each operand fewer
    times; a small one leaves more tiles to share among the processors. Nothing tells beforehand
    which wins, so a handful that fits is timed.

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


GROUP = 8
"""Rows of tiles that are worked on together, so that their right operands are still in the cache
(Triton's tutorial 03)."""
WIDEST = 2**31 - 1
"""Offsets beyond this need 64 bits."""
TMA_BYTES = 16
"""Alignment that the tensor memory accelerator asks of addresses and strides."""
INTERPRETED_TILE = Tile(m=32, n=32, k=32, warps=1, stages=1)
INTERPRETED_PROCESSORS = 4
"""Programs of the persistent kernel in the interpreter: fewer than there are tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One product to be computed, with the tensors to write to."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor
    kept: torch.Tensor | None
    """Where what goes into the activation is kept for backward."""
    alpha: float
    beta: float
    activation: str

    @property
    def size(self) -> tuple[int, int, int]:
        """M, N of the result, and K."""
        return self.out.shape[0], self.out.shape[1], self.a.shape[1]

    @property
    def is_wide(self) -> bool:
        """Whether an offset may need 64 bits."""
        tensors = (self.a, self.b, self.c, self.residual, self.out, self.kept)
        return any(_last_offset(tensor) > WIDEST for tensor in tensors if tensor is not None)


def is_interpreted() -> bool:
    """Return whether Triton's interpreter stands in for a GPU."""
    return type(tiled_kernel).__name__ == "InterpretedFunction"


def fits_descriptors(call: KernelCall) -> bool:
    """Return whether the tensor memory accelerator can fetch both operands."""
    return hasattr(tl, "make_tensor_descriptor") and all(map(_is_fetchable, (call.a, call.b)))


def run(call: KernelCall, variant: str) -> None:
    """Compute the product.

    Args:
        call: What to compute.
        variant: `tiled`, `persistent`, or `auto`.

    Raises:
        ValueError: if `persistent` is asked for and the operands do not are as it needs them.
    """
    if variant == "auto":
        variant = "persistent" if _has_tma(call) else "tiled"
    with on_device(call.a.device):
        if variant == "persistent":
            _run_persistent(call, processor_count(call.a.device))
        else:
            _run_tiled(call)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the operands' device the current one: Triton runs kernels, and tunes them, there.

    Torch's own operators see to that themselves; a script may compute on `cuda:1` and never say so
    but in its tensors.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def processor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; a made-up small one in the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _run_tiled(call: KernelCall) -> None:
    m, n, k = call.size

    def grid(meta: Any) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    c, residual, kept = (_or(tensor, call.out) for tensor in (call.c, call.residual, call.kept))
    _launch(
        tiled_kernel,
        grid,
        call,
        call.a,
        call.b,
        c,
        _or(call.bias, call.out),
        residual,
        call.out,
        kept,
        m,
        n,
        k,
        *call.a.stride(),
        *call.b.stride(),
        *c.stride(),
        *residual.stride(),
        *call.out.stride(),
        *kept.stride(),
        call.alpha,
        call.beta,
        **_what_follows(call),
        WIDE=call.is_wide,
        **_arithmetic(call),
    )


def _run_persistent(call: KernelCall, processors: int) -> None:
    if not fits_descriptors(call):
        raise ValueError(
            f"the persistent kernel needs operands that lie in rows or columns of a multiple of "
            f"{TMA_BYTES} bytes, not strides {call.a.stride()} and {call.b.stride()}"
        )
    m, n, k = call.size
    _give_memory()
    c, residual, kept = (_or(tensor, call.out) for tensor in (call.c, call.residual, call.kept))
    _launch(
        persistent_kernel,
        (processors,),
        call,
        call.a,
        call.b,
        c,
        _or(call.bias, call.out),
        residual,
        call.out,
        kept,
        m,
        n,
        k,
        _row_stride(call.a),
        _row_stride(call.b),
        *c.stride(),
        *residual.stride(),
        *call.out.stride(),
        *kept.stride(),
        call.alpha,
        call.beta,
        A_TURNED=_is_turned(call.a),
        B_TURNED=_is_turned(call.b),
        PROGRAMS=processors,
        **_what_follows(call),
        WIDE=call.is_wide,
        **_arithmetic(call),
    )


def _launch(kernel: Any, grid: Any, call: KernelCall, *values: Any, **known: Any) -> None:
    """Run a kernel with the fastest tile; the interpreter takes one size for all."""
    if not is_interpreted():
        _tuned(kernel)[grid](*values, **known)
        return
    tile = INTERPRETED_TILE
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    kernel[grid](*values, **known, **blocks, GROUP_M=2)


@functools.cache
def _tuned(kernel: Any) -> Any:
    configs = [
        triton.Config(
            {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": GROUP},
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        for tile in TILES
    ]
    names = set(kernel.arg_names)
    wanted = ("m", "n", "k", "ACTIVATION", "HAS_C", "KEEPS", "A_TURNED", "B_TURNED")
    strides = ("s_am", "s_bk")  # which side is together
    key = [name for name in (*wanted, *strides) if name in names]
    return triton.autotune(configs, key=key, prune_configs_by={"early_config_prune": _pruned})(
        kernel
    )


def _pruned(configs: Any, named: Any, **known: Any) -> Any:
    """Return the configurations whose tile is worth trying for this product."""
    given = {**named, **known}
    sides = 2 if given["ACTIVATION"] == "swiglu" else 1
    worth = tiles_worth_trying(given["m"], given["n"], given["a"].element_size(), right_sides=sides)
    sizes = {(tile.m, tile.n, tile.k) for tile in worth}
    return [
        config
        for config in configs
        if tuple(config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) in sizes
    ]


def _what_follows(call: KernelCall) -> dict[str, Any]:
    return {
        "ACTIVATION": call.activation,
        "HAS_C": call.c is not None and call.beta != 0.0,
        "HAS_BIAS": call.bias is not None,
        "HAS_RESIDUAL": call.residual is not None,
        "KEEPS": call.kept is not None,
    }


def _arithmetic(call: KernelCall) -> dict[str, Any]:
    is_tf32 = call.a.dtype == torch.float32 and _allows_tf32()
    widens = is_interpreted() and call.a.dtype == torch.bfloat16
    return {"PRECISION": "tf32" if is_tf32 else "ieee", "WIDENS": widens}


def _allows_tf32() -> bool:
    """Return whether the script lets torch's own products run in tf32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set with the newer switches, which the older one refuses to read
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def _has_tma(call: KernelCall) -> bool:
    if call.a.device.type != "cuda" or torch.version.hip or not call.a.shape[1]:
        return False
    is_hopper = torch.cuda.get_device_capability(call.a.device) >= (9, 0)
    return is_hopper and call.a.element_size() == 2 and fits_descriptors(call)


def _give_memory() -> None:
    """Let kernels that build descriptors on the device ask torch for the room.

    Each time: Triton remembers it by thread, and backward runs in threads of autograd's.
    """
    if is_interpreted():
        return

    def room(size: int, alignment: int, stream: Any) -> torch.Tensor:
        del alignment, stream  # torch's blocks are aligned to more, on the stream of the launch
        return torch.empty(size, device="cuda", dtype=torch.int8)  # the current one

    triton.set_allocator(room)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or one that stands in for it and is never read."""
    return other if tensor is None else tensor


def _is_turned(tensor: torch.Tensor) -> bool:
    return tensor.stride(1) != 1


def _row_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(1) if _is_turned(tensor) else tensor.stride(0)


def _is_fetchable(tensor: torch.Tensor) -> bool:
    lies_together = 1 in tensor.stride()
    stride_bytes = _row_stride(tensor) * tensor.element_size()
    is_aligned = tensor.data_ptr() % TMA_BYTES == 0 and stride_bytes % TMA_BYTES == 0
    return lies_together and is_aligned and stride_bytes > 0


def _last_offset(tensor: torch.Tensor) -> int:
    return sum(
        (size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
