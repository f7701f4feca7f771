"""What a GPU takes alongside the tensors: context, libraries' workspaces, NCCL.

`find_calibration` reads it from a file; `with_workspaces` adds to a stream what no tracer sees: the
workspaces of cuBLAS, cuDNN and attention kernels.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.hardware.catalogue import GpuModel
from flatout.planner.kernel_workspaces import CONVOLVING, taken_by
from flatout.planner.largest_batch import Affine
from flatout.records.input_files import read_json
from flatout.records.memory_stream import Allocation, Component, Draft, MemoryStream, Phase
from flatout.records.plan import Amount, NumberSource
from flatout.records.units import MIB

SCHEMA = "flatout.calibration/1"
FOLDER = Path(__file__).with_name("calibrations")
ASSUMED = FOLDER / "assumed.json"
CUBLAS_SM90 = (9, 0)
"""From this compute capability on torch gives cuBLAS the larger workspace."""
AMD_128 = ("mi300x",)
"""GPUs for which torch gives hipBLAS 128 MiB: gfx942 in aten/src/ATen/cuda/CublasHandlePool.cpp."""
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE_PART = re.compile(r":(\d+):(\d+)")
"""KiB and count of one kind of buffers in that variable, as torch reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Bytes that no tracer sees, of one GPU with one torch."""

    context: Amount
    """The process's own share of the device before any tensor, and the kernels it loads."""
    cublas_workspace: Amount
    """Of one handle on one stream; forward and backward have a handle each."""
    nccl: Amount
    """Of the first communicator of a process."""
    trace_error: float | None = None
    """Largest relative error of predicted against measured allocated bytes, where measured."""
    reserve_errors: tuple[float, float] | None = None
    """By what shares reserved bytes were predicted too small and too large at most."""


def find_calibration(gpu: GpuModel, torch_version: str) -> Calibration:
    """Return what was measured on this GPU with this torch, else what is assumed.

    A file of the same GPU with another torch is better than none; it is then tagged assumed.

    One JSON file a GPU and torch version is in `calibrations/`; `benchmarks/run_gpu.py` has one in
    its record, to be put there. Where there is none, `assumed.json` is taken, and its numbers say
    so.
    """
    series = _series(torch_version)
    files = [_read(path) for path in sorted(FOLDER.glob("*.json")) if path != ASSUMED]
    found = [plain for plain in files if plain["gpu"] == gpu.name]
    found.sort(key=lambda plain: _series(plain["torch"]) == series)
    measured: Mapping[str, Any] = found[-1] if found else {}
    is_same = bool(measured) and _series(measured["torch"]) == series
    amounts, assumed = measured.get("amounts", {}), _read(ASSUMED)["amounts"]

    def amount(name: str, fallback: str = "") -> Amount:
        is_measured = name in amounts
        plain = amounts[name] if is_measured else assumed[fallback or name]
        source = NumberSource.CALIBRATED if is_measured and is_same else NumberSource.ASSUMED
        return Amount(source=source, **{end: plain[end] for end in ("bytes", "low", "high")})

    is_new = gpu.compute_capability is not None and gpu.compute_capability >= CUBLAS_SM90
    workspace = "cublas_workspace_sm90" if is_new else "cublas_workspace"
    workspace = "hipblas_workspace_gfx942" if gpu.name in AMD_128 else workspace
    errors = measured.get("errors", {}) if is_same else {}
    return Calibration(
        context=amount("context"),
        cublas_workspace=amount("cublas_workspace", workspace),
        nccl=amount("nccl"),
        trace_error=errors.get("trace"),
        reserve_errors=tuple(errors["reserve"]) if "reserve" in errors else None,
    )


def with_environment(calibration: Calibration, variables: Mapping[str, str]) -> Calibration:
    """Return the calibration with the workspace that CUBLAS_WORKSPACE_CONFIG asks for.

    What torch cannot read there it leaves at its default, and so does this.
    """
    parts = WORKSPACE_PART.findall(variables.get(WORKSPACE_VARIABLE, ""))
    if not parts:
        return calibration
    size = sum(int(kibibytes) * int(count) for kibibytes, count in parts) * 1024
    asked = replace(calibration.cublas_workspace, bytes=size, low=size, high=size)
    return replace(calibration, cublas_workspace=asked)


def _read(path: Path) -> Mapping[str, Any]:
    plain = read_json(path)
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    return plain


