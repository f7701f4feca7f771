"""Values of a sample as payload bytes and back: numbers, texts, bytes, JSON, arrays, images.

`payload` and `value` do it for one field; `encode` and `decode` for a whole sample.
"""

import io
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flatout.data import pictures
from flatout.data.format import BadSample, Field

LENGTH = struct.Struct("<Q")


def encode(sample: Any) -> list[bytes | memoryview]:
    """Return the parts that, joined, `decode` makes the sample of.

    Tensors and arrays are taken as they are in memory, without gaps, the rest is pickled. What
    comes back is equal bit by bit, writable, and shares no memory with what was stored.

    Raises:
        Exception: whatever pickling the user's own objects raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(sample)
    views = [buffer.raw() for buffer in buffers]
    lengths = [len(views), stream.tell(), *(view.nbytes for view in views)]
    return [b"".join(map(LENGTH.pack, lengths)), stream.getvalue(), *views]


def decode(data: bytes | memoryview) -> Any:
    """Return the sample that `encode` took apart."""
    count, length = (LENGTH.unpack_from(data, 8 * i)[0] for i in range(2))
    sizes = [LENGTH.unpack_from(data, 8 * (2 + i))[0] for i in range(count)]
    place = 8 * (2 + count) + length
    buffers = []
    for size in sizes:
        buffers.append(bytearray(data[place : place + size]))
        place += size
    return pickle.loads(data[place - sum(sizes) - length : place - sum(sizes)], buffers=buffers)  # noqa: S301  made by `encode`


class _Pickler(pickle.Pickler):
    """Takes plain tensors out of the pickle, as numpy arrays do on their own."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how a plain tensor is made again; everything else pickles its own way."""
        import torch

        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        # In which order its numbers lie in memory is kept (channels_last, say): kernels, and so
        # rounding, depend on it. A clone has no gaps and, else, the same order.
        kept = thing.detach() if thing.is_contiguous() else thing.detach().clone()
        flat: Any = kept.as_strided((kept.numel(),), (1,)).view(torch.uint8).numpy()
        raw, dtype = pickle.PickleBuffer(flat), str(kept.dtype).removeprefix("torch.")
        return _tensor, (raw, dtype, tuple(kept.shape), kept.stride())


def _is_plain(tensor: Any) -> bool:
    import torch

    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_odd = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return is_dense and not is_odd and tensor.numel() > 0


def _tensor(raw: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).as_strided(shape, stride)


MAX_DIMS = 255
ARRAY_KINDS = "biufc"
"""NumPy's letters for booleans, integers and floating numbers: plain memory, no objects."""
_REFUSALS = (struct.error, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)
"""What writers raise about a value they cannot write: numbers beyond 64 bits overflow, JSON that is
too deep is a `RecursionError`, and tensors without plain memory raise a `RuntimeError`."""


def structure_of(sample: Any) -> tuple[str, tuple[str, ...], tuple[Any, ...]]:
    """Return how a data set's item is built, the names of its fields, and their values.

    >>> structure_of((b"x", 3))
    ('tuple', ('0', '1'), (b'x', 3))
    >>> structure_of({"text": "a"})
    ('dict', ('text',), ('a',))

    Raises:
        BadSample: if it is a mapping with a key that is no text.
    """
    if isinstance(sample, Mapping):
        odd = [key for key in sample if not isinstance(key, str)]
        if odd:
            raise BadSample(
                f"its key {odd[0]!r} is no text: make the data set return mappings by text"
            )
        return "dict", tuple(map(str, sample)), tuple(sample.values())
    if type(sample) in (tuple, list) and not _is_list_of_numbers(sample) and sample != []:
        names = tuple(str(number) for number in range(len(sample)))
        return type(sample).__name__, names, tuple(sample)
    return "single", ("value",), (sample,)


