"""The section on the input pipeline: CPU time and bytes of a sample by leg, cores for a device."""

from collections.abc import Iterable, Iterator

from flatout.core.pipeline import ASKED, PACKING, Pipeline, Stage
from flatout.core.profile import Profile
from flatout.core.units import format_bytes, format_count, format_ms, format_rate, format_share
from flatout.reporting.tables import labelled
from flatout.reporting.text.journey import LABEL_WIDTH

MIN_SHARE = 0.01
"""A leg below a hundredth of the sample's time is not worth a reader's."""
WORDS = {"python": "own Python", "transport": "sending to the loop", "copy": "copy to device"}
"""What a reader calls a leg, where its name does not say it."""


def pipeline_lines(profile: Profile, width: int) -> list[str]:
    """Return what a sample costs by leg; nothing where no sample was looked at."""
    if profile.pipeline is None:
        return []
    return [
        line
        for label, text in _rows(profile.pipeline)
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]


def _rows(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    shown = [stage for stage in pipeline.stages if stage.share >= MIN_SHARE or stage.wait_ms >= 0.1]
    legs = ", ".join(map(_stage, shown))
    yield "a sample", f"{format_ms(pipeline.cpu_ms)} of one core (n={pipeline.samples}): {legs}"
    if sizes := _sizes(shown):
        yield "its bytes", sizes
    yield "cores", _cores(pipeline)
    if pipeline.is_fed:
        return
    levers = {lever for stage in shown for lever in stage.levers}
    useful = sorted((pipeline.cores_without(lever), lever) for lever in levers - ASKED)
    if useful:
        parts = [
            f"{lever} leaves {format_count(cores)} at least ({_legs(pipeline, lever)})"
            for cores, lever in useful[:3]
        ]
        yield "levers", "of these cores " + ", ".join(parts)
    if PACKING in levers:
        yield (
            "packing",
            f"{format_count(pipeline.cores_without(PACKING))} cores at least after packing: "
            f"{PACKING} takes {_legs(pipeline, PACKING)} from a store; flatout pack makes one",
        )


def _legs(pipeline: Pipeline, lever: str) -> str:
    return ", ".join(WORDS.get(name, name) for name in pipeline.legs_of(lever))


def _sizes(stages: Iterable[Stage]) -> str:
    """Return the bytes of a sample by leg, where they are known; legs with the same together."""
    legs: dict[float, list[str]] = {}
    for stage in stages:
        if stage.bytes:
            legs.setdefault(stage.bytes, []).append(WORDS.get(stage.name, stage.name))
    return "; ".join(f"{', '.join(names)} {format_bytes(size)}" for size, names in legs.items())


def _stage(stage: Stage) -> str:
    text = f"{WORDS.get(stage.name, stage.name)} {format_ms(stage.cpu_ms)}"
    text += f" ({format_share(stage.share)})"
    return text + (f" + {format_ms(stage.wait_ms)} blocked" if stage.wait_ms >= 0.1 else "")


def _cores(pipeline: Pipeline) -> str:
    verdict = "enough" if pipeline.is_fed else "too few"
    return (
        f"{format_count(pipeline.cores_needed)} cores feed one device with this pipeline, at the "
        f"{format_rate(pipeline.samples_per_s)} samples/s it takes when data is free; "
        f"{pipeline.usable_cores:g} are there: {verdict}"
    )
