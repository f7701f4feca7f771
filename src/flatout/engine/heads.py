"""The last layers whose logits are made only when somebody reads them, and what became of them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flatout.engine.head_loss import HEAD_LOSS, Loss, find_difference
from flatout.engine.late_logits import (
    PLAIN,
    LateLogits,
    Layer,
    late_logits,
    may_be_late,
)

READS = 3
"""Of logits that a loss did without, by which a script is not judged yet: a look at the start."""
SELDOM = 10
"""Losses for each further reading of the logits that makes doing without them worth it."""


@dataclass(slots=True, eq=False)
class Head:
    """What became of the logits of one layer."""

    uses: int = 0
    reads: int = 0
    is_proven: bool = False
    against: str = ""
    """Why its logits are made at once, as without the lever."""


class Heads:
    """Of one process."""

    def __init__(
        self,
        linear: Callable[..., torch.Tensor],
        cross_entropy: Callable[..., torch.Tensor],
        *,
        min_bytes: int,
        least: int,
        most: int,
    ) -> None:
        """Begin with no layer known.

        Args:
            linear: torch's own layer.
            cross_entropy: torch's own loss.
            min_bytes: of logits: smaller tables are made at once.
            least: bytes of a slice in fp32.
            most: slices of a batch.
        """
        self.plain_linear = linear
        self.plain_loss = cross_entropy
        self.min_bytes = max(1, min_bytes)
        self.least, self.most = least, most
        self.known: Any = WeakIdKeyDictionary()
        """By weight: its `Head`."""
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        """Calls whose logits somebody holds."""
        self.unmade: dict[tuple[int, int], int] = {}
        """Losses that did without logits, by their rows and classes."""
        self.against: list[str] = []

    def logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a stand-in for a layer's logits; None where they are to be made at once."""
        if not may_be_late(hidden, weight, bias) or self._head(weight).against:
            return None
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dtype = autocast or weight.dtype
        if dtype == torch.float16:
            return None  # a gradient scaler's factor comes too late for gradients made in forward
        rows = hidden.numel() // max(1, hidden.shape[-1])
        size = rows * weight.shape[0] * dtype.itemsize
        # With fewer rows than the layer is wide, its weight's gradient is no smaller than they are.
        if size < self.min_bytes or rows < weight.shape[1] or not _agree(hidden, weight, autocast):
            return None
        layer = Layer(
            weight=weight,
            bias=bias,
            autocast=autocast,
            linear=self.plain_linear,
            on_read=self._read,
        )
        self.layers.add(layer)
        return late_logits(layer, hidden, dtype)

    def loss(self, late: LateLogits, target: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Return the loss without the logits; None where they have to be made."""
        layer, hidden = late.layer, late.hidden
        head = self._head(layer.weight)
        is_whole = late.table is None and not layer.is_made and hidden._version == late.version
        if head.against or not is_whole or layer.is_past():
            return None
        if not _is_ours(late, target, options) or not may_be_late(hidden, layer.weight, layer.bias):
            return None
        loss = Loss(
            dtype=layer.autocast or layer.weight.dtype,
            rows=self._rows(len(hidden), len(layer.weight)),
            ignore_index=options["ignore_index"],
            reduction=options["reduction"],
            label_smoothing=options["label_smoothing"],
            class_weights=options["weight"],
        )
        given = (hidden, layer.weight, layer.bias, target, loss)
        if not self._is_proven(head, given):
            return None
        layer.is_used = True
        head.uses += 1
        shape = (len(hidden), len(layer.weight))
        self.unmade[shape] = self.unmade.get(shape, 0) + 1
        result: torch.Tensor = HEAD_LOSS(*given)
        is_wide = torch.is_autocast_enabled(hidden.device.type)
        return result if is_wide else result.to(late.dtype)

    def keep(self, *_: Any) -> None:
        """Keep what logits are made of, for those that are read after the optimizer's step."""
        for layer in list(self.layers):
            layer.keep()

    def _head(self, weight: torch.Tensor) -> Head:
        if weight not in self.known:
            self.known[weight] = Head()
        head: Head = self.known[weight]
        return head

    def _rows(self, rows: int, classes: int) -> int:
        return max(1, self.least // (4 * classes), -(-rows // self.most))

    def _is_proven(self, head: Head, given: tuple[Any, ...]) -> bool:
        """Compare the two ways on the first batch of a layer."""
        if not head.is_proven:
            found = find_difference(self.plain_loss, *given)
            if found is not None:
                self._leave(head, f"the {found} came out otherwise on the first batch")
            head.is_proven = not head.against
        return head.is_proven

    def _read(self, layer: Layer) -> None:
        """Note that logits were made after all; a script that reads them often gets them."""
        head = self._head(layer.weight)
        head.reads += 1
        if not layer.is_used and not head.uses:
            self._leave(head, "the logits are not for a loss of this kind alone")
        elif head.reads > READS and head.reads * SELDOM > head.uses:
            self._leave(head, "the script reads the logits beside the loss")

    def _leave(self, head: Head, why: str) -> None:
        if not head.against:
            head.against = why
            self.against.append(why)


def _agree(hidden: torch.Tensor, weight: torch.Tensor, autocast: torch.dtype | None) -> bool:
    """Tell whether torch's layer takes these, so that its own error comes where it would."""
    is_alike = hidden.dtype == weight.dtype or autocast is not None
    return is_alike and hidden.device == weight.device and hidden.shape[-1] == weight.shape[1]


def _is_ours(late: LateLogits, target: Any, options: dict[str, Any]) -> bool:
    weights = options["weight"]
    return (
        type(target) is torch.Tensor
        and late.dim() == 2
        and target.shape == late.shape[:1]
        and target.dtype == torch.int64
        and target.device == late.device
        and options["reduction"] in ("mean", "sum")
        and (options["size_average"], options["reduce"]) == (None, None)
        and (weights is None or (type(weights) in PLAIN and not weights.requires_grad))
    )
