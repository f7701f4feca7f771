"""The recorder: listens in the training process and writes the guard record at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flatout.agent.guard.gradients import GradientNotes
from flatout.agent.guard.record import GuardRecord, rank_path, write_record
from flatout.agent.guard.samples import Memory, SampleStream
from flatout.agent.guard.sketches import EarlySteps, to_numbers
from flatout.agent.guard.structure import LaterNotes, describe_modules, name_parameters, of_root
from flatout.agent.guard.updates import UpdateNotes
from flatout.agent.ranks import own_rank
from flatout.agent.session import Session
from flatout.agent.tf32 import rounds_to_tf32

GRADIENT_STEPS = 2
"""Steps whose gradients are kept. Later ones differ by what Adam makes of rounding: a deviation of
2.5e-5 at step 2 was 5e-3 at step 5 (guard study, section 2.2)."""
SHADOW_STEPS = 3
"""Steps that are shadowed. A changed beta2 shows from the second step on."""
HALF = ("torch.bfloat16", "torch.float16")


class GuardRecorder:
    """Records one guard trial of a training script; changes nothing in it.

    The specification may hold `reference`: path of the baseline's record, for the shadow step. The
    script's own settings are used without it.
    """

    def __init__(self, session: Session, spec: Mapping[str, Any], path: Path) -> None:
        self._session = session
        self._path = path
        self._memory = Memory()
        self._samples: dict[str, SampleStream] = {}
        self._arguments: dict[str, SampleStream] = {}
        self._structure: dict[str, str] = {}
        self._described: set[int] = set()
        self._low_precision = False
        self._later = LaterNotes()
        self._terms: list[torch.Tensor] = []
        self._losses: list[list[torch.Tensor]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._counts: dict[int, int] = {}
        self._inside: int | None = None
        self._inside_backwards = 0
        self._had_gradients = False
        self._draws = False
        self._streams: list[torch.Tensor] = []
        """Where the global random streams were at the last forward."""
        self._early = EarlySteps(
            lambda: min(self._counts.values(), default=0) < max(GRADIENT_STEPS, SHADOW_STEPS)
        )
        self._early.listen()
        self._gradients = GradientNotes(GRADIENT_STEPS, self._early)
        self._updates = UpdateNotes(SHADOW_STEPS, spec.get("reference"), self._early)
        for event, listener in (
            ("batch", self._on_batch),
            ("forward", self._on_forward),
            ("loss", self._on_loss),
            ("backward_end", self._on_backward_end),
            ("before_step", self._on_before_step),
            ("after_step", self._on_after_step),
            ("stop", self._on_stop),
        ):
            session.on(event, listener)

    def _on_batch(self, batch: Any, loader_address: str) -> None:
        self._samples.setdefault(loader_address, SampleStream(self._memory)).add(batch)

    def _on_forward(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        number = self._root_number(module)
        place = of_root(number).rstrip(".") or "root0"
        stream = self._arguments.setdefault(place, SampleStream(self._memory))
        stream.add({"args": list(args), "kwargs": kwargs})
        if number not in self._described:
            self._described.add(number)
            self._structure.update(describe_modules(module, number))
            self._low_precision |= _is_low_precision(module)
        if not self._draws:
            self._streams = random_streams()

    def _on_loss(self, loss: torch.Tensor) -> None:
        self._terms.append(loss.detach().clone())

    def _on_backward_end(self) -> None:
        pairs = zip(self._streams, random_streams() if self._streams else (), strict=True)
        self._draws |= any(not before.equal(after) for before, after in pairs)
        self._streams = []
        if self._inside is not None:
            self._inside_backwards += 1
            if self._inside_backwards > 1:
                return  # a closure that goes on moves the parameters: only its first call counts
        named = self._named()
        self._gradients.after_backward(named, self._session.last_scale)
        if not self._session.optimizers:
            self._gradients.by_hand(named)
            self._updates.by_hand()
            self._end_segment()

    def _on_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if _is_skipped(optimizer):
            return
        number = self._number(optimizer)
        self._inside, self._inside_backwards = number, 0
        self._had_gradients = self._has_gradients(optimizer)
        step = self._counts.get(number, 0) + 1
        named = self._named()
        self._gradients.before_step(number, step, optimizer, named)
        self._updates.before_step(number, step, optimizer, named)

    def _on_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        number, self._inside = self._inside, None
        if number is None:
            return  # the scaler found infinities: nothing was updated
        if not (self._had_gradients or self._inside_backwards):
            self._gradients.forget()
            self._updates.forget(number)
            return
        step = self._counts[number] = self._counts.get(number, 0) + 1
        inside = self._inside_backwards
        self._gradients.after_step(number, step, optimizer, self._named(), backwards_inside=inside)
        self._updates.after_step(number, step, optimizer, backwards_inside=inside)
        self._early.forget()
        self._end_segment()

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step could change anything: some scripts begin with an empty one."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(map(self._early.has_gradient, parameters))

    def _end_segment(self) -> None:
        self._losses.append(self._terms)
        self._terms = []
        self._memory.forget()
        self._later.after_step(len(self._losses), self._session.roots)

    def _on_stop(self) -> None:
        roots = self._session.roots
        parameter = next((p for root in roots for p in root.parameters()), None)
        record = GuardRecord(
            torch=torch.__version__,
            device=parameter.device.type if parameter is not None else "unknown",
            threads=torch.get_num_threads(),
            low_precision=self._low_precision,
            tf32=rounds_to_tf32(roots),
            samples={place: stream.to_json() for place, stream in self._samples.items()},
            arguments={place: stream.to_json() for place, stream in self._arguments.items()},
            structure=self._structure,
            optimizers=self._updates.optimizers(),
            start=self._gradients.start(),
            gradients=self._gradients.sets(),
            updates=tuple(self._updates.updates),
            has_reference=self._updates.has_reference,
            update_gaps=tuple(self._updates.gaps.values()),
            buffers={name: to_numbers(value) for name, value in self._later.buffers.items()},
            later=self._later.facts(len(self._losses), roots),
            losses=tuple(sum(float(term) for term in terms) for terms in self._losses if terms),
            draws=self._draws,
            errors=tuple(self._session.errors),
        )
        write_record(record, rank_path(self._path, own_rank()))

    def _named(self) -> dict[str, torch.nn.Parameter]:
        self._meet(*self._session.optimizers)
        return name_parameters(self._session.roots, self._optimizers)

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        self._meet(*self._session.optimizers, optimizer)
        return next(n for n, known in enumerate(self._optimizers) if known is optimizer)

    def _meet(self, *optimizers: torch.optim.Optimizer) -> None:
        """Number optimizers; keeping them alive keeps the numbers."""
        for optimizer in optimizers:
            if all(known is not optimizer for known in self._optimizers):
                self._optimizers.append(optimizer)

    def _root_number(self, module: torch.nn.Module) -> int:
        roots = self._session.roots
        return next((number for number, root in enumerate(roots) if root is module), len(roots))


def random_streams() -> list[torch.Tensor]:
    """Return the states of the global generators that a forward may draw from; no device waits."""
    is_there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_there else ())]


def _is_low_precision(module: torch.nn.Module) -> bool:
    """Return whether a root runs in half precision because the script wants it so."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return False
    has_half = any(str(p.dtype) in HALF for p in module.parameters())
    return has_half or torch.is_autocast_enabled(parameter.device.type)


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradient scaler found infinities and left the skipping to the optimizer.

    Other optimizers are not called at all then. Reading the flag waits for the device.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0
