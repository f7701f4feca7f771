"""A pipeline to offer rules and reports to."""

from flatout.records.journey import Pipeline, Stage


def pipeline(*, needed=8.0, usable=2.0, techniques=("fast_decode", "ram_cache")):
    """Return a pipeline in which decoding is most of a sample's 4 ms."""
    return Pipeline(
        stages=(
            Stage(name="decode", cpu_ms=3.0, share=0.75, techniques=techniques),
            Stage(name="collate", cpu_ms=1.0, share=0.25),
        ),
        samples=64,
        cpu_ms=4.0,
        samples_per_s=2000.0,
        cores_needed=needed,
        usable_cores=usable,
    )
