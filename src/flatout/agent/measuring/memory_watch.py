"""What holds the memory of a training process, as it goes and when there is no more of it.

`MemoryWatch` is alongside every trial and every run. `find_live` finds the tensors that are alive,
by the address of their storage. `KeptGraphs` finds autograd graphs that outlive their step.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.measuring import kernels
from flatout.agent.measuring.allocation_streams import CpuStream
from flatout.agent.ranks import rank_and_size
from flatout.agent.session import Session
from flatout.agent.training_device import find_cuda_device, find_cuda_devices
from flatout.analysis.allocations import EARLIER, OWN, AllocationLook, AllocationSite, LiveBlock
from flatout.analysis.steps import running_anchor
from flatout.records.errors import is_out_of_memory
from flatout.records.trial_result import Segment
from flatout.records.units import format_bytes

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes whose storage is their own; subclasses may wrap others, which are found on their own."""


def find_live(session: Session, device: str) -> dict[int, LiveBlock]:
    """Return what torch's allocator gave to the tensors that Python can reach.

    Memory from elsewhere (numpy, shared memory, mapped files) is left out: a storage on it cannot
    be resized.
    """
    kinds = dict(_kinds(session))
    found: dict[int, LiveBlock] = {}
    for tensor in _tensors():
        if tensor.device.type != device or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or not storage.resizable():
            continue
        kind, module = kinds.get(address, ("", ""))
        known = found.get(address)
        # Of all views of a storage the largest tells most.
        if known is None or (known.look and tensor.numel() > math.prod(known.look.shape)):
            look = AllocationLook(tuple(tensor.shape), str(tensor.dtype), kind, module)
            found[address] = LiveBlock(size, AllocationSite(EARLIER), 0, look)
    return found


def look_of(tensor: Any, device: str) -> tuple[int, AllocationLook] | None:
    """Return address and look of an ordinary tensor on the device."""
    if type(tensor) not in PLAIN or tensor.device.type != device:
        return None
    if tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr(), AllocationLook(
        tuple(tensor.shape), str(tensor.dtype)
    )


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Not isinstance: lazy proxies answer that by running code.
        if type(thing) in PLAIN:
            yield thing
            gradient: Any = thing.grad if thing.is_leaf else None
            if type(gradient) in PLAIN:
                yield gradient


