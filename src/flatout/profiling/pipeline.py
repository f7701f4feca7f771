"""From what the pipeline's probe saw to a `Pipeline`. Pure; runs in the parent."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from flatout.core.journey import TRAINING
from flatout.core.machine import Machine
from flatout.core.pipeline import LEVERS, STAGES, Pipeline, Stage
from flatout.core.profile import Profile

KINDS = (
    (
        "read",
        r"built-in method (io|_io|posix|nt)\.|'(read\w*|peek|seek|tell|close|__exit__)' of '_io\.|"
        r"mmap|/(h5py|lmdb|zarr|fsspec|smart_open|pathlib)",
    ),
    (
        "decode",
        r"ImagingDecoder|PIL/(ImageFile|\w*ImagePlugin|_binary)|_open_core|"
        r"PIL/Image\.py:(open|preinit|init)|imdecode|imread|decode_(jpeg|png|image)|simplejpeg|"
        r"torchcodec|turbojpeg|imageio|(zlib|_lzma|bz2|zstd|lz4)|/json/|_pickle\.loads?|"
        r"npyio|numpy/lib/_?format|soundfile|torchaudio|decord|/av/|"
        r"flatout/(kernels/region|data/(pillow|decoders|regions|shrinking))\.py",
    ),
    ("resize", r"'(resize|reduce)' of 'ImagingCore|flatout/(kernels/resample|data/resizing)\.py"),
    ("tokenise", r"tokenizers\.|Tokenizer|tokenization_|sentencepiece|tiktoken"),
    (
        "normalise",
        r"flatout/data/(packed|transport|tensors|arrays|levels)\.py|"
        r"[Nn]ormalize|to_tensor|ToTensor|pil_to_tensor|PILToTensor|convert_image_dtype|to_dtype|"
        r"'(sub|sub_|div|div_|mul|mul_|float|half|to|permute|contiguous|astype|transpose)' of '"
        r"(torch|numpy)|from_numpy|as_tensor|method torch\.tensor|numpy\.(array|asarray)|"
        r"__array_interface__|'tobytes'|ImagingEncoder",
    ),
    (
        "transform",
        r"ImagingCore|PIL/|torchvision|albumentations|cv2|kornia|skimage|scipy|interpolate|"
        r"'(flip|roll|resize|crop)' of|grid_sample",
    ),
    ("collate", r"_utils/collate|_utils/fetch|torch\.stack|torch\.cat|pad_sequence|data_collator"),
)
"""By stage what the names of its functions hold; the first that fits counts."""
DECODED = ("read", "decode")
"""Stages before anything random: their result can be kept where the samples change."""
PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in KINDS)


def stage_of(function: str) -> str:
    """Return the stage to which a function's own time belongs.

    >>> stage_of("~:<method 'decode' of 'ImagingDecoder' objects>")
    'decode'
    >>> stage_of("/lib/flatout/kernels/region.py:decode_region")
    'decode'
    >>> stage_of("/lib/flatout/kernels/resample.py:resampled")
    'resize'
    >>> stage_of("/home/me/train.py:__getitem__")
    'python'
    """
    return next((name for name, pattern in PATTERNS if pattern.search(function)), "python")


def pipeline_of(
    seen: Mapping[str, Any] | None,
    profile: Profile,
    machine: Machine,
    known: Collection[str],
) -> Pipeline | None:
    """Return the diagnosis; None where no sample was looked at.

    Args:
        seen: What the probe wrote.
        profile: Of the timed pass, with its ceilings.
        machine: Where it ran.
        known: Names of the techniques there are.
    """
    if not seen or not seen["samples"]:
        return None
    samples = seen["samples"]
    cpu_ms, wait_ms, sizes = _per_sample(seen, profile)
    total = sum(cpu_ms.values())
    rate = profile.samples_per_s_per_rank * profile.ceilings.free_data
    return Pipeline(
        stages=tuple(
            Stage(
                name=name,
                cpu_ms=cpu_ms[name],
                share=cpu_ms[name] / total if total else 0.0,
                wait_ms=wait_ms.get(name, 0.0),
                bytes=sizes.get(name),
                levers=levers_of(name, known, is_repeated=seen.get("is_repeated")),
            )
            for name in STAGES
            if cpu_ms.get(name) or wait_ms.get(name)
        ),
        samples=samples,
        cpu_ms=total,
        samples_per_s=rate,
        cores_needed=rate * total / 1e3,
        usable_cores=machine.usable_cores / max(1, len(profile.ranks)),
        missing=seen["missing"],
        is_repeated=seen.get("is_repeated"),
    )


def levers_of(stage: str, known: Collection[str], *, is_repeated: bool | None) -> tuple[str, ...]:
    """Return the levers that take a stage away; a cache keeps what is the same each time.

    >>> levers_of("transform", ("ram_cache", "device_preprocess"), is_repeated=False)
    ('device_preprocess',)
    """
    useless: tuple[str, ...] = () if is_repeated is not False else ("device_cache",)
    if is_repeated is False and stage not in DECODED:
        useless = ("device_cache", "ram_cache")
    return tuple(x for x in LEVERS[stage] if x in known and x not in useless)


Values = dict[str, float]


def _per_sample(seen: Mapping[str, Any], profile: Profile) -> tuple[Values, Values, Values]:
    """Return CPU milliseconds, blocked milliseconds and bytes of one sample, by stage."""
    samples = seen["samples"]
    shares: Values = {}
    for function, own_s in seen["functions"].items():
        name = stage_of(function)
        shares[name] = shares.get(name, 0.0) + own_s
    profiled = sum(shares.values())
    # What was profiled is slower, so only its shares count; the plain batches have the time.
    whole_ms = 1e3 * seen["cpu_s"] / samples
    cpu_ms = {name: whole_ms * own / profiled for name, own in shares.items()} if profiled else {}
    if seen["transport_s"] is not None:
        cpu_ms["transport"] = 1e3 * seen["transport_s"] / seen["transport_samples"]
    copies = _copy_ms(profile)
    if copies:
        cpu_ms["copy"] = copies
    wait_ms = {"read": 1e3 * max(0.0, seen["wall_s"] - seen["cpu_s"]) / samples}
    cpu_ms.setdefault("read", 0.0)
    made = seen["batch_bytes"] / samples
    sizes = dict.fromkeys(("normalise", "collate", "transport", "copy"), made)
    if seen["read_bytes"] is not None:
        sizes |= dict.fromkeys(("read", "decode"), seen["read_bytes"] / samples)
    return cpu_ms, wait_ms, sizes


def _copy_ms(profile: Profile) -> float:
    legs = profile.journey.legs if profile.journey else ()
    found = (leg.per_sample_ms or 0.0 for leg in legs if (leg.name, leg.where) == ("h2d", TRAINING))
    return next(found, 0.0)
