"""Small journeys to offer rules and reports to."""

from flatout.records.journey import TRAINING, WORKERS, Journey, Leg, WorkerFacts

MIB = 1024**2


def leg(name, ms, *, where=WORKERS, step_ms=100.0, **changes):
    return Leg(name=name, where=where, ms=ms, share=ms / step_ms, **changes)


def worker(number=0, **changes):
    known = {
        "busy_share": 0.9,
        "user_share": 0.3,
        "system_share": 0.1,
        "voluntary_switches_per_s": 100.0,
        "involuntary_switches_per_s": 10.0,
        "storage_bytes_per_step": 0.0,
        "read_bytes_per_step": 3.0 * MIB,
        "pss_bytes": 100 * MIB,
        "growth_bytes_per_step": 0.0,
    }
    return WorkerFacts(number=number, **known | changes)


def journey(*, growth=0.0, read_ms=60.0, decode_ms=20.0, collate_ms=10.0):
    """Return the journey of a job with two workers."""
    return Journey(
        legs=(
            leg("queue", 50.0, where=TRAINING),
            leg("read", read_ms, per_sample_ms=read_ms / 10),
            leg("decode", decode_ms, per_sample_ms=decode_ms / 10),
            leg("collate", collate_ms, per_sample_ms=collate_ms / 10),
        ),
        workers=tuple(worker(number, growth_bytes_per_step=growth) for number in (0, 1)),
    )
