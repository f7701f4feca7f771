"""How much of torch's own memory a piece of training takes, from the profiler's events."""

import gc

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step):
    """Run a step and return the most bytes that it held beyond what was there before."""
    gc.collect()  # what others left must not be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step()
    sizes = [
        event.nbytes()
        for event in sorted(
            record.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        )
        if event.name() == "[memory]"
    ]
    now = highest = 0
    for size in sizes:
        now += size
        highest = max(highest, now)
    return highest
