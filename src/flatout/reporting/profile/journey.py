"""The section on the input pipeline: CPU time and bytes of a sample by leg, cores for a device.

The section on the journey of a batch: who makes it, what its legs cost, what they read.
"""

from collections.abc import Iterable, Iterator, Sequence

from flatout.records.catalogue import declared, only_on_request
from flatout.records.journey import (
    TRAINING,
    WORKERS,
    Journey,
    Leg,
    Pipeline,
    Stage,
    WorkerFacts,
)
from flatout.records.profile import LoaderFacts, Profile
from flatout.records.units import format_bytes, format_count, format_ms, format_rate, format_share
from flatout.reporting.tables import labelled

LABEL_WIDTH = 11
MIN_SHARE = 0.005
"""A leg below half a percent of the step is not worth a reader's time."""
PHASES = ("forward", "backward", "optimizer")
"""Legs that the table of phases shows already."""
WORDS = {
    "read": "blocked in reading",
    "decode": "decode and transform",
    "collate": "collate",
    "pin": "pinning",
    "queue": "waiting at the loader's queue",
    "sampler": "sampler and the rest of the loader",
    "h2d": "copy to device",
    "loss": "loss",
    "sync": "copy to host",
    "other": "other Python",
}
"""What a reader calls a leg."""
STARTS = {
    "fork": "a copy of the training process, at once and with all that the data set holds",
    "spawn": "a fresh process that imports the script and gets the data set pickled",
    "forkserver": "a copy of a small server process, which imports the script and gets the data "
    "set pickled",
}
"""What a worker begins with."""
MIN_GROWTH_BYTES = 1024.0
"""Growth of a worker below a kibibyte a step is the allocator's noise."""


def journey_lines(profile: Profile, width: int) -> list[str]:
    """Return the legs that the phases do not show; nothing where no journey was followed."""
    journey = profile.journey
    if journey is None:
        return []
    return [
        line
        for label, text in _rows(journey, profile)
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]


def _rows(journey: Journey, profile: Profile) -> Iterator[tuple[str, str]]:
    loop = [leg for leg in journey.legs if leg.where == TRAINING and leg.name not in PHASES]
    shown = [leg for leg in loop if leg.share >= MIN_SHARE]
    if shown:
        yield "batch", "in the loop: " + ", ".join(map(_leg, shown))
    copies = next((leg for leg in loop if leg.name == "h2d" and leg.bytes_per_s), None)
    if copies is not None:
        yield "copies", _copies(copies, profile)
    workers = [facts for facts in journey.workers if facts.number >= 0]
    if workers:
        yield "workers", _workers(workers, [x for x in journey.legs if x.where == WORKERS])
    yield from (("started", _started(x)) for x in profile.training_loaders[:1] if x.start_method)
    read = [facts for facts in journey.workers if facts.read_bytes_per_step is not None]
    if read:
        yield "reads", _reads(read)
    grown = max((facts.growth_bytes_per_step or 0.0 for facts in workers), default=0.0)
    if grown >= MIN_GROWTH_BYTES:
        yield "growth", f"a worker's memory grows by {format_bytes(grown)} a step"
    unknown = dict(journey.missing or {})
    if profile.device_kind == "cpu":
        unknown.pop("h2d, sync", None)  # there is no device to copy to
    if unknown:
        yield "not known", "; ".join(f"{what}: {why}" for what, why in unknown.items())


def _leg(leg: Leg) -> str:
    return f"{WORDS.get(leg.name, leg.name)} {format_ms(leg.ms)} ({format_share(leg.share)})"


def _copies(leg: Leg, profile: Profile) -> str:
    text = f"{format_bytes(leg.bytes_per_step or 0.0)} a step to the device"
    limit = profile.limits.copy_bytes_per_s if profile.limits else None
    rate = f" at {format_bytes(leg.bytes_per_s or 0.0)}/s"
    return text + rate + (f" of {format_bytes(limit)}/s measured" if limit else "")


def _workers(workers: Sequence[WorkerFacts], legs: Sequence[Leg]) -> str:
    busy = [facts.busy_share for facts in workers]
    made_ms = sum(leg.per_sample_ms or 0.0 for leg in legs)
    whole = sum(leg.ms for leg in legs) or 1.0
    parts = ", ".join(f"{WORDS[leg.name]} {format_share(leg.ms / whole)}" for leg in legs)
    switches = sum(facts.involuntary_switches_per_s for facts in workers) / len(workers)
    system = sum(facts.system_share for facts in workers) / len(workers)
    return (
        f"{len(workers)}, busy {format_share(min(busy))} to {format_share(max(busy))}; "
        f"{format_ms(made_ms)} a sample: {parts}; system time {format_share(system)}, "
        f"{format_rate(switches)} times a second another process took a worker's core"
    )


