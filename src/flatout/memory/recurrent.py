"""LSTM, GRU and plain recurrent layers on a device that is not there: what cuDNN's would allocate.

Torch dispatches them to a kernel that a build without CUDA does not hold. Here an autograd function
allocates the same tensors: outputs, cuDNN's reserve space, and in backward the gradients with the
one buffer that holds those of all weights. The size of the reserve space is cuDNN's own secret and
an estimate here: the gates, the cell and the hidden state of every time step and layer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Matrix products a cell computes for each unit."""
KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Values kept for each unit and time step: its gates, and its states."""
ASSUMED = "cuDNN's reserve space of recurrent layers is assumed, not known"


class Layers(NamedTuple):
    """The settings of a recurrent layer."""

    kind: str
    layers: int
    directions: int
    hidden: int
    dropout: float
    is_training: bool
    batch_first: bool


class _Recurrent(torch.autograd.Function):
    """Allocate what cuDNN's recurrent forward and backward allocate."""

    @staticmethod
    def forward(ctx: Any, settings: Layers, source: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, weights = rest[: _states(settings)], rest[_states(settings) :]
        width = settings.directions * states[0].shape[-1]
        if settings.batch_first and source.dim() == 3:
            source = source.transpose(0, 1)
        steps = source.shape[:-1].numel()
        output = source.new_empty((*source.shape[:-1], width))
        finals = [state.new_empty(state.shape) for state in states]
        kept = KEPT[settings.kind] * settings.hidden * settings.directions * settings.layers
        masks = width * (settings.layers - 1) if settings.dropout else 0
        reserve = source.new_empty(
            (steps * (kept + masks) if settings.is_training else 0) * source.element_size(),
            dtype=torch.uint8,
        )
        ctx.settings = settings
        ctx.save_for_backward(source, output, reserve, *states, *weights)
        if settings.batch_first and source.dim() == 3:
            output = output.transpose(0, 1)
        return output, *finals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        settings = ctx.settings
        source, _, _, *rest = ctx.saved_tensors
        states, weights = rest[: _states(settings)], rest[_states(settings) :]
        if settings.batch_first and source.dim() == 3:
            gradients[0].transpose(0, 1).contiguous()  # as cuDNN's wrapper does
        grads = [torch.empty_like(source), *(torch.empty_like(state) for state in states)]
        buffer = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        parts, place = [], 0
        for weight in weights:
            parts.append(buffer[place : place + weight.numel()].view_as(weight))
            place += weight.numel()
        if settings.batch_first and source.dim() == 3:
            grads[0] = grads[0].transpose(0, 1)
        return None, *grads, *parts


def _states(settings: Layers) -> int:
    return 2 if settings.kind == "lstm" else 1


def recurrent(kind: str, note: Any) -> Any:
    """Return what stands for `torch._VF.lstm` and its like; `note` is told what is assumed."""

    def run(source: Tensor, *args: Any) -> Any:
        note(ASSUMED)
        if isinstance(args[2], tuple | list):  # a packed sequence
            _, hx, weights, _, layers, dropout, training, bidirectional = args
            batch_first = False
        else:
            hx, weights, _, layers, dropout, training, bidirectional, batch_first = args
        states: Sequence[Tensor] = hx if isinstance(hx, tuple | list) else (hx,)
        if torch.is_autocast_enabled("cuda"):
            to = torch.get_autocast_dtype("cuda")
            source, states, weights = source.to(to), _cast(states, to), _cast(weights, to)
        first = states[-1]
        settings = Layers(
            kind, layers, 2 if bidirectional else 1, first.shape[-1], dropout, training, batch_first
        )
        output, *finals = _Recurrent.apply(settings, source, *states, *weights)  # type: ignore[no-untyped-call]
        return output, *finals

    return run


def _cast(tensors: Sequence[Tensor], to: torch.dtype) -> list[Tensor]:
    """Return the tensors as autocast hands them to cuDNN."""
    return [tensor.to(to) for tensor in tensors]
