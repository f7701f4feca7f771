"""Numbers of the device that the host reads a step later, where the script does not notice.

A read gives a stand-in that takes part in sums and goes into what is printed. Whatever else is
asked of it makes it wait for its value, which is then a plain number.
"""

import operator
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from flatout.engine.late_output import LateOutput
from flatout.engine.read_sites import ReadSites

STEPS_LATE = 2
"""Forwards after which a value is waited for: at the second one, the step after its own has been
launched whole."""
Read = Callable[[torch.Tensor], Any]
_READ: Read = torch.Tensor.item
_PRINT = print


class Late:
    """A number that is on its way from the device, or a sum with such a number in it."""

    __slots__ = ("_event", "_host", "_known", "_parts", "_reads", "_value", "sample")
    __array_ufunc__ = None
    """Numpy leaves operations with it to it."""
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, reads: "LateReads", sample: Any) -> None:
        self._reads = reads
        self._known = False
        self._value: Any = None
        self._host: Any = None
        self._event: Any = None
        self._parts: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.sample = sample
        """A number of the same type, to try formats with."""

    def is_there(self) -> bool:
        """Tell whether the value is known without a wait."""
        if self._known:
            return True
        if self._parts is not None:
            return all(not isinstance(part, Late) or part.is_there() for part in self._parts[1])
        return self._event is None or bool(self._event.query())

    def value(self) -> Any:
        """Return the plain number; this waits where it is still on its way."""
        if self._known:
            return self._value
        if self._parts is not None:
            operation, parts = self._parts
            self._value = operation(*map(plain, parts))
        else:
            if self._event is not None:
                self._event.synchronize()
            self._value = _READ(self._host)
            self._reads.give_back(self._host)
        self._known, self._parts, self._host, self._event = True, None, None, None
        return self._value

    def __format__(self, spec: str) -> str:
        return self._reads.text(self, sys._getframe(1), lambda value: format(value, spec))

    def __str__(self) -> str:
        return self._reads.text(self, sys._getframe(1), str)

    def __repr__(self) -> str:
        return repr(self.value())

    def __reduce__(self) -> Any:
        value = self.value()  # what is copied or pickled is a plain number
        return type(value), (value,)

    def __round__(self, digits: int | None = None) -> Any:
        return self._reads.join(sys._getframe(1), round, self, digits)

    def __neg__(self) -> Any:
        return self._reads.join(sys._getframe(1), operator.neg, self)

    def __pos__(self) -> Any:
        return self._reads.join(sys._getframe(1), operator.pos, self)

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, int | float) or not other:
            return self.value() / plain(other)
        return self._reads.join(sys._getframe(1), operator.truediv, self, other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)  # is_integer, as_integer_ratio


def plain(value: Any) -> Any:
    """Return a number as the script knows it, whether it was late or not."""
    return value.value() if isinstance(value, Late) else value


