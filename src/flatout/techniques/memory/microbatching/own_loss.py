"""What a model makes of parts of a batch: whether it is what it makes of the whole.

Outputs are put together, which is tried on the first batch: of a sequence whose first dimension is
time, or of samples that are compared, parts make something else. A barely trained LSTM depends on
what came before by so little that its parts seem to fit: so some samples are changed, too, and the
others have to stay what they were. What a call leaves on the model (statistics of its own, a term
of the loss, a state to go on from) would be left by each part.

How the losses of parts make that of the batch is tried too. A Hugging Face model with labels
returns the mean over its tokens, without those that are to be ignored; others a sum, or a mean over
samples. Which it is cannot be read off: one part of the script's own batch is compared with its
halves, without gradients and without dropout.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from flatout.agent.guard.recorder import random_streams
from flatout.agent.task_loop import batch_size, samples_at, split
from flatout.agent.untouched import (
    PLAIN,
    attributes_of,
    buffers_of,
    changed_attributes,
    state_kept,
    streams_kept,
)
from flatout.techniques.memory.microbatching import find_coupled

IGNORED = -100
"""What marks a label that does not count: `ignore_index` of torch's cross-entropy."""
LABELS = ("labels", "label", "targets", "target")
"""Names of arguments that hold them."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative, of a loss computed in another order; 1e-2 for the short types."""
SHORT_TOLERANCE = 1e-2
APART = 1e-3
"""Weights that differ by less than this part make no difference worth another look."""
NOT_JOINED = (
    "what the model makes of a batch is not what it makes of its parts, put together: "
    "its batches were run whole"
)
KEEPS = (
    "each training call changes its input or leaves something on the model (statistics, a term of "
    "the loss, a state), as each part would do: its batches were run whole"
)
LOOKS = 8
"""Batches that are looked at to tell weighings apart; those left then are alike on this data."""


class OwnLoss:
    """Of one model: which weights of the parts' losses give the batch's."""

    def __init__(self) -> None:
        self.left = list(WEIGHINGS)
        """Weighings that fitted every batch so far, the most particular first."""
        self.looks = 0
        self.obstacle: str | None = None
        """Why parts of the first batch cannot take its place, empty where they can; None before it.
        """

    @property
    def trouble(self) -> str:
        """Why batches are run whole; empty while they are not."""
        if self.obstacle:
            return self.obstacle
        if self.left:
            return ""
        return "the model's own loss is no sum or mean of its parts': its batches were run whole"

    def joins(
        self, call: Callable[..., Any], module: torch.nn.Module, whole: Any, parts: Sequence[Any]
    ) -> bool:
        """Return whether a batch's outputs are those of its parts put together; tried once."""
        if self.obstacle is None and _has_values(parts):
            count = min(max(2, batch_size(parts[0])), batch_size(whole))
            self.obstacle = _find_obstacle(call, module, whole, count)
        return not self.obstacle

    def weights(
        self, call: Callable[..., Any], module: torch.nn.Module, whole: Any, parts: Sequence[Any]
    ) -> list[float] | None:
        """Return the weight of each part's loss; None where no weights make the batch's."""
        if not _has_values(parts):
            return _alike(parts)  # a trace of shapes: what the weights are takes no memory
        self._look(call, module, whole, batch_size(parts[0]))
        found = (WEIGHINGS[name](parts) for name in self.left)
        return next((weights for weights in found if weights is not None), None)

    def _look(
        self, call: Callable[..., Any], module: torch.nn.Module, whole: Any, samples: int
    ) -> None:
        """Compare a few samples with their halves: more might not fit, so the batch is split."""
        size = batch_size(whole)
        rows = _telling_rows(whole, size, max(2, samples))
        if len(rows) < 2:
            return
        batch = samples_at(whole, size, rows)
        halves = split(batch, len(rows), 2)
        found = {name: WEIGHINGS[name](halves) for name in self.left}
        known = {name: weights for name, weights in found.items() if weights is not None}
        if self._has_to_look(list(known.values())):
            self.looks += 1
            fitting = _fitting(call, module, batch, halves, known)
            self.left = [name for name in self.left if name in fitting or name not in known]

    def _has_to_look(self, weights: Sequence[Sequence[float]]) -> bool:
        if not self.looks:
            return bool(weights)
        differ = any(_apart(one, weights[0]) for one in weights[1:])
        return differ and self.looks < LOOKS


