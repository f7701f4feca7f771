"""Call a model and leave no trace: random streams, buffers and attributes are put back."""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PLAIN = (bool, int, float, str, type(None))
"""Types of a module's own settings and counts: compared by their value."""
Attributes = list[tuple[dict[str, Any], dict[str, Any], dict[str, list[Any]]]]
"""Of each module its attributes, what they were, and what was in the lists among them."""


@contextmanager
def streams_kept() -> Iterator[None]:
    """Set the random streams of this process back at the end, those of its GPUs too.

    The casts that autocast has kept are forgotten. Those of calls without gradients have none, and
    the script's own call would take them: torch 2.9 gives such weights no gradient (pytorch issue
    158232, fixed by pull request 165068), later ones choose other operators, which a second run for
    checkpointing does not.
    """
    before = [(put, read()) for read, put in _streams().values()]
    try:
        yield
    finally:
        for put, state in before:
            put(state)
        sys.modules["torch"].clear_autocast_cache()


def stream_states() -> dict[str, Any]:
    """Return the states of the random streams of this process, by name."""
    return {name: read() for name, (read, _) in _streams().items()}


def _streams() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how to read and how to set the streams, by name."""
    import torch

    found = host_streams() | {"torch": (torch.get_rng_state, torch.set_rng_state)}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch.cuda"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    return found


def host_streams() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how to read and how to set Python's and numpy's streams, by name."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "random": (random.getstate, random.setstate)
    }
    if "numpy.random" in sys.modules:
        numpy = sys.modules["numpy.random"]
        # The other form is for one kind of generator alone.
        found["numpy.random"] = functools.partial(numpy.get_state, legacy=False), numpy.set_state
    return found


@dataclass(frozen=True, slots=True, eq=False)
class KeptBuffer:
    """A buffer as it was."""

    owner: "torch.nn.Module"
    name: str
    buffer: "torch.Tensor"
    value: "torch.Tensor"
    changes: int

    @property
    def is_written(self) -> bool:
        """Whether torch counted a change since."""
        return _changes(self.buffer) != self.changes

    @property
    def is_replaced(self) -> bool:
        """Whether its owner has another one now."""
        return self.owner._buffers.get(self.name) is not self.buffer

    def put_back(self) -> None:
        """Let it be, and say, what it was and said."""
        if self.is_replaced:
            self.owner._buffers[self.name] = self.buffer
        if self.buffer.shape == self.value.shape:
            # Past autograd: batch norm saved its statistics for a backward that never reads them.
            self.buffer.data.copy_(self.value)


def buffers_of(module: "torch.nn.Module") -> list[KeptBuffer]:
    """Return the module's buffers as they are now."""
    return [
        KeptBuffer(owner, name, buffer, buffer.detach().clone(), _changes(buffer))
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def _changes(buffer: "torch.Tensor") -> int:
    return 0 if buffer.is_inference() else buffer._version


@contextmanager
def buffers_kept(module: "torch.nn.Module") -> Iterator[None]:
    """Put the module's buffers back at the end, those too that were replaced by others."""
    before = buffers_of(module)
    try:
        yield
    finally:
        for kept in before:
            kept.put_back()


def attributes_of(module: "torch.nn.Module") -> Attributes:
    """Return what the script's own modules in it keep as they are now; torch's keep nothing."""
    own = (m for m in module.modules() if not type(m).__module__.startswith("torch."))
    known = [vars(inner) for inner in own]
    return [
        (own, dict(own), {name: [*x] for name, x in own.items() if type(x) is list})
        for own in known
    ]


def changed_attributes(before: Attributes) -> Attributes:
    """Return those of modules of which one is new, has another value or is a longer list."""

    def is_changed(own: dict[str, Any], known: dict[str, Any], lists: dict[str, list[Any]]) -> bool:
        if own.keys() != known.keys() or any(len(own[k]) != len(x) for k, x in lists.items()):
            return True
        pairs = ((known[name], value) for name, value in own.items())
        return any(one is not x and not (isinstance(x, PLAIN) and one == x) for one, x in pairs)

    return [entry for entry in before if is_changed(*entry)]


def put_attributes_back(before: Attributes) -> None:
    """Let the attributes be what they were, and no others; functions stay: techniques set them."""
    for own, known, lists in before:
        for name in [name for name, value in own.items() if not callable(value)]:
            if name not in known:
                del own[name]
        own.update((k, x) for k, x in known.items() if not callable(own.get(k)))
        for name, values in lists.items():
            known[name][:] = values


@contextmanager
def state_kept(module: "torch.nn.Module") -> Iterator[None]:
    """Put random streams, and the module's buffers and attributes, back at the end."""
    before = attributes_of(module)
    with streams_kept(), buffers_kept(module):
        try:
            yield
        finally:
            put_attributes_back(before)
