"""GPUs that a plan may be made for without having one: memory, arithmetic, bandwidth, sources.

Memory is what torch can have: the total capacity that its out-of-memory messages name, which is
less than what is on the box. Arithmetic is the dense peak of the maker's data sheet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatout.records.errors import UserError, unknown
from flatout.records.machine import Device
from flatout.records.units import GIB, KIB, MIB, format_bytes

MIN_BYTES = 64 * MIB
"""A number below this was meant as something else: no GPU is that small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One kind of GPU."""

    name: str
    full_name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    """None for AMD, and where it is not known."""
    bf16_flops: float
    """Dense, per second, with fp32 accumulation; fp16's where the GPU has no bf16."""
    fp32_flops: float
    """Of plain fp32 without tensor cores."""
    tf32_flops: float
    """Dense; fp32's where the GPU has no TF32."""
    bandwidth: float
    """Bytes per second of the device's memory."""
    host_bandwidth: float
    """Bytes per second to the host in one direction, by its link."""
    peer_bandwidth: float
    """Bytes per second to another GPU in one direction."""


# Name, GiB, compute capability; TFLOP/s in bf16, TF32 and fp32; GB/s of the memory, to the host
# and to another GPU; full name.
TABLE = """
h200       139.72  9.0   989.4   494.7   66.9  4800  50  450  NVIDIA H200 SXM
h100-pcie   79.10  9.0   756.5   378     51.2  2039  50   50  NVIDIA H100 PCIe
h100-nvl    93.1   9.0   835.5   417.5   60    3938  50  300  NVIDIA H100 NVL
h100        79.10  9.0   989.4   494.7   66.9  3350  50  450  NVIDIA H100 SXM 80GB
a100-80     79.14  8.0   312     156     19.5  2039  25  300  NVIDIA A100 SXM 80GB
a100-40     39.38  8.0   312     156     19.5  1555  25  300  NVIDIA A100 SXM 40GB
l40s        44.42  8.9   362.05  183     91.6   864  25   25  NVIDIA L40S
l4          22.03  8.9   121      60     30.3   300  25   25  NVIDIA L4
a10g        21.99  8.6    70      35     31.2   600  25   25  NVIDIA A10G
t4          14.56  7.5    65       8.1    8.1   320  12   12  NVIDIA T4
rtx4090     23.52  8.9   165.2    82.6   82.6  1008  25   25  NVIDIA GeForce RTX 4090
rtx3090     23.69  8.6    71      35.6   35.6   936  25   25  NVIDIA GeForce RTX 3090
mi300x     191.45  -    1307.4   653.7  163.4  5300  50   64  AMD Instinct MI300X
"""
"""In the order of `flatout plan --help`. Rates are of the makers' data sheets, of the RTX 4090 and
3090 of the Ada and GA102 whitepapers. A link of 16 lanes really gives 12, 25 or 50 GB/s one way:
some four fifths of 16, 32 and 64 of PCIe 3, 4 and 5. Memory is what torch's messages name, and the
least where they differ (h100: vllm #27508; l40s: Step-Video-T2V #8; t4: Open-Sora #697; rtx4090:
VGen #104); the PCIe H100's is taken to be that of the SXM, and of the NVL's 94 GB, ECC and driver
are taken to keep 1 %. The T4's bf16 is fp16."""


def _model(row: str) -> GpuModel:
    name, gib, capability, *rates, full_name = row.split(maxsplit=9)
    bf16, tf32, fp32, memory, host, peer = map(float, rates)
    major, _, minor = capability.partition(".")
    return GpuModel(
        name=name,
        full_name=full_name,
        memory_bytes=int(float(gib) * GIB),
        compute_capability=(int(major), int(minor)) if minor else None,
        bf16_flops=bf16 * 1e12,
        tf32_flops=tf32 * 1e12,
        fp32_flops=fp32 * 1e12,
        bandwidth=memory * 1e9,
        host_bandwidth=host * 1e9,
        peer_bandwidth=peer * 1e9,
    )


MODELS = tuple(map(_model, TABLE.strip().splitlines()))
CATALOGUE: Mapping[str, GpuModel] = {model.name: model for model in MODELS}

UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 1e3, "mb": 1e6, "gb": 1e9}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
UNNAMED = "unnamed"
UNKNOWN_GPU = CATALOGUE["a100-80"]
"""Arithmetic that a device without a name is given; times of a plan are ratios, not seconds."""


def find_gpu(text: str) -> GpuModel:
    """Return the GPU of this name, or one of unknown make with this much memory.

    >>> find_gpu("H200").compute_capability, find_gpu("24GiB").memory_bytes
    ((9, 0), 25769803776)
    """
    word = text.strip().lower()
    if word in CATALOGUE:
        return CATALOGUE[word]
    match = SIZE.fullmatch(word)
    if match and match[2] in UNITS:
        return unnamed(int(float(match[1]) * UNITS[match[2]]), text)
    sizes = [name for name in CATALOGUE if word and name.startswith(f"{word}-")]
    if sizes:
        raise UserError(f"there are several {text}; give one of: {', '.join(sizes)}")
    said = unknown("GPU", text, CATALOGUE)
    pause = "" if said.endswith("?") else ";"
    raise UserError(f"{said}{pause} a size such as 24GiB works too")


def unnamed(memory_bytes: int, text: str) -> GpuModel:
    """Return a GPU of which only the memory is known; the rest is an A100's."""
    if memory_bytes < MIN_BYTES:
        raise UserError(
            f"--gpu {text}: a device of {memory_bytes} bytes is none; "
            f"give its memory, as 24GiB, or one of: {', '.join(CATALOGUE)}"
        )
    full_name = f"a GPU with {format_bytes(memory_bytes)}"
    return replace(UNKNOWN_GPU, name=UNNAMED, full_name=full_name, memory_bytes=memory_bytes)


def model_of(device: Device) -> GpuModel:
    """Return the catalogue's entry for a device that is there, with the memory it really has."""
    name = device.name.lower()
    words = re.sub(r"[^a-z0-9]+", " ", name)
    # A laptop's GPU has the name of a larger one.
    for model in MODELS if "laptop" not in words.split() else ():
        family, _, size = model.name.partition("-")
        short = family.removeprefix("rtx")
        if short in words.split() and (not size or size in name):
            return replace(model, full_name=device.name, memory_bytes=device.memory_bytes)
    fallback = unnamed(max(device.memory_bytes, MIN_BYTES), device.name)
    return replace(fallback, full_name=device.name, compute_capability=device.compute_capability)