def _telling_rows(whole: Any, size: int, most: int) -> list[int]:
    """Return the samples to compare: those with the most labels that count, then with the fewest.

    Weighings give the same where all samples are alike. One in which no label counts tells nothing.
    """
    labels = _labels_of([whole])
    if labels is None or labels[0].shape[:1] != (size,):
        return list(range(min(most, size)))
    counts = (labels[0] != IGNORED).reshape(size, -1).sum(1).tolist()
    rows = sorted((row for row in range(size) if counts[row]), key=lambda row: -counts[row])
    half = most // 2
    return rows if len(rows) <= most else [*rows[: most - half], *rows[len(rows) - half :]]


def scalars_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors without a dimension in what a model returned."""
    leaves = _pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.dim()]


def _find_obstacle(
    call: Callable[..., Any], module: torch.nn.Module, whole: Any, count: int
) -> str:
    """Run the first few samples as a batch, and in parts; return why parts are none, or "".

    More might not fit.
    """
    batch = samples_at(whole, batch_size(whole), range(count))
    try:
        with torch.no_grad(), state_kept(module):
            if _keeps_something(call, module, batch):
                return KEEPS
            return "" if _joins(call, module, batch, count) else NOT_JOINED
    except Exception:  # noqa: BLE001  it wants as many samples, as a state that is not split
        return NOT_JOINED


def _keeps_something(call: Callable[..., Any], module: torch.nn.Module, batch: Any) -> bool:
    """Return whether each training call leaves something else on the model, once it has begun."""
    # Torch's own norms are in it only where parts were asked for all the same.
    buffers = () if find_coupled(module) else buffers_of(module)
    given = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    changes = [leaf._version for leaf in given]
    call(*batch[0], **batch[1])
    before = attributes_of(module)
    call(*batch[0], **batch[1])
    return (
        [leaf._version for leaf in given] != changes
        or any(kept.is_written or kept.is_replaced for kept in buffers)
        or bool(changed_attributes(before))
    )


def _joins(call: Callable[..., Any], module: torch.nn.Module, batch: Any, count: int) -> bool:
    """Compare the outputs of a batch with those of its halves.

    Then the samples of the first half are made like the last one: no other sample may notice. Where
    a model draws numbers in evaluation too, halves are given others, and this alone tells.
    """
    halves = split(batch, count, 2)
    half = batch_size(halves[0])
    changed = samples_at(batch, count, [count - 1] * half + [*range(half, count)])
    with _evaluating(module):
        before = random_streams()
        with streams_kept():
            expected, plain = _rows_of(call(*batch[0], **batch[1]), count)
            draws = not all(map(torch.equal, before, random_streams()))
        with streams_kept():
            beside, _ = _rows_of(call(*changed[0], **changed[1]), count)
        made = [_rows_of(call(*x, **named), batch_size((x, named))) for x, named in halves]
    found = [torch.cat(parts) for parts in zip(*(rows for rows, _ in made), strict=True)]
    return (
        all(values == plain for _, values in made)
        and (draws or _are_close(found, expected))
        and _are_close([x[half:] for x in beside], [x[half:] for x in expected], TOLERANCE)
    )


def _rows_of(output: Any, rows: int) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the outputs of so many rows that can be compared, and what is no tensor.

    Raises:
        ValueError: if there are others, which cannot be put together.
    """
    leaves = _pytree.tree_leaves(output)
    plain = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    is_other = any(leaf.shape[0] != rows for leaf in tensors)
    # A float says something of the samples, such as how many were right.
    if is_other or not all(isinstance(x, PLAIN) and type(x) is not float for x in plain):
        raise ValueError
    return [leaf for leaf in tensors if leaf.is_floating_point()], plain


