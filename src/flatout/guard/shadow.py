"""The shadow step: what the baseline's optimizer would have done with the same gradients.

It separates faults of the optimizer (rate, decay, a stale parameter) from noise in the gradient, so
its limit is the same for every promise.
"""

import collections
import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.guard.early import EarlySteps
from flatout.guard.pinning import streams_kept
from flatout.guard.record import OptimizerRecord
from flatout.guard.structure import kind_of

if TYPE_CHECKING:
    import torch

MAX_ELEMENTS = 1 << 28
"""Parameters shadowed per optimizer: the copies (parameter, gradient, state) then stay below 6 GiB
of host memory. Larger tensors are left out first and the record says how many."""
OWN = frozenset(
    {"state", "param_groups", "step", "grad_scale", "found_inf"}
    | {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
)
"""Attributes that the shadow must not share with the live optimizer."""
ONE_TENSOR_AT_A_TIME = {"foreach": False, "fused": False, "capturable": False}


@dataclass(slots=True, kw_only=True)
class _Copy:
    live: "torch.nn.Parameter"
    shadow: "torch.nn.Parameter"
    before: "torch.Tensor"


class Shadow:
    """One optimizer rebuilt on copies of the model's parameters, on the CPU, with its own state."""

    def __init__(
        self,
        live: "torch.optim.Optimizer",
        reference: OptimizerRecord,
        named: "Mapping[str, torch.nn.Parameter]",
    ) -> None:
        """Rebuild the optimizer of `reference` for the parameters of the same names.

        Raises:
            LookupError: if the class or a parameter is not found here.
        """
        import torch

        wanted = [name for group in reference.groups for name in group]
        missing = [name for name in wanted if name not in named]
        if missing:
            raise LookupError(f"no parameter {missing[0]} in the model")
        kept = _within_budget({name: named[name] for name in wanted})
        self.left_out = len(wanted) - len(kept)
        self._copies: dict[str, _Copy] = {}
        for name in kept:
            value = named[name].detach()
            shadow = torch.nn.Parameter(value.cpu().clone(), requires_grad=True)
            self._copies[name] = _Copy(live=named[name], shadow=shadow, before=shadow.detach())
        self._groups: list[dict[str, Any]] = [
            {"params": [self._copies[name].shadow for name in group if name in kept]}
            for group in reference.groups
        ]
        self._kind = _find_kind(reference.kind, live)
        self._optimizer = _rebuild(self._kind, live, self._groups)

    def take_parameters(self, early: EarlySteps) -> None:
        """Copy the parameters as they are before the step."""
        for copy in self._copies.values():
            copy.before = early.before(copy.live).cpu().clone()

    def take_gradients(self, scale: float, early: EarlySteps) -> None:
        """Copy the gradients that the step will use, or has just used."""
        for copy in self._copies.values():
            gradient = early.gradient(copy.live)
            if gradient is None:
                copy.shadow.grad = None
            else:
                copy.shadow.grad = gradient.detach().cpu().clone().div_(scale)

    def step(
        self, settings: Sequence[Mapping[str, Any]]
    ) -> dict[str, tuple[float, float, float, float]]:
        """Step on the copies and compare with what became of the live parameters."""
        import torch

        for group, values in zip(self._groups, settings, strict=True):
            group.update({name: _revived(value) for name, value in values.items()})
            group.update({k: v for k, v in ONE_TENSOR_AT_A_TIME.items() if k in group})
        with torch.no_grad():
            for copy in self._copies.values():
                copy.shadow.copy_(copy.before)
            with _unheard(), streams_kept():
                self._kind.step(self._optimizer)
            return {name: _compare(copy) for name, copy in self._copies.items()}


def _compare(copy: _Copy) -> tuple[float, float, float, float]:
    import torch

    before, shadow = copy.before.double(), copy.shadow.detach().double()
    after = copy.live.detach().cpu().double()
    norms = ((after - shadow).norm(), (shadow - before).norm(), before.norm())
    difference, step, size = (float(norm) for norm in norms)
    return difference, step, size, torch.finfo(copy.shadow.dtype).eps / 2


def _within_budget(named: "Mapping[str, torch.nn.Parameter]") -> set[str]:
    """Return the names whose copies fit, smallest tensors first."""
    kept: set[str] = set()
    total = 0
    for name in sorted(named, key=lambda name: named[name].numel()):
        total += named[name].numel()
        if total > MAX_ELEMENTS:
            break
        kept.add(name)
    return kept


def _find_kind(path: str, live: "torch.optim.Optimizer") -> Any:
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


def _rebuild(kind: Any, live: "torch.optim.Optimizer", groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer the way unpickling does.

    No constructor runs: it may have arguments that nobody recorded, and the seams listen to it.
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


def _revived(value: Any) -> Any:
    """Return a setting as the optimizer had it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep the shadow's step from the global step hooks, which count training steps.

    The dictionaries are exchanged, not emptied: torch is iterating over them further up the stack.
    """
    from torch.optim import optimizer as module

    hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    kept = {name: getattr(module, name) for name in hooks}
    for name in hooks:
        setattr(module, name, collections.OrderedDict())
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
