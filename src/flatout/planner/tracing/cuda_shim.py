"""Let torch's C++ believe in a CUDA device that is not there, by ctypes alone.

Fake tensors on `cuda` can be made on any build of torch, but the first backward aborts the process
where no device guard is registered, and raises where `at::hasCUDA()` says no. So:

1. a guard that counts no device is put into the empty slot, and torch replaces it by its own
   guard for fake devices (`c10::impl::ensureCUDADeviceGuardSet`);
2. the CUDA hooks object is pointed at a copy of its table of virtual functions, in which
   `hasCUDA()`, `hasCuDNN()` and a few more say yes.

Places in the tables are counted in the headers that the installed torch ships, and everything is
checked before it is touched: names of symbols, lengths of tables, and the machine code of the two
functions that are reused. What does not match is refused with `ShimRefused`. Linux only, and
process-wide: trace in a process of its own.
"""

import ctypes
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Pointer = ctypes.c_void_p
CUDA, META = 1, 14
"""Places of the device types in torch's table of guards: c10/core/DeviceType.h."""
GUARDS = 16
"""Places of that table that are looked at; it holds one for each device type, 20 and more."""
HEADER_SLOTS = 2
"""What is before the functions of a table: offset to top, and the type's description."""
RETURN_TRUE = (
    bytes.fromhex("b801000000c3"),  # x86-64: mov eax, 1; ret
    bytes.fromhex("20008052c0035fd6"),  # AArch64: mov w0, 1; ret
)
RETURN_FALSE = (
    bytes.fromhex("31c0c3"),  # x86-64: xor eax, eax; ret
    bytes.fromhex("00008052c0035fd6"),  # AArch64: mov w0, 0; ret
)
BRANCH_TARGETS = (bytes.fromhex("f30f1efa"), bytes.fromhex("5f2403d5"))
"""What compilers may put first: endbr64, bti c."""
YES = (
    "hasCUDA",
    "hasCUDART",
    "isBuilt",
    "isAvailable",
    "getNumGPUs",
    "deviceCount",
    "hasCuDNN",
    "compiledWithCuDNN",
    "supportsDilatedConvolutionWithCuDNN",
    "supportsDepthwiseConvolutionWithCuDNN",
    "supportsBFloat16ConvolutionWithCuDNNv8",
    "supportsBFloat16RNNWithCuDNN",
)
"""Hooks that answer true, or 1: one device, with cuDNN."""
NO = ("current_device", "getCurrentDevice", "hasPrimaryContext")
"""Hooks that answer false, or 0: the first device, and no context to visit."""
NEEDED = ("hasCUDA", "hasCuDNN", "isAvailable", "deviceCount")
CUDNN_VERSION = 91900
"""cuDNN 9.19, the one torch 2.13 ships with CUDA 13."""

_kept: list[Any] = []
"""What C++ now points at; it lives as long as the process."""


class ShimRefused(Exception):  # noqa: N818  an answer, not an error
    """Something about this torch is not as expected; the text says what."""


@functools.cache
def install() -> None:
    """Set the virtual device up in this process; a second call does nothing.

    Raises:
        ShimRefused: where this torch is not as expected. Nothing was changed then, or only the
            slot of a guard that was empty before.
    """
    import torch

    home = Path(torch.__file__).parent
    try:
        core = ctypes.CDLL(str(home / "lib" / "libc10.so"))
        library = ctypes.CDLL(str(home / "lib" / "libtorch_cpu.so"))
        guards = (Pointer * GUARDS).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        set_guard = core["_ZN3c104impl24ensureCUDADeviceGuardSetEv"]
        get_hooks = library["_ZN2at6detail12getCUDAHooksEv"]
        include = home / "include"
        guard_slots = slots_of(include / "c10/core/impl/DeviceGuardImplInterface.h")
        hook_slots = slots_of(
            include / "ATen/detail/AcceleratorHooksInterface.h",
            include / "ATen/detail/CUDAHooksInterface.h",
        )
    except (OSError, AttributeError, ValueError) as error:
        raise ShimRefused(f"this torch has other insides: {error}") from error
    code = _Code()
    get_hooks.restype = Pointer
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(Pointer))
    replaced = _hook_table(code, hooks, hook_slots, _return_true(code, guards, guard_slots))
    _set_guard(code, guards, guard_slots, set_guard)
    hooks[0] = ctypes.addressof(replaced) + HEADER_SLOTS * ctypes.sizeof(Pointer)
    found = torch._C._get_accelerator().type
    if found != "cuda":
        raise ShimRefused(f"torch still takes {found} for its accelerator")


def slots_of(*headers: Path) -> dict[str, int]:
    """Return the place of each virtual function of a class, bases first, with `` as the number.

    Raises:
        ValueError: if a header holds no such class.
    """
    slots: dict[str, int] = {}
    place = 0
    for header in headers:
        for name in virtual_functions(header.read_text(encoding="utf-8"), header.stem):
            is_override = name in slots and header is not headers[0]
            if name == "~":
                # A destructor takes two places, and those of a derived class are its base's.
                place += 0 if header is not headers[0] else 2
            elif not is_override:
                slots.setdefault(name, place)
                place += 1
    slots[""] = place
    return slots


