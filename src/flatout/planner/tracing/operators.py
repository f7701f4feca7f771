"""Answers about operators that fake tensors cannot give: values, sizes, and memory inside kernels.

`OperatorAnswers` answers for values that are read and sizes that depend on data; `inside` says what
kernels of the host allocate; `completed` adds outputs that torch's shape functions leave empty.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
UNANSWERED = object()
"""Says that an operator is to be computed as usual."""
AGREEING = ("all", "equal", "isfinite", "isclose", "allclose")
"""Parts of the names of operators whose answer is usually yes."""
MAX_NUMEL = 1 << 22
"""Elements up to which an operator without a shape function is run for real on zeros."""


@dataclass(slots=True)
class OperatorAnswers:
    """How questions to fake tensors are answered, and what the report says about it.

    A value that the training reads (`loss.item()`, `if mask.any()`) is answered so that the usual
    questions take their usual turn: numbers are one, `any` is no, `all` and `equal` are yes. A size
    that depends on values (boolean indexing, `nonzero`, `unique`) is answered by its upper bound,
    or by the share of it that the caller stated.
    """

    mask_share: float = 1.0
    origin: Callable[[Tensor], str] = field(default=lambda _: "")
    """The name of the operator that made a tensor."""
    here: Callable[[], str] = field(default=lambda: "")
    """The line of the user's that is running."""
    see: Callable[[Tensor, Any], None] = field(default=lambda *_: None)
    """Told of a tensor that an operator makes inside."""
    notes: dict[str, None] = field(default_factory=dict)
    """Clauses for the reader, each once."""

    def note(self, text: str) -> None:
        """Keep a clause for the reader."""
        self.notes.setdefault(text)

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the answer to an operator, `UNANSWERED` where it can be computed as usual."""
        rule = _RULES.get(func)
        return UNANSWERED if rule is None else rule(self, args, kwargs)

    def bound(self, count: int, what: str) -> int:
        """Return how many elements of so many are taken to be chosen."""
        share = "all" if self.mask_share == 1 else f"a share of {self.mask_share:g}"
        where = self.here()
        self.note(
            f"{what}{' at ' + where if where else ''} depends on values: "
            f"{share} of the elements were taken to be chosen"
        )
        return max(1, math.ceil(count * self.mask_share)) if count else 0


def _scalar(answers: OperatorAnswers, args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    if tensor.constant is not None:
        return tensor.constant.item()
    if tensor.dtype is torch.bool:
        return any(word in answers.origin(tensor) for word in AGREEING)
    return 1.0 if tensor.dtype.is_floating_point else 1


def _agree(_: OperatorAnswers, args: Sequence[Any], __: dict[str, Any]) -> Any:
    return True if isinstance(args[0], FakeTensor) else UNANSWERED


def _nonzero(answers: OperatorAnswers, args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    count = answers.bound(tensor.numel(), "the size of nonzero()")
    return tensor.new_empty((count, tensor.dim()), dtype=torch.int64)


def _masked_select(answers: OperatorAnswers, args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor, mask = args[0], args[1]
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    chosen = torch.broadcast_shapes(tensor.shape, mask.shape).numel()  # type: ignore[no-untyped-call]
    return tensor.new_empty((answers.bound(chosen, "the size of masked_select()"),))


def _index(answers: OperatorAnswers, args: Sequence[Any], _: dict[str, Any]) -> Any:
    tensor, indices = args[0], args[1]
    masks = [each for each in indices if each is not None and each.dtype is torch.bool]
    if not masks or not isinstance(tensor, FakeTensor):
        return UNANSWERED
    whole: list[Any] = []
    for each in indices:
        if each is None or each.dtype is not torch.bool:
            whole.append(each)
            continue
        count = answers.bound(each.numel(), "the size of indexing by a mask")
        places = tensor.new_empty((count, each.dim()), dtype=torch.int64)
        answers.see(places, aten.nonzero.default)
        whole.extend(places.unbind(1))
    return aten.index.Tensor(tensor, whole)


def _reduced_loss(answers: OperatorAnswers, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a loss in the storage of its unreduced form: torch resizes that, and it stays large.

    So in `TORCH_META_FUNC(mse_loss)`, aten/src/ATen/native/Loss.cpp, for every device.
    """
    tensor, target = args[0], args[1]
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if not isinstance(tensor, FakeTensor) or reduction == 0:
        return UNANSWERED
    shape = torch.broadcast_shapes(tensor.shape, target.shape)  # type: ignore[no-untyped-call]
    kept, spare = tensor.new_empty(shape), tensor.new_empty(shape)
    answers.see(kept, aten.mse_loss.default)
    answers.see(spare, aten.mse_loss.default)
    return kept.flatten()[:1].view(()) if kept.numel() else UNANSWERED


