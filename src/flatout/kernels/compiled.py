"""C sources of this package, compiled once with the machine's own compiler and loaded.

Torch's compiler needs the same compiler for a CPU. What was compiled is in flatout's cache, under
a name that changes with the source, the compiler and the processor.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from flatout.launch.trial_process import scratch_root
from flatout.records.errors import NotApplicable

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
"""Fused multiplication and addition would round once where the original rounds twice."""
COMPILERS = ("cc", "gcc", "clang")
LIMIT_S = 60.0
"""Longest time for a file; these take about a second."""


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
    """Return the library of `<name>.c` alongside this module."""
    source = Path(__file__).with_name(f"{name}.c")
    compiler = find_compiler()
    path = _cached_path(source, compiler)
    if not path.exists():
        _compile(source, compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotApplicable(
            f"what {compiler} made of {source.name} does not load: {error}"
        ) from None


def load_function(name: str, function: str, *arguments: Any) -> Any:
    """Return a function of `<name>.c` that takes these types and returns an int.

    Raises:
        NotApplicable: if there is no compiler, or it fails.
    """
    found = getattr(load_library(name), function)
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def has_compiler() -> bool:
    """Return whether this machine has a C compiler."""
    try:
        find_compiler()
    except NotApplicable:
        return False
    return True


def find_compiler() -> str:
    """Return the C compiler of this machine."""
    named = os.environ.get("CC", "").split()
    found = next(filter(None, map(shutil.which, (*named[:1], *COMPILERS))), None)
    if found is None:
        raise NotApplicable("it needs a C compiler (cc, gcc or clang) on this machine")
    return found


def _cached_path(source: Path, compiler: str) -> Path:
    """Return where the library is: homes are shared by machines with other processors."""
    what = (source.read_bytes(), _identity(compiler), " ".join(FLAGS).encode(), _processor())
    digest = hashlib.blake2b(b"\0".join(what), digest_size=10).hexdigest()
    return scratch_root() / "libraries" / f"{source.stem}-{digest}.so"


def _identity(compiler: str) -> bytes:
    """Return what changes with the compiler: asking it for its version takes longer than a batch.

    What an older one compiled is not wrong, and is compared with its reference where it is used.
    """
    path = Path(compiler).resolve()
    known = path.stat()
    return f"{path} {known.st_size} {known.st_mtime_ns}".encode()


@functools.cache
def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return b"\n".join(sorted({x for x in lines if x.startswith((b"flags", b"Features"))}))


def _compile(source: Path, compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(made), str(source), "-lm", "-ldl"],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        if done.returncode:
            first = next(iter(done.stderr.strip().splitlines()), "no message")
            raise NotApplicable(f"{compiler} does not compile {source.name}: {first}")
        made.replace(path)
