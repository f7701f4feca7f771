"""Say what several tools predict for one training step on the CPU, and what it really takes.

    python planner_case.py NAME

The models are those of the tests' CPU truth. Prints JSON: bytes by tool, the seconds of those that
trace, and what a batch extrapolated from two traces has other than a trace of it.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from memory_case import STEPS, train

from flatout.planner.largest_batch import affine, difference
from flatout.planner.plan import formula, largest_by_component
from flatout.planner.replay import components_at
from flatout.planner.tracing.trace import trace
from tests.support.host_kernels import trace_host
from tests.support.truth_models import MODELS

FP32 = 4


def truth(subject, batch):
    """Return the most bytes that torch's allocator had given out in a real run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(subject, batch, device="cpu")
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def ours(subject, batch):
    """Return the traced peak, and the classic formula with the trace's own terms."""
    stream = trace_host(subject, batch=batch)
    course = stream.alive()
    at_peak = components_at(stream, course.index(max(course)))
    estimate, _ = formula(at_peak, largest_by_component(stream))
    return max(course), estimate


def extrapolated(subject, batch):
    """Return how many allocations differ at three times the batch, and of how many."""
    model = affine(trace(subject, batch=batch), trace(subject, batch=batch + 1))
    off, of = difference(model.at(3 * batch), trace(subject, batch=3 * batch))
    return {"off": off, "of": of}


def tracker(subject, batch):
    """Return torch's MemTracker's peak of a second iteration: it follows one only.

    None where it fails, as it does where a checkpoint runs a module again.
    """
    try:
        return tracked(subject, batch)
    except Exception as error:  # noqa: BLE001  whatever it cannot follow
        print(f"MemTracker: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def tracked(subject, batch):
    from torch.distributed._tools.mem_tracker import MemTracker

    device = torch.device("cpu")
    model = subject.model().train()
    optimizer = subject.optimizer(model)
    one_step(subject, model, optimizer, batch, device)
    followed = MemTracker()
    followed.track_external(model, optimizer)
    with followed:
        one_step(subject, model, optimizer, batch, device)
    return followed.get_tracker_snapshot("peak")[device]["Total"]


def one_step(subject, model, optimizer, batch, device):
    for _ in range(subject.accumulate):
        loss = subject.loss(model, subject.batch(batch, device))
        loss = loss / subject.accumulate if subject.accumulate > 1 else loss
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def deepspeed_zero2(parameters):
    """Return estimate_zero2_model_states_mem_needs of deepspeed for one GPU, without offload."""
    return 4 * parameters + 16 * parameters


def deepspeed_zero3(parameters, largest_layer):
    """Return estimate_zero3_model_states_mem_needs of deepspeed for one GPU, without offload."""
    return 4 * largest_layer + 18 * parameters


def accelerate(parameters):
    """Return what `accelerate estimate-memory` says of training in fp32 with Adam."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    return max(estimate_training_usage(FP32 * parameters, "float32").values())


def timed(call, *words):
    """Return a result with its seconds."""
    began = time.perf_counter()
    return call(*words), time.perf_counter() - began


def main(name):
    torch.manual_seed(0)
    subject = MODELS[name]
    batch = subject.batch_size
    # First: autograd counts the devices at a process's first backward, real or not.
    other_batches = extrapolated(subject, batch)
    model = subject.model()
    parameters = sum(p.numel() for p in model.parameters())
    layers = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    del model
    (peak, classic), ours_s = timed(ours, subject, batch)
    followed, tracker_s = timed(tracker, subject, batch)
    found = {
        "truth": truth(subject, batch),
        "parameters": parameters,
        "steps": STEPS,
        "predicted": {
            "flatout": peak,
            "MemTracker": followed,
            "classic formula": classic,
            "accelerate": accelerate(parameters),
            "DeepSpeed ZeRO-2": deepspeed_zero2(parameters),
            "DeepSpeed ZeRO-3": deepspeed_zero3(parameters, max(layers)),
        },
        "seconds": {"flatout": ours_s, "MemTracker": tracker_s},
        "extrapolated": other_batches,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
