"""Digests of samples: what a training really saw, whatever the loader's workers and layout."""

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

MAX_FIELDS = 16
"""A longer list is a batch of samples, not a set of fields: it is digested as rows."""
MAX_DEPTH = 8
"""Deeper nesting is not followed; nothing real nests its batch that far."""
DIGEST_BYTES = 8
PLAIN = (bool, int, float, complex, str, bytes, np.generic)


class SampleStream:
    """Running digests of all that passes one place, field by field.

    A digest covers the rows from the first batch on, joined along the first dimension, so the same
    samples in smaller micro-batches reach the same digest at the same number of rows.
    """

    def __init__(self, memory: "Memory | None" = None) -> None:
        self._fields: dict[str, _Field] = {}
        self._memory = memory or Memory()

    def add(self, value: Any) -> None:
        """Take in one batch, or the arguments of one call."""
        for path, leaf in leaves(value):
            self._fields.setdefault(path, _Field()).add(leaf, self._memory)

    def to_json(self) -> dict[str, tuple[tuple[int, str], ...]]:
        """Return the marks of every field."""
        return {path: tuple(item.marks) for path, item in self._fields.items()}


class Memory:
    """What tensors on a device did to a digest in this step, for those that pass two places.

    A batch that is on the device is an argument of the call as well: copying and hashing it twice
    would take most of the time of a guard trial. Only the very same object counts, unchanged since,
    and only where both digests stood at the same point. What is on the CPU is read again: a worker
    may write into its memory, and no version tells.
    """

    def __init__(self) -> None:
        self._passed: dict[int, tuple[weakref.ref[Any], int, str, Any]] = {}

    def keep(self, leaf: Any, before: str, hasher: Any) -> None:
        """Note that a tensor took a digest from where it stood to where it is now."""
        if is_on_device(leaf):
            self._passed[id(leaf)] = (weakref.ref(leaf), leaf._version, before, hasher.copy())

    def find(self, leaf: Any, before: str) -> Any:
        """Return the digest that a tensor leads to, None where that is not known."""
        if id(leaf) not in self._passed:
            return None
        kept, version, stood, hasher = self._passed[id(leaf)]
        tensor = kept()
        if tensor is None or tensor is not leaf or tensor._version != version or stood != before:
            return None
        return hasher.copy()

    def forget(self) -> None:
        """Begin another step."""
        self._passed.clear()


def is_on_device(leaf: Any) -> bool:
    """Return whether a leaf is a tensor that has to be copied here, and tells when it changes."""
    return _is_tensor(leaf) and leaf.device.type != "cpu" and not leaf.is_inference()


class _Field:
    def __init__(self) -> None:
        self.hasher: Any = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.rows = 0
        self.form = ""
        self.marks: list[tuple[int, str]] = []

    def add(self, leaf: Any, memory: Memory) -> None:
        rows, form = _form(leaf)
        before = f"{self.form}{self.hasher.hexdigest()}"
        known = memory.find(leaf, before)
        if known is not None:
            self.hasher = known
        else:
            if form != self.form:
                self.hasher.update(form.encode())
            for part in _contents(leaf):
                self.hasher.update(part)
            memory.keep(leaf, before, self.hasher)
        self.form = form
        self.rows += rows
        self.marks.append((self.rows, self.hasher.hexdigest()))


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every field that can be digested, with its path.

    Computed tensors (those with a `grad_fn`) are left out: they are results, not samples.

    >>> dict(leaves({"text": ["a", "b"], "pair": (1, {"x": 2.5})}))
    {'text': ['a', 'b'], 'pair[0]': 1, 'pair[1].x': 2.5}
    """
    if _is_tensor(value):
        if value.grad_fn is None:
            yield path, (list(value.unbind()) if value.is_nested else value)
    elif isinstance(value, (np.ndarray, *PLAIN)) or _is_rows(value):
        yield path, value
    elif hasattr(value, "__array_interface__"):
        yield path, np.asarray(value)
    elif depth < MAX_DEPTH:
        for name, item in _items(value):
            yield from leaves(item, path + name if path else name.lstrip("."), depth + 1)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "grad_fn") and hasattr(value, "untyped_storage")


def _is_rows(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return len(value) > MAX_FIELDS or all(isinstance(item, PLAIN) for item in value)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a structure; nothing for what cannot be looked into."""
    if isinstance(value, Mapping):
        yield from ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, set | frozenset):
        yield ".items", sorted(map(repr, value))
    elif isinstance(value, Sequence):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{item.name}", getattr(value, item.name)) for item in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{key}", item) for key, item in vars(value).items())


def _form(leaf: Any) -> tuple[int, str]:
    """Return the number of rows of a leaf and the form of one row."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        rows = int(shape[0]) if len(shape) else 1
        dtype = str(leaf.dtype).removeprefix("torch.")
        return rows, f"<{dtype} {'x'.join(map(str, shape[1:])) if len(shape) else 'scalar'}>"
    if isinstance(leaf, list | tuple):
        return len(leaf), "<rows>"
    return 1, f"<{type(leaf).__name__}>"


def _contents(leaf: Any) -> Iterator[Any]:
    """Yield the bytes of a leaf, in logical order."""
    if _is_tensor(leaf):
        yield from _tensor_contents(leaf)
    elif isinstance(leaf, np.ndarray):
        yield from _array_contents(leaf)
    elif isinstance(leaf, list | tuple):
        for item in leaf:
            for path, part in leaves(item):
                yield f"{path}{_form(part)}".encode()
                yield from _contents(part)
    else:
        yield repr(leaf).encode() + b"\0"


def _array_contents(array: "np.ndarray[Any, Any]") -> Iterator[Any]:
    if array.dtype.hasobject:
        yield from _contents(array.tolist() if array.ndim else [array.item()])
    else:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _tensor_contents(tensor: Any) -> Iterator[Any]:
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
