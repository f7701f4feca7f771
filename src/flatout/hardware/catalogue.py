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
    multiprocessors: int
    """Streaming multiprocessors, of AMD compute units."""
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
    source: str


def _model(
    name: str,
    full_name: str,
    gib: float,
    capability: tuple[int, int] | None,
    tera: tuple[float, float, float],
    rest: tuple[int, float, float, float, str],
) -> GpuModel:
    """Return a model from TFLOP/s (bf16, tf32, fp32) and counts, GB/s and source."""
    multiprocessors, memory_gb_s, host_gb_s, peer_gb_s, source = rest
    return GpuModel(
        name=name,
        full_name=full_name,
        memory_bytes=int(gib * GIB),
        compute_capability=capability,
        multiprocessors=multiprocessors,
        bf16_flops=tera[0] * 1e12,
        tf32_flops=tera[1] * 1e12,
        fp32_flops=tera[2] * 1e12,
        bandwidth=memory_gb_s * 1e9,
        host_bandwidth=host_gb_s * 1e9,
        peer_bandwidth=peer_gb_s * 1e9,
        source=source,
    )


SHEET = "NVIDIA's data sheet (dense peaks); memory"
PCIE4, PCIE5, PCIE3 = 25.0, 50.0, 12.0
"""GB/s that a link of 16 lanes really gives one way: some four fifths of 32, 64 and 16."""

MODELS = (
    _model(
        *("h200", "NVIDIA H200 SXM", 139.72, (9, 0), (989.4, 494.7, 66.9)),
        (132, 4800, PCIE5, 450, f"{SHEET}: 139.72 to 139.81 GiB in torch's messages"),
    ),
    _model(
        *("h100-pcie", "NVIDIA H100 PCIe", 79.10, (9, 0), (756.5, 378, 51.2)),
        (114, 2039, PCIE5, PCIE5, f"{SHEET}: taken to be that of the SXM"),
    ),
    _model(
        *("h100-nvl", "NVIDIA H100 NVL", 93.1, (9, 0), (835.5, 417.5, 60)),
        (132, 3938, PCIE5, 300, f"{SHEET}: 94 GB, of which ECC and driver are taken to keep 1 %"),
    ),
    _model(
        *("h100", "NVIDIA H100 SXM 80GB", 79.10, (9, 0), (989.4, 494.7, 66.9)),
        (132, 3350, PCIE5, 450, f"{SHEET}: 79.11 GiB (vllm #27508), 79.10 to 79.19 elsewhere"),
    ),
    _model(
        *("a100-80", "NVIDIA A100 SXM 80GB", 79.14, (8, 0), (312, 156, 19.5)),
        (108, 2039, PCIE4, 300, f"{SHEET}: 79.14 to 79.25 GiB in torch's messages"),
    ),
    _model(
        *("a100-40", "NVIDIA A100 SXM 40GB", 39.38, (8, 0), (312, 156, 19.5)),
        (108, 1555, PCIE4, 300, f"{SHEET}: 39.38 to 39.56 GiB in torch's messages"),
    ),
    _model(
        *("l40s", "NVIDIA L40S", 44.42, (8, 9), (362.05, 183, 91.6)),
        (142, 864, PCIE4, PCIE4, f"{SHEET}: 44.42 GiB (Step-Video-T2V #8)"),
    ),
    _model(
        *("l4", "NVIDIA L4", 22.03, (8, 9), (121, 60, 30.3)),
        (58, 300, PCIE4, PCIE4, f"{SHEET}: 22.03 to 22.17 GiB in torch's messages"),
    ),
    _model(
        *("a10g", "NVIDIA A10G", 21.99, (8, 6), (70, 35, 31.2)),
        (80, 600, PCIE4, PCIE4, "A10G data sheet; memory: 22.0 GiB in torch's messages"),
    ),
    _model(
        *("t4", "NVIDIA T4", 14.56, (7, 5), (65, 8.1, 8.1)),
        (40, 320, PCIE3, PCIE3, f"{SHEET}: 14.56 to 14.75 GiB (Open-Sora #697); fp16, no bf16"),
    ),
    _model(
        *("rtx4090", "NVIDIA GeForce RTX 4090", 23.52, (8, 9), (165.2, 82.6, 82.6)),
        (128, 1008, PCIE4, PCIE4, "Ada whitepaper; memory: 23.64 GiB (VGen #104), 23.52 elsewhere"),
    ),
    _model(
        *("rtx3090", "NVIDIA GeForce RTX 3090", 23.69, (8, 6), (71, 35.6, 35.6)),
        (82, 936, PCIE4, PCIE4, "GA102 whitepaper; memory: 23.69 GiB in torch's messages"),
    ),
    _model(
        *("mi300x", "AMD Instinct MI300X", 191.45, None, (1307.4, 653.7, 163.4)),
        (
            304,
            5300,
            PCIE5,
            64,
            "AMD's data sheet; memory: 191.45 to 191.69 GiB in torch's messages",
        ),
    ),
)
"""In the order of `flatout plan --help`. Where messages differ the least memory is taken."""

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
    """Return a GPU of which only the memory is known."""
    if memory_bytes < MIN_BYTES:
        raise UserError(
            f"--gpu {text}: a device of {memory_bytes} bytes is none; "
            f"give its memory, as 24GiB, or one of: {', '.join(CATALOGUE)}"
        )
    return GpuModel(
        name=UNNAMED,
        full_name=f"a GPU with {format_bytes(memory_bytes)}",
        memory_bytes=memory_bytes,
        compute_capability=UNKNOWN_GPU.compute_capability,
        multiprocessors=UNKNOWN_GPU.multiprocessors,
        bf16_flops=UNKNOWN_GPU.bf16_flops,
        fp32_flops=UNKNOWN_GPU.fp32_flops,
        tf32_flops=UNKNOWN_GPU.tf32_flops,
        bandwidth=UNKNOWN_GPU.bandwidth,
        host_bandwidth=UNKNOWN_GPU.host_bandwidth,
        peer_bandwidth=UNKNOWN_GPU.peer_bandwidth,
        source="only its memory is known; arithmetic and bandwidth are an A100's",
    )


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
