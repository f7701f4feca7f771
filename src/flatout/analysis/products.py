"""The distinct matrix products of a step, and how well their sizes suit a GPU. Pure numbers.

`seen_products` takes them from the calls that the products' probe wrote down. `tile_share`,
`wave_share` and `aligned_bytes` ask for whole tiles, whole waves, aligned rows.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.analysis.steps import medians_by_step, sums_by_step
from flatout.records.roofline import Product

TILE = (128, 256)
"""Rows and columns that one processor computes at a time: cuBLAS's most efficient tile, by
NVIDIA's guide. Products with a shorter side get `SMALL_TILE`."""
SMALL_TILE = (64, 64)
MOST_ALIGNED_BYTES = 128
"""A line of the caches: aligned to more is no better."""
TENSOR_CORE_BYTES = 16
"""Rows that are no multiple of it cannot be fetched at full width (NVIDIA's guide)."""


def tile_for(m: int, n: int) -> tuple[int, int]:
    """Return the tile that the formulas assume for a result.

    >>> tile_for(4096, 4096), tile_for(4096, 100)
    ((128, 256), (64, 64))
    """
    return TILE if m >= TILE[0] and n >= TILE[0] else SMALL_TILE


def tile_share(m: int, n: int) -> float:
    """Return which part of the tiles that cover the result is the result.

    Sources of this, `wave_share` and `aligned_bytes`: NVIDIA, "Matrix Multiplication Background
    User's Guide" (tile and wave quantization, alignment of 16 bytes for tensor cores); S. Bekman,
    "Machine Learning Engineering", chapter on performance (the staircase of a growing dimension).

    >>> tile_share(256, 256), round(tile_share(257, 256), 3)
    (1.0, 0.669)
    """
    rows, columns = tile_for(m, n)
    covered = math.ceil(m / rows) * rows * math.ceil(n / columns) * columns
    return m * n / covered


def wave_share(m: int, n: int, processors: int, *, batch: int = 1) -> float:
    """Return which part of the processors' turns is used: the last wave is seldom full.

    132 processors do 132 tiles in one turn and 133 in two:

    >>> wave_share(128, 256 * 132, 132), round(wave_share(128, 256 * 133, 132), 3)
    (1.0, 0.504)
    """
    rows, columns = tile_for(m, n)
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    return tiles / (processors * math.ceil(tiles / processors))


