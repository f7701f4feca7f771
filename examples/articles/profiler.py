"""A profile of a few steps: memory only with profile_memory, the schedule's steps counted by
prof.step().

TensorBoard's profiler plug-in is no longer developed: open the trace in https://ui.perfetto.dev
instead.

    python examples/articles/profiler.py
    flatout measure --trace trace.json train.py
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn, profiler

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
kinds = [profiler.ProfilerActivity.CPU]
if torch.cuda.is_available():
    kinds.append(profiler.ProfilerActivity.CUDA)
with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "trace.json"
    with profiler.profile(
        activities=kinds,
        schedule=profiler.schedule(wait=1, warmup=1, active=3),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(trace)),
        record_shapes=True,
        profile_memory=True,
    ) as prof:
        for _ in range(5):  # fewer steps than wait + warmup + active write nothing
            model(torch.randn(8, 64)).mean().backward()
            prof.step()
    events = json.loads(trace.read_text())["traceEvents"]
steps = {
    event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")
}
print(
    f"result: {len(steps)} steps in the trace; "
    f"memory in it: {any(e.get('name') == '[memory]' for e in events)}"
)
