"""Trace the memory of a training step: every allocation, without the device and without weights.

`trace` runs the step under fake tensors in this very process. On a machine without a GPU that tells
torch's C++ of a device that is not there, for the rest of the process: trace in a process of its
own (`flatout.planner.memory_trace` does). `allocations_of` says what each is for.
"""

import contextlib
import gc
import itertools
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from flatout.agent.guard.structure import plain_name
from flatout.agent.measuring.source_lines import SourceLines
from flatout.agent.patching import swapped, wrap
from flatout.planner.tracing.compiled import bounded_step
from flatout.planner.tracing.cuda_shim import ShimRefused
from flatout.planner.tracing.fake_rules import fake_rules
from flatout.planner.tracing.recording import Birth, Recording
from flatout.planner.tracing.simulated_gpu import (
    CAPABILITY,
    Note,
    VirtualFakeMode,
    device_layers,
    virtual_cuda,
)
from flatout.planner.tracing.simulated_ranks import pretended_world
from flatout.planner.tracing.training_step import STEPS, TrainingStep
from flatout.records.errors import NotApplicable
from flatout.records.memory_stream import Allocation, Component, MemoryStream, Phase, StreamEvent
from flatout.records.technique import Technique, hook_points_of, name_of


def know_model(recording: Recording, model: nn.Module) -> dict[int, str]:
    """Say what the model's tensors are for; return the names of its modules by identity."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), plain_name(name) or type(module).__name__)
        own = names[id(module)] if name else ""
        for buffer in module.buffers(recurse=False):
            recording.know(buffer, Component.BUFFERS, own)
        for parameter in module.parameters(recurse=False):
            recording.know(parameter, Component.PARAMETERS, own)
    return names


def know_gradients(recording: Recording, parameters: Iterable[Any]) -> None:
    """Say which allocations are gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            owner = recording.find(parameter)
            recording.know(parameter.grad, Component.GRADIENTS, owner.module if owner else "")