def virtual_functions(source: str, name: str) -> list[str]:
    """Return the names of the virtual functions a class declares, `~` for its destructor.

    >>> virtual_functions("struct X A { virtual ~A(); virtual int f(int x) const = 0; };", "A")
    ['~', 'f']
    """
    source = re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL)
    source = re.sub(r"#ifdef USE_ROCM\n.*?#(?:else|endif)", "", source, flags=re.DOTALL)
    start = re.search(rf"\b(?:struct|class)\s+(?:\w+\s+)?{name}\b[^;{{]*\{{", source)
    if start is None:
        raise ValueError(f"no class {name} in its header")
    body = source[start.end() : _end_of_class(source, start.end())]
    declared = re.findall(r"\bvirtual\s+[^;{]*?\([^;{]*", body)
    found = [re.search(r"(~?)(\w+)\s*\(", each) for each in declared]
    return ["~" if each[1] else each[2] for each in found if each is not None]


def _end_of_class(source: str, start: int) -> int:
    depth = 1
    for place in range(start, len(source)):
        depth += {"{": 1, "}": -1}.get(source[place], 0)
        if depth == 0:
            return place
    raise ValueError("a class without an end")


class _Code:
    """The ranges of memory that hold code of torch's libraries."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        parts = (line.split() for line in maps)
        own = (p for p in parts if "libtorch" in p[-1] or "libc10" in p[-1])
        ranges = (p[0].partition("-") for p in own if "x" in p[1])
        self.ranges = [(int(low, 16), int(high, 16)) for low, _, high in ranges]

    def holds(self, address: int | None) -> bool:
        """Return whether an address is in code."""
        return address is not None and any(low <= address < high for low, high in self.ranges)

    def length(self, table: Any) -> int:
        """Return how many pointers to code follow each other."""
        count = 0
        while self.holds(table[count]):
            count += 1
        return count

    def is_one_of(self, address: int, codes: Iterable[bytes]) -> bool:
        """Return whether the function at an address is one of these instructions."""
        if not self.holds(address):
            return False
        found = ctypes.string_at(address, 16)
        for prefix in BRANCH_TARGETS:
            found = found.removeprefix(prefix)
        return any(found.startswith(code) for code in codes)


def _table(holder: Any) -> Any:
    """Return the table of virtual functions of an object."""
    return ctypes.cast(holder[0], ctypes.POINTER(Pointer))


def _return_true(code: _Code, guards: Any, slots: dict[str, int]) -> int:
    """Return the address of a function that is nothing but `return true`.

    That is the meta device's guard asked whether a stream is done.
    """
    if guards[META] is None:
        raise ShimRefused("no guard of the meta device")
    table = _table(ctypes.cast(guards[META], ctypes.POINTER(Pointer)))
    if code.length(table) < slots[""] - 1:
        raise ShimRefused("the guards have fewer functions than their header declares")
    address = table[slots.get("queryStream", 0)]
    if not code.is_one_of(address, RETURN_TRUE):
        raise ShimRefused("queryStream of the meta device's guard is not `return true`")
    return int(address)


def _hook_table(code: _Code, hooks: Any, slots: dict[str, int], yes: int) -> Any:
    """Return a copy of the hooks' table in which a device is there."""
    table = _table(hooks)
    count, declared = code.length(table), slots[""]
    missing = [name for name in NEEDED if name not in slots]
    if missing:
        raise ShimRefused(f"the headers declare no hook {missing[0]}")
    no = table[slots["hasCUDA"]]
    if code.is_one_of(no, RETURN_FALSE):
        is_known = count == declared
    else:  # a build with CUDA has hooks of its own behind the same places
        is_known = count >= declared and _says_no(no)
        no = _constant(ctypes.c_bool, 0)
    if not is_known:
        raise ShimRefused(f"{count} CUDA hooks where the headers declare {declared}")
    copy = (Pointer * (count + HEADER_SLOTS))(*[table[i - HEADER_SLOTS] for i in range(count + 2)])
    answers: Sequence[tuple[str, int]] = [
        *((name, yes) for name in YES),
        *((name, no) for name in NO),
        ("versionCuDNN", _constant(ctypes.c_long, CUDNN_VERSION)),
        ("versionRuntimeCuDNN", _constant(ctypes.c_long, CUDNN_VERSION)),
        ("batchnormMinEpsilonCuDNN", _constant(ctypes.c_double, 0.0)),
    ]
    for name, address in answers:
        if name in slots:
            copy[slots[name] + HEADER_SLOTS] = address
    _kept.append(copy)
    return copy


def _says_no(address: int) -> bool:
    """Return whether `hasCUDA` answers false: there is no device."""
    return ctypes.CFUNCTYPE(ctypes.c_bool, Pointer)(address)(None) is False


def _constant(kind: Any, value: float) -> int:
    """Return the address of a function that returns one value."""
    function = ctypes.CFUNCTYPE(kind, Pointer)(lambda _: value)
    _kept.append(function)
    address = ctypes.cast(function, Pointer).value
    assert address is not None
    return address


def _set_guard(code: _Code, guards: Any, slots: dict[str, int], set_guard: Any) -> None:
    """Fill the empty slot of CUDA's guard with one that counts no device; torch replaces it."""
    if guards[CUDA] is not None:
        return
    table = _table(ctypes.cast(guards[META], ctypes.POINTER(Pointer)))
    count = code.length(table)
    draft = (Pointer * count)(*[table[i] for i in range(count)])
    draft[slots["deviceCount"]] = _constant(ctypes.c_byte, 0)
    holder = (Pointer * 1)(ctypes.addressof(draft))
    _kept.extend([draft, holder])
    guards[CUDA] = ctypes.addressof(holder)
    set_guard()
    if guards[CUDA] == ctypes.addressof(holder):
        guards[CUDA] = None
        raise ShimRefused("torch did not put its guard for fake devices in")
