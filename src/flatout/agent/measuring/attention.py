"""Which of torch's kernels compute attention in a training, and why where it is the slow one."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from flatout.agent import patching
from flatout.agent.describe import is_compiled
from flatout.agent.session import Session

MATH = "math"
NAMES = {0: MATH, 1: "flash", 2: "efficient", 3: "cudnn"}
"""Torch's numbers for its backends."""
OPERATOR = "scaled_dot_product_attention"
_UNSEEN: list[None] = []
"""An entry for each block of `unseen` that runs."""


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run calls of a model that are not the training's: no one notes what their attention runs on.

    Two forwards are compared in float64, which no fused kernel of a GPU takes: what ran there says
    nothing of the training.
    """
    _UNSEEN.append(None)
    try:
        yield
    finally:
        _UNSEEN.pop()


def may_look() -> bool:
    """Return whether a call of attention is the training's own and can be looked at."""
    return not (torch.compiler.is_compiling() or _UNSEEN)


class AttentionMeter:
    """Looks at a training's first fused attention, once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.patch: patching.Patch | None = None

    def install(self) -> None:
        """Look when a root makes its first call."""
        self.session.on("root", self.begin)
        self.session.on("forward_end", self.end)

    def begin(self, module: torch.nn.Module) -> None:
        """Stand in for torch's operator until it is called; compiled models are left alone.

        Whoever compiled them, the script or a technique: their code holds as long as the
        operator is the one that it was compiled with, so putting torch's back would compile all
        of it again.
        """
        if self.patch is None and not is_compiled(module):
            self.patch = patching.wrap(functional, OPERATOR, self.looking)

    def looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the operator, with its call looked at."""

        @functools.wraps(original)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            # A script may have kept a reference to it.
            if self.patch is not None and may_look():
                self.session.quietly(self.look)(*args, **kwargs)
            return original(*args, **kwargs)

        return looked_at

    def look(self, *args: Any, **kwargs: Any) -> None:
        """Note the backend of a call, and look no more."""
        self.end()
        name, why = backend_of(*args, **kwargs)
        self.session.model_facts[-1] |= {"attention_backend": name, "attention_why": why}

    def end(self, *_: Any) -> None:
        """Put torch's operator back."""
        if self.patch is not None:
            self.patch.undo()
            self.patch = None
        self.session.off("root", self.begin)
        self.session.off("forward_end", self.end)


def backend_of(  # noqa: PLR0913, PLR0917  torch's own signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> tuple[str, str]:
    """Return the backend that torch takes for a call, and of the slow one the reason."""
    kind = query.device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        query, key, value = query.to(to), key.to(to), value.to(to)
    number = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    name = NAMES.get(number, "another")
    if name != MATH:
        return name, ""
    if query.is_cuda:
        return name, _cuda_reason(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    return name, _cpu_reason(query, attn_mask, dropout_p)


def _cuda_reason(*call: Any) -> str:
    """Return what torch itself says; it warns of every condition that is not met."""
    cuda: Any = torch.backends.cuda
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        cuda.can_use_flash_attention(cuda.SDPAParams(*call), debug=True)
    said = "; ".join(str(reason.message).partition(" (")[0] for reason in reasons[1:3])
    return said or "no fused kernel takes it"


def _cpu_reason(query: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> str:
    if dropout_p:
        return "attention drops weights, which the CPU's fused kernel cannot"
    if query.dim() != 4:
        return f"the tensors have {query.dim()} dimensions, the fused kernel takes 4"
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return "the mask needs a gradient or has a form that the fused kernel does not take"
    return "the fused kernel does not take these shapes and dtypes"
