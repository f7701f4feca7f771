"""Padding of text batches: cut off where a whole column is padding, or filled with other samples.

A batch is a mapping with an `attention_mask` of samples by tokens; every other tensor that begins
with the same two dimensions goes with it (`trimmed`, `packed`). `SimilarLengths` makes batches of
samples about as long as each other.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flatout.agent.hooks.loader import MASK
from flatout.data.proof.forked import in_forks
from flatout.records.errors import NotApplicable

TOKENS = "input_ids"
LIMIT_S = 60.0


def lengths_of(dataset: Any, *, processes: int, limit_s: float = LIMIT_S) -> list[int]:
    """Return the number of tokens of every sample, counted in forked processes."""
    count = len(dataset)

    def part(first: int) -> Any:
        return lambda: [length_of(dataset[i]) for i in range(first, count, processes)]

    answers = in_forks([part(first) for first in range(processes)], limit_s)
    lengths = [0] * count
    for first, answer in enumerate(answers):
        if answer is None:
            raise NotApplicable(
                f"counting the tokens of {count} samples takes over {limit_s:.0f} s"
            )
        if "error" in answer:
            raise NotApplicable(f"the lengths of the samples are not known: {answer['error']}")
        lengths[first::processes] = answer["value"]
    return lengths


def length_of(sample: Any) -> int:
    """Return the number of tokens of a sample: those that its mask keeps, or all it has.

    >>> length_of({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}), length_of(([7, 8], 1))
    (2, 2)
    """
    if isinstance(sample, Mapping):
        if MASK in sample:
            return int(sum(1 for kept in _plain(sample[MASK]) if kept))
        if TOKENS in sample:
            return len(sample[TOKENS])
    elif isinstance(sample, tuple | list) and sample and _is_tokens(sample[0]):
        return len(sample[0])
    elif _is_tokens(sample):
        return len(sample)
    raise ValueError("a sample has no input_ids and no list of tokens")


def _plain(values: Any) -> Sequence[Any]:
    found: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return found


def _is_tokens(value: Any) -> bool:
    """Return whether a value is a row of whole numbers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return len(value.shape) == 1 and "int" in str(value.dtype)
    return isinstance(value, list) and bool(value) and all(isinstance(x, int) for x in value)


