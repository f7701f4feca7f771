"""Let the CUDA allocator grow its segments instead of asking for new ones.

What it does: sets `expandable_segments:True` under both names that torch reads, before the process
starts, and asks the allocator afterwards whether it took it.
When it helps: sizes that vary from step to step leave holes that nothing fits into.
What it costs: nothing known in time; tools that share CUDA memory between processes may break.
How it is checked: it changes addresses only, losses are bit-identical; the technique fails where
the allocator does not say that it is on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, MemoryOption, Numerics, Rescue, Technique
from flatout.techniques.memory_pressure import is_tight, peak_bytes

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch 2.9.1 ignores the new name for CUDA without a word (pytorch #183387), and later ones warn
of the old: both are set."""
SETTING = "expandable_segments"
FREED_SHARE = 0.05
"""Of the reserved memory, where no fragmentation was measured: 9742 to 9128 MiB for GPT-2 in bf16,
6656 to 5592 for a ResNet-50 (simulated)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandableSegments(Technique):
    """Let the CUDA allocator grow its segments."""

    addresses: ClassVar[frozenset[str]] = frozenset({"fragmented_memory", "out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    rescues: ClassVar[tuple[Rescue, ...]] = (Rescue(cost=0.0, needs_device=True),)
    by_hand: ClassVar[str] = """
In the environment of the process, under both names:
PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ExpandableSegments"]:
        """Return the technique on CUDA, where memory is tight."""
        return [cls()] if profile.device_kind == "cuda" and is_tight(profile, machine) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        why = "segments grow instead of being asked for again: less memory is unused"
        return [
            MemoryOption(
                why=why,
                expands_segments=True,
                helps=lambda _, device: not device.has_expandable_segments,
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what no tensor used at the peak back."""
        story = profile.memory
        share = story.fragmentation_share if story else None
        freed = int((FREED_SHARE if share is None else share) * peak_bytes(profile))
        return Effect(peak_bytes=-freed, why="no holes between segments")

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Add the setting to both variables, with what either of them holds: torch reads one."""
        held = next(filter(None, map(variables.get, VARIABLES)), "")
        return {**variables, **dict.fromkeys(VARIABLES, with_setting(held))}

    def start(self) -> None:
        """Make sure that this torch has the allocator at all."""
        import torch

        if not torch.cuda.is_available():
            raise NotApplicable("torch sees no CUDA device: the CPU's allocator has no segments")

    def model(self, root: Any) -> Any:
        """Ask the allocator, once a tensor is on the device.

        Raises:
            RuntimeError: if it did not take the setting.
        """
        if not any(p.is_cuda for p in root.parameters()):
            raise NotApplicable("the model is not on a CUDA device")
        taken = find_setting(allocator_settings())
        if not taken:
            raise RuntimeError(
                f"the allocator says {SETTING}={taken}: the script, or something before it, set "
                f"{' or '.join(VARIABLES)} itself"
            )
        return root


def with_setting(configuration: str) -> str:
    """Return an allocator configuration with expandable segments.

    >>> with_setting("max_split_size_mb:128,expandable_segments:False")
    'max_split_size_mb:128,expandable_segments:True'
    """
    others = [part for part in configuration.split(",") if part.strip() and SETTING not in part]
    return ",".join([*others, f"{SETTING}:True"])


def allocator_settings() -> Any:
    """Return what the CUDA allocator says of itself."""
    import torch

    return torch.cuda.memory._snapshot().get("allocator_settings", {})


def find_setting(settings: Mapping[str, Any]) -> bool:
    """Return whether the allocator has expandable segments on.

    >>> find_setting({"expandable_segments": True}), find_setting({})
    (True, False)
    """
    return str(settings.get(SETTING, False)).lower() in ("true", "1")


KOREAN = """
Let the CUDA allocator grow its segments.
    CUDA 할당자가 세그먼트를 늘려 쓰게 합니다.
In the environment of the process, under both names:
    프로세스의 환경 변수에서, 두 이름 모두로:
segments grow instead of being asked for again: less memory is unused
    세그먼트를 새로 요청하지 않고 늘려서, 쓰이지 않는 메모리가 줄어듭니다
no holes between segments
    세그먼트 사이에 빈 곳이 생기지 않습니다
torch sees no CUDA device: the CPU's allocator has no segments
    torch에 CUDA 디바이스가 보이지 않습니다. CPU의 할당자에는 세그먼트가 없습니다
the model is not on a CUDA device
    모델이 CUDA 디바이스에 있지 않습니다
"""
