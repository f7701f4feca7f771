"""Train a compiled CNN for real and trace it: the measured peak, and the traced bounds."""

import json
from dataclasses import replace

import torch

from flatout.planner.plan import compiled_spread
from tests.planner.test_cpu_truth import measured_peak
from tests.support.host_kernels import trace_host
from tests.support.truth_models import MODELS

if __name__ == "__main__":
    plain = MODELS["small_cnn"]
    compiled = replace(plain, model=lambda: torch.compile(plain.model()))
    # For real first: what Dynamo once skipped under a tracer it never compiles again.
    measured = measured_peak(compiled, steps=3)
    stream = trace_host(compiled)
    less, more = compiled_spread(stream)
    eager = max(stream.alive())
    found = {"measured": measured, "low": eager - less, "eager": eager, "high": eager + more}
    print(json.dumps(found))
