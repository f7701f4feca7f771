"""What each optimizer step of the training process did, against its shadow.

`UpdateNotes` compares it with a `Shadow`: what the baseline's optimizer would have done with the
same gradients. That separates faults of the optimizer (rate, decay, a stale parameter) from noise
in the gradient, so the limit is the same for every promise.
"""

import collections
import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.guard.gradients import scale_at_step
from flatout.agent.guard.record import GuardRecord, OptimizerRecord, Update, find_record, rank_path
from flatout.agent.guard.sketches import EarlySteps
from flatout.agent.guard.structure import describe_optimizer, kind_of, settings_of
from flatout.agent.ranks import own_rank
from flatout.agent.untouched import streams_kept

MAX_ELEMENTS = 1 << 28
"""Parameters shadowed per optimizer: the copies (parameter, gradient, state) then stay below 6 GiB
of memory. Larger tensors are left out first and the record says how many."""
COPIES = 5
"""Of each parameter: as it was, as the shadow has it, its gradient, and two of state."""
MOST_FREE_SHARE = 0.5
"""Of the device's free memory that the copies may take: the training has yet to make its state."""
CHUNK = 1 << 20
"""Elements that are in float64 at a time: of whole tensors those copies took longer than the step
itself (124M parameters on two cores)."""
OWN = frozenset(
    {"state", "param_groups", "step", "grad_scale", "found_inf"}
    | {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)
"""Attributes that the shadow must not share with the live optimizer."""
ONE_TENSOR_AT_A_TIME = {"foreach": False, "fused": False, "capturable": False}


@dataclass(slots=True, kw_only=True)
class _Copy:
    live: torch.nn.Parameter
    shadow: torch.nn.Parameter
    before: torch.Tensor


class Shadow:
    """One optimizer rebuilt on copies of the model's parameters, with its own state.

    The copies are next to the parameters on a GPU that has room for them, else on the CPU.
    """

    def __init__(
        self,
        live: torch.optim.Optimizer,
        reference: OptimizerRecord,
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """Rebuild the optimizer of `reference` for the parameters of the same names.

        Raises:
            LookupError: if the class or a parameter is not found here.
        """
        wanted = [name for group in reference.groups for name in group]
        missing = [name for name in wanted if name not in named]
        if missing:
            raise LookupError(f"no parameter {missing[0]} in the model")
        kept = _within_budget({name: named[name] for name in wanted})
        self.left_out = len(wanted) - len(kept)
        place = place_for([named[name] for name in kept])
        self._copies: dict[str, _Copy] = {}
        for name in kept:
            value = named[name].detach().to(place)
            shadow = torch.nn.Parameter(value.clone(), requires_grad=True)
            self._copies[name] = _Copy(live=named[name], shadow=shadow, before=value.clone())
        self._groups: list[dict[str, Any]] = [
            {"params": [self._copies[name].shadow for name in group if name in kept]}
            for group in reference.groups
        ]
        self._kind = _find_kind(reference.kind, live)
        self._optimizer = _rebuild(self._kind, live, self._groups)

    def take_parameters(self, early: EarlySteps) -> None:
        """Copy the parameters as they are before the step."""
        for copy in self._copies.values():
            copy.before.copy_(early.before(copy.live))

    def take_gradients(self, scale: float, early: EarlySteps) -> None:
        """Copy the gradients that the step will use, or has just used."""
        for copy in self._copies.values():
            gradient, kept = early.gradient(copy.live), copy.shadow.grad
            if gradient is None:
                copy.shadow.grad = None
                continue
            if kept is None or kept.layout != gradient.layout or kept.dtype != gradient.dtype:
                kept = gradient.detach().to(copy.shadow.device).clone()
            else:
                kept.copy_(gradient.detach())
            copy.shadow.grad = kept.div_(scale)

    def step(
        self, settings: Sequence[Mapping[str, Any]]
    ) -> dict[str, tuple[float, float, float, float]]:
        """Step on the copies and compare with what became of the live parameters."""
        for group, values in zip(self._groups, settings, strict=True):
            # JSON knows no tuples, which the optimizer had.
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
            group.update({k: v for k, v in ONE_TENSOR_AT_A_TIME.items() if k in group})
        with torch.no_grad():
            for copy in self._copies.values():
                copy.shadow.copy_(copy.before)
            with _unheard(), streams_kept():
                self._kind.step(self._optimizer)
            return {name: _compare(copy) for name, copy in self._copies.items()}


def place_for(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return where copies of the parameters and what a step needs of them go."""
    places = {parameter.device for parameter in parameters}
    host = torch.device("cpu")
    if len(places) != 1 or (place := places.pop()).type != "cuda":
        return host
    if any(map(_is_wrapped, parameters)):
        return host  # parts of other ranks' tensors
    needed = COPIES * sum(x.numel() * x.element_size() for x in parameters)
    free, _total = torch.cuda.mem_get_info(place)
    return place if needed <= MOST_FREE_SHARE * free else host


def _compare(copy: _Copy) -> tuple[float, float, float, float]:
    shadow = copy.shadow.detach()
    moved = copy.live.detach().to(shadow.device)
    difference, step, size = [0.0], [0.0], [0.0]
    for after, wanted, before in zip(*map(_chunks, (moved, shadow, copy.before)), strict=True):
        exact = wanted.double()
        difference.append(float((after.double() - exact).norm()))
        step.append(float((exact - before.double()).norm()))
        size.append(float(before.double().norm()))
    eps = torch.finfo(shadow.dtype).eps / 2
    return math.hypot(*difference), math.hypot(*step), math.hypot(*size), eps


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor in parts that are small in float64; one of no ordinary kind as it is."""
    if _is_wrapped(tensor) or tensor.numel() <= CHUNK:
        return (tensor,)
    return tensor.reshape(-1).split(CHUNK)  # type: ignore[no-untyped-call,no-any-return]


def _is_wrapped(tensor: Any) -> bool:
    """Return whether a tensor has others inside, as one that is sharded over ranks does."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def _within_budget(named: Mapping[str, torch.nn.Parameter]) -> set[str]:
    """Return the names whose copies fit, smallest tensors first."""
    kept: set[str] = set()
    total = 0
    for name in sorted(named, key=lambda name: named[name].numel()):
        total += named[name].numel()
        if total > MAX_ELEMENTS:
            break
        kept.add(name)
    return kept


def _find_kind(path: str, live: torch.optim.Optimizer) -> Any:
    """Return the optimizer class at `module:name`.

    Raises:
        LookupError: if there is none.
    """
    if kind_of(live) == path:
        return type(live)
    module, _, qualified = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in qualified.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"no optimizer class {path} here") from error
    return found


def _rebuild(kind: Any, live: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer the way unpickling does.

    No constructor runs: it may have arguments that no one recorded, and the hook points listen
    to it.
    """
    shadow = kind.__new__(kind)
    if type(live) is kind:
        shadow.__dict__.update({k: v for k, v in vars(live).items() if k not in OWN})
    shadow.__setstate__(
        {
            "defaults": dict(live.defaults),
            "state": collections.defaultdict(dict),
            "param_groups": groups,
        }
    )
    return shadow


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep the shadow's step from the global step hooks, which count training steps.

    The dictionaries are exchanged, not emptied: torch is iterating over them further up the stack.
    """
    from torch.optim import optimizer as module

    with (
        patching.swapped(module, "_global_optimizer_pre_hooks", collections.OrderedDict()),
        patching.swapped(module, "_global_optimizer_post_hooks", collections.OrderedDict()),
    ):
        yield


class UpdateNotes:
    """The first steps of every optimizer alongside the shadow of the reference's optimizer."""

    def __init__(
        self, steps: int, reference: str | Path | None, early: EarlySteps | None = None
    ) -> None:
        """Follow the optimizers of this rank's record at `reference`; the script's own without."""
        self._early = early or EarlySteps()
        self._steps = steps
        self._path = reference
        self._records: dict[int, OptimizerRecord] = {}
        self._shadows: dict[int, Shadow] = {}
        self.updates: list[Update] = []
        self.gaps: dict[int, str] = {}
        """Why updates were not compared, by the optimizer concerned."""

    @functools.cached_property
    def _reference(self) -> GuardRecord | None:
        """The baseline's record of the same rank, which is not known before the training begins."""
        if self._path is None:
            return None
        return find_record(rank_path(Path(self._path), own_rank()))

    @property
    def has_reference(self) -> bool:
        """Whether a baseline's optimizers are followed."""
        return self._reference is not None

    def before_step(
        self,
        number: int,
        step: int,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """Note the settings of the step and copy what it starts from."""
        self._note_settings(number, optimizer, named)
        if step > self._steps or number in self.gaps:
            return
        try:
            if number not in self._shadows:
                self._shadows[number] = Shadow(optimizer, self._model_for(number), named)
                self._note_left_out(number)
            shadow = self._shadows[number]
            shadow.take_parameters(self._early)
            shadow.take_gradients(scale_at_step(optimizer), self._early)
        except Exception as error:  # noqa: BLE001  the rest of the guard goes on; the gap is told
            self.gaps[number] = f"optimizer {number}: {type(error).__name__}: {error}"

    def after_step(
        self, number: int, step: int, optimizer: torch.optim.Optimizer, *, backwards_inside: int
    ) -> None:
        """Let the shadow step and keep the difference."""
        if step > self._steps or number in self.gaps:
            return
        if backwards_inside > 1:
            self.gaps[number] = f"optimizer {number}: its closure runs backward more than once"
            return
        try:
            shadow = self._shadows[number]
            if backwards_inside:
                shadow.take_gradients(scale_at_step(optimizer), self._early)
            tensors = shadow.step(self._model_for(number).settings[step - 1])
        except Exception as error:  # noqa: BLE001  the rest of the guard goes on; the gap is told
            self.gaps[number] = f"optimizer {number}: {type(error).__name__}: {error}"
            return
        self.updates.append(Update(optimizer=number, step=step, tensors=tensors))
        if step == self._steps:
            del self._shadows[number]  # the training may need what its copies take

    def forget(self, number: int) -> None:
        """Take a step back that had no gradients: nothing was updated."""
        record = self._records.get(number)
        if record is not None:
            self._records[number] = replace(record, settings=record.settings[:-1])

    def by_hand(self) -> None:
        """Note that no optimizer makes the updates."""
        self.gaps.setdefault(-1, "the script updates its parameters without an optimizer")

    def optimizers(self) -> tuple[OptimizerRecord, ...]:
        """Return the optimizers that stepped, in the order of construction."""
        return tuple(self._records[number] for number in sorted(self._records))

    def _note_settings(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        if number not in self._records:
            names = {id(parameter): name for name, parameter in named.items()}
            self._records[number] = describe_optimizer(number, optimizer, names)
        record = self._records[number]
        settings = (*record.settings, settings_of(optimizer))
        self._records[number] = replace(record, settings=settings)

    def _model_for(self, number: int) -> OptimizerRecord:
        """Return the optimizer to shadow: the reference's, else the script's own.

        Raises:
            LookupError: if the reference has no such optimizer, or cannot be read.
        """
        if self._path is None:
            return self._records[number]
        if self._reference is None:
            raise LookupError("the baseline's record cannot be read")
        for record in self._reference.optimizers:
            if record.number == number:
                return record
        raise LookupError("the baseline has no such optimizer")

    def _note_left_out(self, number: int) -> None:
        left_out = self._shadows[number].left_out
        if left_out:
            self.gaps[-2 - number] = (
                f"optimizer {number}: its {left_out} largest tensors were left out"
            )
