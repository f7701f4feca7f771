"""Padding of text batches: cut off where a whole column is padding, or filled with other samples.

A batch is a mapping with an `attention_mask` of samples by tokens; every other tensor that begins
with the same two dimensions goes with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatout.seams.text import MASK

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
    return rebuilt(
        batch, {name: value[:, first:last].contiguous() for name, value in along.items()}
    )


def rebuilt(batch: Any, changes: Mapping[str, Any]) -> Any:
    """Return the batch, of its own type, with some of its values changed."""
    import copy

    changed = copy.copy(batch)
    for name, value in changes.items():
        changed[name] = value
    return changed


def packed(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rows of a padded batch put behind one another in fewer rows, None if none is won.

    The rows keep their order inside a row that is filled first-fit. `position_ids` begin anew with
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
    """Tell whether each label that counts is predicted inside of its sample: from a token kept.

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
    """Tell whether any label of a column counts."""
    return labels is not None and bool((labels[:, column] != IGNORED).any())


def _says_more(name: Any, value: Any, first: int, last: int) -> bool:
    """Tell whether a tensor has more than one filler in the columns that are to be cut."""
    left, right = value[:, :first], value[:, last:]
    is_label = name == LABELS and value.dim() == 2
    filler = IGNORED if is_label else (left if first else right)[:1, :1]
    return bool((left != filler).any() or (right != filler).any())


def _goes_along(value: Any, mask: Any) -> bool:
    return hasattr(value, "dim") and value.dim() >= 2 and value.shape[:2] == mask.shape
