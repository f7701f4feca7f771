"""Add to a stream what no tracer sees: the workspaces of cuBLAS, cuDNN and attention kernels.

The sizes come from a calibration; those inside attention follow from the tensors beside them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from flatout.memory.calibration import Calibration
from flatout.memory.edits import Draft
from flatout.memory.stream import Allocation, Component, MemoryStream, Phase

PRODUCT = re.compile(r"\b(?:mm|addmm|bmm|baddbmm|addmv|_scaled_mm|linear)\b")
"""Operators that cuBLAS runs."""
CONVOLUTION = re.compile(r"\b(?:cudnn_)?convolution\w*")
ATTENTION_BACKWARD = re.compile(r"_scaled_dot_product_(?:flash|cudnn)_attention_backward")
CONVOLVING = "convolution"
FP32_BYTES = 4
"""Flash attention sums the gradient of the queries in fp32 (flash_attn's mha_bwd)."""


def with_workspaces(stream: MemoryStream, calibration: Calibration) -> MemoryStream:
    """Return the stream with workspaces; one of a CPU is taken for that of a GPU."""
    draft = Draft(stream)
    _add_cublas(draft, calibration.cublas_workspace.bytes)
    for first, last in _runs(stream, CONVOLUTION):
        _add(draft, first, last, calibration.convolution_workspace.bytes, CONVOLVING)
    for first, last in _runs(stream, ATTENTION_BACKWARD):
        _add(draft, first, last, _attention_bytes(stream.allocations[first]), "attention backward")
    return draft.build()


def has_convolution(stream: MemoryStream) -> bool:
    """Tell whether a stream that has workspaces holds a convolution's."""
    return any(a.operator == f"workspace of {CONVOLVING}" for a in stream.allocations)


def with_convolution_bytes(stream: MemoryStream, size: int) -> MemoryStream:
    """Return a stream that has workspaces with those of convolutions of another size."""
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        if allocation.operator == f"workspace of {CONVOLVING}":
            draft.resize(index, size)
    return draft.build()


def _add_cublas(draft: Draft, size: int) -> None:
    """Forward and backward run on threads of their own, each with a handle; both stay."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for index, allocation in enumerate(draft.stream.allocations):
            if allocation.phase is phase and PRODUCT.search(allocation.operator):
                birth = draft.lives[index].birth
                draft.add(_workspace(allocation, size, "cuBLAS"), birth, None)
                break


def _runs(stream: MemoryStream, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last allocation of each call of an operator.

    One call makes its results one right after the other; the operator's name tells it from others.
    """
    found: list[int] = []
    for index, allocation in enumerate(stream.allocations):
        matches = pattern.search(allocation.operator) is not None
        if found and (
            not matches or index != found[-1] + 1 or not _same_call(stream, found[-1], index)
        ):
            yield found[0], found[-1]
            found = []
        if matches:
            found.append(index)
    if found:
        yield found[0], found[-1]


def _same_call(stream: MemoryStream, before: int, index: int) -> bool:
    one, other = stream.allocations[before], stream.allocations[index]
    return one.operator == other.operator and (one.module, one.line) == (other.module, other.line)


def _add(draft: Draft, first: int, last: int, size: int, name: str) -> None:
    birth, end = draft.lives[first].birth, draft.lives[last].birth + 1
    draft.add(_workspace(draft.stream.allocations[first], size, name), birth, end)


def _workspace(beside: Allocation, size: int, name: str) -> Allocation:
    return replace(
        beside,
        size=size,
        component=Component.WORKSPACE,
        operator=f"workspace of {name}",
        shape=(),
        dtype="",
        used_on=(),
    )


def _attention_bytes(gradient: Allocation) -> int:
    """Return the sum in fp32 of the queries' gradient, and one number a row."""
    if len(gradient.shape) < 2:
        return 0
    return (prod(gradient.shape) + prod(gradient.shape[:-1])) * FP32_BYTES