def _summing(operation: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forth(self: Late, other: Any) -> Any:
        return self._reads.join(sys._getframe(1), operation, self, other)

    def back(self: Late, other: Any) -> Any:
        return self._reads.join(sys._getframe(1), operation, other, self)

    return forth, back


def _at_once(operation: Callable[..., Any]) -> Callable[..., Any]:
    def now(self: Late, *others: Any) -> Any:
        return operation(self.value(), *map(plain, others))

    return now


def _at_once_back(operation: Callable[..., Any]) -> Callable[..., Any]:
    def now(self: Late, other: Any) -> Any:
        return operation(other, self.value())

    return now


for _name in ("add", "sub", "mul"):
    _forth, _back = _summing(getattr(operator, _name))
    setattr(Late, f"__{_name}__", _forth)
    setattr(Late, f"__r{_name}__", _back)
for _name in ("floordiv", "mod", "pow"):
    setattr(Late, f"__{_name}__", _at_once(getattr(operator, _name)))
for _name in ("truediv", "floordiv", "mod", "pow"):
    setattr(Late, f"__r{_name}__", _at_once_back(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "abs"):
    setattr(Late, f"__{_name}__", _at_once(getattr(operator, _name)))
for _kind in (bool, int, float, complex):
    setattr(Late, f"__{_kind.__name__}__", _at_once(_kind))
setattr(Late, "__trunc__", _at_once(int))  # noqa: B010  like its neighbours


class LateReads:
    """The reads of one training: which may be late, and which are under way."""

    def __init__(self, output: LateOutput | None = None) -> None:
        self.sites = ReadSites()
        self.output = output
        self.pending: deque[tuple[int, Late]] = deque()
        self.tick = 0
        self.late: Counter[str] = Counter()
        """Late reads by line."""
        self.at_once: dict[str, str] = {}
        """Lines that read at once, with the reason."""
        self._free: dict[Any, list[torch.Tensor]] = {}

    def read(self, tensor: torch.Tensor, frame: FrameType, line: str) -> Any:
        """Return a tensor's number: later where the line allows it."""
        site = self.sites.of(frame)
        is_number = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32)
        if not site.is_late or not is_number or not self.can_be_late(tensor):
            self.at_once.setdefault(line, site.why or "it is no single number on a GPU or CPU")
            return _READ(tensor)
        self.late[line] += 1
        return self.send(tensor)

    def can_be_late(self, tensor: torch.Tensor) -> bool:
        """Tell whether the number can travel by itself."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and tensor.numel() == 1 and tensor.device.type in ("cpu", "cuda")

    def send(self, tensor: torch.Tensor) -> Late:
        """Let a number travel to the host, and return what stands for it."""
        late = Late(self, 1.0 if tensor.is_floating_point() else 1)
        with torch.no_grad():
            late._host = self._room(tensor)
            late._host.copy_(tensor.detach().reshape(()), non_blocking=True)
        if tensor.is_cuda:
            late._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            late._event.record(torch.cuda.current_stream(tensor.device))
        self.pending.append((self.tick, late))
        return late

    def join(self, frame: FrameType, operation: Callable[..., Any], *parts: Any) -> Any:
        """Return the outcome of an operation: a plain number where it can be or must be one."""
        if not self.sites.of(frame).is_late or all(_is_known(part) for part in parts):
            return operation(*map(plain, parts))
        samples = [part.sample if isinstance(part, Late) else part for part in parts]
        if not all(isinstance(sample, int | float | None) for sample in samples):
            return operation(*map(plain, parts))
        late = Late(self, operation(*samples))
        late._parts = operation, parts
        self.pending.append((self.tick, late))
        return late

    def text(self, late: Late, frame: FrameType, render: Callable[[Any], str]) -> str:
        """Return a number as text, or a stand-in where a `print` will write it."""
        output = self.output
        is_late = output is not None and sys.stdout is output and not late._known
        is_own = "print" in frame.f_globals or "print" in frame.f_locals or print is not _PRINT
        if not is_late or is_own or self.sites.of(frame).kind != "print":
            return render(late.value())
        render(late.sample)  # a format that does not fit fails here, as it would have
        return output.place(late, render)  # type: ignore[union-attr]

    def step(self) -> None:
        """Wait for what is a step old; the device is busy with what was launched since."""
        self.tick += 1
        while self.pending and self.pending[0][0] <= self.tick - STEPS_LATE:
            self.pending.popleft()[1].value()
        while self.pending and self.pending[0][1].is_there():
            self.pending.popleft()[1].value()
        if self.output is not None:
            self.output.let_out()

    def drain(self) -> None:
        """Wait for everything, and write everything."""
        while self.pending:
            self.pending.popleft()[1].value()
        if self.output is not None:
            self.output.let_out(waits=True)

    def give_back(self, host: torch.Tensor) -> None:
        """Let the place of a number that was read serve again."""
        self._free.setdefault((host.dtype, host.is_pinned()), []).append(host)

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free.get((tensor.dtype, tensor.is_cuda))
        if free:
            return free.pop()
        # By name: the script may have made another device the default one.
        return torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _is_known(part: Any) -> bool:
    return not isinstance(part, Late) or part._known
