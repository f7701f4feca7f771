"""Logits that are made when somebody reads them; a loss that can do without never does.

`LateLogits` stands for what a wide last layer returns. It knows the layer's input, so views of it,
slices of its rows and `float()` are such stand-ins too: of the same view or slice of the input.
Anything else that is done to it is done to the real logits, made that moment by torch's own layer.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

PLAIN = (torch.Tensor, torch.nn.Parameter)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES_AT_EASE = (
    *("dtype", "device", "layout", "shape", "ndim", "requires_grad", "is_leaf", "is_cuda"),
    *("is_sparse", "is_nested", "is_quantized", "is_meta", "is_mkldnn", "is_cpu", "is_mps"),
    *("itemsize", "nbytes", "_version", "is_xla", "is_xpu", "is_sparse_csr"),
)
AT_EASE = {
    *(getattr(torch.Tensor, name).__get__ for name in NAMES_AT_EASE),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement),
    *(torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_complex),
    *(torch.Tensor.element_size, torch.Tensor.get_device, torch.numel, torch.is_complex),
    *(torch.Tensor.__len__, torch.Tensor.__hash__),
}
"""What may be asked of a stand-in as it is."""
RESHAPES = {
    *(torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten),
    *(torch.reshape, torch.flatten),
}
GRADIENT_NAMES = ("register_hook", "retain_grad")
GRAD: Any = vars(torch._C.TensorBase)["grad"].__get__
"""None of what is no leaf; compilers ask for it."""
LATE = (
    "the logits are read after the values they are made of were changed: read them before that, or "
    "leave out chunked_cross_entropy"
)
UNSEEN = (
    "the logits are written to where no function of Python sees it: leave out chunked_cross_entropy"
)
UNKNOWN_GRADIENT = (
    "the gradient of the logits is asked for after a loss that makes none: ask before the loss, or "
    "leave out chunked_cross_entropy"
)


@dataclass(eq=False)
class Layer:
    """One call of the layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: torch.dtype | None
    """What autocast made of its product, None without."""
    linear: Callable[..., torch.Tensor]
    """Torch's own."""
    on_read: Callable[["Layer"], None]
    """Told when the logits are made after all."""
    is_used: bool = False
    """Whether a loss did without its logits."""
    is_made: bool = False
    """Whether somebody has them, and may have changed them."""
    kept: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """Its values before an optimizer's step, which may change them and count no version."""
    versions: tuple[int, ...] = ()
    stand_ins: list["weakref.ref[LateLogits]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = self.now()

    def now(self) -> tuple[int, ...]:
        """Return the versions of its values."""
        return tuple(t._version for t in (self.weight, self.bias) if t is not None)

    def is_past(self) -> bool:
        """Tell whether an optimizer made a step since, or its values were changed otherwise."""
        return self.kept is not None or self.now() != self.versions

    def keep(self) -> None:
        """Keep the values as they are, where somebody may still read the logits."""
        if self.is_made or self.is_past():
            return
        if any(late() is not None for late in self.stand_ins):
            bias = None if self.bias is None else self.bias.detach().clone()
            self.kept = self.weight.detach().clone(), bias

    def make(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, by torch's own layer."""
        if self.kept is None and self.now() != self.versions:
            raise RuntimeError(LATE)
        weight, bias = self._as_they_were()
        self.on_read(self)
        kind = hidden.device.type
        with torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            return self.linear(hidden, weight, bias)

    def _as_they_were(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the values at the layer's call, whose gradients are still those of its own."""
        if self.kept is None:
            return self.weight, self.bias
        weight, bias = self.kept
        return AS_IT_WAS(self.weight, weight), bias if bias is None else AS_IT_WAS(self.bias, bias)


class LateLogits(torch.Tensor):
    """Stands in for logits; `hidden` is what they are made of, one row for each of theirs."""

    layer: Layer
    hidden: torch.Tensor
    version: int
    """Of the hidden values, when they were given."""
    remake: "_Product | _View"
    """Makes the real ones, from those of the stand-in that it is a view of."""
    table: torch.Tensor | None

    def made(self) -> torch.Tensor:
        """Return the real logits; whoever reads them first, their graph is there for a loss."""
        if self.table is None:
            with torch.inference_mode(False), torch.enable_grad():  # noqa: FBT003  compilers know it so
                self.table = self.remake(LateLogits.made)
            self.layer.is_made = True
        return self.table

    def unkept(self) -> torch.Tensor:
        """Return the real logits for an operation below autograd, where they would get no graph."""
        return self.remake(LateLogits.unkept) if self.table is None else self.table

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer, give another stand-in, or let it be done to the real logits."""
        del types
        kwargs = kwargs or {}
        if func in AT_EASE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LateLogits):
            if first.layer.is_used and func.__name__ in GRADIENT_NAMES:
                raise RuntimeError(UNKNOWN_GRADIENT)
            if func == GRAD and (first.table is None or not first.table.retains_grad):
                return None
            found = _derived(first, func, args[1:], kwargs)
            if found is not None:
                return found
            if _is_in_place(func):
                first.layer_made()
        return func(*_real(args, LateLogits.made), **_real(kwargs, LateLogits.made))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch does not type it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let what came by no Python function be done to the real logits."""
        del types
        if _is_written(func, args):
            raise RuntimeError(UNSEEN)
        return func(*_real(args, LateLogits.unkept), **_real(kwargs or {}, LateLogits.unkept))

    def layer_made(self) -> None:
        """Make every stand-in of the call: one of them is about to be written to."""
        for late in self.layer.stand_ins:
            found = late()
            if found is not None:
                found.made()


class _StandIn(torch.autograd.Function):
    """A stand-in for autograd: a gradient that reaches it goes the way of the layer."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        hidden, weight, bias, dtype = given
        ctx.save_for_backward(hidden, weight, bias)
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            LateLogits, shape, dtype=dtype, device=hidden.device
        )
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias = ctx.saved_tensors
        rows, tables = hidden.flatten(0, -2), gradient.to(weight.dtype).flatten(0, -2)
        return (
            (tables @ weight).to(hidden.dtype).view_as(hidden),
            tables.t() @ rows.to(weight.dtype),
            None if bias is None else tables.sum(0).to(bias.dtype),
            None,
        )


STAND_IN: Any = _StandIn.apply
"""Hidden values, the layer's weight, its bias or None, the type of the logits."""


class _AsItWas(torch.autograd.Function):
    """Kept values of a weight or a bias, whose gradient is its own."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        del ctx
        _, kept = given
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        del ctx
        return gradient, None


AS_IT_WAS: Any = _AsItWas.apply
"""The parameter, its kept values."""


def late_logits(
    layer: Layer, hidden: torch.Tensor, dtype: torch.dtype, remake: Any = None
) -> LateLogits:
    """Return a stand-in for what the layer makes of hidden values."""
    made: LateLogits = STAND_IN(hidden, layer.weight, layer.bias, dtype)
    made.layer, made.hidden, made.version = layer, hidden, hidden._version
    made.table = None
    made.remake = remake or _Product(layer, hidden, hidden._version)
    layer.stand_ins.append(weakref.ref(made))
    return made


@dataclass(frozen=True, slots=True)
class _Product:
    layer: Layer
    hidden: torch.Tensor
    version: int

    def __call__(self, read: "Reading") -> torch.Tensor:
        del read
        if self.hidden._version != self.version:
            raise RuntimeError(LATE)
        return self.layer.make(self.hidden)


@dataclass(frozen=True, slots=True)
class _View:
    base: LateLogits
    func: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, read: "Reading") -> torch.Tensor:
        return self.func(read(self.base), *self.args, **self.kwargs)


Reading = Callable[[LateLogits], torch.Tensor]
"""How the real logits of a stand-in are got at."""


def may_be_late(hidden: Any, weight: Any, bias: Any) -> bool:
    """Tell whether a layer's logits may be made later: plain training, nobody watching autograd."""
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    return (
        torch.is_grad_enabled()
        and all(type(t) in PLAIN and t.dtype in TYPES and not t.is_meta for t in tensors)
        and hidden.dim() > 1
        and hidden.requires_grad
        and not hasattr(weight, "ds_id")  # DeepSpeed takes its values away after the layer's call
        and not _is_in_group()
        and not _is_captured(hidden)
        and not _is_recorded()
    )


def _is_in_group() -> bool:
    """Tell whether a weight may be sharded: then its values go after the layer's call.

    Those of FSDP go in a group of one process as well.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_captured(hidden: torch.Tensor) -> bool:
    """Tell whether a CUDA graph is recorded, which replays what was done and asks no Python."""
    return hidden.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_recorded() -> bool:
    """Tell whether hooks see what is saved for backward: checkpointing counts it, offloads it."""
    autograd = torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    is_hooked = top is None or top(False) is not None  # noqa: FBT003  its only argument
    return is_hooked or is_transformed()


def is_transformed() -> bool:
    """Tell whether functorch or a tracer follows each operation, and knows none of ours."""
    return torch._C._is_tracing() or torch._C._functorch.maybe_current_level() is not None


def _derived(
    late: LateLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return a stand-in for a view, a slice or a wider type; None where there is none."""
    # A compiled function is given the real ones; what is made without gradients has none later.
    is_real = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if is_real or late.table is not None or late.hidden._version != late.version:
        return None
    if func in (torch.Tensor.float, torch.Tensor.to):
        return _widened(late, func, args, kwargs)
    if func is torch.Tensor.contiguous and not args and not kwargs:
        return _packed(late)
    hidden = _picked(late, func, args, kwargs)
    if hidden is None:
        return None
    return late_logits(late.layer, hidden, late.dtype, _View(late, func, args, kwargs))


def _packed(late: LateLogits) -> LateLogits:
    """Return what `contiguous()` gives: of a slice a copy, that may be changed by itself."""
    if isinstance(late.remake, _Product):
        return late
    view = _View(late, torch.Tensor.contiguous, (), {})
    return late_logits(late.layer, late.hidden, late.dtype, view)


def _picked(
    late: LateLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the hidden values of the rows that a view or a slice leaves."""
    if func in RESHAPES:
        return _reshaped(late, func, args, kwargs)
    if func is torch.Tensor.__getitem__ and _keeps_classes(args[0], late.dim()):
        return late.hidden[args[0]]
    return None


def _widened(
    late: LateLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    if func is torch.Tensor.to and (kwargs or len(args) != 1):
        return None
    if func is torch.Tensor.float and (args or kwargs):
        return None
    wanted = torch.float32 if func is torch.Tensor.float else args[0]
    if wanted in (late.dtype, late.device):
        return late
    if wanted is not torch.float32:
        return None
    return late_logits(late.layer, late.hidden, torch.float32, _View(late, func, args, kwargs))


def _reshaped(
    late: LateLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    shape = func(torch.empty(late.shape, device="meta"), *args, **kwargs).shape
    if len(shape) < 2 or shape[-1] != late.shape[-1]:
        return None
    return late.hidden.reshape(*shape[:-1], late.hidden.shape[-1])


def _keeps_classes(index: Any, dims: int) -> bool:
    """Tell whether an index picks rows alone, by numbers and slices.

    >>> _keeps_classes((..., slice(None, -1), slice(None)), 3), _keeps_classes((..., 5), 3)
    (True, False)
    >>> _keeps_classes(slice(0, 2), 3), _keeps_classes((0, 1), 3), _keeps_classes(None, 3)
    (True, False, False)
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is ... or type(part) in (int, slice) for part in parts):
        return False
    rows = len(parts) - (... in parts)
    last = parts[-1]
    reaches = rows == dims or (... in parts and last is not ...)
    if reaches and last != slice(None):
        return False
    numbers = sum(type(part) is int for part in parts)
    return dims - numbers > 1


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or name[-1:] == "_" != name[-2:-1]


def _is_written(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operation changes a stand-in."""
    given = zip(func._schema.arguments, args, strict=False)
    return any(
        isinstance(value, LateLogits) and place.alias_info is not None and place.alias_info.is_write
        for place, value in given
    )


def _real(value: Any, read: Reading) -> Any:
    """Return nested arguments with the real logits for their stand-ins."""
    return _pytree.tree_map(lambda x: read(x) if isinstance(x, LateLogits) else x, value)
