"""What the memory did over some steps. It slows the step down: for a pass of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.agent.measuring import kernels
from flatout.agent.measuring.allocation_streams import CpuStream, CudaStream
from flatout.agent.measuring.memory_watch import KeptGraphs, find_live, look_of, module_names
from flatout.agent.measuring.operators import operators_of, why_not
from flatout.agent.measuring.source_lines import SourceLines
from flatout.agent.session import Session
from flatout.agent.training_device import find_cuda_device
from flatout.analysis import allocations
from flatout.analysis.allocations import AllocationBooks, AllocationSite, StepEnd
from flatout.analysis.steps import running_anchor
from flatout.records import phase_clock as phases
from flatout.records.trial_result import Segment

AFTER = 3
"""Steps before the first look: by then the optimizer has its state and the roots are known."""
SETTLING = 2
"""Steps in which what is freed and made again in every step comes to be known."""
STEPS = 8
"""Observed steps: a slope over fewer is not robust, and each costs many times an ordinary one."""
FEW_STEPS = 4
"""Steps that still give a slope between pairs."""
MAX_OPERATORS = 100_000
"""Operators after which `FEW_STEPS` are enough: the profiler holds each until the end. An ordinary
step has some thousand."""

BARRED = ("own_profiler", "")


AllocationStream = CpuStream | CudaStream


def start(session: Session, options: Mapping[str, Any]) -> "MemoryProbe":
    """Follow the allocations from the step after the warm-up on."""
    return MemoryProbe(session, options)


class MemoryProbe:
    """Keep the books of the observed steps."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session = session
        self.steps: int = options.get("steps", STEPS)
        self.listens: bool = options.get("listens", True)
        name = options.get("snapshot")
        self.snapshot = str(Path(session.spec.folder) / name) if name else None
        self.ends: list[StepEnd] = []
        self.operators = 0
        self.facts: dict[str, Any] = {}
        self.books = AllocationBooks()
        self.lines = SourceLines()
        self.graphs = KeptGraphs(session)
        self.stream: AllocationStream | None = None
        self.notes: list[tuple[str, str]] = []
        """Names of notes in the catalogue, and the reason that one has."""
        self.seen = 0
        self.modules: list[str] = []
        self.made_by: dict[int, str] = {}
        self.start_place = AllocationSite("other")
        self._undo: list[Callable[[], None]] = []
        kernels.watch()
        session.on("segment", self.saw_segment)

    def saw_segment(self, segment: Segment) -> None:
        """Open and close the books at the ends of steps."""
        if segment.who != running_anchor([each.who for each in self.session.segments]):
            return
        self.seen += 1
        if self.seen == AFTER:
            self.begin()
        elif self.stream is not None:
            self.end_step(self.stream)

    def begin(self) -> None:
        """Put everything in place that listens to the coming steps."""
        self.stream = stream = self._choose_stream()
        stream.start()
        if stream.is_barred:
            self.give_up()
            return
        reason = why_not(self.session) if self.listens else "this pass does without"
        if reason:
            self.notes.append(("no_modules", reason))
        else:
            operators = operators_of(self.session)
            operators.before.append(self.session.quietly(self.before_operator))
            operators.after.append(self.session.quietly(self.after_operator))
            operators.enter()
            self._undo.append(operators.leave)
            self._hook_modules()
        self._follow_phases()
        self.begin_step(stream)

    def give_up(self) -> None:
        """Leave the profiler to the script."""
        self.notes.append(BARRED)
        self.close()

    def begin_step(self, stream: AllocationStream) -> None:
        """Start with the next step."""
        self.modules.clear()
        self.made_by.clear()
        self.start_place = self._place()
        stream.at(self.start_place)

    def end_step(self, stream: AllocationStream) -> None:
        """Enter the step that just ended."""
        if stream.is_barred:
            self.give_up()
            return
        counts = self.seen > AFTER + SETTLING
        stream.end_step()
        live = find_live(self.session, stream.device)
        self.ends.append(StepEnd(self.start_place, live, stream.total(), counts))
        if counts:
            self.graphs.count()
        if self._has_enough():
            self.close()
            return
        self.begin_step(stream)

    def _has_enough(self) -> bool:
        observed = sum(end.counts for end in self.ends)
        is_long = self.operators > MAX_OPERATORS and observed >= FEW_STEPS
        return observed >= self.steps or is_long

    def close(self) -> None:
        """Take everything away that listens."""
        if self.stream is not None:
            stream, self.stream = self.stream, None
            self.books = allocations.replay(stream.stop(), self.ends)
            self.facts = stream.facts()
        while self._undo:
            self._undo.pop()()

    def result(self) -> Mapping[str, Any]:
        """Return the books."""
        self.close()
        if not self.books.ends and BARRED not in self.notes:
            self.notes.append(("memory_too_short", ""))
        return {
            **allocations.summary(self.books),
            **self.facts,
            "kept_graph_nodes": self.graphs.nodes,
            "kept_graph_names": self.graphs.names(),
            "notes": self.notes,
        }

    def before_operator(self, operator: Any, args: Any) -> None:
        """Remark which module's operator runs, and from which line."""
        self.operators += 1
        if self.stream is not None:
            self.stream.at(self._place())

    def after_operator(self, operator: Any, result: Any) -> None:
        """Remark which tensors it made."""
        stream = self.stream
        if stream is None:
            return
        results = result if isinstance(result, tuple | list) else (result,)
        looks = [look for each in results if (look := look_of(each, stream.device))]
        if looks:
            stream.saw(looks)

    def changed_phase(self, phase: int) -> None:
        """Remark that another phase runs."""
        if phase == phases.OTHER:
            self.modules.clear()
        if self.stream is not None:
            self.stream.at(self._place())

    def _place(self) -> AllocationSite:
        phase = phases.NAMES[self.session.clock.stack[-1]]
        return AllocationSite(phase, self._module(), self.lines.here())

    def _module(self) -> str:
        """Return the module that runs; in backward the one whose forward made the node."""
        if self.modules:
            if torch.is_grad_enabled():
                self.made_by[torch._C._autograd._get_sequence_nr() - 1] = self.modules[-1]
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        return self.made_by.get(node._sequence_nr(), "") if node is not None else ""

    def _choose_stream(self) -> AllocationStream:
        device = find_cuda_device(self.session)
        if device is not None:
            return CudaStream(device.index, self.snapshot)
        if self.snapshot:
            self.notes.append(("no_snapshot", ""))
        return CpuStream()

    def _follow_phases(self) -> None:
        """Listen to the clock alongside whoever listens already."""
        clock = self.session.clock
        earlier = clock._mark
        changed = self.session.quietly(self.changed_phase)

        def mark(phase: int) -> None:
            if earlier is not None:
                earlier(phase)
            changed(phase)

        clock.mark_with(mark)
        self._undo.append(lambda: clock.mark_with(earlier))

    def _hook_modules(self) -> None:
        for module, name in module_names(self.session).items():
            try:
                handles = (
                    module.register_forward_pre_hook(_entering(self.modules, name)),
                    module.register_forward_hook(_leaving(self.modules), always_call=True),
                )
            except (RuntimeError, AttributeError):
                continue  # scripted modules take no hooks
            self._undo += [handle.remove for handle in handles]


def _entering(modules: list[str], name: str) -> Callable[..., None]:
    def enter(module: Any, args: Any) -> None:
        modules.append(name)

    return enter


def _leaving(modules: list[str]) -> Callable[..., None]:
    def leave(module: Any, args: Any, output: Any) -> None:
        if modules:
            modules.pop()

    return leave
