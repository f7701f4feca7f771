"""Follow every storage on the traced device from its birth to its death.

`Recording` does it; `labelled` lets tensors of a class of the script's own be fake, too.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from flatout.planner.tracing.operators import UNANSWERED, answered, copied, run_for_real
from flatout.planner.tracing.shape_cache import MISSING, ShapeCache
from flatout.records.errors import UserError
from flatout.records.memory_stream import Component, Mark, Phase, StreamEvent

COMPUTED_BY_TORCH = Tensor.__torch_dispatch__


def _is_labelled(kind: Any) -> bool:
    """Return whether a class of tensors is the script's own, and computes as torch's does."""
    own = issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter)
    return own and kind.__torch_dispatch__ is COMPUTED_BY_TORCH


def may_use_tf32(func: Any, args: Sequence[Any]) -> bool:
    """Return whether torch lets an operator compute in TF32: convolutions it does by default."""
    first = next((one for one in args if isinstance(one, Tensor)), None)
    if first is None or first.dtype != torch.float32:
        return False
    if "convolution" in func.name():
        return bool(torch.backends.cudnn.allow_tf32)
    return torch.get_float32_matmul_precision() != "highest"


def without_label(value: Any) -> Any:
    """Return a value with the tensors in it as plain ones, which share their memory."""
    if isinstance(value, tuple | list):
        return type(value)(map(without_label, value))
    if isinstance(value, Tensor) and _is_labelled(type(value)):
        return _as_subclass(value, Tensor)
    return value


_as_subclass: Callable[[Tensor, type], Any] = Tensor.as_subclass


def labelled(tensor: Tensor, cls: Any) -> Any:
    """Return the tensor as one of this class, still fake where it is; used as `as_subclass`.

    Libraries of pictures have a class of tensors of their own. It adds names and metadata and
    leaves the computing to torch. Fake tensors refuse it, and torch's own `as_subclass`, with which
    it marks what torch returns, cannot mark one that is already of a class.
    """
    if not isinstance(tensor, FakeTensor):
        return _as_subclass(tensor, cls)
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias(tensor)
    if not issubclass(cls, FakeTensor):
        cls = FakeTensor if cls is Tensor else _fake_of(cls)
    made.__class__ = cls
    return made


@functools.cache
def _fake_of(kind: Any) -> type:
    """Return the class of fake tensors that have this class's methods, under its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (FakeTensor, kind), names)
    return made


aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
WITH_ARGUMENTS = frozenset(
    {
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.sum.dim_IntList,
        aten.embedding_dense_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    }
)
"""Operators whose kernels take memory that follows from what they are called with."""
ALONE = 2
"""References to a storage: of its one tensor, and of the Python object that asks."""
FACTORIES = frozenset(
    getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "randn", "rand", "full")
) | {torch.ops.aten.empty.memory_format}
DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
LARGE = 1 << 16
"""Elements from which a weight that a module makes on the host is fake, 256 KiB in fp32."""
FRAMES = 12
"""Callers among which a module's constructor is looked for."""
SEVERAL = "the script uses several GPUs itself: its tensors are planned as if all lay on one"
SUBCLASSES = ("DTensor", "AsyncCollectiveTensor")
"""Tensors that bring their own dispatch and come back with the tensors they hold."""


