"""Predicted peak memory of a training step, by flatout and by what else there is, and the truth.

On the CPU, where the truth is torch.profiler's memory events of a real run. DeepSpeed's estimators
are their published formulas; accelerate's function is called where it is installed. Alongside it
the time of a plan: GPT-2 124M, and a 7B model with LoRA for a GPU that is not there.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.programs import ran
from flatout.records.units import GIB, format_bytes
from flatout.workflow.plan import PlanOptions, plan

THEME = "planner"
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "scripts"
CASES = (
    *("small_cnn", "resnet_50", "unet", "bert", "gpt2", "vit", "gpt", "lstm", "gru"),
    *("experts", "diffusion", "lora", "checkpointed", "accumulated"),
)
"""Of tests/support/truth_models.py."""
TOOLS = (
    *("flatout", "MemTracker", "classic formula"),
    *("accelerate", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"),
)
CASE_S = 600.0
MEDIAN, WORST = 0.001, 0.005
"""Errors of flatout's that are aimed at."""
LARGE, SMALL = "7b", "gpt2"
LARGE_S, LARGE_BYTES = 15.0, 2 * GIB
SMALL_S = 2.0
"""For a trace of two steps of GPT-2 124M in a process that has traced it before."""
WARM_TRACES = 5


def run(bench: Bench) -> Record:
    """Predict and measure every case in a process of its own, then plan a 7B model."""
    rows = []
    for name in CASES:
        rows.append({"case": name, **case(name)})
        off = rows[-1]["extrapolated"]
        bench.say(
            f"  {name}: flatout {error(rows[-1], 'flatout'):+.3%}, "
            f"{off['off']} of {off['of']} off at three times the batch"
        )
    return record_of(rows, large(bench), small(bench))


def case(name: str) -> dict[str, Any]:
    """Return predictions and truth of one case."""
    return answer([sys.executable, str(SCRIPTS / "planner_case.py"), name])


def large(bench: Bench) -> dict[str, Any]:
    """Return seconds, host memory and verdict of planning a 7B model with LoRA for one L40S."""
    found = answer([sys.executable, "-m", "benchmarks.suites.planner", LARGE])
    bench.say(f"  7B with LoRA: {found['seconds']:.1f} s, {format_bytes(found['host_bytes'])}")
    return found


def small(bench: Bench) -> dict[str, Any]:
    """Return the seconds of warm traces of GPT-2 124M."""
    found = answer([sys.executable, "-m", "benchmarks.suites.planner", SMALL])
    bench.say(f"  GPT-2 124M: traced in {statistics.median(found['seconds']):.2f} s")
    return found


def answer(command: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a process prints last."""
    done = ran(command, cwd=ROOT, timeout=CASE_S)
    if done.returncode != 0:
        raise TrialFailedError(f"{' '.join(command[1:])}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def error(row: Mapping[str, Any], tool: str) -> float:
    """Return predicted over true bytes, less 1.

    >>> error({"truth": 200, "predicted": {"x": 150}}, "x")
    -0.25
    """
    return float(row["predicted"][tool] / row["truth"] - 1)


def record_of(
    rows: Sequence[Mapping[str, Any]],
    model_7b: Mapping[str, Any],
    gpt2: Mapping[str, Any],
) -> Record:
    """Return the record: errors by tool, and what a large plan and a small trace take."""
    errors = {
        tool: [error(row, tool) for row in rows if row["predicted"][tool] is not None]
        for tool in TOOLS
    }
    known = {tool: values for tool, values in errors.items() if values}
    own = [abs(value) for value in known["flatout"]]
    is_exact = statistics.median(own) <= MEDIAN and max(own) <= WORST
    traced_s = statistics.median(gpt2["seconds"])
    is_quick = model_7b["seconds"] <= LARGE_S and traced_s <= SMALL_S
    is_quick = is_quick and model_7b["host_bytes"] <= LARGE_BYTES
    off = sum(row["extrapolated"]["off"] for row in rows)
    limits = f"{LARGE_S:.0f} s and {format_bytes(LARGE_BYTES)}"
    took = f"{model_7b['seconds']:.1f} s and {format_bytes(model_7b['host_bytes'])}"
    middle, worst = statistics.median(own), max(own)
    return Record(
        theme=THEME,
        claim=f"the predicted peak is within {WORST:.1%} of a real run's, median {MEDIAN:.1%}; "
        f"other batches are extrapolated exactly; a 7B model with LoRA is planned in {limits}, "
        f"GPT-2 124M traced in {SMALL_S:.0f} s",
        holds=is_exact and is_quick and not off,
        finding=f"median {middle:.3%}, worst {worst:.3%} over {len(rows)} models; {off} "
        f"allocations off at three times the batch; 7B in {took}; GPT-2 in {traced_s:.2f} s",
        table=[("case", "real peak", *known), *(cells(row, list(known)) for row in rows)],
        raw={"rows": list(rows), "large": dict(model_7b), "small": dict(gpt2)},
        notes=[
            "DeepSpeed's columns are its published formulas for model states on one GPU",
            "accelerate's is its estimate of training in fp32 with Adam, for any batch",
            "the classic formula gets the traced, true bytes of its three terms",
            f"MemTracker runs the step for real; median {ratio_of_times(rows):.1f} times as long "
            "as flatout's trace",
        ],
    )


def cells(row: Mapping[str, Any], tools: Sequence[str]) -> tuple[str, ...]:
    """Return a row of the table: the truth, and each tool's relative error."""
    found = [
        f"{error(row, tool):+.2%}" if row["predicted"][tool] is not None else "-" for tool in tools
    ]
    return row["case"], format_bytes(row["truth"]), *found


def ratio_of_times(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of MemTracker's time over flatout's."""
    return statistics.median(
        row["seconds"]["MemTracker"] / row["seconds"]["flatout"]
        for row in rows
        if row["predicted"]["MemTracker"] is not None
    )


def plan_7b() -> None:
    """Plan the 7B model in this process and its children, and print what it took."""
    began = time.perf_counter()
    target = f"{SCRIPTS / 'planner_7b.py'}:subject"
    found = plan(target, (), PlanOptions(gpu="l40s", fit=True)).plan
    seconds = time.perf_counter() - began
    own, children = (
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    batches = found.largest_batch
    print(
        json.dumps(
            {
                "seconds": seconds,
                "host_bytes": 1024 * (own + children),
                "fits": found.fits,
                "used_bytes": found.used.bytes,
                "largest_batch": batches.without_retries if batches else None,
                "checked": found.checked,
            }
        )
    )


def trace_gpt2() -> None:
    """Trace GPT-2 124M again and again in this process, and print the seconds of each."""
    from flatout.planner.tracing.target import load_subject
    from flatout.planner.tracing.trace import trace

    subject = load_subject(f"{SCRIPTS / 'planner_gpt2.py'}:subject")
    trace(subject)
    seconds = []
    for _ in range(WARM_TRACES):
        began = time.perf_counter()
        stream = trace(subject)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "peak_bytes": max(stream.alive())}))


if __name__ == "__main__":
    {LARGE: plan_7b, SMALL: trace_gpt2}[sys.argv[1]]()
