"""A CUDA device that is not there: fake tensors on `cuda` behave as on the machine planned for.

With a GPU present nothing here is needed, and nothing is patched: fake tensors use the real build.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.agent.nested import map_leaves
from flatout.agent.patching import swapped
from flatout.planner.kernel_workspaces import GATES
from flatout.planner.tracing import cuda_shim, layer_kernels

CAPABILITY = (9, 0)
"""Of the pretended device, where no one says another: Hopper."""
BUILT_WITH = torch._C._show_config()
"""Asked for where a device is pretended, a build without CUDA would fail."""
TOTAL_BYTES = 2**47
"""Of the pretended device: a script that asks for free memory is never told to use less."""
Note = Callable[[str], None]
"""Called with each assumption, for the reader."""


class VirtualFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that never touch the device, whatever `torch.cuda.is_available` says."""

    @property
    def avoid_device_init(self) -> bool:
        """Keep torch from starting CUDA, which is not there."""
        return True


@contextlib.contextmanager
def virtual_cuda(capability: tuple[int, int], note: Note) -> Iterator[None]:
    """Pretend a CUDA device while this runs; what C++ was told stays for the process's life.

    Raises:
        ShimRefused: where this torch does not let itself be told.
    """
    cuda_shim.install()
    _capability[0] = capability
    _implement("scaled_dot_product_attention", _attend)
    with contextlib.ExitStack() as stack:
        stack.enter_context(device_layers(note))
        if hasattr(fake_tensor, "init_gpu_context"):
            # It makes a real tensor where a device is there, and this one is not.
            stack.enter_context(swapped(fake_tensor, "init_gpu_context", _constantly(None)))
        for owner, names in _pretended(capability):
            for name, value in names.items():
                stack.enter_context(swapped(owner, name, value))
        yield


@contextlib.contextmanager
def device_layers(note: Note) -> Iterator[None]:
    """Let layers allocate what they would outside a trace while this runs, on a real device too.

    Torch's own shape functions leave cuDNN's reserve space out, and a linear layer adds its bias
    out of place where a dispatch mode looks on.
    """
    _implement("linear", layer_kernels.linear)
    with contextlib.ExitStack() as stack:
        for kind in GATES:
            stack.enter_context(swapped(torch._VF, kind, layer_kernels.recurrent(kind, note)))
        flatten = layer_kernels.flatten_parameters
        stack.enter_context(swapped(torch.nn.RNNBase, "flatten_parameters", flatten))
        yield


def _pretended(capability: tuple[int, int]) -> Sequence[tuple[Any, Mapping[str, Any]]]:
    """Return whose functions are replaced, and what is put in the place of each."""
    properties = SimpleNamespace(
        name="virtual CUDA device",
        major=capability[0],
        minor=capability[1],
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=False,
        gcnArchName="",
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_capability": capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "is_bf16_supported": capability >= (8, 0),
        "is_current_stream_capturing": False,
        "mem_get_info": (TOTAL_BYTES, TOTAL_BYTES),
    }
    nothing = ("_lazy_init", "init", "synchronize", "set_device", "manual_seed", "manual_seed_all")
    seeds = ("seed", "seed_all", "set_rng_state", "set_rng_state_all", "empty_cache")
    meters = ("reset_peak_memory_stats", "reset_max_memory_allocated", "_sleep", "ipc_collect")
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    cuda: dict[str, Any] = {name: _constantly(value) for name, value in answers.items()}
    cuda |= {name: _constantly(None) for name in (*nothing, *seeds, *meters)}
    cuda |= {name: _constantly(0) for name in zero}
    cuda |= {
        "get_rng_state": _random_state,
        "get_rng_state_all": lambda: [_random_state()],
        "memory_stats": _constantly({}),
        "memory_summary": _constantly(""),
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "current_stream": SimulatedStream,
        "default_stream": SimulatedStream,
        "stream": lambda stream: contextlib.nullcontext(stream),
    }
    accelerator = {
        "synchronize": _constantly(None),
        "current_stream": SimulatedStream,
        "set_stream": _constantly(None),
        **{name: _constantly(0) for name in zero if hasattr(torch.accelerator, name)},
    }
    tensor = {
        "record_stream": _constantly(None),
        "pin_memory": lambda tensor, *_, **__: tensor,
        "is_pinned": lambda *_, **__: False,
    }
    random = {"get_rng_state": _random_state, "set_rng_state": _constantly(None)}
    build = {
        # Libraries of kernels keep it when they are imported, where a device is there.
        "_cuda_getCurrentRawStream": _constantly(0),
        "_show_config": _constantly(BUILT_WITH),
        "_scatter": _scattered,
    }
    return (
        (torch.cuda, cuda),
        (torch.accelerator, accelerator),
        (torch.Tensor, tensor),
        (torch.cuda.random, random),
        (torch, {"Generator": Generator, "load": _loading(torch.load)}),
        (torch._C, build),
    )


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    """Return what stands for the device's random state: seed and offset, 16 bytes on the host."""
    return torch.empty(16, dtype=torch.uint8, device="cpu")


def _scattered(tensor: torch.Tensor, gpus: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """Return what `DataParallel` hands its only GPU: all of it."""
    return tuple(tensor.to(torch.device("cuda", gpu)) for gpu in gpus)


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` that reads onto the host and moves what belongs on a GPU from there."""

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if callable(map_location):
            return load(file, map_location, *args, **kwargs)
        homes: set[str] = set()

        def on_host(storage: Any, home: str) -> Any:
            homes.add(home)
            return storage

        value = load(file, on_host, *args, **kwargs)
        where = map_location if isinstance(map_location, Mapping) else {}
        wanted = {str(where.get(home, home)) for home in homes}
        if map_location is not None and not where:
            wanted = {str(torch.device(map_location))}
        is_wanted = any(each.startswith("cuda") for each in wanted)
        return map_leaves(value, _on_gpu) if is_wanted else value

    return loaded


def _on_gpu(leaf: Any) -> Any:
    """Return a part of a checkpoint on the device, where it is a tensor or a module."""
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return torch.empty_like(leaf, device="cuda")
    return leaf.to("cuda") if isinstance(leaf, torch.Tensor | torch.nn.Module) else leaf


_generator = torch.Generator


class _Generators(type(_generator)):  # type: ignore[misc]  # its type has no stub
    """The class of both kinds: torch's own generators stay generators."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _generator)


class Generator(_generator, metaclass=_Generators):
    """A generator of the host, whatever device it is asked for: no fake tensor draws from it."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        """Return one of the host."""
        return super().__new__(cls)


def _constantly(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class SimulatedEvent:
    """An event of a stream on which nothing runs: it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = _constantly(None)
    query = _constantly(value=True)
    elapsed_time = _constantly(0.0)


class SimulatedStream:
    """A stream on which nothing runs: it is done."""

    stream_id = cuda_stream = 0
    wait_stream = wait_event = synchronize = _constantly(None)
    query = _constantly(value=True)
    is_capturing = _constantly(value=False)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or SimulatedEvent()

    def __enter__(self) -> "SimulatedStream":
        return self

    def __exit__(self, *_: object) -> None: ...


_capability: list[tuple[int, int]] = [CAPABILITY]
"""Of the device that attention is computed for."""


@functools.wraps(layer_kernels.attend)
def _attend(*args: Any, **kwargs: Any) -> Any:
    return layer_kernels.attend(_capability[0], *args, **kwargs)


@functools.cache
def _implement(name: str, kernel: Callable[..., Any]) -> Any:
    """Let a function stand for one of torch's operators on `cuda` for the rest of the process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("AutogradCUDA", "CUDA"):
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    return library
