"""From what the journey's and the pipeline's probes saw to a `Journey` and a `Pipeline`.

Pure; runs in the parent: `journey_of`, `pipeline_of`.
"""

import errno
import itertools
import os
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatout.analysis.memory import rises, slope_of
from flatout.analysis.steps import Window, block_means
from flatout.analysis.worker_log import named
from flatout.records.catalogue import declared
from flatout.records.journey import (
    SLOW,
    STAGES,
    TRAINING,
    WORKERS,
    Journey,
    Leg,
    Pipeline,
    Stage,
    WorkerFacts,
)
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.phase_clock import NAMES
from flatout.records.profile import Profile
from flatout.records.trial_result import Segment, TrialResult

ORDER = (
    *("read", "decode", "collate", "pin", "queue", "sampler", "h2d"),
    *("forward", "loss", "backward", "optimizer", "sync", "other"),
)
"""Legs of the training thread, in the order in which a batch passes them."""
H2D, BYTES = "h2d", "h2d_bytes"
MADE = ("read", "decode", "collate")
"""What making a batch consists of."""
FOLDED = ("eval", "save")
"""Phases of the clock that a profile counts as `other`."""
SLACK_S = 0.1
"""Records this close outside the window count as at its edge: they are 0.05 s apart."""
MIN_GROWTH_S = 1.0
"""Readings of a worker's memory that span less than this tell nothing of its growth."""
MIN_READINGS = 5
"""Fewer readings tell nothing of it either: each holds the batch that is being made."""
OWN = -1


def journey_of(result: TrialResult, window: Window, profile: Profile) -> Journey | None:
    """Return the journey that a training process's result holds; None where none was followed."""
    seen = result.probes.get("journey")
    if seen is None or not window.measured or not profile.step_ms.median:
        return None
    rows = measured_rows(seen, result.segments, window)
    by_worker = changes(seen, window)
    facts = _all_facts(seen, by_worker, rows, window, profile)
    return Journey(
        legs=(*training_legs(rows, window.period, profile), *_worker_legs(by_worker, profile)),
        workers=tuple(facts),
        missing=_missing(seen, window, facts) or None,
    )


Key = tuple[str, str]
"""A part and the phase it was taken out of; the part `REST` is what no part took."""
REST = ""


def measured_rows(
    seen: Mapping[str, Any], segments: Sequence[Segment], window: Window
) -> list[dict[Key, float]]:
    """Return of each measured step its parts, which add up to the host's time of the step."""
    ends = [step.end for step in window.steps]
    seconds = {segment.end: segment.seconds for segment in segments}
    by_step: dict[float, dict[Key, float]] = {
        step.end: defaultdict(float) for step in window.sampled
    }
    for row in seen["rows"]:
        place = bisect_left(ends, row["end"])
        if place < len(ends) and ends[place] in by_step and row["end"] in seconds:
            _add_row(by_step[ends[place]], row, row["host_s"] or seconds[row["end"]], seen["parts"])
    return list(by_step.values())