def _unique(answers: OperatorAnswers, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    count = answers.bound(tensor.numel(), "the size of unique()")
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return tensor.new_empty((count,)), places, tensor.new_empty((count,), dtype=torch.int64)


def _bincount(answers: OperatorAnswers, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    count = max(kwargs.get("minlength", 0), *(each for each in args[2:3]), 1)
    answers.note(f"bincount() was taken to have {count} bins")
    return tensor.new_empty((count,), dtype=torch.int64)


def _repeat(answers: OperatorAnswers, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    repeats = args[0]
    if not isinstance(repeats, FakeTensor) or kwargs.get("output_size") is not None:
        return UNANSWERED
    answers.note("repeat_interleave() was taken to repeat each element once")
    return repeats.new_empty((repeats.numel(),), dtype=torch.int64)


def _pack(answers: OperatorAnswers, args: Sequence[Any], _: dict[str, Any]) -> Any:
    """Return sequences without their padding; where lengths are unknown none has any."""
    tensor, lengths, is_batch_first = args
    if not isinstance(tensor, FakeTensor):
        return UNANSWERED
    count, steps = tensor.shape[:2] if is_batch_first else (tensor.shape[1], tensor.shape[0])
    if isinstance(lengths, FakeTensor):
        answers.note("packed sequences were all taken to be as long as the longest")
        ends = [steps] * count
    else:
        ends = lengths.tolist()
    data = tensor.new_empty((sum(ends), *tensor.shape[2:]))
    # Real in every trace: what unpacks them reads the numbers in C++.
    return data, torch.tensor([sum(end > step for end in ends) for step in range(max(ends))])


_RULES: dict[Any, Callable[[OperatorAnswers, Sequence[Any], dict[str, Any]], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _agree,
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
    """Return the operator's outputs on real zeros of the host: shapes, where none are known.

    Raises:
        ValueError: if the arguments are too large to be made.
    """
    from torch.utils._pytree import tree_leaves, tree_map

    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if sum(tensor.numel() for tensor in tensors) > MAX_NUMEL:
        raise ValueError("too large to be run for its shape")

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    plain_args, plain_kwargs = tree_map(real, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


BLOCK = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8
"""Channels of one block of oneDNN: as many floats as a vector register holds. Fewer input channels
are read without a copy."""
LSTM_SAMPLE = 64
"""Samples for which a recurrent kernel is run to learn its workspace, linear in the samples."""
MAX_SAMPLE_NUMEL = 1 << 24
"""Elements up to which that is done: the run takes milliseconds."""


class Take(NamedTuple):
    """A buffer is taken inside the kernel."""

    size: int


class Give(NamedTuple):
    """A buffer is given back."""

    taken: int
    """Which one, counted from 0 in the order of taking."""


class Show(NamedTuple):
    """An output of the operator is allocated here."""

    output: int


Inside = Sequence[Take | Give | Show]


def inside(func: Any, args: Sequence[Any], output: Any) -> Inside:
    """Return what happens inside a kernel, in order; empty where only its outputs are made.

    A trace sees what goes into an operator and what comes out. On the CPU oneDNN reorders images
    and weights into blocks of its own layout, computes in a workspace, and reorders back: copies
    that live for the length of a kernel, as seen in torch.profiler's memory events of torch 2.13
    (x86-64). Only traces of the host use this; on CUDA the allocator's replay adds workspaces.
    """
    rule = _HOST_RULES.get(func)
    return () if rule is None else rule(args, output)


def completed(func: Any, args: Sequence[Any], output: Any) -> Any:
    """Return the outputs with those that torch's shape functions leave empty."""
    if func is not aten.mkldnn_rnn_layer.default:
        return output
    *known, space = output
    size = _rnn_workspace(args)
    return (*known, space.new_empty((size,), dtype=torch.uint8))


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


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_blocked(images: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes this convolution in blocks of channels."""
    return (
        torch._C._has_mkldnn
        and images.dtype in (torch.float32, torch.bfloat16)
        and images.dim() == 4
        and images.shape[0] > 1
        and images.is_contiguous()
        and weight.is_contiguous()
    )


def _padded(tensor: Tensor) -> int:
    """Return the bytes of a picture's copy in blocks of channels."""
    channels = tensor.shape[1]
    return _bytes(tensor) // channels * (-(-channels // BLOCK) * BLOCK)


def _padded_weight(weight: Tensor, *, reads_blocks: bool) -> int:
    outer, inner = weight.shape[:2]
    width = -(-inner // BLOCK) * BLOCK if reads_blocks else inner
    return _bytes(weight) // (outer * inner) * (-(-outer // BLOCK) * BLOCK) * width


def _read(tensor: Tensor) -> Take:
    """Take the copy that a kernel reads; few channels are read as they lie."""
    return Take(_padded(tensor) if tensor.shape[1] >= BLOCK else 0)


def _along(source: Tensor, weight: Tensor, made: Tensor, first: int) -> list[Take | Give | Show]:
    """Return what a convolution in its forward direction does: copies, and `made` in blocks."""
    return [
        _read(source),
        Take(_padded_weight(weight, reads_blocks=source.shape[1] >= BLOCK)),
        Take(_padded(made)),
        *(Give(first + 1), Give(first), Show(0), Give(first + 2)),
    ]


def _against(
    source: Tensor, weight: Tensor, made: Tensor, *, is_strided: bool
) -> list[Take | Give | Show]:
    """Return what the gradient of a picture takes; strided, it is laid out twice more."""
    begin: list[Take | Give | Show] = [
        *(Take(_padded(source)), Take(_padded_weight(weight, reads_blocks=True))),
        Take(_bytes(made) if is_strided else _padded(made)),
        *(Give(1), Give(0)),
    ]
    if is_strided:
        return [*begin, Take(_bytes(made)), Show(0), Give(3), Give(2)]
    return [*begin, Show(0), Give(2)]


def _is_strided(stride: Sequence[int]) -> bool:
    return any(step > 1 for step in stride)


def _convolution(args: Sequence[Any], output: Tensor) -> Inside:
    images, weight, _, stride, _, _, is_transposed = args[:7]
    if not _is_blocked(images, weight):
        return ()
    if is_transposed:
        return _against(images, weight, output, is_strided=_is_strided(stride))
    return _along(images, weight, output, 0)


def _convolution_backward(args: Sequence[Any], output: Sequence[Any]) -> Inside:
    gradient, images, weight, _, stride, _, _, is_transposed = args[:8]
    if not _is_blocked(images, weight):
        return ()
    course: list[Take | Give | Show] = []
    if output[0] is not None and is_transposed:
        course = _along(gradient, weight, images, 0)
    elif output[0] is not None:
        course = _against(gradient, weight, images, is_strided=_is_strided(stride))
    count = sum(isinstance(event, Take) for event in course)
    course += [_read(gradient) if is_transposed else Take(_padded(gradient))]
    course += [Take(_padded(images)) if is_transposed else _read(images), Take(_bytes(weight))]
    course += [Give(count + 1), Give(count), Show(1), Show(2), Give(count + 2)]
    return course


def _rnn_workspace(args: Sequence[Any]) -> int:
    """Return the bytes of the workspace that is kept for backward, by a run on a few samples."""
    source, is_training = args[0], args[15]
    if not is_training:
        return 0
    count = source.shape[1]  # time comes first here, whatever the layer was told
    sample = LSTM_SAMPLE
    if source.numel() // count * sample > MAX_SAMPLE_NUMEL:
        sample = 1

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if value is source:
            shape[1] = sample
        elif value is args[5] or value is args[6]:
            shape[-2] = sample
        return torch.zeros(shape, dtype=value.dtype, device="cpu")

    kept: Tensor = aten.mkldnn_rnn_layer.default(*map(real, args))[3]
    size: int = kept.numel() * count // sample
    return size


_HOST_RULES: dict[Any, Callable[[Sequence[Any], Any], Inside]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
