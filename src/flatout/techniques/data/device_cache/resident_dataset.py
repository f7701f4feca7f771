"""A whole data set as tensors on the training's device, from which batches are picked by number.

A loader without workers fetches `[dataset[i] for i in numbers]` and collates them; picking rows of
what collating the whole set gives is the same batch, without a call a sample and without a copy.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.agent.nested import leaves_of, map_leaves
from flatout.data.proof.changes import ChangeWatch
from flatout.records.errors import NotApplicable

CHUNK = 256
"""Samples that are collated at a time: their pieces are joined at the end."""


class Resident:
    """The collated set; `fetch` gives a batch as torch's own fetcher does."""

    def __init__(self, whole: Any, dataset: Any = None) -> None:
        self.whole = whole
        self.watch = ChangeWatch(dataset)
        """Whether the set was changed since it was collated."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves_of(self.whole))

    def is_on(self, device: Any) -> bool:
        """Return whether all of it is on a device."""
        import torch

        wanted = torch.device(device)
        if str(wanted) == "cuda":
            wanted = torch.device("cuda", torch.cuda.current_device())
        return all(leaf.device == wanted for leaf in leaves_of(self.whole))

    def move(self, device: Any, *, budget_bytes: int) -> None:
        """Put the set on a device; where it lay before its memory is given back."""
        if self.bytes > budget_bytes:
            raise NotApplicable(_too_big(self.bytes, budget_bytes))
        self.whole = map_leaves(self.whole, lambda leaf: leaf.to(device))

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return the batch of these samples, in memory of its own."""
        import torch

        from flatout.data.byte_batches.ring import sent

        rows = torch.as_tensor(numbers, dtype=torch.int64)
        on_device: dict[Any, Any] = {}

        def picked(leaf: Any) -> Any:
            if leaf.device not in on_device:
                on_device[leaf.device] = sent(rows, leaf.device)
            return leaf.index_select(0, on_device[leaf.device])

        return map_leaves(self.whole, picked)


def collate_whole(dataset: Any, *, budget_bytes: int, limit_s: float) -> Resident:
    """Return the whole set, collated as torch does it.

    Raises:
        NotApplicable: if the samples do not stack, do not fit, or take too long.
    """
    from torch.utils.data import TensorDataset, default_collate

    from flatout.data.proof.random_streams import Streams

    if type(dataset) is TensorDataset:
        whole: Any = list(dataset.tensors)
        resident = Resident(whole, dataset)
        if resident.bytes > budget_bytes:
            raise NotApplicable(_too_big(resident.bytes, budget_bytes))
        return resident
    ends_at, streams = time.monotonic() + limit_s, Streams()
    pieces: list[Any] = []
    forms: set[Any] = set()
    count = len(dataset)
    for first in range(0, count, CHUNK):
        samples = [dataset[i] for i in range(first, min(first + CHUNK, count))]
        forms.update(map(_form, samples))
        if len(forms) > 1:
            raise NotApplicable("the samples differ in structure or type: batches would, too")
        pieces.append(_stacked(default_collate, samples))
        if not first:
            expected = Resident(pieces[0]).bytes * count // len(samples)
            if expected > budget_bytes:
                raise NotApplicable(_too_big(expected, budget_bytes))
        if streams.are_moved():
            streams.set_back()
            raise NotApplicable("a sample draws random numbers")
        if time.monotonic() > ends_at:
            raise NotApplicable(f"making all {count} samples takes more than {limit_s:.0f} s")
    return Resident(_joined(pieces), dataset)


def _form(sample: Any) -> Any:
    """Return all of a sample but its values and sides; torch looks at a batch's first sample only.

    >>> _form((1, {"a": 2.0})) == _form((3, {"a": 4.0})), _form([1]) == _form([1.5])
    (True, False)
    """
    if isinstance(sample, Mapping):
        return type(sample), *((name, _form(part)) for name, part in sample.items())
    if isinstance(sample, list | tuple):
        return type(sample), *map(_form, sample)
    return type(sample), getattr(sample, "dtype", None)


def _stacked(collate: Any, samples: list[Any]) -> Any:
    import torch

    try:
        piece = collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        raise NotApplicable(f"the samples do not stack: {error}") from None
    for leaf in leaves_of(piece):
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            kind = type(leaf).__name__
            raise NotApplicable(f"a sample holds a {kind}, which is no tensor or number")
    return piece


def _joined(pieces: list[Any]) -> Any:
    """Return the pieces joined leaf by leaf, in the structure of the first."""
    import torch

    columns = zip(*map(leaves_of, pieces), strict=True)
    try:
        joined = iter([torch.cat(column) for column in columns])
    except (RuntimeError, ValueError) as error:
        raise NotApplicable(f"the samples do not stack: {error}") from None
    return map_leaves(pieces[0], lambda _: next(joined))


def _too_big(needed: int, budget: int) -> str:
    return f"the set takes {needed / 1e9:.2f} GB, and {budget / 1e9:.2f} GB are free for it"


KOREAN = """
the samples differ in structure or type: batches would, too
    샘플들의 구조나 타입이 서로 달라 배치도 달라집니다
a sample draws random numbers
    난수를 뽑는 샘플이 있습니다
making all {n} samples takes more than {limit} s
    샘플 {n}개를 모두 만드는 데 {limit} s가 넘게 걸립니다
the samples do not stack: {error}
    샘플들을 쌓을 수 없습니다: {error}
a sample holds a {kind}, which is no tensor or number
    샘플에 텐서도 숫자도 아닌 {kind}이(가) 들어 있습니다
the set takes {needed} GB, and {free} GB are free for it
    데이터셋에 {needed} GB가 필요한데 {free} GB만 비어 있습니다
"""
