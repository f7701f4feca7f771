"""What the model and its optimizers are made of, as plain text and plain numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.agent.guard.record import OptimizerRecord
from flatout.agent.guard.sketches import buffer_sketch

if TYPE_CHECKING:
    import torch


RATES = ("p", "eps", "momentum", "dropout", "dropout_p", "drop_prob", "lower", "upper")
"""Attributes of modules that change the training without changing a parameter. A doubled dropout
rate shows nowhere else: twelve seeds of losses and gradients did not see it."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Name parts that torch's own wrappers add."""
FREE_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that choose how a step is computed, not what it computes."""


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without the parts that wrappers add.

    >>> plain_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for part in WRAPPERS:
        name = name.replace(part, "").replace(part.rstrip("."), "")
    return name


def of_root(number: int) -> str:
    """Return the prefix of the names in one of the roots; the first has none.

    >>> of_root(0), of_root(1)
    ('', 'root1.')
    """
    return f"root{number}." if number else ""


def describe_modules(root: "torch.nn.Module", number: int) -> dict[str, str]:
    """Return one line for each module of a root: type, mode and rates."""
    return {
        f"{of_root(number)}{plain_name(name)}" or "(root)": _line(module)
        for name, module in root.named_modules()
    }


def _line(module: "torch.nn.Module") -> str:
    rates = (
        f"{name}={value}"
        for name in RATES
        if isinstance(value := getattr(module, name, None), int | float)
    )
    mode = "training" if module.training else "eval"
    return " ".join([type(module).__name__, mode, *rates])


def name_parameters(
    roots: Sequence["torch.nn.Module"], optimizers: Iterable["torch.optim.Optimizer"]
) -> "dict[str, torch.nn.Parameter]":
    """Return every trained parameter by name; each one once.

    Names come from the roots; parameters that only an optimizer knows are numbered there.
    """
    named: dict[str, torch.nn.Parameter] = {}
    seen: set[int] = set()
    for number, root in enumerate(roots):
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[f"{of_root(number)}{plain_name(name)}"] = parameter
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"optimizer{number}.group{place}.{position}"] = parameter
    return named


def describe_optimizer(
    number: int, optimizer: "torch.optim.Optimizer", names: Mapping[int, str]
) -> OptimizerRecord:
    """Return an optimizer's class, and which named parameters are in which group."""
    groups = (
        tuple(names[id(parameter)] for parameter in group["params"])
        for group in optimizer.param_groups
    )
    return OptimizerRecord(number=number, kind=kind_of(optimizer), groups=tuple(groups))


def kind_of(optimizer: "torch.optim.Optimizer") -> str:
    """Return the `module:name` of an optimizer's class."""
    kind = type(optimizer)
    return f"{kind.__module__}:{kind.__qualname__}"


def settings_of(optimizer: "torch.optim.Optimizer") -> tuple[dict[str, Any], ...]:
    """Return the plain hyper-parameters of each group as they are now."""
    return tuple(
        {
            name: plain
            for name, value in group.items()
            if name != "params" and (plain := _plain(value)) is not NotImplemented
        }
        for group in optimizer.param_groups
    )


def _plain(value: Any) -> Any:
    """Return a setting as JSON can carry it, `NotImplemented` where it cannot."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and hasattr(value, "numel") and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return NotImplemented if NotImplemented in items else items
    return NotImplemented


MOVES = "changes after the first step"
RESTS = "stays as the first step left it"


class LaterNotes:
    """Modes and rates at the end of each step, and which buffers go on changing.

    These are plain facts that rounding leaves; only the first steps' numbers are compared. A model
    that is left in eval mode, or a running average that is still, shows in no gradient of the first
    steps and, with every dropout off, in no loss of the later ones.
    """

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self.buffers: Mapping[str, torch.Tensor] = {}
        """Sketches of the buffers after the first step."""

    def after_step(self, step: int, roots: "Sequence[torch.nn.Module]") -> None:
        """Note what changed in the modules; the first step's end is where that begins."""
        if step == 1:
            self.buffers = _sketches(roots)
        for number, root in enumerate(roots):
            for name, line in describe_modules(root, number).items():
                # Not the type: a technique may put another module in its place later on.
                manner = line.partition(" ")[2]
                if self._now.setdefault(name, manner) != manner:
                    self._now[name] = manner
                    self._modules[f"module {name} from step {step} on"] = manner

    def facts(self, steps: int, roots: "Sequence[torch.nn.Module]") -> dict[str, str]:
        """Return what was noted, and for each buffer whether it changed after the first step."""
        if steps < 2:
            return {}
        last = _sketches(roots)
        moves = {
            f"buffer {name}": RESTS if first.cpu().equal(last[name].cpu()) else MOVES
            for name, first in self.buffers.items()
            if name in last and first.shape == last[name].shape
        }
        return self._modules | moves


def _sketches(roots: "Sequence[torch.nn.Module]") -> "dict[str, torch.Tensor]":
    return {
        f"{of_root(number)}{plain_name(name)}": buffer_sketch(buffer, name)
        for number, root in enumerate(roots)
        for name, buffer in root.named_buffers()
    }
