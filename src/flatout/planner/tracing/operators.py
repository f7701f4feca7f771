"""Answers about operators that fake tensors cannot give: values, sizes, and copies of a kernel.

`answered` gives them. A value that the training reads (`loss.item()`, `if mask.any()`) is answered
so that the usual questions take their usual turn: numbers are one, `any` is no, `all` and `equal`
are yes. A size that depends on values (boolean indexing, `nonzero`, `unique`) is answered by its
upper bound, or by the share of it that the caller stated. `copied` says what CUDA's kernels make
contiguous first.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from flatout.planner.tracing.recording import Recording

aten = torch.ops.aten
UNANSWERED = object()
"""Says that an operator is to be computed as usual."""
AGREEING = ("all", "equal", "isfinite", "isclose", "allclose")
"""Parts of the names of operators whose answer is usually yes."""
MAX_NUMEL = 1 << 22
"""Elements up to which an operator without a shape function is run for real on zeros."""


def answered(recording: "Recording", func: Any, args: Any, kwargs: Any) -> Any:
    """Return the answer to an operator, `UNANSWERED` where it can be computed as usual."""
    rule = _RULES.get(func)
    if rule is None or not isinstance(args[0], FakeTensor):
        return UNANSWERED
    return rule(recording, args, kwargs)


def _bound(recording: "Recording", count: int, what: str) -> int:
    """Return how many elements of so many are taken to be chosen."""
    share = recording.mask_share
    chosen = "all" if share == 1 else f"a share of {share:g}"
    where = recording.here()
    recording.note(
        f"{what}{' at ' + where if where else ''} depends on values: "
        f"{chosen} of the elements were taken to be chosen"
    )
    return max(1, math.ceil(count * share)) if count else 0


def _scalar(recording: "Recording", args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.constant is not None:
        return tensor.constant.item()
    if tensor.dtype is torch.bool:
        birth = recording.find(tensor)
        return birth is not None and any(word in str(birth.operator) for word in AGREEING)
    return 1.0 if tensor.dtype.is_floating_point else 1


def _nonzero(recording: "Recording", args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor = args[0]
    count = _bound(recording, tensor.numel(), "the size of nonzero()")
    return tensor.new_empty((count, tensor.dim()), dtype=torch.int64)


def _masked_select(recording: "Recording", args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor, mask = args[0], args[1]
    chosen = torch.broadcast_shapes(tensor.shape, mask.shape).numel()  # type: ignore[no-untyped-call]
    return tensor.new_empty((_bound(recording, chosen, "the size of masked_select()"),))


def _index(recording: "Recording", args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor, indices = args[0], args[1]
    masks = [each for each in indices if each is not None and each.dtype is torch.bool]
    if not masks:
        return UNANSWERED
    whole: list[Any] = []
    for each in indices:
        if each is None or each.dtype is not torch.bool:
            whole.append(each)
            continue
        count = _bound(recording, each.numel(), "the size of indexing by a mask")
        places = tensor.new_empty((count, each.dim()), dtype=torch.int64)
        recording.saw_inside(places, aten.nonzero.default)
        whole.extend(places.unbind(1))
    return aten.index.Tensor(tensor, whole)


def _reduced_loss(recording: "Recording", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a loss in the storage of its unreduced form: torch resizes that, and it stays large.

    So in `TORCH_META_FUNC(mse_loss)`, aten/src/ATen/native/Loss.cpp, for every device.
    """
    tensor, target = args[0], args[1]
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction == 0:
        return UNANSWERED
    shape = torch.broadcast_shapes(tensor.shape, target.shape)  # type: ignore[no-untyped-call]
    kept, spare = tensor.new_empty(shape), tensor.new_empty(shape)
    recording.saw_inside(kept, aten.mse_loss.default)
    recording.saw_inside(spare, aten.mse_loss.default)
    return kept.flatten()[:1].view(()) if kept.numel() else UNANSWERED


def _unique(recording: "Recording", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    count = _bound(recording, tensor.numel(), "the size of unique()")
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return tensor.new_empty((count,)), places, tensor.new_empty((count,), dtype=torch.int64)


def _bincount(recording: "Recording", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    count = max(kwargs.get("minlength", 0), *(each for each in args[2:3]), 1)
    recording.note(f"bincount() was taken to have {count} bins")
    return tensor.new_empty((count,), dtype=torch.int64)


def _repeat(recording: "Recording", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    repeats = args[0]
    if kwargs.get("output_size") is not None:
        return UNANSWERED
    recording.note("repeat_interleave() was taken to repeat each element once")
    return repeats.new_empty((repeats.numel(),), dtype=torch.int64)


def _pack(recording: "Recording", args: Sequence[Any], _: dict[str, Any]) -> Any:
    """Return sequences without their padding; where lengths are unknown none has any."""
    tensor, lengths, is_batch_first = args
    count, steps = tensor.shape[:2] if is_batch_first else (tensor.shape[1], tensor.shape[0])
    if isinstance(lengths, FakeTensor):
        recording.note("packed sequences were all taken to be as long as the longest")
        ends = [steps] * count
    else:
        ends = lengths.tolist()
    data = tensor.new_empty((sum(ends), *tensor.shape[2:]))
    # Real in every trace: what unpacks them reads the numbers in C++.
    return data, torch.tensor([sum(end > step for end in ends) for step in range(max(ends))])


_RULES: dict[Any, Callable[["Recording", Sequence[Any], dict[str, Any]], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda *_: True,
    aten.mse_loss.default: _reduced_loss,
    aten.smooth_l1_loss.default: _reduced_loss,
    aten._pack_padded_sequence.default: _pack,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat,
}


def run_for_real(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the operator's outputs on real zeros of the host: shapes, where none are known."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if sum(tensor.numel() for tensor in tensors) > MAX_NUMEL:
        raise ValueError("too large to be run for its shape")

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    plain_args, plain_kwargs = tree_map(real, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


_COPIED = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten.embedding_dense_backward.default: (0, 1),
    aten._log_softmax.default: (0,),
    aten._log_softmax_backward_data.default: (0, 1),
    aten._softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
}
"""Which tensors CUDA's kernels make contiguous first; the copies die with the call."""


def copied(func: Any, args: Sequence[Any]) -> dict[int, Tensor]:
    """Return the copies that a CUDA kernel makes of its arguments, by their places."""
    return {
        place: args[place].contiguous()
        for place in _COPIED.get(func, ())
        if not args[place].is_contiguous()
    }
