"""Text at the loader's seam: where a tokenizer works, and how much of a batch is padding."""

from collections.abc import Iterator, Mapping, MutableMapping
from types import CodeType
from typing import Any

MASK = "attention_mask"
PADDED_BATCHES = 8
"""First batches whose padding is counted: reading a mask takes microseconds, and few are enough."""
DATA_SET, COLLATE = "data set", "collate_fn"
TOKENIZER_METHODS = ("get_vocab", "encode_batch", "encode_as_ids", "encode_ordinary")
"""A tokenizer has one of these: Hugging Face, tokenizers, sentencepiece, tiktoken."""


def tokenizer_place(dataset: Any, collate: Any) -> str:
    """Return where a tokenizer is held: `data set`, `collate_fn`, or nothing."""
    if any(map(is_tokenizer, _held_by_dataset(dataset))):
        return DATA_SET
    return COLLATE if any(map(is_tokenizer, _held_by_collate(collate))) else ""


def is_tokenizer(thing: Any) -> bool:
    """Tell whether a thing turns text into numbers."""
    kind = type(thing)
    return any(callable(getattr(kind, name, None)) for name in TOKENIZER_METHODS)


def _held_by_dataset(dataset: Any) -> Iterator[Any]:
    depth = 0
    while dataset is not None and depth < 4:  # a subset of a subset
        yield from getattr(dataset, "__dict__", {}).values()
        dataset, depth = getattr(dataset, "dataset", None), depth + 1


def _held_by_collate(collate: Any) -> Iterator[Any]:
    inner = getattr(collate, "func", collate)
    yield from (getattr(collate, "keywords", None) or {}).values()
    yield from getattr(inner, "__dict__", {}).values()
    yield from map(_content, getattr(inner, "__closure__", None) or ())
    known = getattr(inner, "__globals__", {})
    yield from (known[name] for name in _names(getattr(inner, "__code__", None)) if name in known)


def _names(code: CodeType | None) -> Iterator[str]:
    """Yield the global names that a function uses, in its comprehensions too."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names(constant if isinstance(constant, CodeType) else None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that the function does not have yet
        return None


def note_padding(facts: MutableMapping[str, Any], batch: Any, count: int) -> None:
    """Keep the mean share of padding of the first batches, where they have a mask."""
    share = padding_of(batch) if count < PADDED_BATCHES else None
    if share is not None:
        before = facts.get("pad_share")
        facts["pad_share"] = share if before is None else (before * count + share) / (count + 1)


def padding_of(batch: Any) -> float | None:
    """Return the share of a batch's tokens that its mask takes out; None without a mask."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if mask is None or len(getattr(mask, "shape", ())) != 2 or not mask.numel():
        return None
    kept = float((mask != 0).sum())
    return 1.0 - kept / int(mask.numel())
