"""How many samples and bytes a batch holds, read from shapes and from what the sampler chose."""

import contextlib
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flatout.agent import patching

CHOSEN = "_flatout_chosen"
"""On an iterator: the sizes that its sampler chose."""
MOST_AHEAD = 1024
"""Batches that workers may be asked for ahead of the one that is drawn."""
IMAGE_DIMS = 3
"""Channels, height, width."""
CHANNELS = (1, 3, 4)
"""Grey, colour, colour with transparency."""
FIRST = 8
"""Numbers that are kept of an epoch's first batch."""
DIGESTED = 256
"""Numbers that are read of each tensor in the first batch."""
MAX_DEPTH = 4
"""Levels of a batch that are looked into."""


class _Chosen:
    """The sizes of the latest batches that a sampler chose, and how many it chose in all."""

    __slots__ = ("count", "first", "sizes")

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []
        self.sizes: deque[int] = deque(maxlen=MOST_AHEAD)


def note_chosen(kind: Any) -> None:
    """Keep on every iterator of a loader how many samples its sampler chooses for each batch."""

    def noting(choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(choose)
        def next_index(iterator: Any) -> Any:
            index = choose(iterator)
            chosen = iterator.__dict__.get(CHOSEN)
            if chosen is None:
                chosen = iterator.__dict__[CHOSEN] = _Chosen()
                chosen.count = iterator._num_yielded  # more than none where an epoch goes on
                chosen.first = _numbers(index)
            chosen.count += 1
            chosen.sizes.append(size_chosen(index))
            return index

        return next_index

    def forgetting(reset: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reset)
        def begin_again(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            # A loader may keep its iterator, and with it its workers, from epoch to epoch.
            iterator.__dict__.pop(CHOSEN, None)
            return reset(iterator, *args, **kwargs)

        return begin_again

    patching.wrap(kind, "_next_index", noting)
    patching.wrap(kind, "_reset", forgetting)


def size_chosen(index: Any) -> int:
    """Return how many samples a sampler chose, 0 where it only counts.

    >>> size_chosen([3, 1, 2]), size_chosen(3)
    (3, 0)
    >>> size_chosen([None, None])  # the sampler of an iterable data set
    0
    """
    return len(index) if type(index) is list and index and index[0] is not None else 0


def _numbers(index: Any) -> list[int]:
    """Return the first numbers that a sampler chose; none where it chose something else."""
    few = index[:FIRST] if type(index) is list else []
    return few if all(type(number) is int for number in few) else []


def first_samples(iterator: Any) -> list[int]:
    """Return the first samples of an iterator's epoch, as numbers in the data set."""
    chosen = iterator.__dict__.get(CHOSEN)
    return chosen.first if chosen is not None else []


def batch_digest(iterator: Any, batch: Any) -> str:
    """Return a digest of which samples a batch has and how their tensors begin, empty if unknown.

    Numbers alone would not do: each rank may have a data set of its own.
    """
    numbers = first_samples(iterator)
    tensors = [leaf for leaf in _tensors(batch) if leaf.device.type == "cpu" and leaf.numel()]
    if not numbers or not tensors:
        return ""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    for tensor in tensors:
        with contextlib.suppress(Exception):  # sparse and nested ones have no plain numbers
            digest.update(repr(tensor.flatten()[:DIGESTED].tolist()).encode())
    return digest.hexdigest()


def _tensors(batch: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(batch, "element_size"):
        yield batch
        return
    for part in _parts(batch, depth):
        yield from _tensors(part, depth + 1)


def samples_of(iterator: Any, batch: Any, expected: int | None = None) -> int:
    """Return the number of samples in the batch that an iterator gave last."""
    chosen = iterator.__dict__.get(CHOSEN)
    place = 0 if chosen is None else chosen.count - iterator._num_yielded + 1
    known = chosen is not None and 0 < place <= len(chosen.sizes)
    return samples_in(batch, chosen.sizes[-place] if known else 0, expected)


def samples_in(batch: Any, chosen: int, expected: int | None = None) -> int:
    """Return the number of samples in a batch for which a sampler chose so many.

    Its choice holds whatever the shapes are: sequences padded with time first, the nodes of graphs,
    lists of samples of any length. Shapes decide where nothing was chosen, and of a single item
    where batches have one, which may be a batch that the data set made.
    """
    is_known = chosen > 1 or (chosen == 1 and (expected or 1) > 1)
    return chosen if is_known else leading_size(batch, expected) or texts_in(batch)


def texts_in(batch: Any, depth: int = 0) -> int:
    """Return the number of texts in a batch of a stream that has nothing else yet.

    >>> texts_in({"text": ["one", "two"], "language": "en"})
    2
    """
    if isinstance(batch, list | tuple) and batch and all(isinstance(x, str) for x in batch):
        return len(batch)
    sizes = (texts_in(part, depth + 1) for part in _parts(batch, depth))
    return next((size for size in sizes if size), 0)


def leading_size(batch: Any, expected: int | None = None, depth: int = 0) -> int:
    """Return the number of samples: the first dimension of the first tensor in the batch.

    A list of images that differ in size is counted by its items. A scalar counts where there is
    nothing else.

    >>> leading_size({"label": []})
    0
    """
    shape = _shape(batch)
    if shape is not None:
        return int(shape[0] or 0) if len(shape) else 1
    parts = _parts(batch, depth)
    if isinstance(batch, list | tuple) and _are_images(batch, expected):
        return len(batch)
    sizes = (leading_size(part, expected, depth + 1) for part in sorted(parts, key=is_scalar))
    return next((size for size in sizes if size), 0)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number in a tensor: a time or a weight, which tells no size."""
    return bool(_shape(value) == ())


def is_rehearsed(value: Any, depth: int = 0) -> bool:
    """Return whether a call's arguments hold a shape with an open dimension: a plan, no data.

    Keras calls layers with such symbols while it builds a model of them.
    """
    shape = _shape(value)
    if shape is not None:
        return None in shape
    parts: Iterable[Any] = ()
    if depth < MAX_DEPTH and isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
    return any(is_rehearsed(part, depth + 1) for part in parts)


def _shape(value: Any) -> Any:
    """Return the shape of a tensor or array, None for anything else, as one of ragged rows.

    Classes and settings have a `shape` and a `dtype` as well, but theirs is no tuple.
    """
    try:
        shape = getattr(value, "shape", None) if hasattr(value, "dtype") else None
    except Exception:  # noqa: BLE001  a nested tensor raises, and properties run the user's code
        return None
    return shape if isinstance(shape, tuple) else None


def _are_images(items: Sequence[Any], expected: int | None) -> bool:
    """Return whether every item is one image, channels first, rather than a part of the batch.

    Two equally shaped parts of a batch look alike; the loader's batch size tells them apart.
    """
    shapes = [_shape(item) for item in items]
    if not shapes or any(shape is None or len(shape) != IMAGE_DIMS for shape in shapes):
        return False
    if any(shape[0] not in CHANNELS for shape in shapes):
        return False
    if expected is None:
        return all(shape[0] > 1 for shape in shapes)
    return len(items) == expected or all(shape[0] != expected for shape in shapes)


def tensor_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in _tensors(batch))


def sample_size(sample: Any) -> int:
    """Return how large a sample is next to others: what its batch grows by follows from it.

    That is the bytes of its tensors and arrays; where it has none, the numbers in its lists, which
    are tokens; where it has none either, the characters of its texts.

    >>> sample_size({"input_ids": [5, 3, 9], "label": 1}), sample_size(("a text", 0))
    (3, 6)
    """
    return next((size for size in _sizes(sample) if size), 0)


def _sizes(sample: Any, depth: int = 0) -> tuple[int, int, int]:
    if isinstance(sample, str | bytes):
        return 0, 0, len(sample)
    if hasattr(sample, "element_size"):
        return tensor_bytes(sample) if sample.dim() else 0, 0, 0
    if _shape(sample) is not None:
        return int(sample.nbytes) if _shape(sample) else 0, 0, 0
    if isinstance(sample, list | tuple) and all(isinstance(one, int | float) for one in sample):
        return 0, len(sample), 0
    found = [_sizes(part, depth + 1) for part in _parts(sample, depth)]
    nbytes, numbers, characters = (sum(column) for column in zip((0, 0, 0), *found, strict=True))
    return nbytes, numbers, characters


def _parts(batch: Any, depth: int) -> Iterable[Any]:
    """Return what a batch holds: values of a mapping, items of a sequence, or an object's fields.

    Objects of the script's own may hold themselves, so nothing deep is followed.
    """
    if depth == MAX_DEPTH or isinstance(batch, type):
        return ()
    if isinstance(batch, Mapping) or (
        hasattr(batch, "keys") and callable(getattr(batch, "values", None))  # a table's is an array
    ):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return batch
    return list(getattr(batch, "__dict__", {}).values())
