"""The input pipeline's diagnosis as a table in the reader's language."""

from collections.abc import Iterator

from flatout.core.pipeline import PACKING, Stage
from flatout.core.profile import Profile
from flatout.core.units import format_bytes, format_count, format_rate, format_share
from flatout.reporting.messages import Messages
from flatout.reporting.profile_tables import Sheet


def pipeline_sheets(profile: Profile, say: Messages) -> Iterator[Sheet]:
    """Return the table of a sample's legs, where samples were looked at."""
    pipeline = profile.pipeline
    if pipeline is None:
        return
    fed = "about.pipeline_fed" if pipeline.is_fed else "about.pipeline_starved"
    told = say(
        "about.pipeline",
        needed=format_count(pipeline.cores_needed),
        rate=format_rate(pipeline.samples_per_s),
        n=pipeline.samples,
    )
    sentences = [told, say(fed, cores=f"{pipeline.usable_cores:.0f}")]
    if pipeline.legs_of(PACKING) and not pipeline.is_fed:
        packed = format_count(pipeline.cores_without(PACKING))
        sentences.append(say("about.pipeline_packed", cores=packed))
    yield Sheet(
        name="pipeline",
        columns=("leg", "cpu_ms", "share", "blocked_ms", "sample_bytes", "levers"),
        rows=tuple(_row(stage, say) for stage in pipeline.stages),
        shares=tuple(stage.share for stage in pipeline.stages),
        kinds=("data_wait",) * len(pipeline.stages),
        sentences=tuple(sentences),
    )


def _row(stage: Stage, say: Messages) -> tuple[str, ...]:
    unknown = say("reading.unknown")
    return (
        say.known("stage", stage.name),
        f"{stage.cpu_ms:.3f}",
        format_share(stage.share),
        f"{stage.wait_ms:.3f}" if stage.wait_ms else unknown,
        format_bytes(stage.bytes) if stage.bytes is not None else unknown,
        ", ".join(stage.levers) or unknown,
    )
