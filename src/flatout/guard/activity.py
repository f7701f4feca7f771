"""Does dropout still act? How much a model's output moves when only the random streams do.

The gradients are compared with every dropout off, and the modules' rates are compared too; neither
sees a lever that loses a functional dropout. So the first training call is run under a few seeds:
without dropout every output is the same. From the guard study, section 2.4: the mean loss does not
see dropout off, the deviation over seeds does (0.00 of the baseline's), and at four seeds it is too
noisy to judge the rate by.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.guard.record import rank_path
from flatout.seams.ranks import own_rank

if TYPE_CHECKING:
    import torch

    from flatout.seams.session import Session

SEEDS = 4
LEAST_SHARE = 0.2
"""Of the baseline's deviation. Dropout off gives 0, half the rate still 0.5."""
ACTIVE = 1e-5
"""A relative deviation over seeds below this is rounding: nothing random acts in the model."""


class ActivityRecorder:
    """Measures, at the first training call of each root, the deviation over seeds."""

    def __init__(self, session: "Session", path: Path) -> None:
        self._session = session
        self._path = path
        self._found: dict[str, float] = {}
        session.on("forward", self._on_forward)
        session.on("stop", self._on_stop)

    def _on_forward(
        self, module: "torch.nn.Module", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        number = str(self._session.roots.index(module))
        if number in self._found:
            return
        call = self._session.training_calls[id(module)]
        with _kept(module):
            self._found[number] = deviation([_output(call, args, kwargs, s) for s in range(SEEDS)])

    def _on_stop(self) -> None:
        path = rank_path(self._path, own_rank())
        path.write_text(json.dumps({"activity": self._found}), encoding="utf-8")


def deviation(outputs: "Sequence[torch.Tensor]") -> float:
    """Return the relative deviation over seeds of outputs of equal shape.

    That is the root of the mean variance over the root of the mean square.
    """
    import torch

    stacked = torch.stack(list(outputs))
    size = stacked.square().mean().sqrt().item()
    return stacked.var(dim=0).mean().sqrt().item() / size if size else 0.0


def find_fault(baseline: Mapping[str, float], candidate: Mapping[str, float]) -> str | None:
    """Return what is wrong with a candidate's activity, None where it is as the baseline's.

    >>> find_fault({"0": 0.3}, {"0": 0.0})
    'dropout no longer acts: over 4 seeds the output moves by 0 of its size instead of 0.3'
    >>> find_fault({"0": 0.3}, {"0": 0.2}) is None
    True
    """
    for number, expected in baseline.items():
        found = candidate.get(number)
        if found is None:
            return f"root {number} was not called, so whether dropout acts is not known"
        if found < LEAST_SHARE * expected and expected > ACTIVE:
            return (
                f"dropout no longer acts: over {SEEDS} seeds the output moves by {found:.2g} of "
                f"its size instead of {expected:.2g}"
            )
    return None


def is_active(activity: Mapping[str, float]) -> bool:
    """Tell whether anything random acts in the models."""
    return any(share > ACTIVE for share in activity.values())


def find_activity(path: str | None) -> dict[str, float] | None:
    """Return what a trial recorded, None where it recorded nothing."""
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        found: dict[str, float] = json.loads(Path(path).read_text(encoding="utf-8"))["activity"]
        return found or None
    return None


def _output(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> "torch.Tensor":
    """Return every number that a call gives under a seed, as one row."""
    import torch
    from torch.utils import _pytree

    torch.manual_seed(seed)
    leaves = _pytree.tree_leaves(call(*args, **kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return torch.cat([x.detach().flatten().double() for x in tensors])


@contextlib.contextmanager
def _kept(module: "torch.nn.Module") -> Iterator[None]:
    """Set random streams and buffers back: these calls must leave no trace in the training."""
    import torch

    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.copy_(before[name])