class SimilarLengths:
    """Batches of samples of similar length, in a new order every epoch; each sample once.

    A random permutation is cut into windows of some batches; within a window samples are sorted by
    length and cut into batches, whose order is random again. Ranks that share the batches must each
    give a generator of the same seed, or every rank draws another order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        window: int,
        drop_last: bool = False,
        generator: Any = None,
    ) -> None:
        if batch_size < 1 or window < 1:
            raise ValueError(f"batch_size={batch_size} and window={window} must be at least 1")
        self.lengths = lengths
        self.batch_size = batch_size
        self.window = window
        self.drop_last = drop_last
        self.generator = generator

    def __len__(self) -> int:
        count = len(self.lengths)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        generator = self.generator
        if generator is None:  # as torch's own random sampler does: one draw an epoch
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if self.drop_last:
            order = order[: len(self) * self.batch_size]
        batches: list[list[int]] = []
        short: list[list[int]] = []
        size = self.batch_size * self.window
        for first in range(0, len(order), size):
            group = sorted(order[first : first + size], key=lambda i: self.lengths[i])
            cut = [group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]
            (short if len(cut[-1]) < self.batch_size else batches).append(cut.pop())
            batches += cut
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]
        yield from short


IGNORED = -100
"""Labels that torch's and Hugging Face's losses leave out."""
LABELS = "labels"
SPOKEN_FOR = (MASK, "input_ids", "token_type_ids", "position_ids")
"""Tensors whose padding a mask tells: `decoder_attention_mask` that of `decoder_input_ids`."""


def trimmed(batch: Any, *, multiple_of: int = 1) -> Any:
    """Return the batch without the columns at either end that are padding in every row.

    What any of its masks keeps stays, that of a second text too. A batch whose labels count in the
    other columns, or a tensor of which says there what no mask tells to be padding, is returned as
    it is: the loss would be another one.
    """
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if mask is None or mask.dim() != 2 or not bool(mask.any()):
        return batch
    along = {name: value for name, value in batch.items() if _goes_along(value, mask)}
    masks = {str(name): value for name, value in along.items() if str(name).endswith(MASK)}
    used = _used_columns(masks.values(), mask)
    first, last = int(used[0]), int(used[-1]) + 1
    if first and _counts_at(along.get(LABELS), first):
        first -= 1  # a causal model predicts the longest row's first token from the place before
    length = -(-(last - first) // multiple_of) * multiple_of
    width = mask.shape[1]
    if length >= width:
        return batch
    # Rounding up takes back columns on the side where there is padding.
    first = min(first, width - length)
    last = first + length
    told = {name.removesuffix(MASK) + column for name in masks for column in SPOKEN_FOR}
    if any(_says_more(n, v, first, last) for n, v in along.items() if n not in told):
        return batch
    changed = copy.copy(batch)  # of its own type
    for name, value in along.items():
        changed[name] = value[:, first:last].contiguous()
    return changed


def packed(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rows of a padded batch put behind one another in fewer rows, None if none is won.

    The rows keep their order inside a row that is filled first-fit. `position_ids` begin again with
    each sample; that is how causal models of Hugging Face tell samples apart, so there is no mask.
    The first label of a sample is left out: it would be predicted from the sample before.
    """
    import torch

    mask = batch[MASK] != 0
    lengths: list[int] = mask.sum(dim=1).tolist()
    width = mask.shape[1]
    places = first_fit(lengths, width)
    rows = 1 + max((row for row, _ in places), default=-1)
    if rows >= mask.shape[0]:
        return None
    names = [n for n, v in batch.items() if n != MASK and _goes_along(v, batch[MASK])]
    made = {
        name: torch.full(
            (rows, width, *batch[name].shape[2:]),
            IGNORED if name == LABELS else 0,
            dtype=batch[name].dtype,
            device=batch[name].device,
        )
        for name in names
    }
    positions = torch.zeros((rows, width), dtype=torch.int64, device=mask.device)
    for sample, (row, start) in enumerate(places):
        end = start + lengths[sample]
        for name in names:
            made[name][row, start:end] = batch[name][sample][mask[sample]]
        if LABELS in made and start < end:
            made[LABELS][row, start] = IGNORED
        positions[row, start:end] = torch.arange(lengths[sample], device=mask.device)
    made["position_ids"] = positions
    return made


def first_fit(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return of each sample the row and the place in it: the longest are placed first.

    >>> first_fit([3, 6, 2, 5], 8)
    [(1, 5), (0, 0), (0, 6), (1, 0)]
    """
    filled: list[int] = []
    places = [(0, 0)] * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = (row for row, used in enumerate(filled) if used + lengths[sample] <= width)
        row = next(room, len(filled))
        if row == len(filled):
            filled.append(0)
        places[sample] = (row, filled[row])
        filled[row] += lengths[sample]
    return places


def is_predicted_inside(labels: Any, mask: Any) -> bool:
    """Return whether each label that counts is predicted inside of its sample: from a token kept.

    A causal model predicts a label from the place before it. A label in the padding, or right
    behind padding on the left, has no such place in a row without padding.
    """
    kept = mask != 0
    counted = labels[:, 1:] != IGNORED
    return not bool((counted & ~(kept[:, 1:] & kept[:, :-1])).any())


def _used_columns(masks: Iterable[Any], mask: Any) -> Any:
    """Return the numbers of the columns in which any of the masks keeps something."""
    used = mask != 0
    for value in masks:
        used = used | (value != 0).reshape(*mask.shape, -1).any(dim=-1)
    return used.any(dim=0).nonzero().flatten()


def _counts_at(labels: Any, column: int) -> bool:
    """Return whether any label of a column counts."""
    return labels is not None and bool((labels[:, column] != IGNORED).any())


def _says_more(name: Any, value: Any, first: int, last: int) -> bool:
    """Return whether a tensor has more than one filler in the columns that are to be cut."""
    left, right = value[:, :first], value[:, last:]
    is_label = name == LABELS and value.dim() == 2
    filler = IGNORED if is_label else (left if first else right)[:1, :1]
    return bool((left != filler).any() or (right != filler).any())


def _goes_along(value: Any, mask: Any) -> bool:
    return hasattr(value, "dim") and value.dim() >= 2 and value.shape[:2] == mask.shape