def aligned_bytes(m: int, n: int, k: int, layout: str, element_bytes: int) -> int:
    """Return the largest power of two, up to a cache line, that divides every row fetched.

    A row is what is together in memory: K numbers of a left operand by rows, M by columns.

    >>> aligned_bytes(8192, 50304, 768, "NT", 2), aligned_bytes(8192, 50257, 768, "NT", 2)
    (128, 2)
    """
    left, right = layout[0], layout[-1]
    extents = [m if left == "T" else k, k if right == "T" else n, n]
    common = math.gcd(*extents) * element_bytes
    return min(common & -common, MOST_ALIGNED_BYTES)


ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
OPERANDS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
"""Places of left and right operand among the arguments."""
GROUPED = "_grouped_mm"
"""Products of groups of rows, each with a matrix of its own."""
LEAST_USUAL = 0.5
"""Calls that come back in half of the steps are at least this part of a step, or sizes vary."""

Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A product, and how to call it again."""

    product: Product
    call: Call


def seen_products(found: Mapping[str, Any]) -> tuple[Seen, ...]:
    """Return the distinct products of a step with their calls per step: medians over the steps."""
    counts = counts_per_step(found["segments"])
    rows = [
        Seen(product=product_of(call, counts[number]), call=call)
        for number, call in found["calls"].items()
        if counts.get(number)
    ]
    forwards = [row.product for row in rows if row.product.role == "forward"]
    return tuple(
        replace(row, product=replace(row.product, role=role_of(row.product, forwards)))
        for row in rows
        if row.product.flops and row.product.dtype in ELEMENT_BYTES
    )


def counts_per_step(segments: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return how often a step makes each call: medians, which an unusual step does not move.

    Where sizes differ from step to step, as those of graphs and padded texts do, hardly any call
    comes back in half of the steps: then those of one step, the middle one by its calls.

    >>> counts_per_step([{"who": 0, "counts": {"0": 2}}, {"who": 0, "counts": {"0": 2, "1": 1}}])
    {'0': 2.0, '1': 0.5}
    """
    usual = {name: float(n) for name, n in medians_by_step(segments, "counts").items()}
    by_calls = sorted(sums_by_step(segments, "counts"), key=Counter.total)
    middle = by_calls[len(by_calls) // 2] if by_calls else Counter()
    if sum(usual.values()) >= LEAST_USUAL * middle.total():
        return usual
    return {name: float(count) for name, count in middle.items() if count}


def attention_flops(segments: Sequence[Mapping[str, Any]]) -> float:
    """Return the operations of fused attention in a step."""
    rows = [{**segment, "n": {"n": segment["attention_flops"]}} for segment in segments]
    return float(medians_by_step(rows, "n").get("n", 0.0))


def product_of(call: Call, count: float) -> Product:
    """Return the product that a call makes; of backward ones the role is not decided yet."""
    name = call["operator"].removeprefix("aten::")
    is_convolution = name.startswith("convolution")
    if is_convolution:
        facts = _convolution(call, is_backward=name == "convolution_backward")
    else:
        facts = _grouped(call) if name == GROUPED else _plain(call, name)
    dtype = "tf32" if call["tf32"] else facts["dtype"]
    m, n, k = (facts[size] for size in "mnk")
    layout = "NT" if is_convolution else facts["layout"]
    return Product(
        **{"role": call["when"], **facts, "dtype": dtype},
        operator=name,
        count=count,
        bytes=_bytes(call),
        aligned_bytes=aligned_bytes(m, n, k, layout, ELEMENT_BYTES.get(dtype, 4)),
    )


def role_of(product: Product, forwards: Sequence[Product]) -> str:
    """Return what a product is for.

    Of `y = x @ w`, x being M by K and w K by N, the gradient of x is an M by K product over N, that
    of w a K by N product over M. Where the sizes allow both, the layout tells: only the gradient
    of a weight has its left operand turned.
    """
    if product.role != "backward":
        return product.role
    if product.operator == "convolution_backward":
        return "both"
    sizes = (product.m, product.n, product.k)
    as_input = any(sizes == (f.m, f.k, f.n) for f in forwards if f.batch == product.batch)
    # Autograd may compute a weight's gradient turned: N by K.
    as_weight = any(
        product.k == f.m and {product.m, product.n} == {f.k, f.n}
        for f in forwards
        if f.batch == product.batch
    )
    if product.batch > 1:
        return "dgrad"  # both operands of a batched product are activations
    if as_input and as_weight:
        return "wgrad" if product.layout.startswith("T") else "dgrad"
    return "wgrad" if as_weight else "dgrad"


def resized(call: Call, change: Mapping[int, int]) -> dict[str, Any] | None:
    """Return the call with every size that is a key replaced by its value; None if it has none.

    Batches and convolutions stay as they are: their sizes mean other things.
    """
    name = call["operator"].removeprefix("aten::")
    if name not in OPERANDS:
        return None
    arguments = [_resized(argument, change) for argument in call["arguments"]]
    if arguments == call["arguments"]:
        return None
    return {**call, "arguments": arguments, "out": _resized(call["out"], change)}


def recast(call: Call, dtype: str) -> dict[str, Any]:
    """Return the call with operands in another arithmetic."""
    kind = "float32" if dtype == "tf32" else dtype
    changed: dict[str, Any] = _recast(dict(call), kind)
    return {**changed, "tf32": dtype == "tf32"}


def _recast(value: Any, dtype: str) -> Any:
    if isinstance(value, list):
        return [_recast(item, dtype) for item in value]
    if not isinstance(value, dict):
        return value
    if "stride" in value:
        return {**value, "dtype": dtype} if value["dtype"] in ELEMENT_BYTES else value
    return {key: _recast(item, dtype) for key, item in value.items()}


def _resized(value: Any, change: Mapping[int, int]) -> Any:
    """Return a tensor's description with other sizes, lying as it did."""
    if not isinstance(value, dict):
        return value
    shape, stride = value["shape"], value["stride"]
    keeps = max(len(shape) - 2, 0)
    sizes = [*shape[:keeps], *(change.get(size, size) for size in shape[keeps:])]
    if sizes == shape:
        return value
    order = sorted(range(len(sizes)), key=lambda place: (stride[place], place), reverse=True)
    steps, step = [0] * len(sizes), 1
    for place in reversed(order):
        if stride[place] == 0 and shape[place] > 1:
            continue  # one row, shown many times
        steps[place] = step
        step *= sizes[place]
    return {**value, "shape": sizes, "stride": steps}


def _plain(call: Call, name: str) -> dict[str, Any]:
    left, right = (call["arguments"][place] for place in OPERANDS[name])
    *batch, m, k = left["shape"]
    sizes = {"m": m, "n": right["shape"][-1], "k": k, "batch": math.prod(batch)}
    layout, flops = _layout(left) + _layout(right), 2 * math.prod(sizes.values())
    return {**sizes, "dtype": left["dtype"], "layout": layout, "flops": flops}


def _convolution(call: Call, *, is_backward: bool) -> dict[str, Any]:
    """Return a convolution as the product that it is: pixels by output channels."""
    arguments = call["arguments"]
    image, weight = arguments[1:3] if is_backward else arguments[:2]
    result = arguments[0] if is_backward else call["out"]
    turned, groups = (arguments[7], arguments[9]) if is_backward else (arguments[6], arguments[8])
    shape = weight["shape"]
    pixels = image if turned else result
    products = sum(map(bool, arguments[10][:2])) if is_backward else 1
    m = pixels["shape"][0] * math.prod(pixels["shape"][2:])
    sizes = {"m": m, "n": shape[0] // groups, "k": math.prod(shape[1:]), "batch": groups}
    layout = "channels last" if image["stride"][1] == 1 else "channels first"
    flops = 2 * math.prod(sizes.values()) * products
    return {**sizes, "dtype": image["dtype"], "layout": layout, "flops": flops}


def _grouped(call: Call) -> dict[str, Any]:
    """Return products in groups as one batch, each of the average size; the work is exact.

    The size of each group is in a tensor, which no one waits for.
    """
    left, right = call["arguments"][:2]
    sizes = [*left["shape"][-2:], right["shape"][-1]]
    is_ragged = len(left["shape"]) + len(right["shape"]) < 6
    are_flat = len(left["shape"]) == len(right["shape"]) == 2
    stacked = left if len(left["shape"]) == 3 else right
    groups = call["arguments"][2]["shape"][0] if are_flat else stacked["shape"][0]
    flops = 2 * math.prod(sizes) * (1 if is_ragged else groups)
    if is_ragged:
        # Of a weight's gradient the groups lie along the sum, else along rows or columns.
        place = 1 if are_flat else 0 if len(left["shape"]) == 2 else 2
        sizes[place] = math.ceil(sizes[place] / groups)
    role = call["when"]
    if role == "backward":
        role = "wgrad" if are_flat else "dgrad"
    layout = _layout(left) + _layout(right)
    facts = {"dtype": left["dtype"], "layout": layout, "flops": flops, "role": role}
    return {**facts, "m": sizes[0], "n": sizes[2], "k": sizes[1], "batch": groups}


def _layout(tensor: Mapping[str, Any]) -> str:
    rows, columns = tensor["shape"][-2:]
    step_down, step_along = tensor["stride"][-2:]
    if step_along == 1 or columns == 1:
        return "N"
    return "T" if step_down == 1 or rows == 1 else "S"


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in a call, each element once."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, Mapping):
        return 0
    if "stride" not in value:
        return _bytes(value["arguments"]) + _bytes(value["out"])
    sizes = zip(value["shape"], value["stride"], strict=True)
    elements: int = math.prod(size for size, step in sizes if step or size == 1)
    return elements * int(ELEMENT_BYTES.get(value["dtype"], 4))