def build(structure: str, names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return the item again that `structure_of` took apart."""
    if structure == "dict":
        return dict(zip(names, values, strict=True))
    if structure == "single":
        return values[0]
    return tuple(values) if structure == "tuple" else list(values)


def field_of(name: str, value: Any) -> Field:
    """Return the field that can hold a value."""
    plain = {bool: "bool", int: "int", float: "float", str: "str", bytes: "bytes"}
    if type(value) in plain:
        return Field(name=name, kind=plain[type(value)])
    if pictures.is_pil(value):
        return Field(name=name, kind="image", holder="pil")
    try:
        array, holder = _array_of(value)
    except OverflowError:
        raise BadSample(_not_stored(name, "a list of numbers beyond 64 bits")) from None
    if array is not None:
        if array.dtype.kind not in ARRAY_KINDS:
            raise BadSample(_not_stored(name, f"an array of {array.dtype}"))
        return Field(
            name=name, kind="array", dtype=array.dtype.newbyteorder("<").str, holder=holder
        )
    if isinstance(value, list | dict | tuple) and _is_json(value):
        return Field(name=name, kind="json")
    raise BadSample(_not_stored(name, f"{type(value).__module__}.{type(value).__qualname__}"))


def _not_stored(name: str, what: str) -> str:
    return (
        f"field {name!r} is {what}; packed are bytes, text, numbers, NumPy arrays, tensors, PIL "
        "images and plain lists and mappings of those numbers and texts (nothing is pickled): "
        "make the data set return one of these"
    )


def payload(field: Field, value: Any) -> bytes:
    """Return the bytes of one value, as the source has it."""
    writer = _WRITERS.get(field.kind)
    try:
        return writer(field, value) if writer else pictures.from_source(value)
    except _REFUSALS as error:
        if isinstance(error, BadSample):
            raise
        raise BadSample(
            f"field {field.name!r} is {type(value).__name__} here and {field.kind} in the samples "
            f"before ({error})"
        ) from None


def value(field: Field, data: memoryview) -> Any:
    """Return the value of a payload; an image is left to `flatout.data.pictures`."""
    return _READERS[field.kind](field, data)


def shape_of(field: Field, data: bytes | memoryview) -> tuple[int, ...] | None:
    """Return the shape of an array or a raw image, None for everything else."""
    if field.kind == "array":
        return _dims(data)[0]
    return pictures.raw_shape(data) if field.kind == "image" else None


def array_in(field: Field, data: memoryview) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return an array of a payload without copying it; the memory is read-only."""
    shape, at = _dims(data)
    return np.frombuffer(data[at:], dtype=field.dtype).reshape(shape)


def _array_payload(field: Field, value: Any) -> bytes:
    if field.holder == "list" and isinstance(value, list) and not value:
        # A list without numbers has no type of its own.
        value = np.empty(0, dtype=field.dtype)
    array, _holder = _array_of(value)
    if array is None:
        raise TypeError("not an array")
    if array.dtype.newbyteorder("<").str != field.dtype:
        raise ValueError(f"{array.dtype}, not {field.dtype}")
    if array.ndim > MAX_DIMS:
        raise ValueError(f"{array.ndim} dimensions")
    plain = np.asarray(array, dtype=field.dtype)
    head = struct.pack(f"<B{plain.ndim}I", plain.ndim, *plain.shape)
    return head + plain.tobytes()


def _dims(data: bytes | memoryview) -> tuple[tuple[int, ...], int]:
    dims = data[0]
    return struct.unpack_from(f"<{dims}I", data, 1), 1 + 4 * dims


def _array_of(value: Any) -> tuple["np.ndarray[Any, np.dtype[Any]] | None", str]:
    """Return the value as an array and what it was; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value), "numpy"
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        return value.detach().cpu().numpy(), "torch"
    if isinstance(value, list) and _is_list_of_numbers(value):
        kind = np.int64 if type(value[0]) is int else np.float64
        return np.asarray(value, dtype=kind), "list"
    return None, ""


def _is_list_of_numbers(value: Any) -> bool:
    """Return whether a list holds whole numbers only, or floating ones only."""
    return isinstance(value, list) and {type(item) for item in value} in ({int}, {float})


def _array_value(field: Field, data: memoryview) -> Any:
    array = array_in(field, data)
    if field.holder == "torch":
        import torch

        return torch.from_numpy(array.copy())
    return array.tolist() if field.holder == "list" else array.copy()


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _number_payload(field: Field, value: Any) -> bytes:
    kind, code = _NUMBERS[field.kind]
    if type(value) is not kind:  # 1 is neither 1.0 nor True: what is read must be what was given
        raise TypeError(f"not {kind.__name__}")
    return struct.pack(code, value)


def _json_payload(field: Field, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    read = json.loads(text)
    # No number that is none equals another one.
    if read != value and repr(read) != repr(value):
        raise BadSample(
            f"field {field.name!r} holds what would come back as something else, such as a tuple "
            "or a key that is no text: make the data set return lists, and mappings by text"
        )
    return text.encode("utf-8")


def _bytes_payload(_field: Field, value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("not bytes")
    return bytes(value)


_NUMBERS: Mapping[str, tuple[type, str]] = {
    "int": (int, "<q"),
    "bool": (bool, "<?"),
    "float": (float, "<d"),
}
_WRITERS: Mapping[str, Callable[[Field, Any], bytes]] = {
    "int": _number_payload,
    "bool": _number_payload,
    "float": _number_payload,
    "str": lambda _field, value: value.encode("utf-8", "surrogatepass"),
    "bytes": _bytes_payload,
    "json": _json_payload,
    "array": _array_payload,
}
_READERS: Mapping[str, Callable[[Field, memoryview], Any]] = {
    "int": lambda _field, data: struct.unpack("<q", data)[0],
    "bool": lambda _field, data: struct.unpack("<?", data)[0],
    "float": lambda _field, data: struct.unpack("<d", data)[0],
    "str": lambda _field, data: str(data, "utf-8", "surrogatepass"),
    "bytes": lambda _field, data: bytes(data),
    "json": lambda _field, data: json.loads(bytes(data)),
    "array": _array_value,
    "image": lambda _field, data: pictures.source_bytes(data),
}
