"""The cores that there are cannot make the samples that the device takes."""

from flatout.analysis.feeding import useful_workers, workers_now
from flatout.records.catalogue import only_on_request, setter_of
from flatout.records.finding import Finding
from flatout.records.journey import Pipeline
from flatout.records.machine import Machine
from flatout.records.messages import named, words
from flatout.records.profile import Profile
from flatout.records.units import format_count, format_ms, format_rate, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step in waiting, cheaper samples are not worth a reader's time."""
AT_LINES = ("DL02", "DL03", "DL04", "DL05", "DL06")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a pipeline that needs more cores than there are, where the step waits for data."""
    pipeline, share = profile.pipeline, profile.lost_to_data
    if pipeline is None or pipeline.is_fed or share < MIN_SHARE:
        return None
    costly = max(pipeline.stages, key=lambda stage: stage.cpu_ms)
    return Finding(
        code="short_of_cores",
        share=share,
        because=words(
            "finding.short_of_cores.because",
            made=format_ms(pipeline.cpu_ms),
            needed=format_count(pipeline.cores_needed),
            rate=format_rate(pipeline.samples_per_s),
            cores=format_count(pipeline.usable_cores),
            share=format_share(costly.share),
            leg=named("stage", costly.name),
        ),
        next=_next(pipeline, workers_now(profile), useful_workers(profile, machine)),
        lines=tuple(loader.line for loader in profile.training_loaders if loader.line),
        evidence={
            "cores_needed": pipeline.cores_needed,
            "usable_cores": pipeline.usable_cores,
            "cpu_ms": pipeline.cpu_ms,
            "costly_cpu_ms": costly.cpu_ms,
        },
    )


def _next(pipeline: Pipeline, workers: int, useful: int) -> str:
    """Return what to do: workers as long as there are cores for them, then cheaper samples."""
    names = {name for stage in pipeline.stages for name in stage.techniques} - only_on_request()
    best = sorted(names, key=lambda name: (pipeline.cores_without(name), name))[:3]
    if workers < useful:
        made = format_rate(1e3 * pipeline.usable_cores / pipeline.cpu_ms)
        only = ",".join([setter_of("num_workers"), *best])
        return words(
            "finding.short_of_cores.next_workers",
            cores=str(useful),
            rate=made,
            command=f"flatout tune --only {only} train.py",
        )
    if not best:
        return words("finding.short_of_cores.next_none")
    command = f"flatout tune --only {','.join(best)} train.py"
    return words("finding.short_of_cores.next_techniques", command=command)
