"""The same on a GPU: two Triton kernels, in which the table crosses the memory three times.

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
    """Return the gradient of the logits for that of each row's loss, in the logits' precision."""
    made = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, classes = logits.shape
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _differentiate[(rows, triton.cdiv(classes, BLOCK))](
            *(logits, places, normalizers, gradient.contiguous(), made),
            *(*logits.stride(), classes),
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
    most = tl.full((block,), float("-inf"), tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, classes, block):
        places = start + columns
        at = logits + row * row_stride + places.to(tl.int64) * stride
        x = tl.load(at, mask=places < classes, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        # What is minus infinity on both sides would be no number.
        kept = tl.where(most == float("-inf"), 0.0, total * tl.exp(most - larger))
        total = kept + tl.where(x == float("-inf"), 0.0, tl.exp(x - larger))
        most = larger
    largest = tl.max(most, 0)
    whole = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - largest)), 0)
    tl.store(found + row, largest + tl.log(whole))


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917  as kernels are called
    logits, places, normalizers, gradient, made, row_stride, stride, classes, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_there = columns < classes
    at = logits + row * row_stride + columns.to(tl.int64) * stride
    x = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(normalizers + row))
    share = tl.where(columns == tl.load(places + row), share - 1.0, share)
    value = share * tl.load(gradient + row)
    tl.store(made + row * classes + columns, value.to(made.dtype.element_ty), mask=is_there)
