"""What a script by itself makes of one rounding: its inputs and weights are rounded to bf16, once.

Some networks amplify whatever happens below: deep ones with BatchNorm, before they are trained.
One rounding of their images moves their gradients by a fifth, so that bf16 cannot be held to less.
Where bf16 is further off than this trial explains, it is the script's arithmetic that loses digits:
backward stability (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.5).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.core.nested import map_leaves

if TYPE_CHECKING:
    import torch

    from flatout.seams.session import Session


def round_once(session: "Session") -> None:
    """Round the parameters of each root before its first call, and the arguments of every call.

    Everything after that is computed as the script says. Arguments that the training computes (a
    generator's images) are left alone.
    """
    met: set[int] = set()

    def on_forward(
        module: "torch.nn.Module", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if id(module) not in met:
            met.add(id(module))
            for parameter in module.parameters():
                _round(parameter)
        map_leaves([list(args), dict(kwargs)], _round_given)

    session.on("forward", on_forward)


def _round_given(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor) and not leaf.requires_grad:
        _round(leaf)
    return leaf


def _round(tensor: "torch.Tensor") -> None:
    import torch

    if tensor.dtype in (torch.float32, torch.float64):
        # By way of `data`: autograd takes what it kept of an earlier call for unchanged, and a
        # second rounding does change nothing.
        tensor.data.copy_(tensor.data.to(torch.bfloat16))
