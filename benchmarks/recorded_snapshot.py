"""Play a snapshot that torch recorded on a GPU through the simulated allocator.

Recorded requests in, recorded segments compared: what differs then is the simulator's error and
none of the tracer's.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flatout.planner.allocator import Block, CachingAllocator, DeviceFullError
from flatout.planner.allocator_settings import AllocatorSettings
from flatout.records.errors import UserError

FROM_DEVICE = frozenset({"segment_alloc", "segment_map"})
TO_DEVICE = frozenset({"segment_free", "segment_unmap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplay:
    """A recorded run alongside the simulated one."""

    recorded_reserved: int
    """Largest bytes that the real allocator held."""
    simulated_reserved: int
    recorded_segments: tuple[int, ...]
    """Sizes in the order in which they were asked of the device."""
    simulated_segments: tuple[int, ...]
    requests: int
    left_out: int
    """Frees of blocks that were allocated before the recording began."""

    @property
    def is_exact(self) -> bool:
        """Whether every request to the device has the recorded size and order."""
        return self.recorded_segments == self.simulated_segments

    @property
    def error(self) -> float:
        """Simulated over recorded reserved bytes, less 1."""
        return self.simulated_reserved / max(1, self.recorded_reserved) - 1

    @property
    def first_difference(self) -> int | None:
        """Number of the first request to the device that differs."""
        pairs = zip(self.recorded_segments, self.simulated_segments, strict=False)
        for number, (one, other) in enumerate(pairs):
            if one != other:
                return number
        if len(self.recorded_segments) == len(self.simulated_segments):
            return None
        return min(len(self.recorded_segments), len(self.simulated_segments))


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return a snapshot; nothing but plain values is unpickled, whoever wrote the file."""
    try:
        plain = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
        raise UserError(f"{path} is no memory snapshot of torch: {error}") from error
    if not isinstance(plain, dict) or "device_traces" not in plain:
        raise UserError(
            f"{path} is no memory snapshot of torch; torch.cuda.memory._dump_snapshot writes one"
        )
    return plain


def replay_recorded(
    snapshot: Mapping[str, Any],
    settings: AllocatorSettings,
    *,
    device: int = 0,
    capacity: int | None = None,
) -> RecordedReplay:
    """Return the recorded run alongside a simulated one that gets the same requests."""
    entries: Sequence[Mapping[str, Any]] = snapshot["device_traces"][device]
    simulated: list[int] = []

    def tell(action: str, _address: int, size: int, _stream: int) -> None:
        if action in FROM_DEVICE:
            simulated.append(size)

    allocator = CachingAllocator(settings, capacity=capacity, listener=tell)
    live: dict[int, Block] = {}
    requests = left_out = 0
    for number, entry in enumerate(entries):
        action = entry["action"]
        if action == "alloc":
            requests += 1
            try:
                live[entry["addr"]] = allocator.malloc(entry["size"], entry["stream"])
            except DeviceFullError:
                break
        elif action == "free_completed":
            # Freed where the recording says so: what another stream delayed is delayed here.
            left_out += not _free(allocator, live, entry["addr"])
        elif action in TO_DEVICE and entries[number - 1]["action"] not in TO_DEVICE:
            allocator.empty_cache()
    recorded = tuple(entry["size"] for entry in entries if entry["action"] in FROM_DEVICE)
    return RecordedReplay(
        recorded_reserved=_peak_reserved(entries),
        simulated_reserved=allocator.peak_reserved,
        recorded_segments=recorded,
        simulated_segments=tuple(simulated),
        requests=requests,
        left_out=left_out,
    )


def _free(allocator: CachingAllocator, live: dict[int, Block], address: int) -> bool:
    block = live.pop(address, None)
    if block is None:
        return False
    allocator.free(block)
    return True


def _peak_reserved(entries: Sequence[Mapping[str, Any]]) -> int:
    reserved = peak = 0
    for entry in entries:
        if entry["action"] in FROM_DEVICE:
            reserved += entry["size"]
        elif entry["action"] in TO_DEVICE:
            reserved -= entry["size"]
        peak = max(peak, reserved)
    return peak


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers; refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which no snapshot needs")