def know_state(recording: Recording, optimizer: Optimizer) -> None:
    """Say which allocations an optimizer keeps."""
    for parameter, state in optimizer.state.items():
        owner = recording.find(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if hasattr(value, "untyped_storage"):
                recording.know(value, Component.OPTIMIZER, owner.module if owner else "")


def allocations_of(recording: Recording) -> tuple[Allocation, ...]:
    """Return the traced allocations, each with what it is for."""
    backwards = [mark.at for mark in recording.marks if mark.phase is Phase.BACKWARD]
    return tuple(
        Allocation(
            size=birth.size,
            component=birth.component or _by_life(birth, backwards),
            phase=birth.phase,
            step=birth.step,
            operator=str(birth.operator),
            module=birth.module,
            line=birth.line,
            shape=birth.shape,
            dtype=birth.dtype,
            arguments=birth.arguments,
        )
        for birth in recording.births
    )


def ordered(events: Sequence[StreamEvent]) -> tuple[StreamEvent, ...]:
    """Return the events with deaths that follow each other in the order of their births.

    Together they say the same, and two traces then say it alike: what dies with a dictionary of
    C++'s dies in the order of its pointers.
    """
    found: list[StreamEvent] = []
    for is_birth, run in itertools.groupby(events, key=lambda event: event.born):
        part = list(run)
        found += part if is_birth else sorted(part, key=lambda event: event[0])
    return tuple(found)


def _by_life(birth: Birth, backwards: Sequence[int]) -> Component:
    """Return what an allocation is for by when it lived."""
    if birth.phase is Phase.DATA:
        return Component.INPUTS
    if birth.phase is Phase.SETUP:
        return Component.BUFFERS if birth.died is None else Component.TEMPORARIES
    if birth.phase is not Phase.FORWARD:
        return Component.TEMPORARIES
    after = bisect_left(backwards, birth.born)
    begins = backwards[after] if after < len(backwards) else None
    if begins is None:
        return Component.TEMPORARIES
    is_kept = birth.died is None or birth.died >= begins
    return Component.ACTIVATIONS if is_kept else Component.TEMPORARIES


EXPECTED_WARNINGS = (
    "Accessing the data pointer of FakeTensor",
    "PyTorch was compiled without cuDNN",
    r"Using `torch.compile\(module\)` when there are global hooks",
)
"""What torch says of fake tensors and of our hooks; none of it is the user's business."""
COMPILED = "torch.compile: traced as eager code, because a tracer switches the compiler off"


def trace(
    subject: TrainingStep,
    *,
    batch: int | None = None,
    changes: Sequence[Technique] = (),
    device: str = "cuda",
    capability: tuple[int, int] = CAPABILITY,
) -> MemoryStream:
    """Return every allocation of the first steps of a training.

    Args:
        subject: The training step.
        batch: Samples of a micro-batch; None takes the subject's own number.
        changes: Techniques that act at the model, forward and optimizer hook points.
        device: `cuda`, there or not, or `cpu`.
        capability: Compute capability of a pretended CUDA device.
    """
    count, began_s = subject.batch_size if batch is None else batch, time.monotonic()
    with scene(device, capability=capability, mask_share=subject.mask_share) as recording:
        training = _Training(subject, recording, changes)
        with pretended_world(subject.world_size), _steady_collection(), training.hooked():
            training.build()
            for step in range(STEPS):
                training.step(step, count)
            stream = stream_of(recording, steps=STEPS, batch=count, flops=training.step_flops)
            took_s = time.monotonic() - began_s
            stream = replace(stream, micro_batches=subject.accumulate, traced_s=took_s)
            if COMPILED not in stream.notes:
                return stream
            assert recording.fake is not None
            return bounded_step(stream, training.model, subject, recording.fake)


@contextlib.contextmanager
def scene(
    device: str,
    *,
    capability: tuple[int, int] = CAPABILITY,
    mask_share: float = 1.0,
    is_whole: bool = True,
    moved: Callable[[dict[int, nn.Parameter]], None] = lambda _: None,
) -> Iterator[Recording]:
    """Set up the device to trace on: the real build's, else a pretended one, else the host.

    What happens on it from then on is in the recording, while that is entered.

    Args:
        device: `cuda` or `cpu`, as `trace` has them.
        capability: Compute capability of a pretended CUDA device.
        mask_share: Share of a mask that is taken to be true where a size depends on it.
        is_whole: Whether every tensor is fake; else the host's are real, and what runs there does.
        moved: Told of parameters that were replaced by `Module.to` and its like.
    """
    notes: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        fake: FakeTensorMode | None
        method, fake = _method(stack, device, capability, notes.setdefault)
        if method == "cpu_fake" and not is_whole:
            method, fake = "real", None
        here = SourceLines().here
        recording = Recording(
            method, fake, is_whole=is_whole, notes=notes, mask_share=mask_share, here=here
        )
        stack.enter_context(fake_rules(moved, recording.resized, recording.saw_inside))
        if isinstance(fake, VirtualFakeMode):
            # `torch.tensor(..., device="cuda")` makes its numbers on the host first.
            was_set = torch._C._only_lift_cpu_tensors()
            stack.callback(torch._C._set_only_lift_cpu_tensors, was_set)
            torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003  C takes no names
        stack.enter_context(warnings.catch_warnings())
        for text in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", text)
        yield recording


def _method(
    stack: contextlib.ExitStack, device: str, capability: tuple[int, int], note: Note
) -> tuple[str, FakeTensorMode]:
    """Return how to trace, with what was needed for it set up on the stack."""
    if device == "cpu":
        return "cpu_fake", FakeTensorMode(allow_non_fake_inputs=True)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_capability()
        if here != capability:
            note(
                f"traced on the GPU of this machine, of compute capability {here[0]}.{here[1]}: on "
                "the planned one attention may take another kernel, which keeps more"
            )
        stack.enter_context(device_layers(note))
        # Prefetchers of scripts call it, and tensors in name only have no such operator.
        stack.enter_context(swapped(torch.Tensor, "record_stream", lambda *_: None))
        return "cuda_fake", FakeTensorMode(allow_non_fake_inputs=True)
    try:
        stack.enter_context(virtual_cuda(capability, note))
    except ShimRefused as reason:
        note(
            f"no CUDA device could be pretended ({reason}): traced on the host, whose operators "
            "keep other tensors; expect an error of several percent"
        )
        return "cpu_fake", FakeTensorMode(allow_non_fake_inputs=True)
    return "virtual_cuda", VirtualFakeMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _steady_collection() -> Iterator[None]:
    """Collect cycles at changes of phase only, so that two traces free in the same order."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def stream_of(
    recording: Recording, *, steps: int, batch: int | None = None, flops: float = 0.0
) -> MemoryStream:
    """Return what was traced so far as a record."""
    return MemoryStream(
        allocations=allocations_of(recording),
        events=ordered(recording.events),
        marks=tuple(recording.marks),
        device=recording.device,
        method=recording.method,
        steps=steps,
        batch=batch,
        model_flops=flops,
        tf32_share=recording.tf32_flops / (recording.flops or 1.0),
        spreads_itself=distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1,
        notes=tuple(recording.notes),
    )


class _Training:
    """The loop of one subject, with the phases said to the recording."""

    def __init__(
        self, subject: TrainingStep, recording: Recording, changes: Sequence[Technique]
    ) -> None:
        self.subject, self.recording, self.changes = subject, recording, changes
        self.device = torch.device(recording.device)
        self.model: Any = None
        self.optimizer: Any = None
        self.scaler: Any = torch.amp.GradScaler(recording.device, enabled=subject.scales_gradients)
        self.call: Any = None
        self.names: dict[int, str] = {}
        self.step_flops = 0.0
        self.at = (Phase.SETUP, 0)

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase, with nothing left of the one before that no one holds."""
        gc.collect()
        self.at = (phase, step)
        self.recording.enter(phase, step)

    def build(self) -> None:
        """Make the model and its optimizer on the traced device."""
        self.enter(Phase.SETUP, 0)
        subject = self.subject
        with self.recording:
            # On the host first, as scripts do: what is cast there never weighs on the device.
            model = subject.model().to(self.device)
            model.train()
            self.model = self.changed("model", model)
            self.names = know_model(self.recording, self.model)
            if is_compiled(self.model):
                self.recording.note(COMPILED)
            self.optimizer = self.changed("optimizer", subject.optimizer(self.model))
        call = type(self.model).__call__
        self.call = self.changed("forward", lambda *a, **k: call(self.model, *a, **k), self.model)

    def step(self, number: int, count: int) -> None:
        """Train one optimizer step."""
        before = self.recording.flops
        with self.recording:
            for _ in range(self.subject.accumulate):
                self.micro_step(number, count)
            self.step_flops = self.recording.flops - before
            self.enter(Phase.OPTIMIZER, number)
            self.update()
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()

    def micro_step(self, number: int, count: int) -> None:
        """Run forward and backward of one micro-batch."""
        subject, recording = self.subject, self.recording
        self.enter(Phase.DATA, number)
        batch = subject.batch(count, self.device)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                recording.know(leaf, Component.INPUTS)
        self.enter(Phase.FORWARD, number)
        dtype = None if subject.autocast is None else getattr(torch, subject.autocast)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss = subject.loss(self.model, batch)
        if subject.accumulate > 1:
            loss = loss / subject.accumulate
        self.enter(Phase.BACKWARD, number)
        loss = self.scaler.scale(loss)
        loss.backward()
        del loss
        know_gradients(recording, self.model.parameters())

    def update(self) -> None:
        """Step the optimizer, clipped and unscaled as the subject says."""
        if self.subject.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.subject.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def changed(self, hook_point: str, value: Any, *context: Any) -> Any:
        """Return the value after every change that acts at this hook point."""
        for change in self.changes:
            if hook_point not in hook_points_of(change):
                continue
            try:
                value = getattr(change, hook_point)(value, *context)
            except NotApplicable as reason:
                self.recording.note(f"{name_of(change)} does not apply: {reason}")
        return value

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow which module runs and when an optimizer steps, while this runs."""
        with contextlib.ExitStack() as stack:
            for handle in follow(
                self.recording, lambda module: self.names.get(id(module), ""), lambda: self.at
            ):
                stack.callback(handle.remove)
            stack.enter_context(self.called())
            yield

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Send the root's outermost calls through the changes, while this runs."""
        if not any("forward" in hook_points_of(change) for change in self.changes):
            yield
            return
        inside = [False]

        def changed(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if module is not self.model or inside[0] or self.at[0] is not Phase.FORWARD:
                    return original(module, *args, **kwargs)
                inside[0] = True
                try:
                    return self.call(*args, **kwargs)
                finally:
                    inside[0] = False

            return call

        with wrap(nn.Module, "__call__", changed):
            yield


def is_compiled(model: nn.Module) -> bool:
    """Return whether any of it is to be compiled: a dispatch mode switches Dynamo off silently."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def follow(
    recording: Recording,
    name_of: Callable[[nn.Module], str],
    phase_of: Callable[[], tuple[Phase, int]],
) -> Sequence[Any]:
    """Install hooks that say which module runs, and what an optimizer's step holds.

    An optimizer may step inside backward: its phase is then the optimizer's for as long.
    """
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    running = recording.modules

    def enters(module: nn.Module, _: Any) -> None:
        running.append(name_of(module) or (running[-1] if running else ""))

    def leaves(_: nn.Module, __: Any, ___: Any) -> None:
        running.pop()

    def steps(optimizer: Any, _: Any, __: Any) -> None:
        know_gradients(recording, (p for group in optimizer.param_groups for p in group["params"]))
        recording.enter(Phase.OPTIMIZER, phase_of()[1])

    def stepped(optimizer: Any, _: Any, __: Any) -> None:
        know_state(recording, optimizer)
        recording.enter(*phase_of())

    return (
        modules.register_module_forward_pre_hook(enters),
        modules.register_module_forward_hook(leaves, always_call=True),
        optimizers.register_optimizer_step_pre_hook(steps),
        optimizers.register_optimizer_step_post_hook(stepped),
    )
