"""Keep freed memory in the process instead of giving it back to the system.

What it does: preloads tcmalloc where it is installed, or tells glibc's own allocator never to map
and unmap large blocks.
When it helps: on the CPU, where every step frees its activations and faults them in again.
What it costs: the process keeps its peak memory.
How it is checked: losses and gradients are bit-identical.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

from flatout.hardware.accelerator import find_tcmalloc
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique

GLIBC_VARIABLES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""No block is mapped on its own, nothing below 2 GiB is given back, and the heap grows by 64 MiB:
1.09-1.19x in fp32 and 0.94-1.19x in bf16 (measured, spread 8 %)."""
FAULT_US = 0.5
"""Time of one minor page fault: kernel entry and zeroing 4 KiB. General knowledge, 0.25 us on bare
metal to 1 us in a virtual machine; not measured here."""
SAVED_SHARE = {"tcmalloc": 0.9, "glibc": 0.7}
"""Share of the faults that goes away. Assumed from the measured gains: 1.08-1.34x
with tcmalloc, less with glibc's settings."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAllocator(Technique):
    """Keep freed memory in the process."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "optimizer"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
In the environment of the process, for the allocator "$library":
tcmalloc: LD_PRELOAD=/path/to/libtcmalloc_minimal.so
glibc: MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_, see the technique's page.
"""

    library: Literal["tcmalloc", "glibc"] = "glibc"
    """`tcmalloc` must be installed; `glibc` only sets the allocator that is there."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["CpuAllocator"]:
        """Return what is installed, on the CPU."""
        if profile.device_kind != "cpu" or not profile.minor_faults_per_step:
            return ()
        found: list[CpuAllocator] = []
        if machine.tcmalloc_path:
            found.append(cls(library="tcmalloc"))
        if is_glibc():
            found.append(cls(library="glibc"))
        return found

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the time of the page faults back, but for those that stay."""
        faults_ms = profile.minor_faults_per_step * FAULT_US / 1e3
        most_ms = profile.step_ms.median * profile.share("forward", "backward", "optimizer")
        return Effect(
            step_ms=-min(faults_ms * SAVED_SHARE[self.library], most_ms),
            why=f"{profile.minor_faults_per_step:.0f} page faults per step",
        )

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Preload tcmalloc, or set glibc's allocator."""
        if self.library == "glibc":
            return {**variables, **GLIBC_VARIABLES}
        path = find_tcmalloc()
        return variables if path is None else with_preload(variables, path)

    def start(self) -> None:
        """Make sure that the process really runs with it."""
        if self.library == "tcmalloc":
            if "tcmalloc" not in Path("/proc/self/maps").read_text(errors="surrogateescape"):
                raise NotApplicable(
                    "tcmalloc was not preloaded; install it (Debian: apt install "
                    "libtcmalloc-minimal4) or take library='glibc'"
                )
            return
        if not is_glibc():
            raise NotApplicable("this Python does not use glibc's allocator")
        missing = [name for name in GLIBC_VARIABLES if name not in os.environ]
        if missing:
            raise NotApplicable(f"the process started without {', '.join(missing)}")


def is_glibc() -> bool:
    """Return whether this Python runs on glibc."""
    return platform.libc_ver()[0] == "glibc"


def with_preload(variables: Mapping[str, str], path: str) -> Mapping[str, str]:
    """Return the environment with one more library in front of those preloaded already.

    >>> with_preload({"LD_PRELOAD": "/lib/a.so"}, "/lib/b.so")
    {'LD_PRELOAD': '/lib/b.so:/lib/a.so'}
    """
    others = variables.get("LD_PRELOAD", "")
    return {**variables, "LD_PRELOAD": f"{path}:{others}" if others else path}


KOREAN = """
Keep freed memory in the process.
    해제한 메모리를 프로세스 안에 둡니다.
In the environment of the process, for the allocator "{library}":
    프로세스의 환경 변수에서, 할당자 "{library}"의 경우:
tcmalloc: LD_PRELOAD=/path/to/libtcmalloc_minimal.so
    tcmalloc이면 LD_PRELOAD=/path/to/libtcmalloc_minimal.so
glibc: MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_, see the technique's page.
    glibc이면 MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_를 씁니다. 기법 문서를
    보세요.
{n} page faults per step
    스텝마다 페이지 폴트가 {n}번 납니다
tcmalloc was not preloaded; install it (Debian: apt install libtcmalloc-minimal4) or take
library='glibc'
    tcmalloc이 미리 로드되지 않았습니다. 설치하거나(Debian: apt install libtcmalloc-minimal4)
    library='glibc'를 쓰세요
this Python does not use glibc's allocator
    이 파이썬은 glibc의 할당자를 쓰지 않습니다
the process started without {names}
    프로세스가 {names} 없이 시작되었습니다
"""