def _are_close(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tolerance: Mapping[torch.dtype, float] = MappingProxyType({}),
) -> bool:
    """Return whether outputs are alike but for rounding; masked logits are infinite in both."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return False
    pairs = [
        (x.dtype, one.float().nan_to_num(0.0, 0.0, 0.0), x.float().nan_to_num(0.0, 0.0, 0.0))
        for one, x in zip(found, expected, strict=True)
    ]
    return all(
        bool((one - wanted).norm() <= tolerance.get(dtype, SHORT_TOLERANCE) * wanted.norm())
        for dtype, one, wanted in pairs
    )


def _fitting(
    call: Callable[..., Any],
    module: torch.nn.Module,
    whole: Any,
    parts: Sequence[Any],
    known: dict[str, list[float]],
) -> list[str]:
    """Return the weighings that give the batch's own losses."""
    with torch.no_grad(), _evaluating(module), streams_kept():
        expected = scalars_of(call(*whole[0], **whole[1]))
        made = [scalars_of(call(*args, **kwargs)) for args, kwargs in parts]
    return [name for name, weights in known.items() if _fits(expected, made, weights)]


def _fits(
    expected: Sequence[torch.Tensor],
    made: Sequence[Sequence[torch.Tensor]],
    weights: Sequence[float],
) -> bool:
    for number, whole in enumerate(expected):
        # A part in which no label counts has no mean.
        loss = math.fsum(w * float(x[number]) for w, x in zip(weights, made, strict=True) if w)
        allowed = TOLERANCE.get(whole.dtype, SHORT_TOLERANCE)
        if not math.isclose(loss, float(whole), rel_tol=allowed, abs_tol=1e-12):
            return False
    return True


def _has_values(parts: Sequence[Any]) -> bool:
    leaves = _pytree.tree_leaves(parts)
    return not any(
        isinstance(leaf, FakeTensor) or leaf.device.type == "meta"
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return any(
        not math.isclose(a, b, rel_tol=APART, abs_tol=APART)
        for a, b in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off: other masks are another loss."""
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def _alike(parts: Sequence[Any]) -> list[float] | None:
    """Each part counts whole: the loss is a sum, or is divided by a number that is given."""
    return [1.0] * len(parts)


def _by_shifted_labels(parts: Sequence[Any]) -> list[float] | None:
    """By the labels that count after the first: a language model predicts the next token."""
    labels = _labels_of(parts)
    if labels is None or any(part.dim() < 2 for part in labels):
        return None
    return _shares([part[:, 1:] for part in labels])


def _by_labels(parts: Sequence[Any]) -> list[float] | None:
    labels = _labels_of(parts)
    return None if labels is None else _shares(labels)


def _by_samples(parts: Sequence[Any]) -> list[float] | None:
    sizes = [batch_size(part) for part in parts]
    return [size / sum(sizes) for size in sizes]


def _labels_of(parts: Sequence[Any]) -> list[torch.Tensor] | None:
    for name in LABELS:
        found = [kwargs.get(name) for _, kwargs in parts]
        if all(isinstance(x, torch.Tensor) and not x.is_floating_point() for x in found):
            return found
    return None


def _shares(labels: Sequence[torch.Tensor]) -> list[float] | None:
    counts = torch.stack([(part != IGNORED).sum() for part in labels]).tolist()
    total = sum(counts)
    return [count / total for count in counts] if total else None


WEIGHINGS: dict[str, Callable[[Sequence[Any]], list[float] | None]] = {
    "each whole": _alike,
    "by shifted labels": _by_shifted_labels,
    "by labels": _by_labels,
    "by samples": _by_samples,
}
"""What a part's loss may count, the most particular first."""


KOREAN = """
the model's own loss is no sum or mean of its parts': its batches were run whole
    모델 자체의 손실이 나눈 부분들의 합이나 평균이 아니어서 배치를 통째로 실행했습니다
what the model makes of a batch is not what it makes of its parts, put together: its batches were
run whole
    모델이 배치로 만드는 출력이 나눈 부분들의 출력을 합친 것과 달라 배치를 통째로 실행했습니다
each training call changes its input or leaves something on the model (statistics, a term of the
loss, a state), as each part would do: its batches were run whole
    학습 호출마다 입력을 바꾸거나 모델에 통계나 손실의 항, 상태 같은 것을 남기는데, 나누면 부분마다
    그렇게 되어 배치를 통째로 실행했습니다
"""