def _series(version: str) -> str:
    """Return major and minor version.

    >>> _series("2.11.0+cu130"), _series("any")
    ('2.11', 'any')
    """
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


PRODUCT = re.compile(r"\b(?:mm|addmm|bmm|baddbmm|addmv|_scaled_mm|linear)\b")
"""Operators that cuBLAS runs."""
WITH_BIAS = re.compile(r"\baddmm\b")
"""Operators that cuBLASLt runs."""
CUBLASLT_BYTES = MIB
"""Of cuBLASLt, once: aten/src/ATen/cuda/CUDABlas.cpp where CUBLASLT_WORKSPACE_SIZE is not set."""
BATCHES_KEPT = 16
"""Batches at which a stream is kept: the ladder and the ways to spread it ask for the same ones."""
MOST_CONVOLUTION_BYTES = 256 * MIB
"""What a convolution may take on a GPU that nothing was measured on, where its rule says less."""


def with_workspaces(stream: MemoryStream, calibration: Calibration) -> MemoryStream:
    """Return the stream with workspaces; one of a CPU is taken for that of a GPU.

    cuBLAS's size comes from a calibration, those of other kernels from what they are called with.
    """
    draft = Draft(stream)
    for workspace, after, stays in _workspaces(stream, calibration):
        place = draft.lives[after].birth + 1
        draft.add(workspace, place, None if stays else place)
    return draft.build()


def whole_at(model: Affine, calibration: Calibration) -> Callable[[int], MemoryStream]:
    """Return the stream with workspaces at every batch: `with_workspaces` of the model's.

    Sizes differ from batch to batch, and nothing else: where they are is found once.
    """
    whole = with_workspaces(model.stream, calibration)

    @functools.lru_cache(BATCHES_KEPT)
    def at(batch: int) -> MemoryStream:
        found = model.at(batch)
        own = (workspace for workspace, _, _ in _workspaces(found, calibration))
        allocations = (*found.allocations, *own)
        return replace(found, allocations=allocations, events=whole.events, marks=whole.marks)

    return at


def has_convolution(stream: MemoryStream) -> bool:
    """Return whether a stream that has workspaces holds a convolution's."""
    return any(a.operator == f"workspace of {CONVOLVING}" for a in stream.allocations)


def with_convolution_bytes(stream: MemoryStream, change: Callable[[int], int]) -> MemoryStream:
    """Return a stream that has workspaces with those of convolutions of other sizes."""
    draft = Draft(stream)
    for index, allocation in enumerate(stream.allocations):
        if allocation.operator == f"workspace of {CONVOLVING}":
            draft.resize(index, change(allocation.size))
    return draft.build()


def _workspaces(
    stream: MemoryStream, calibration: Calibration
) -> Iterator[tuple[Allocation, int, bool]]:
    """Yield each workspace, the number of the allocation that it follows, and whether it stays.

    What a library takes at its first call stays; forward and backward run on threads of their own,
    each with a handle.
    """
    size, rows = calibration.cublas_workspace.bytes, stream.allocations
    for operators, phase, kept in (
        (PRODUCT, Phase.FORWARD, size),
        (WITH_BIAS, Phase.FORWARD, CUBLASLT_BYTES),
        (PRODUCT, Phase.BACKWARD, size),
    ):
        calls = (n for n, a in enumerate(rows) if a.phase is phase and operators.search(a.operator))
        for first in itertools.islice(calls, 1):
            yield _workspace(rows[first], kept, "cuBLAS"), first, True
    for members in _calls(stream):
        call = [rows[index] for index in members]
        for after, taken, name in taken_by(call):
            # Empty ones, too: streams at different batches have the same allocations.
            yield _workspace(call[after], taken, name), members[after], False


def _calls(stream: MemoryStream) -> Iterator[list[int]]:
    """Yield the numbers of the results of each call whose arguments are known."""
    members: list[int] = []
    for index, allocation in enumerate(stream.allocations):
        is_later = members and allocation.operator == stream.allocations[members[0]].operator
        if members and (allocation.arguments or not is_later):
            yield members
            members = []
        if allocation.arguments or (members and allocation.shape):
            members.append(index)
    if members:
        yield members


def _workspace(beside: Allocation, size: int, name: str) -> Allocation:
    return replace(
        beside,
        size=size,
        component=Component.WORKSPACE,
        operator=f"workspace of {name}",
        shape=(),
        dtype="",
        arguments=(),
    )