def _add_row(
    step: dict[Key, float], row: Mapping[str, Any], host_s: Sequence[float], names: Sequence[str]
) -> None:
    phases = ["other" if phase in FOLDED else phase for phase in NAMES]
    for phase, value in zip(phases, host_s, strict=True):
        step[REST, phase] += value
    for index, value in row["parts"].items():
        part, phase = names[int(index) // len(NAMES)], phases[int(index) % len(NAMES)]
        step[part, phase] += value
        if part != BYTES:
            step[REST, phase] -= value


def training_legs(
    rows: Sequence[Mapping[Key, float]], period: int, profile: Profile
) -> tuple[Leg, ...]:
    """Return the legs of the training thread: they add up to the step.

    They do so whatever clock the phases are from: the legs are the profile's phases, each split by
    the shares that were taken out of it on the host.
    """
    legs: dict[str, float] = defaultdict(float)
    # The device's own trace knows the copies better than the host, which may not wait for them.
    untold = (BYTES, H2D) if profile.phases_ms[H2D] > 0 else (BYTES,)
    known = sorted({key for row in rows for key in row if key[0] not in untold})
    has_workers = any(loader.workers for loader in profile.training_loaders)
    for phase, phase_ms in profile.phases_ms.items():
        rest = phase if phase != "data_wait" else "queue" if has_workers else "sampler"
        for part, share in _shares(rows, [key for key in known if key[1] == phase], period).items():
            legs[part or rest] += share * phase_ms
    copied = statistics.fmean(
        sum(value for (part, _), value in row.items() if part == BYTES) for row in rows
    )
    found = (_leg(name, TRAINING, legs[name], profile) for name in ORDER if legs[name])
    return tuple(
        replace(leg, bytes_per_step=copied, bytes_per_s=1e3 * copied / leg.ms)
        if leg.name == H2D and copied > 0
        else leg
        for leg in found
    )


def _shares(
    rows: Sequence[Mapping[Key, float]], keys: Sequence[Key], period: int
) -> dict[str, float]:
    """Return the shares of a phase by part: medians like the phases', scaled to add up to 1."""
    typical = {
        key[0]: max(
            0.0, statistics.median(block_means([row.get(key, 0.0) for row in rows], period))
        )
        for key in keys
    }
    total = sum(typical.values())
    return {part: value / total for part, value in typical.items()} if total else {REST: 1.0}


def _leg(name: str, where: str, ms: float, profile: Profile) -> Leg:
    return Leg(
        name=name,
        where=where,
        ms=ms,
        share=ms / profile.step_ms.median,
        per_sample_ms=ms / profile.samples_per_step if profile.samples_per_step else None,
    )


Change = dict[str, float]
"""What a process's counters grew by between its first and last record in the window; memory, which
goes up and down, by the slope of all its readings."""
ByWorker = dict[tuple[str, int], list[Change]]


def changes(seen: Mapping[str, Any], window: Window) -> ByWorker:
    """Return what each worker did, by its loader and number: a new process at every epoch."""
    found: ByWorker = defaultdict(list)
    for process in seen["processes"]:
        change = change_of(process["records"], window)
        if change is not None:
            number = int(named(process["records"][0])["number"])
            found[process["address"], number].append(change)
    return found


def change_of(records: Sequence[Sequence[float]], window: Window) -> Change | None:
    """Return what a process's counters grew by within the window, None without two records."""
    began = window.measured[0].end - window.measured[0].wall_s - SLACK_S
    inside = [named(r) for r in records if began <= r[0] <= window.measured[-1].end + SLACK_S]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    change = {name: last[name] - first[name] for name in first}
    for name in ("read_bytes", "storage_bytes", "pss_bytes"):
        if last[name] < 0:
            change[name] = last[name]  # refused, with the reason
    # The proportional size is read seldom where that takes long: then what a fork shares is left.
    known = (readings_of(name, inside) for name in ("pss_bytes", "anonymous_bytes"))
    sizes = next((readings for readings in known if _is_enough(readings)), [])
    span_s = sizes[-1][0] - sizes[0][0] if sizes else 0.0
    grows = bool(sizes) and rises([size for _, size in sizes])
    return change | {
        "pss_bytes": last["pss_bytes"],
        "pss_growth": slope_of(sizes) * span_s if grows else 0.0,
        "pss_span_s": span_s,
    }


def _is_enough(readings: Sequence[tuple[float, float]]) -> bool:
    """Return whether readings are many and far enough apart to tell of a growth."""
    return len(readings) >= MIN_READINGS and readings[-1][0] - readings[0][0] >= MIN_GROWTH_S


def readings_of(name: str, records: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Return the moments and values at which a value that is read seldom was read again.

    >>> readings_of("x", [{"at_s": 1, "x": 5}, {"at_s": 2, "x": 5}, {"at_s": 3, "x": 7}])
    [(3, 7)]
    """
    return [
        (now["at_s"], now[name])
        for before, now in itertools.pairwise(records)
        if now[name] > 0 and before[name] > 0 and now[name] != before[name]
    ]


def _worker_legs(by_worker: ByWorker, profile: Profile) -> tuple[Leg, ...]:
    all_changes = [change for group in by_worker.values() for change in group]
    batches = sum(change["batches"] for change in all_changes)
    if not batches:
        return ()
    per_batch = profile.batches_per_step / batches
    read = sum(max(0.0, change["read_bytes"]) for change in all_changes) * per_batch
    legs = []
    for name in MADE:
        ms = 1e3 * sum(change[f"{name}_s"] for change in all_changes) * per_batch
        leg = _leg(name, WORKERS, ms, profile)
        legs.append(replace(leg, share=leg.share / len(by_worker)))
        if name == "read" and read:
            legs[-1] = replace(legs[-1], bytes_per_step=read)
    return tuple(legs)


def _all_facts(
    seen: Mapping[str, Any],
    by_worker: ByWorker,
    rows: Sequence[Mapping[Key, float]],
    window: Window,
    profile: Profile,
) -> list[WorkerFacts]:
    """Return the training process, where it makes batches itself, and its workers."""
    step_s = profile.step_ms.median / 1e3
    own = change_of(seen["own"], window)
    made_s = sum(value for row in rows for (part, _), value in row.items() if part in MADE)
    found = []
    if own is not None and made_s:
        share = made_s / sum(step.wall_s for step in window.sampled)
        found.append(_facts(OWN, [own], step_s, share * own["at_s"]))
    for number, (_, group) in enumerate(sorted(by_worker.items())):
        busy_s = sum(change[f"{name}_s"] for change in group for name in MADE)
        found.append(_facts(number, group, step_s, busy_s))
    return found


def _facts(number: int, group: Sequence[Change], step_s: float, busy_s: float) -> WorkerFacts:
    wall_s = max(sum(change["at_s"] for change in group), 1e-9)

    def per_s(name: str) -> float:
        return sum(change[name] for change in group) / wall_s

    def per_step(name: str) -> float | None:
        is_known = all(change[name] >= 0 for change in group)
        return per_s(name) * step_s if is_known else None

    last = group[-1]
    grown = [change["pss_growth"] for change in group if change["pss_span_s"]]
    span_s = sum(change["pss_span_s"] for change in group)
    return WorkerFacts(
        number=number,
        busy_share=busy_s / wall_s,
        user_share=per_s("user_s"),
        system_share=per_s("system_s"),
        voluntary_switches_per_s=per_s("voluntary"),
        involuntary_switches_per_s=per_s("involuntary"),
        storage_bytes_per_step=per_step("storage_bytes"),
        read_bytes_per_step=per_step("read_bytes"),
        pss_bytes=int(last["pss_bytes"]) if last["pss_bytes"] > 0 else None,
        growth_bytes_per_step=sum(grown) / span_s * step_s if span_s else None,
    )


def _missing(
    seen: Mapping[str, Any], window: Window, facts: Sequence[WorkerFacts]
) -> dict[str, str]:
    """Return what is not known, with the reason."""
    missing = dict(seen["missing"])
    records = [p["records"][-1] for p in seen["processes"] if p["records"]] + seen["own"][-1:]
    refused = [named(record) for record in records]
    for what, name, path in (
        ("bytes read", "read_bytes", "/proc/PID/io"),
        ("memory of the workers", "pss_bytes", "/proc/PID/smaps_rollup"),
    ):
        codes = {int(-record[name]) for record in refused if record[name] < 0}
        if codes:
            missing[what] = words("note.not_allowed", path=path, why=_reason(min(codes)))
    if seen["processes"] and not any(fact.number >= 0 for fact in facts):
        missing["workers"] = words("note.no_batches")
    if not seen["times_copies"]:
        missing["h2d, sync"] = words("note.on_cpu")
    return missing


def _reason(code: int) -> str:
    return f"{errno.errorcode.get(code, code)}, {os.strerror(code)}"


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
    """Return the diagnosis; None where no sample was looked at."""
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
                techniques=techniques_of(name, known, is_repeated=seen.get("is_repeated")),
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
        **_slow_samples(seen.get("sample_s", ())),
    )


def _slow_samples(taken: Sequence[tuple[int | None, float]]) -> dict[str, Any]:
    """Return the fields about samples that take far longer than most."""
    if not taken:
        return {}
    median_s = statistics.median(took_s for _number, took_s in taken)
    slow = [took_s for _number, took_s in taken if took_s >= SLOW * median_s > 0]
    number, slowest_s = max(taken, key=lambda pair: pair[1])
    return {
        "slow_samples": len(slow),
        "slow_share": sum(slow) / sum(took_s for _number, took_s in taken) if slow else 0.0,
        "slowest_sample": number,
        "slowest_ms": 1e3 * slowest_s,
        "median_ms": 1e3 * median_s,
    }


def techniques_of(
    stage: str, known: Collection[str], *, is_repeated: bool | None
) -> tuple[str, ...]:
    """Return the techniques that take a stage away; a cache keeps what is the same each time.

    The mildest come first: by promise, without preparation, and with the fewest stages.

    >>> techniques_of("transform", ("ram_cache", "device_preprocess"), is_repeated=False)
    ('device_preprocess',)
    """
    keeping = declared("keeps_samples") if is_repeated is False and stage not in DECODED else {}
    stages, promises = declared("stages"), declared("numerics")
    found = (x for x in known if stage in stages.get(x, ()) and x not in keeping)

    def order(name: str) -> tuple[int, bool, int, str]:
        is_prepared = name in declared("prepared_by")
        return promises[name].rank, is_prepared, len(stages[name]), name

    return tuple(sorted(found, key=order))


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
