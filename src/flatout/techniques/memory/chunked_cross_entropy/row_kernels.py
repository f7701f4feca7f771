"""Cross-entropy of whole tables on a GPU: two Triton kernels that read and write it three times.

Slice by slice torch would start some thousand kernels for a step of GPT-2, more than the GPU waits
for.
"""

import functools

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Classes that a program holds at once: eight warps have 16 each a thread."""
WARPS = 8
MOST_PADDING = 1024
"""Classes that rows of logits are longer than they are, where they were padded."""


def find_normalizers(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of each row's exponentials, in fp32."""
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _normalize[(len(logits),)](
            logits, found, *logits.stride(), logits.shape[1], block=BLOCK, num_warps=WARPS
        )
    return found


def make_gradient(
    logits: torch.Tensor, places: torch.Tensor, normalizers: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the logits for that of each row's loss, in the logits' precision.

    Its rows are as far apart as those of the logits, where that takes little more memory: aligned
    ones are written several classes at once.
    """
    rows, classes = logits.shape
    is_padded = logits.stride(1) == 1 and classes <= logits.stride(0) <= classes + MOST_PADDING
    apart = logits.stride(0) if is_padded else classes
    made = torch.empty(rows, apart, dtype=logits.dtype, device=logits.device)[:, :classes]
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _differentiate[(rows,)](
            *(logits, places, normalizers, gradient.contiguous(), made),
            *(*logits.stride(), apart, classes),
            block=BLOCK,
            num_warps=WARPS,
        )
    return made


@functools.cache
def can_run(device: torch.device) -> bool:
    """Return whether the kernels compile and run on a GPU: Triton wants a C compiler, too."""
    try:
        logits = torch.zeros(1, 2, device=device)
        found = find_normalizers(logits)
        made = make_gradient(logits, torch.zeros_like(found, dtype=torch.int64), found, found)
        return bool(made.isfinite().all())
    except Exception:  # noqa: BLE001  whatever is missing, torch does it slice by slice
        return False


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(  # type: ignore[no-untyped-def]
    logits, found, row_stride, stride, classes, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    at = logits + row * row_stride + columns.to(tl.int64) * stride
    most = float("-inf")
    total = tl.zeros((block,), tl.float32)
    whole = classes // block * block
    # Without a mask several classes are loaded at once.
    for start in range(0, whole, block):
        most, total = _taken_in(most, total, tl.load(at + start * stride).to(tl.float32))
    x = tl.load(at + whole * stride, mask=whole + columns < classes, other=float("-inf"))
    most, total = _taken_in(most, total, x.to(tl.float32))
    tl.store(found + row, most + tl.log(tl.sum(total, 0)))


@triton.jit
def _taken_in(most, total, x):  # type: ignore[no-untyped-def]
    larger = tl.maximum(most, tl.max(x, 0))
    base = tl.where(larger == float("-inf"), 0.0, larger)  # so far all are hidden
    return larger, total * tl.exp(most - base) + tl.exp(x - base)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917  as kernels are called
    logits,
    places,
    normalizers,
    gradient,
    made,
    row_stride,
    stride,
    made_stride,
    classes,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    at = logits + row * row_stride + columns.to(tl.int64) * stride
    to = made + row * made_stride + columns
    normalizer, scale = tl.load(normalizers + row), tl.load(gradient + row)
    place = tl.load(places + row)
    whole = classes // block * block
    for start in range(0, whole, block):
        share = tl.exp(tl.load(at + start * stride).to(tl.float32) - normalizer)
        value = tl.where(start + columns == place, share - 1.0, share) * scale
        tl.store(to + start, value.to(made.dtype.element_ty))
    is_there = whole + columns < classes
    x = tl.load(at + whole * stride, mask=is_there, other=0.0)
    share = tl.exp(x.to(tl.float32) - normalizer)
    value = tl.where(whole + columns == place, share - 1.0, share) * scale
    tl.store(to + whole, value.to(made.dtype.element_ty), mask=is_there)
