"""Does dropout still act? How much a model's output moves when only the random streams do.

The gradients are compared with every dropout off, and the modules' rates are compared too; neither
sees a technique that loses a functional dropout. So the first training call is run under a few
seeds: without dropout every output is the same. From the guard study, section 2.4: the mean loss
does not see dropout off, the deviation over seeds does (0.00 of the baseline's), and at four
seeds it is too noisy to judge the rate by.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.agent.guard.record import rank_path
from flatout.agent.nested import leaves_of
from flatout.agent.ranks import own_rank
from flatout.agent.untouched import state_kept
from flatout.records.input_files import read_json

if TYPE_CHECKING:
    import torch

    from flatout.agent.session import Session

SEEDS = 4
LEAST_SHARE = 0.2
"""Of the baseline's deviation. Dropout off gives 0, half the rate still 0.5."""
ACTIVE = 1e-5
"""A relative deviation over seeds below this is rounding: nothing random acts in the model."""
MOST_LOOKED_AT = 1 << 22
"""Numbers of one output that are looked at, at most: 32 MiB on the CPU. Of a step of GPT-2, whose
logits are 823 million, that is some 250 for each token: a mean over four million moves by far less
than what the check allows, and all of them would be gigabytes to copy and add up under each seed.
"""


class ActivityRecorder:
    """Measures, at the first training call of each root, the deviation over seeds."""

    def __init__(self, session: "Session", path: Path) -> None:
        self._session = session
        self._path = path
        self._found: dict[str, float | None] = {}
        session.on("forward", self._on_forward)
        session.on("stop", self._on_stop)

    def _on_forward(
        self, module: "torch.nn.Module", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        number = str(self._session.roots.index(module))
        if number in self._found:
            return
        self._found[number] = None  # and it stays so where the look fails
        call = self._session.training_calls[id(module)]
        spread = ActivitySpread()
        with state_kept(module):
            for seed in range(SEEDS):
                spread.add(_outputs(call, args, kwargs, seed))
        self._found[number] = spread.deviation()

    def _on_stop(self) -> None:
        path = rank_path(self._path, own_rank())
        path.write_text(json.dumps({"activity": self._found}), encoding="utf-8")


class ActivitySpread:
    """The relative deviation over seeds, of outputs that are shown one after the other.

    The running mean of every number is kept on the CPU (Welford's way, which stays exact where
    nothing moves), the rest is sums. The logits of a language model take gigabytes: four of them
    side by side on the device would be out of memory where the training fits. Of such an output
    numbers at fixed places are looked at, the same under every seed and in every trial.
    """

    def __init__(self) -> None:
        self._seeds = 0
        self._means: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._moved = 0.0
        """Sum over all numbers of the squared distances from their means over the seeds."""
        self._squares = 0.0

    def add(self, outputs: "Sequence[torch.Tensor]") -> None:
        """Add the outputs under one more seed.

        Raises:
            ValueError: if they hold no number, or others than under the seeds before.
        """
        import torch

        if not self._seeds:
            # Not where the script makes its tensors by default.
            self._means = [
                torch.zeros(looked_at(x).numel(), dtype=torch.double, device="cpu") for x in outputs
            ]
            self._sizes = [x.numel() for x in outputs]
        sizes = [x.numel() for x in outputs]
        if not sum(sizes) or sizes != self._sizes:
            raise ValueError(f"outputs of {sizes} numbers, not of {self._sizes}")
        self._seeds += 1
        for output, mean in zip(outputs, self._means, strict=True):
            # Masked logits are infinite under every seed, and say nothing.
            values = looked_at(output).cpu().double().nan_to_num(0.0, 0.0, 0.0)
            distance = values - mean
            mean += distance / self._seeds
            self._moved += distance.dot(values - mean).item()
            self._squares += values.dot(values).item()

    def deviation(self) -> float:
        """Return the root of the mean variance over the root of the mean square."""
        variance = self._moved / (self._seeds - 1)
        square = self._squares / self._seeds
        return math.sqrt(variance / square) if square else 0.0


def looked_at(output: "torch.Tensor") -> "torch.Tensor":
    """Return the numbers of an output that are looked at, on its device; all of a small one.

    Their places follow from the number of entries alone. The stride shares no factor with it, hence
    none with any dimension: every column of a matrix is met, not a few of them over and over.
    """
    flat = output.flatten()
    stride = max(1, -(-flat.numel() // MOST_LOOKED_AT))
    while stride > 1 and math.gcd(stride, flat.numel()) > 1:
        stride += 1
    return flat[::stride]


def find_fault(
    baseline: Mapping[str, float | None], candidate: Mapping[str, float | None]
) -> str | None:
    """Return what is wrong with a candidate's activity, None where it is as the baseline's.

    >>> find_fault({"0": 0.3}, {"0": 0.0})
    'dropout no longer acts: over 4 seeds the output moves by 0 of its size instead of 0.3'
    >>> find_fault({"0": 0.3}, {"0": 0.2}) is None
    True
    """
    # Here, and below: the training's process may lack what reads messages, and says none of them.
    from flatout.records.messages import words

    for number, expected in baseline.items():
        assert expected is not None, "there is nothing to hold a candidate against"
        if number not in candidate:
            return words("guard.root_not_called", n=number)
        found = candidate[number]
        if found is None:
            return words("guard.root_unknown", n=number)
        if found < LEAST_SHARE * expected and expected > ACTIVE:
            about = {"n": str(SEEDS), "now": f"{found:.2g}", "was": f"{expected:.2g}"}
            return words("guard.no_dropout", **about)
    return None


def is_active(activity: Mapping[str, float | None]) -> bool:
    """Return whether anything random acts in the models."""
    return any(share is not None and share > ACTIVE for share in activity.values())


def find_unknown(activity: Mapping[str, float | None] | None) -> str | None:
    """Return why nothing can be held against what a trial recorded, None where it can.

    >>> find_unknown({"0": 0.3}) is None
    True
    """
    from flatout.records.messages import words

    if activity is None:
        return words("guard.no_activity")
    number = next((number for number, share in activity.items() if share is None), None)
    return None if number is None else words("guard.root_unknown_unchanged", n=number)


def find_activity(path: str | None) -> dict[str, float | None] | None:
    """Return what a trial recorded by root; None where it left no record.

    A root is None that was called and whose deviation could not be found.
    """
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        found: dict[str, float | None]
        found = read_json(path)["activity"]
        return found
    return None


def _outputs(
    call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> "list[torch.Tensor]":
    """Return every tensor of floating-point numbers that a call gives under a seed."""
    import torch
    from torch.utils import _pytree

    torch.manual_seed(seed)
    found: list[torch.Tensor] = []
    for leaf in _pytree.tree_leaves(call(*args, **kwargs)):
        # An object of the script's own is a leaf to torch: its fields are looked at.
        is_own = not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__")
        parts = leaves_of(vars(leaf) if is_own else leaf)
        tensors = (part for part in parts if isinstance(part, torch.Tensor))
        found += [part.detach() for part in tensors if part.is_floating_point()]
    return found
