"""How long planning for 1,024 GPUs takes, and how much memory: an 8B model by its configuration.

Each round is a fresh process, start and imports included, as a user waits for it.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.programs import python
from flatout.analysis.worker_log import read_pss
from flatout.records.units import GIB, format_bytes
from flatout.workflow.plan import PlanOptions, plan

THEME = "plan_ranks"
ROUNDS, SMOKE_ROUNDS = 5, 1
SMOKE_S = 30.0
GPUS, HOSTS, BATCH = 8, 128, 2048
"""Of each host, hosts, and samples of a step over all of them."""
MOST_S, MOST_BYTES = 10.0, GIB
ROUND_S = 300.0
LOOK_S = 0.2
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""The sizes that Meta published for Llama 3 8B."""
SMALL = {**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


def run(bench: Bench) -> Record:
    """Plan the same training in fresh processes."""
    is_smoke = bench.budget_s < SMOKE_S
    sizes = SMALL if is_smoke else LLAMA_8B
    (bench.work / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    seen = []
    for number in range(SMOKE_ROUNDS if is_smoke else ROUNDS):
        seen.append(one_round(bench.work))
        bench.say(f"  round {number + 1}: {seen[-1]['seconds']:.1f} s")
    return record_of(seen)


def one_round(work: Path) -> dict[str, Any]:
    """Return what one plan took and said, and what an equal one held.

    Who reads what a process holds stops it meanwhile, so the plan that is timed is not looked at.
    """
    most = 0
    with ThreadPoolExecutor(1) as pool:
        looked_at = pool.submit(one_plan, work)
        while not looked_at.done():
            most = max(most, held_below())
            time.sleep(LOOK_S)
    looked_at.result()
    return {**one_plan(work), "host_bytes": most}


def one_plan(work: Path) -> dict[str, Any]:
    """Plan in a fresh process and return what it took and said."""
    code = "import time; began = time.time(); from benchmarks.suites.plan_ranks import planned"
    root = Path(__file__).parents[2]
    arguments = ["-c", f"{code}; planned({str(work / 'config.json')!r}, began)"]
    done = python(arguments, cwd=root, timeout=ROUND_S)
    if done.returncode:
        raise TrialFailedError(done.stderr[-2_000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def held_below() -> int:
    """Return the bytes that the processes below this one hold, what they share counted once."""
    below = psutil.Process().children(recursive=True)
    # Of one that has ended meanwhile there is an error number below zero.
    return round(sum(max(0.0, read_pss(Path(f"/proc/{process.pid}"))) for process in below))


def planned(config: str, began: float) -> None:
    """Plan in this process and its children, and print what it took."""
    options = PlanOptions(gpu="h100", gpus=GPUS, hosts=HOSTS, batch=BATCH)
    found = plan(f"hf:{config}", ("sequence=4096", "autocast=bfloat16"), options).plan
    print(
        json.dumps(
            {
                "seconds": time.time() - began,
                "ways": len(found.parallel),
                "fitting": sum(way.fits for way in found.parallel),
                "verdict": found.advice.verdict if found.advice else "",
            }
        )
    )


def record_of(seen: Sequence[Mapping[str, Any]]) -> Record:
    """Judge the slowest and the largest round."""
    slowest_s = max(one["seconds"] for one in seen)
    most_bytes = max(one["host_bytes"] for one in seen)
    middle_s = statistics.median(one["seconds"] for one in seen)
    first = seen[0]
    return Record(
        theme=THEME,
        claim=f"a training on {GPUS * HOSTS:,} GPUs is planned in less than {MOST_S:.0f} s and "
        f"{format_bytes(MOST_BYTES)}, whole process, slowest of {len(seen)} rounds",
        holds=slowest_s < MOST_S and most_bytes < MOST_BYTES,
        finding=f"{slowest_s:.1f} s, {format_bytes(most_bytes)}; {first['ways']} ways looked at",
        table=[
            ("", "middle", "most", "n"),
            ("time", f"{middle_s:.1f} s", f"{slowest_s:.1f} s", str(len(seen))),
            (
                "memory of all its processes",
                format_bytes(statistics.median(one["host_bytes"] for one in seen)),
                format_bytes(most_bytes),
                str(len(seen)),
            ),
            ("ways to spread it, of which fit", str(first["ways"]), str(first["fitting"]), ""),
        ],
        raw={"rounds": list(seen), "python": sys.version},
        notes=(
            f"The memory is what all processes of an equal plan held at once, looked at every "
            f"{LOOK_S:g} s; what they share counts once. The plan that is timed is not looked at.",
        ),
    )
