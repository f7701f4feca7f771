"""What a training process would have written, of steps that are all alike."""

from flatout.agent.measuring.kernels import DeviceTrace, trace_facts
from flatout.records.json_records import from_plain
from flatout.records.trial_result import TrialResult

STEPS = 12


def kernel(name, ts, dur, launched=None):
    """Return the event of a kernel and of its launch, in microseconds."""
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur}
    if launched is None:
        return [event]
    number = len(name) + int(ts)
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched}
    arguments = {"args": {"correlation": number}}
    return [event | arguments, launch | {"dur": 1.0} | arguments]


def traced(*events, segments, lasted_us=0.0):
    """Return what the recorder notes of such a trace."""
    flat = [event for pair in events for event in pair]
    return trace_facts(DeviceTrace(events=flat, lasted_s=lasted_us / 1e6), segments)


def result(*, step_s=0.1, who=(0,), device=(), models=(), optimizers=()):
    """Return the result of a dozen steps of which forward and backward take a half each."""
    half = step_s / len(who) / 2
    segments = [
        {
            "who": one,
            "seconds": [0.0, half, half, 0.0, 0.0, 0.0, 0.0],
            "end": number * step_s + (place + 1) * 2 * half,
            "batches": 1,
            "samples": 8,
            "backwards": 1,
            "evals": 0,
            "loader_starts": 0,
            "losses": [1.0],
        }
        for number in range(STEPS)
        for place, one in enumerate(who)
    ]
    plain = {
        "segments": segments,
        "period": 1,
        "device": {"kind": "cpu", "peak": {}} | dict(device),
        "load": {"delay_share": 0.0, "foreign_share": 0.0},
        "environment": {"threads": 2},
        "loaders": [],
        "models": list(models),
        "optimizers": list(optimizers),
        "errors": [],
        "probes": {},
        "listening_s_per_step": 0.0,
        "marking_s": 0.0,
    }
    return from_plain(TrialResult, plain)
