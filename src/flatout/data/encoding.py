"""Samples as bytes and back: tensors and arrays as they lie in memory, the rest pickled.

What comes back is equal bit by bit, writable, and shares no memory with what was stored.
"""

import io
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<Q")


def encode(sample: Any) -> list[bytes | memoryview]:
    """Return the parts that, joined, `decode` makes the sample of.

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
    """Takes plain tensors out of the pickle, as numpy arrays do by themselves."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how a plain tensor is made again; everything else pickles its own way."""
        import torch

        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        flat: Any = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        raw = pickle.PickleBuffer(flat)
        return _tensor, (raw, str(thing.dtype).removeprefix("torch."), tuple(thing.shape))


def _is_plain(tensor: Any) -> bool:
    import torch

    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_odd = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return is_dense and not is_odd and tensor.numel() > 0


def _tensor(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(shape)