@dataclass(slots=True)
class Birth:
    """One allocation while it is traced."""

    size: int
    born: int
    operator: Any
    phase: Phase
    step: int
    module: str
    line: str
    died: int | None = None
    component: Component | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    arguments: tuple[tuple[int, ...], ...] = ()


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Log births and deaths of the storages on one device, and keep their tensors fake.

    Args:
        method: How a `MemoryStream` is traced.
        fake: The mode that computes shapes; None where everything runs for real.
        is_whole: Whether every tensor is fake; else only those on the traced device are, and
            the host's are real.
        notes: Clauses for the reader so far, each once.
        mask_share: Share of a mask that is taken to be true where a size depends on it.
        here: Returns the line of the user's that is running.
    """

    def __init__(
        self,
        method: str,
        fake: FakeTensorMode | None,
        *,
        is_whole: bool,
        notes: dict[str, None],
        mask_share: float,
        here: Callable[[], str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.method, self.fake, self.is_whole = method, fake, is_whole
        self.device = "cuda" if "cuda" in method else "cpu"
        """Type of the traced device."""
        self.notes, self.mask_share, self.here = notes, mask_share, here
        self._shapes = None if fake is None else ShapeCache(fake)
        self.births: list[Birth] = []
        self.events: list[StreamEvent] = []
        self.marks: list[Mark] = []
        self.modules: list[str] = []
        """Names of the modules that are running, the innermost last."""
        self.flops = self.tf32_flops = 0.0
        """Of all that was traced, and of these what may be computed in TF32."""
        self.phase, self.step = Phase.SETUP, 0
        self.looks_away: Callable[[], bool] = lambda: False
        """Whether what is made now is none of the training's memory."""
        self._alive: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def enter(self, phase: Phase, step: int) -> None:
        """Say where the training is from now on."""
        if self.marks and (self.phase, self.step) == (phase, step):
            return
        self.phase, self.step = phase, step
        self.marks.append(Mark(len(self.events), phase, step))

    def know(self, tensor: Any, component: Component, module: str = "") -> None:
        """Say what a tensor is for, if it is on the device."""
        birth = self.find(tensor)
        if birth is not None:
            birth.component = component
            birth.module = module or birth.module

    def find(self, tensor: Any) -> Birth | None:
        """Return the allocation of a tensor; of one that is spread, of this device's part."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return None
        place = self._alive.get(tensor.untyped_storage()._cdata)
        return None if place is None else self.births[place]

    def note(self, text: str) -> None:
        """Keep a clause for the reader."""
        self.notes.setdefault(text)

    def resized(self, storage: Any) -> None:
        """Log that a storage was given back or taken again in place, as FSDP does."""
        key = storage._cdata
        place = self._alive.get(key)
        size = storage.nbytes()
        if place is not None and self.births[place].size == size:
            return
        if place is None and storage.device.type not in (self.device, "meta"):
            return
        if place is not None:
            self._end(key)
        if size:
            birth = self._begin(storage, "resize_")
            old = self.births[place] if place is not None else None
            birth.shape, birth.dtype = (old.shape, old.dtype) if old else ((), "")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute one operator's shapes and log the storages it makes."""
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind.__name__ in SUBCLASSES for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            # Elsewhere autograd takes it apart before it comes here.
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.add.Tensor and _adds_in_place(*args[:2]):
            func = aten.add_.Tensor
        output = answered(self, func, args, kwargs)
        copies = copied(func, args) if self.device == "cuda" else {}
        self._see(tuple(copies.values()), func)
        count = len(self.births)
        if output is UNANSWERED:
            args = tuple(copies.get(place, value) for place, value in enumerate(args))
            output = self._compute(func, types, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            made = formula(*args, **kwargs, out_val=output)
            self.flops += made
            self.tf32_flops += made if may_use_tf32(func, args) else 0.0
        self._see(output, func)
        result = next((birth for birth in self.births[count:] if birth.shape), None)
        if func in WITH_ARGUMENTS and result is not None:
            is_backward = func is aten.convolution_backward.default
            result.arguments = _numbers(args, args[1:3] if is_backward else args[:2])
        return output

    def _compute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.fake is None or not (self.is_whole or self._is_fake(func, args, kwargs)):
            return func(*args, **kwargs)
        try:
            return self._compute_shapes(func, types, args, kwargs)
        except DEPENDENT as error:
            raise UserError(
                f"{func}{self._place()} gives something that depends on the data's values, which "
                "a trace does not have; everything up to there could be predicted"
            ) from error
        except RuntimeError as error:
            if not _lacks_shapes(error):
                raise
            return self._compute_for_real(func, args, kwargs, error)

    def _compute_shapes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert self.fake is not None
        assert self._shapes is not None
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        key = self._shapes.key(func, args, kwargs)
        if key is None:
            output = self.fake.dispatch(func, types, args, kwargs)
            if output is NotImplemented:
                plain = without_label((*args, *kwargs.values()))
                kwargs = dict(zip(kwargs, plain[len(args) :], strict=True))
                output = self.fake.dispatch(func, types, plain[: len(args)], kwargs)
            return output
        output = self._shapes.find(key, args)
        if output is MISSING:
            output = self.fake.dispatch(func, types, args, kwargs)
            self._shapes.keep(key, args, kwargs, output)
        return output

    def _compute_for_real(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run an operator that has no shape function on real zeros of the host."""
        assert self.fake is not None
        fake, device = self.fake, torch.device(self.device)
        try:
            output = run_for_real(func, args, kwargs)
        except Exception as failure:
            raise UserError(
                f"{func}{self._place()} has no shape function in torch and could not be "
                f"run on the host either ({failure}): its memory cannot be predicted"
            ) from failure
        self.note(f"{func} has no shape function: its shapes were found by running it")

        def faked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with fake:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

        return tree_map(faked, output)

    def _is_fake(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operator concerns the traced device, or tensors that are fake."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self.device:
            return True
        if func in FACTORIES and _is_large(args) and _builds_module():
            return True
        return any(self._is_ours(value) for value in (*args, *kwargs.values()))

    def _is_ours(self, value: Any) -> bool:
        """Return whether a value is or holds a fake tensor, or one that a real device just got."""
        if isinstance(value, Tensor):
            return isinstance(value, FakeTensor) or value.device.type == self.device
        return isinstance(value, tuple | list) and any(self._is_ours(each) for each in value)

    def _place(self) -> str:
        line = self.here()
        module = f" in {self.modules[-1]}" if self.modules else ""
        return f" at {line}{module}" if line else module

    def _see(self, output: Any, func: Any) -> None:
        if isinstance(output, Tensor):
            self.saw_inside(output, func)
        elif isinstance(output, tuple | list):
            for each in output:
                self._see(each, func)

    def saw_inside(self, tensor: Tensor, func: Any) -> None:
        """Log a tensor of the device, unless its storage is known."""
        if tensor.device.type != self.device:
            return
        if tensor.layout is torch.sparse_coo:
            self._see([tensor._indices(), tensor._values()], func)
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive or not storage.nbytes() or self.looks_away():
            return
        if tensor.device.index:
            self.note(SEVERAL)
        birth = self._begin(storage, func)
        birth.shape = tuple(tensor.shape)
        birth.dtype = str(tensor.dtype).removeprefix("torch.")

    def _begin(self, storage: Any, operator: Any) -> Birth:
        key = storage._cdata
        self._alive[key] = len(self.births)
        birth = self._enter_birth(storage.nbytes(), operator)
        self._ends[key] = weakref.ref(storage, functools.partial(self._ended, key))
        return birth

    def _enter_birth(self, size: int, operator: Any) -> Birth:
        birth = Birth(
            size=size,
            born=len(self.events),
            operator=operator,
            phase=self.phase,
            step=self.step,
            module=self.modules[-1] if self.modules else "",
            line=self.here(),
        )
        self.events.append(StreamEvent(len(self.births), True))  # noqa: FBT003  a row of the stream
        self.births.append(birth)
        return birth

    def _enter_death(self, index: int) -> None:
        self.births[index].died = len(self.events)
        self.events.append(StreamEvent(index, False))  # noqa: FBT003  a row of the stream

    def _ended(self, key: int, end: Any) -> None:
        if self._ends.get(key) is end:
            self._end(key)

    def _end(self, key: int) -> None:
        self._ends.pop(key)
        self._enter_death(self._alive.pop(key))


def is_composite(func: Any) -> bool:
    """Return whether an operator is nothing but calls of others."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _adds_in_place(sum_so_far: Any, gradient: Any) -> bool:
    """Return whether autograd adds up two gradients without new memory where no mode looks on.

    InputBuffer::accumulate takes the first one's storage if no one else holds it, but not from
    tensors that a dispatch mode sees. An addition of its own holds both tensors alike.
    """
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(gradient, Tensor)
        and not isinstance(torch._C._current_autograd_node(), FunctionCtx)
        and (sum_so_far.shape, sum_so_far.dtype) == (gradient.shape, gradient.dtype)
        and sum_so_far._use_count() == gradient._use_count()  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(sum_so_far.untyped_storage()._cdata) == ALONE
    )


def _numbers(args: Sequence[Any], pictures: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return shapes, lists of numbers and numbers, and whether any picture is channels last.

    A bool is a number; what is left out or anything else is empty.
    """
    found = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(tuple(value.shape))
        elif isinstance(value, list | tuple):
            found.append(tuple(map(int, value)))
        else:
            found.append((int(value),) if isinstance(value, int) else ())
    return (*found, (int(any(map(_is_channels_last, pictures))),))


def _is_channels_last(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() != 4 or value.is_contiguous():
        return False
    return value.is_contiguous(memory_format=torch.channels_last)


def _lacks_shapes(error: RuntimeError) -> bool:
    """Return whether an operator failed for want of a function that computes its shapes."""
    if isinstance(error, UnsupportedOperatorException | NotImplementedError):
        return True
    return "no fake impl registered" in str(error)


def _is_large(args: Any) -> bool:
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    return math.prod(sizes) >= LARGE


def _builds_module() -> bool:
    """Return whether a module's constructor is running: its weights need no memory of the host."""
    frame = sys._getframe(3)
    for _ in range(FRAMES):
        is_constructor = frame.f_code.co_name == "__init__"
        if is_constructor and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
