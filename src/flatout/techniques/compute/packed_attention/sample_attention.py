"""Attention inside of documents that share rows: no mask over whole rows, no weights across."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

How = Literal["padded", "varlen", "flex"]
SLACK = 2.0
"""Times the operator's own rounding error that the documents' attention may have."""
LEAST = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """Where the documents are in rows of tokens."""

    rows: torch.Tensor
    """Of each document longer than one token its places in all tokens, padded with its last."""
    is_real: torch.Tensor
    """The same form: whether a place is the document's, or padding."""
    numbers: torch.Tensor
    """Of every token the number of its document."""
    ends: torch.Tensor
    """Running sum of lengths, from 0: for kernels of variable lengths."""
    longest: int


def documents_of(positions: torch.Tensor) -> Documents:
    """Return the documents in rows: positions begin again, at 0, with each of them."""
    starts = positions == 0
    starts[:, 0] = True
    numbers = starts.flatten().cumsum(0) - 1
    lengths = torch.bincount(numbers)
    ends = functional.pad(lengths.cumsum(0), (1, 0))
    longest = int(lengths.max())
    firsts, lengths = ends[:-1][lengths > 1], lengths[lengths > 1]
    steps = torch.arange(longest, device=positions.device)
    return Documents(
        rows=firsts[:, None] + steps.minimum(lengths[:, None] - 1),
        is_real=steps < lengths[:, None],
        numbers=numbers,
        ends=ends.int(),
        longest=longest,
    )


def attend_inside(  # noqa: PLR0913  the operator's own parts
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    *,
    how: How = "padded",
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Return causal attention of each document to itself alone.

    Args:
        q: Rows by heads by tokens by features.
        k: The same, with as many heads or a divisor of them.
        v: The same as `k`.
        documents: Where they lie.
        how: `padded` lays documents side by side, on any device; `varlen` and `flex` are kernels
            of torch's for CUDA.
        scale: Of the products; None for torch's own.
        dropout_p: Share of weights that is dropped.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if how == "flex":
        return _flex(q, k, v, documents, scale)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if how == "varlen":
        found = _varlen(flat_q, flat_k, flat_v, documents, scale)
    else:
        found = _padded(flat_q, flat_k, flat_v, documents, scale, dropout_p)
    return found.view(q.shape[0], q.shape[2], *found.shape[1:]).transpose(1, 2)


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float | None,
    dropout_p: float,
) -> torch.Tensor:
    """Attend with each document in a row of its own; keys behind its end are never looked at."""
    if not len(documents.rows):
        return v
    q, k, values = (x[documents.rows].transpose(1, 2) for x in (q, k, v))
    made = functional.scaled_dot_product_attention(
        q, k, values, is_causal=True, scale=scale, dropout_p=dropout_p
    )
    # A token alone attends to itself: its value is the outcome.
    places = documents.rows[documents.is_real]
    return v.index_copy(0, places, made.transpose(1, 2)[documents.is_real].to(v.dtype))


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """Attend by torch's kernel for variable lengths; written for CUDA, where it has not run yet."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = (
        {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    )
    if scale is not None and "scale" in known:
        causal["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    ends, longest = documents.ends, documents.longest
    found: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **causal)
    made: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return made


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """Attend by FlexAttention with a mask of blocks; on the CPU torch has no backward for it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    numbers = documents.numbers.view(q.shape[0], q.shape[2])

    def inside(b: Any, h: Any, i: Any, j: Any) -> Any:
        del h
        return (numbers[b, i] == numbers[b, j]) & (i >= j)

    length = q.shape[2]
    blocks = create_block_mask(inside, q.shape[0], None, length, length, device=str(q.device))
    run = torch.compile(flex_attention) if q.is_cuda else flex_attention
    found: torch.Tensor = run(q, k, v, block_mask=blocks, scale=scale)
    return found


def find_difference(  # noqa: PLR0913  the operator's own parts
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    documents: Documents,
    *,
    how: How,
    scale: float | None,
) -> str:
    """Compare outputs and gradients with the operator's under its mask; return what differs."""
    groups = q.shape[1] // k.shape[1]

    def masked(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        b, c = (each.repeat_interleave(groups, dim=1) for each in (b, c))
        added = mask if mask.dtype == torch.bool else mask.to(a.dtype)
        return functional.scaled_dot_product_attention(a, b, c, attn_mask=added, scale=scale)

    def inside(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return attend_inside(a, b, c, documents, how=how, scale=scale)

    exact = _slopes(masked, [x.double() for x in (q, k, v)])
    own = _slopes(masked, [q, k, v])
    try:
        found = _slopes(inside, [q, k, v])
    except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
        return f"{how} does not run here: {str(error).splitlines()[0][:120]}"
    for true, one, other in zip(exact, own, found, strict=True):
        size = max(true.abs().max().item(), 1e-30)
        allowed = SLACK * (one.double() - true).abs().max().item() / size + LEAST
        off = (other.double() - true).abs().max().item() / size
        # The rounding of one operator may be lucky: a few units of the type are always allowed.
        if not off <= max(allowed, 16 * torch.finfo(q.dtype).eps):
            return f"attention inside of documents differs by {off:.1g} from what the mask gives"
    return ""


def _slopes(call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = call(*leaves)
    seed = torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, seed.view(output.shape))]