def _kinds(session: Session) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield what is known by name: the later ones of an address win."""
    for segment in session.segments:
        yield from ((_address(loss), (OWN, "")) for loss in segment.losses)
    for optimizer in session.optimizers:
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from ((_address(value), ("optimizer state", "")) for value in values)
    for module, name in module_names(session).items():
        for buffer in module.buffers(recurse=False):
            yield _address(buffer), ("buffer", name)
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                yield _address(parameter.grad), ("gradient", name)
            yield _address(parameter), ("parameter", name)


def module_names(session: Session) -> dict[torch.nn.Module, str]:
    """Return every module of the roots with its dotted name; of several roots with their class."""
    named: dict[torch.nn.Module, str] = {}
    for root in session.roots:
        kind = type(root).__name__
        for name, module in root.named_modules():
            name = name.replace("_orig_mod.", "").removesuffix("_orig_mod")
            full = f"{kind}.{name}" if name and len(session.roots) > 1 else name or kind
            named.setdefault(module, full)
    return named


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in PLAIN else 0


FIRST_STEPS = 3
"""Steps after which is looked: the optimizer has its state after the first."""
MAX_WAIT = 10
"""Steps of one optimizer in which others have to make their first, to be part of a step."""
PHASES = (
    ("torch.nn.", "forward"),
    ("torch.autograd", "backward"),
    ("torch.optim", "optimizer"),
    ("torch.utils.data", "data_wait"),
)
"""Modules in a traceback and what they do; the innermost decides."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Looks at one training process; writes files into its folder.

    It looks after the first steps only, and once more when an exception says that memory ran out:
    that look is what tells which component grew.
    """

    def __init__(
        self, session: Session, folder: Path, plan: Mapping[str, Any] | None = None
    ) -> None:
        self.session = session
        self.folder = folder
        self.plan = plan
        self.base = resident_bytes()
        self.is_measuring = False
        self.latest: dict[str, int] = {}
        self.latest_step = 0
        self.stream: CpuStream | None = None
        self.live_bytes = 0

    def install(self) -> None:
        """Follow the steps, and look when an exception ends the script."""
        self.session.on("segment", self.saw_segment)
        if self.plan is not None:
            kernels.watch()
        patching.wrap(sys, "excepthook", self.seeing_failure)

    def seeing_failure(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook of what ends the script, which looks at memory that ran out."""
        look = self.session.quietly(self.failed)

        def crashed(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if is_out_of_memory(f"{kind.__name__}: {error}"):
                look(f"{kind.__name__}: {error}", trace)
            previous(kind, error, trace)

        return crashed

    def saw_segment(self, segment: Segment) -> None:
        """Look after each of the first steps; where there is a plan, measure the first steady one.

        That is the second, or of several optimizers the first that is known to be a whole one.
        """
        session = self.session
        if segment.who != running_anchor(list(session.recent)):
            return
        is_known = session.knows_optimizers or max(session.counts.values()) >= MAX_WAIT
        step = session.made_steps
        if self.is_measuring:
            self.compare(step)
        self.latest = components_of(session, self.base)
        self.latest_step = step
        if is_known and self.plan is not None:
            self.is_measuring = True
            self.begin_step()
        elif is_known and step >= FIRST_STEPS:
            session.off("segment", self.saw_segment)

    def begin_step(self) -> None:
        """Start to measure the next step, on the CPU.

        CUDA's allocator keeps the peak since its statistics were reset, and they are the script's
        own: it may log them at the end of its run, and no one else resets them.
        """
        if find_cuda_device(self.session) is not None:
            return
        self.live_bytes = sum(block.size for block in find_live(self.session, "cpu").values())
        self.stream = CpuStream()
        self.stream.start()

    def compare(self, step: int) -> None:
        """Say on stderr what the step took, and how far off the plan was.

        On CUDA all that came before it counts as well.
        """
        plan, self.plan, self.is_measuring = self.plan, None, False
        assert plan is not None
        device = find_cuda_device(self.session)
        if device is not None:
            found = {
                "allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.max_memory_reserved(device),
            }
            when = f"up to step {step}"
        else:
            found = self.measured_on_cpu()
            # Libraries of the CPU keep no workspaces in torch's memory.
            planned = plan["allocated"] - plan.get("workspace", 0)
            when, plan = f"of step {step}", {**plan, "allocated": planned}
        rank = rank_and_size()
        if found and (rank is None or rank[0] == 0):
            said = self.session.spec.translated(describe_comparison(found, plan, when))
            sys.stderr.write(f"flatout: {said}\n")
            sys.stderr.flush()

    def measured_on_cpu(self) -> dict[str, int]:
        """Return the most bytes that torch's CPU allocator had given out in the step."""
        stream, self.stream = self.stream, None
        if stream is None or stream.is_barred:
            return {}
        now = highest = self.live_bytes
        for event in stream.stop():
            now += event.size
            highest = max(highest, now)
        return {"allocated": highest}

    def failed(self, message: str, trace: TracebackType | None) -> None:
        """Note what held the memory when there was no more; the frames still hold it."""
        self.session.record_noted()
        self.save(
            "oom",
            {
                "message": message.splitlines()[0][:300],
                "phase": phase_of(trace),
                "step": self.session.made_steps + 1,
                "components": components_of(self.session, self.base),
                "before": self.latest,
                "since": self.latest_step,
            },
        )

    def save(self, name: str, found: Mapping[str, Any]) -> None:
        """Write a file for the parent, under its final name only when it is whole."""
        part = self.folder / f"{name}-{os.getpid()}.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(part.with_suffix(".json"))


def phase_of(trace: TracebackType | None) -> str:
    """Return the phase in which an exception was raised: the clock has left it by now."""
    found = "other"
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        found = next((phase for name, phase in PHASES if module.startswith(name)), found)
        trace = trace.tb_next
    return found


def components_of(session: Session, base: int = 0) -> dict[str, int]:
    """Return the bytes of what can be told apart; the rest is activations and temporaries.

    On the CPU what was resident before training (`base`) counts for nothing.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in _known(session):
        if tensor.layout is not torch.strided:
            # A sparse gradient has no storage of its own: it stays with the activations.
            continue
        address = tensor.untyped_storage().data_ptr()
        if address and address not in seen:
            seen.add(address)
            found[name] = found.get(name, 0) + tensor.untyped_storage().nbytes()
    # Of a model on several devices all that they hold together, as what is found above.
    held = [torch.cuda.memory_allocated(device) for device in find_cuda_devices(session)]
    total = sum(held) if held else resident_bytes() - base
    found["activations and temporaries"] = max(0, total - sum(found.values()))
    return found


def _known(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {id(p): p for root in session.roots for p in root.parameters()}
    for optimizer in session.optimizers:
        parameters |= {id(p): p for g in optimizer.param_groups for p in g["params"]}
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from (("optimizer state", v) for v in values if type(v) is torch.Tensor)
    for parameter in parameters.values():
        yield "parameters", parameter.detach()
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for root in session.roots:
        yield from (("buffers", buffer) for buffer in root.buffers())


def resident_bytes() -> int:
    """Return what this process holds of the machine's memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


MAX_NODES = 50_000
"""Nodes counted at the end of a step: far above, the growth is known."""
MAX_NAMES = 5
"""Variables named; the first are of the innermost function."""
SEVERAL = 2
"""Steps whose graphs a variable must hold to be named: the running step's loss holds one."""
MAX_ITEMS = 1_000
"""Items of a list that are looked through for a tensor with a graph."""


class KeptGraphs:
    """Count, at the ends of steps, the nodes that tensors still hold.

    A graph outlives its step where someone keeps a loss and with it all of its past.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.nodes: list[int] = []

    def count(self) -> None:
        """Count the nodes now."""
        self.nodes.append(_count(tensor.grad_fn for tensor in _with_graph(gc.get_objects())))

    def names(self) -> list[str]:
        """Return the variables of the running functions that hold graphs of several steps.

        To be asked at the end only: reading a frame's variables keeps them alive.
        """
        grown = [late - early for early, late in pairwise(self.nodes)]
        if not grown or min(grown) <= 0:
            return []
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if not module.startswith(("torch.", "flatout.")):
                found += _holders(frame, SEVERAL * max(grown))
            frame = frame.f_back
        return list(dict.fromkeys(found))[:MAX_NAMES]


def _holders(frame: FrameType, many: float) -> Iterator[str]:
    for name, value in list(frame.f_locals.items()):
        tensors = list(_with_graph(_parts(value)))
        if tensors and _count(tensor.grad_fn for tensor in tensors) > many:
            yield name


def _with_graph(things: Any) -> Iterator[torch.Tensor]:
    for thing in things:
        if type(thing) in PLAIN and thing.grad_fn is not None:
            yield thing


def _parts(value: Any) -> list[Any]:
    if type(value) is dict:
        return list(value.values())[:MAX_ITEMS]
    return list(value)[:MAX_ITEMS] if type(value) in (list, tuple) else [value]


def _count(roots: Any) -> int:
    waiting = list(roots)
    seen: set[Any] = set()
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def describe_comparison(
    measured: Mapping[str, int], plan: Mapping[str, Any], when: str = "of step 2"
) -> str:
    """Return how the memory of a step compares with what was planned for it.

    >>> describe_comparison({"allocated": 2**30}, {"device": "an H200", "allocated": 2**30})
    'memory of step 2: allocated 1.00 GiB, planned 1.00 GiB (+0.0 %) for an H200'
    """
    parts = [
        f"{name} {format_bytes(size)}, planned {format_bytes(plan[name])} "
        f"({100 * (size / plan[name] - 1):+.1f} %)"
        for name, size in measured.items()
        if plan.get(name)
    ]
    return f"memory {when}: {'; '.join(parts)} for {plan['device']}"
