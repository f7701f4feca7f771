"""Memory that CUDA kernels take while they run, from the shapes that they are called with.

Derived from calls and training steps that torch 2.11 with cuDNN 9.19 made on an H200: 532
convolutions in three directions, 192 attention layers, and the reductions of 14 recorded trainings.
What follows from layouts (copies), from torch's sources (reductions, attention) is the same on
other GPUs; how many parts a weight gradient is summed in is the H200's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from flatout.records.memory_stream import Allocation
from flatout.records.units import MIB

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
FP32_BYTES = 4
"""Kernels add up in fp32, whatever the tensors are."""
PROCESSORS = 132
"""Streaming multiprocessors of the GPU that all this was derived from, H100 and H200."""
TILE = 128
"""Rows and columns of a matrix product that one of them adds up at a time."""
MOST_PARTS = 14
"""Parts in which the gradient of a weight of several pixels is added up at most."""
PIXELS_FULL, PIXELS_HALF, PIXELS_HALF_TILE = 800, 1_400, 450
"""Output pixels, all pictures together, for each part: in fp32; in half precision, where the weight
is a single pixel or has few input channels; of its other weights, for each tile."""
PIXELS_OF_REST = {4: 224, 2: 1_568}
"""The same for the last tiles of more than are added up at a time, by bytes of an element."""
VECTOR_BYTES = 16
"""Kernels on tensor cores read channels in vectors of this size, and pad to it."""
FEW_CHANNELS = 4
"""Pictures with so few channels have kernels of their own for stride 1, which copy nothing."""
NARROW = 64
"""Up to so many input channels fp32 kernels read or write the usual layout."""
SMALL = 1 << 17
"""Output pixels, all pictures together, up to which they read it."""


class Taken(NamedTuple):
    """Bytes that a kernel takes and gives back at once."""

    after: int
    """Number of the call's allocation that they follow."""
    bytes: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of pictures, whichever direction it is computed in."""

    pictures: int
    inner: int
    """Channels of what it reads."""
    outer: int
    pixels_in: int
    pixels_out: int
    taps: int
    """Pixels of its kernel."""
    stride: int
    groups: int
    dtype: str
    is_channels_last: bool

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES.get(self.dtype, FP32_BYTES)

    def input_bytes(self) -> int:
        """Return the bytes of the input with padded channels."""
        return self.pictures * self.pixels_in * self._padded(self.inner) * self.element_bytes

    def output_bytes(self) -> int:
        """Return the bytes of the output with padded channels."""
        return self.pictures * self.pixels_out * self._padded(self.outer) * self.element_bytes

    def weight_numel(self) -> int:
        """Return the elements of the weight with padded channels."""
        return self._padded(self.inner) // self.groups * self._padded(self.outer) * self.taps

    def copies(self) -> int:
        """Return the bytes of the copies with channels last, which tensor cores want."""
        reads = 0 if self.taps == 1 else self.weight_numel() * self.element_bytes
        if not self.is_channels_last:
            return self.input_bytes() + self.output_bytes() + reads
        is_padded = self._padded(self.inner) != self.inner
        return self.input_bytes() + reads if is_padded else 0

    def along(self) -> int:
        """Return what the forward direction takes."""
        is_plain = self._is_first and self.stride == 1 and not self.is_channels_last
        is_narrow = self.taps == 1 and not self._is_first and self.inner <= NARROW
        if self._copies_nothing() or is_plain or (is_narrow and not self.is_channels_last):
            return 0
        return self.copies() - (self._spared() if self._is_full else 0)

    def against(self) -> int:
        """Return what the gradient of the input takes."""
        is_product = self.taps == 1 and self.inner <= 2 * NARROW and not self.is_channels_last
        has_own = self._is_full and (self._is_first or is_product)
        return 0 if self._copies_nothing() or has_own else self.copies()

    def of_weight(self) -> int:
        """Return what the gradient of the weight takes: copies, and the parts of the sum."""
        is_plain = self._is_full and self._is_first and self.stride == 1
        if self.groups == self.inner > 1 or is_plain:
            return 0
        size = self.copies() + self._split_bytes()
        if self._copies_nothing() and not self.is_channels_last:
            return min(size, self.pictures * self.weight_numel() * FP32_BYTES)
        return size

    def _spared(self) -> int:
        """Return the bytes of the copies that fp32's forward kernels do without."""
        if self._is_first:
            missing = self._padded(self.inner) - self.inner
            numel = self.pictures * self.pixels_in + self.outer * self.taps
            return missing * numel * FP32_BYTES if self.taps > self.stride**2 else 0
        if self.is_channels_last or self.inner > NARROW:
            return 0
        if self.outer > self.inner:
            return self.output_bytes()
        return self.input_bytes() if self.pictures * self.pixels_out < SMALL else 0

    def _split_bytes(self) -> int:
        """Return the bytes of the parts in which the gradient of the weight is added up."""
        weight, pixels = self.weight_numel(), self.pictures * self.pixels_out
        tiles = -(-self.outer // TILE) * -(-weight // self._padded(self.outer) // TILE)
        if tiles > PROCESSORS:
            rest = tiles % PROCESSORS
            most = pixels // PIXELS_OF_REST[4 if self._is_full else 2]
            parts, weight = min(PROCESSORS // max(1, rest), most), rest * TILE * TILE
        elif self.taps == 1 or (self._is_first and self.dtype != "float16"):
            at_once = PROCESSORS * (2 if self._is_full and self.stride == 1 else 1)
            each = PIXELS_FULL if self._is_full else PIXELS_HALF * self.stride**2
            parts = min(at_once // tiles, pixels // each)
        elif self._is_full:
            parts = min(MOST_PARTS, PROCESSORS // tiles, pixels // PIXELS_FULL)
        else:
            parts = min(MOST_PARTS, pixels // (PIXELS_HALF_TILE * tiles))
        return parts * weight * FP32_BYTES if parts > 1 else 0

    @property
    def _is_first(self) -> bool:
        """Whether it reads pictures, which have kernels of their own."""
        return self.inner <= FEW_CHANNELS

    @property
    def _is_full(self) -> bool:
        return self.element_bytes >= FP32_BYTES

    def _copies_nothing(self) -> bool:
        """Return whether its kernels take the tensors as they are."""
        if self.groups == self.inner > 1:
            return True
        is_aligned = self.pixels_out * self.element_bytes % (VECTOR_BYTES // 2) == 0
        # A matrix product of the tensors as they are.
        return self.taps == self.stride == 1 and (self.is_channels_last or is_aligned)

    def _padded(self, channels: int) -> int:
        vector = VECTOR_BYTES // self.element_bytes
        if self._is_first and channels == self.inner and self.dtype != "bfloat16":
            vector = FEW_CHANNELS
        return -(-channels // vector) * vector


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Matrix products a cell computes for each unit."""
KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values kept for each unit, time step and layer; one more lies between two layers."""
HEADER_BYTES = 256
FIXED_BYTES = 8 * MIB
"""Of cuDNN's workspace, for each layer and direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A recurrent layer of cuDNN with its input. All 128 that were measured keep what this says."""

    kind: str
    steps: int
    batch: int
    inner: int
    hidden: int
    layers: int
    directions: int
    element_bytes: int

    def reserve_bytes(self) -> int:
        """Return what is kept for backward."""
        values = KEPT[self.kind] * self.layers + self.layers - 1
        units = self.steps * self.batch * self.hidden * self.directions
        return units * values * self.element_bytes + HEADER_BYTES

    def workspace_bytes(self) -> int:
        """Return what it takes while it runs: the weights once more, and its gates' inputs.

        One layer in one direction has kernels of its own, which keep copies in half precision.
        """
        both = self.hidden * self.directions
        if self.directions == 2:
            values = max(7 * both + self.inner, 15 * self.inner // 2) * self.steps
        elif self.layers > 1:
            values = (5 * self.steps + 48) * self.hidden
        elif self.element_bytes >= FP32_BYTES:
            values = max(3 * (self.hidden + self.inner), 22 * self.hidden // 5) * self.steps
        else:
            values = (21 * self.hidden + self.inner) * self.steps
        values += 11 * both * self.layers
        read = self.inner + (self.layers - 1) * both + self.layers * (self.hidden + 2)
        numel = self.batch * values + GATES[self.kind] * both * read
        return numel * self.element_bytes + FIXED_BYTES * self.layers * self.directions


def column_sum_bytes(rows: int, columns: int, processors: int = PROCESSORS) -> int:
    """Return the buffer in which blocks of threads add up columns: aten/native/cuda/Reduce.cuh.

    >>> column_sum_bytes(2048, 768), column_sum_bytes(4096, 10_000)
    (12582912, 138240000)
    """
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = 512 // vector
    across, down = (1 << min(n, most).bit_length() - 1 for n in (max(1, columns // vector), rows))
    height = min(down, most // min(across, 32))
    width = min(across, most // height)
    values = rows
    if values < min(16 * height, 256):
        return 0
    values = -(-values // height)
    grid = -(-(columns // vector) // width)
    target = processors * (2048 // (width * height))
    if values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return FP32_BYTES * columns * blocks * width * vector if blocks > 1 else 0


def taken_by(call: Sequence[Allocation]) -> Iterator[Taken]:
    """Yield what the kernels of a call take, from the allocations of its results."""
    for name, rule in _RULES.items():
        if call[0].operator.startswith(f"aten.{name}."):
            yield from rule(call)


def _convolution_of(
    call: Sequence[Allocation], output: tuple[int, ...], skipped: int
) -> Convolution:
    """Return the convolution of a call; that of the gradient for a transposed one."""
    source, weight, _, stride, _, _, (is_transposed,), *rest = call[0].arguments[skipped:]
    if is_transposed:
        source, output = output, source
    return Convolution(
        pictures=source[0],
        inner=source[1],
        outer=output[1],
        pixels_in=prod(source[2:]),
        pixels_out=prod(output[2:]),
        taps=prod(weight[2:]),
        stride=max(stride),
        groups=rest[1][0],
        dtype=call[0].dtype,
        is_channels_last=bool(rest[-1][0]),
    )


def _convolution(call: Sequence[Allocation]) -> Iterator[Taken]:
    found = _convolution_of(call, call[0].shape, 0)
    is_transposed = call[0].arguments[6][0]
    yield Taken(0, found.against() if is_transposed else found.along(), CONVOLVING)


def _convolution_backward(call: Sequence[Allocation]) -> Iterator[Taken]:
    output, *_ = call[0].arguments
    found = _convolution_of(call, output, 1)
    is_transposed, wanted = call[0].arguments[7][0], call[0].arguments[10]
    pixels = found.pictures * found.pixels_out
    sizes = (
        found.along() if is_transposed else found.against(),
        found.of_weight(),
        column_sum_bytes(pixels, found.outer) if found.is_channels_last else 0,
    )
    made = [size for size, is_wanted in zip(sizes, wanted, strict=True) if is_wanted]
    for number, size in enumerate(made[: len(call)]):
        yield Taken(number, size, CONVOLVING)


def _sum(call: Sequence[Allocation]) -> Iterator[Taken]:
    """Yield the buffer of a sum over the leading dims, as a bias's gradient is."""
    shape, dims, *_ = call[0].arguments
    summed = {dim % len(shape) for dim in dims} if shape else set()
    if summed and summed == set(range(len(summed))) and len(summed) < len(shape):
        rows, columns = prod(shape[: len(summed)]), prod(shape[len(summed) :])
        yield Taken(0, column_sum_bytes(rows, columns), "sum")


def _attention_backward(call: Sequence[Allocation]) -> Iterator[Taken]:
    """Yield the sum in fp32 of the queries' gradient, and one number a row."""
    shape = call[0].shape
    yield Taken(len(call) - 1, (prod(shape) + prod(shape[:-1])) * FP32_BYTES, ATTENDING)


def _efficient_backward(call: Sequence[Allocation]) -> Iterator[Taken]:
    """Yield outputs times their gradient with its sums, then the queries' gradient in blocks."""
    batch, heads, queries, head = call[0].arguments[1]
    rows = batch * heads * queries
    last = len(call) - 1
    yield Taken(last, rows * head * FP32_BYTES + 2 * rows * FP32_BYTES, ATTENDING)
    blocks, width = -(-queries // BLOCK), -(-head // BLOCK) * BLOCK
    size = batch * heads * blocks * (BLOCK * width * FP32_BYTES + 16) + rows * FP32_BYTES
    yield Taken(last, size, ATTENDING)


def _embedding_backward(call: Sequence[Allocation]) -> Iterator[Taken]:
    """Yield the partial sums of many rows, sorted by token: aten/native/cuda/EmbeddingBackward."""
    gradient, tokens, (vocabulary,), *_ = call[0].arguments
    count = prod(tokens)
    rows = count // ROWS_OF_THREAD + min(vocabulary, count)
    size = rows * gradient[-1] * FP32_BYTES if count > UNSORTED else 0
    yield Taken(0, size, "embedding backward")


UNSORTED, ROWS_OF_THREAD = 3_072, 10
"""Tokens up to which the embedding's gradient is not sorted, and rows that a thread adds up."""
CONVOLVING, ATTENDING = "convolution", "attention backward"
BLOCK = 64
"""Queries, and elements of a head, that the memory-efficient kernel works on at a time."""
_RULES: Mapping[str, Callable[[Sequence[Allocation]], Iterator[Taken]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}
"""By the operator that makes the results."""
