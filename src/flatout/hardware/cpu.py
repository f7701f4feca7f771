"""What the processor is and can do."""

from pathlib import Path

from flatout.hardware.limits import ROOT, affinity, read_text

FEATURES = frozenset(
    {
        *("avx2", "avx512f", "amx_int8", "sve"),
        *("avx512_bf16", "amx_bf16", "bf16"),
        *("avx512_fp16", "amx_fp16", "asimdhp"),
    }
)
"""The instruction sets that change what is worth trying; `sve`, `bf16` and `asimdhp` (half
precision) are Arm's names."""


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's name; empty where the kernel does not tell it."""
    for field in ("model name", "Processor", "Hardware", "cpu model"):
        if name := _field(field, root):
            return " ".join(name.split())
    return ""


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Return those of `FEATURES` that the processor has."""
    flags = _field("flags", root) or _field("Features", root)
    return FEATURES & frozenset(flags.lower().split())


def physical_cores(cpus: frozenset[int] | None = None, root: Path = ROOT) -> int:
    """Return the number of physical cores behind the given logical ones (default: usable ones)."""
    topology = root / "sys/devices/system/cpu"
    groups = set()
    for number in affinity() if cpus is None else cpus:
        folder = topology / f"cpu{number}/topology"
        siblings = read_text(folder / "core_cpus_list") or read_text(
            folder / "thread_siblings_list"
        )
        groups.add(siblings or str(number))
    return len(groups)


def _field(name: str, root: Path) -> str:
    """Return the first value of a field in /proc/cpuinfo."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _colon, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