def _started(loader: LoaderFacts) -> str:
    """Say how the workers start, and what that risks; only fork takes over what is alive."""
    text = f"by {loader.start_method}: {STARTS.get(loader.start_method, 'a method of its own')}"
    if loader.start_reason:
        text += f" ({loader.start_reason})"
    if loader.start_method != "fork":
        return text
    if loader.cuda_at_start:
        text += (
            "; CUDA was initialised before, so a worker that uses it fails: keep that out of "
            'the data set, or give the loader multiprocessing_context="spawn"'
        )
    if loader.threads_at_start:
        text += (
            f"; other threads of Python's were alive ({loader.threads_at_start}): a lock that one "
            "of them holds at that moment stays locked in the worker, which may then hang; start "
            'them later, or give the loader multiprocessing_context="forkserver"'
        )
    return text


def _reads(facts: Sequence[WorkerFacts]) -> str:
    read = sum(x.read_bytes_per_step or 0.0 for x in facts)
    stored = sum(x.storage_bytes_per_step or 0.0 for x in facts)
    if stored > read:
        # Pages of mapped files and what is read ahead are loaded without a call that reads.
        return (
            f"{format_bytes(stored)} a step from storage, {format_bytes(read)} of it by reading "
            "files: the rest is mapped or read ahead"
        )
    source = f"{format_bytes(stored)} of it" if stored else "none of it"
    source += " from storage" if stored else " from storage: cached"
    return f"{format_bytes(read)} a step from files, {source}"


MIN_LEG_SHARE = 0.01
"""A leg below a hundredth of the sample's time is not worth a reader's."""
LEG_WORDS = {"python": "own Python", "transport": "sending to the loop", "copy": "copy to device"}
"""What a reader calls a leg, where its name does not say it."""


def pipeline_lines(profile: Profile, width: int) -> list[str]:
    """Return what a sample costs by leg; nothing where no sample was looked at."""
    if profile.pipeline is None:
        return []
    return [
        line
        for label, text in _leg_rows(profile.pipeline)
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]


def _leg_rows(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    shown = [
        stage for stage in pipeline.stages if stage.share >= MIN_LEG_SHARE or stage.wait_ms >= 0.1
    ]
    legs = ", ".join(map(_stage, shown))
    yield "a sample", f"{format_ms(pipeline.cpu_ms)} of one core (n={pipeline.samples}): {legs}"
    if sizes := _sizes(shown):
        yield "its bytes", sizes
    yield "cores", _cores(pipeline)
    if pipeline.is_fed:
        return
    levers = {lever for stage in shown for lever in stage.levers}
    useful = sorted((pipeline.cores_without(lever), lever) for lever in levers - only_on_request())
    if useful:
        parts = [
            f"{lever} leaves {format_count(cores)} at least ({_legs(pipeline, lever)})"
            for cores, lever in useful[:3]
        ]
        yield "techniques", "of these cores " + ", ".join(parts)
    for lever, command in declared("prepared_by").items():
        if lever in levers:
            yield (
                "packing",
                f"{format_count(pipeline.cores_without(lever))} cores at least after packing: "
                f"{lever} takes {_legs(pipeline, lever)} from a store; {command} makes one",
            )


def _legs(pipeline: Pipeline, lever: str) -> str:
    return ", ".join(LEG_WORDS.get(name, name) for name in pipeline.legs_of(lever))


def _sizes(stages: Iterable[Stage]) -> str:
    """Return the bytes of a sample by leg, where they are known; legs with the same together."""
    legs: dict[float, list[str]] = {}
    for stage in stages:
        if stage.bytes:
            legs.setdefault(stage.bytes, []).append(LEG_WORDS.get(stage.name, stage.name))
    return "; ".join(f"{', '.join(names)} {format_bytes(size)}" for size, names in legs.items())


def _stage(stage: Stage) -> str:
    text = f"{LEG_WORDS.get(stage.name, stage.name)} {format_ms(stage.cpu_ms)}"
    text += f" ({format_share(stage.share)})"
    return text + (f" + {format_ms(stage.wait_ms)} blocked" if stage.wait_ms >= 0.1 else "")


def _cores(pipeline: Pipeline) -> str:
    verdict = "enough" if pipeline.is_fed else "too few"
    return (
        f"{format_count(pipeline.cores_needed)} cores feed one device with this pipeline, at the "
        f"{format_rate(pipeline.samples_per_s)} samples/s it takes when data is free; "
        f"{pipeline.usable_cores:g} are there: {verdict}"
    )
