"""What kernels of the CPU take inside, for traces of the host that are held against real runs.

A trace sees what goes into an operator and what comes out. On the CPU oneDNN reorders images and
weights into blocks of its own layout, computes in a workspace, and reorders back: copies that live
for the length of a kernel, as seen in torch.profiler's memory events of torch 2.13 (x86-64).
Without them the truth of the CPU says little about the tracer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.agent.patching import swapped
from flatout.planner.tracing import trace as tracing
from flatout.planner.tracing.recording import Recording
from flatout.records.memory_stream import Component, MemoryStream

aten = torch.ops.aten
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
    """Return what happens inside a kernel, in order; empty where only its outputs are made."""
    rule = _HOST_RULES.get(func)
    return () if rule is None else rule(args, output)


def completed(func: Any, args: Sequence[Any], output: Any) -> Any:
    """Return the outputs with those that torch's shape functions leave empty."""
    if func is not aten.mkldnn_rnn_layer.default:
        return output
    *known, space = output
    size = _rnn_workspace(args)
    return (*known, space.new_empty((size,), dtype=torch.uint8))


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


class HostRecording(Recording):
    """Logs what kernels of the host take inside, too."""

    def _compute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        output = completed(func, args, super()._compute(func, types, args, kwargs))
        taken: list[int] = []
        for event in inside(func, args, output):
            if isinstance(event, Take):
                taken.append(len(self.births))
                self._enter_birth(event.size, func).component = Component.WORKSPACE
            elif isinstance(event, Give):
                self._enter_death(taken[event.taken])
            else:
                self._see(output if isinstance(output, Tensor) else output[event.output], func)
        return output


def trace_host(*args: Any, **kwargs: Any) -> MemoryStream:
    """Trace on the CPU, as `trace` does, with what its kernels take inside."""
    with swapped(tracing, "Recording", HostRecording):
        return tracing.trace(*args, device="cpu", **kwargs)
