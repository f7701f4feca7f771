"""Predicted memory against a GPU's: 24 cases, each in a process of its own, several at a time.

For each case: the plan's allocated and reserved bytes alongside torch's own counters, traced in
both ways that users have: on the device, and with none in sight; the recorded snapshot played
through the simulator, so that its error and the tracer's are told apart; and for four subjects
whether the recommended batch fits under a limit, and a batch 3 % larger does not.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.programs import python
from benchmarks.recorded_snapshot import read_snapshot, replay_recorded
from flatout.hardware.catalogue import GpuModel, model_of
from flatout.planner.allocator_settings import AllocatorSettings
from flatout.planner.device_model import RESERVE_ERRORS
from flatout.planner.largest_batch import affine, largest_batch, steady_replay
from flatout.planner.memory_trace import open_tracer
from flatout.planner.tracing.script import TraceRequest
from flatout.planner.workspaces import SCHEMA, find_calibration, with_workspaces
from flatout.records.memory_stream import MemoryStream
from flatout.records.plan import NumberSource
from flatout.records.units import GIB, format_bytes

SCRIPTS = Path(__file__).parent / "scripts"
CASES = SCRIPTS / "memory_cases.py"
AT_ONCE = 6
"""Processes side by side: importing torch takes most of a case, and sixteen cores are there."""
CASE_S = 60.0
LAST_S = 20.0
"""A case takes some 15 s, most of it importing torch and tracing: an assumption."""
LIMITED = ("resnet_fp32", "gpt_bf16", "vit_bf16", "lstm_fp32")
LIMIT_BYTES = 8 * GIB
"""A device this small is full in a second."""
LARGER = 1.08
"""The true largest batch may be this much above the recommended one: the plan's margin, and what it
plans too large."""
WAYS: Mapping[str, Mapping[str, str]] = {"device": {}, "simulated": {"CUDA_VISIBLE_DEVICES": ""}}
"""How a case is traced, by what is changed in the tracer's environment: by the real build's own
choices, and as users without a GPU get it."""
GOALS = {"allocated": (0.002, 0.01), "reserved": (0.01, 0.03)}
"""Median and largest relative error that are aimed at."""
WORKSPACES = (32 * 1024 * 1024, 8_519_680)
"""Sizes that torch gives cuBLAS, by compute capability."""

Case = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the cases run."""

    work: Path
    gpu: GpuModel
    torch: str
    deadline: float


def run(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Compare case by case until the time is up; without a CUDA device only predict one."""
    place = Place(
        work=bench.work,
        gpu=model_of(bench.machine.device),
        torch=bench.machine.torch_version,
        # A case that began in time may run on: it has to end before the stage's alarm.
        deadline=time.monotonic() + seconds - LAST_S,
    )
    cases = all_cases()[:1] if smoke else all_cases()
    if bench.machine.device.kind != "cuda":
        return {"rows": [predicted(place, case) for case in cases[:1]], "why": "no CUDA device"}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        bench.say(f"  memory {words(row)}")
        bench.note({"rows": rows, "limited": [], **summary(rows)})

    # The first one alone: what the process takes alongside the allocator is seen on an idle device.
    keep(guarded(place, cases[0], compared))
    side_by_side(place, cases[1:], compared, keep)
    limited = side_by_side(place, [(name, 0) for name in LIMITED][: 1 if smoke else None], held_to)
    found = {"rows": rows, "limited": limited, **summary(rows)}
    found["calibration"] = calibration(place, rows)
    return found


def is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether every case was compared within the goals, and every recommended batch fits."""
    limited = {row["case"] for row in result.get("limited", ()) if row.get("fits")}
    within = all(result.get(way, {}).get(part, {}).get("holds") for way in WAYS for part in GOALS)
    return within and result["compared"] == len(all_cases()) and limited == set(LIMITED)


def all_cases() -> list[Case]:
    """Return the cases, every subject at its smaller batch first."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from memory_cases import BATCHES
    finally:
        sys.path.remove(str(SCRIPTS))
    return [(name, batches[size]) for size in (0, 1) for name, batches in BATCHES.items()]


def guarded(
    place: Place, case: Case, work: Callable[[Place, Case], dict[str, Any]]
) -> dict[str, Any]:
    """Work on a case; what the time does not reach, or what fails, says so."""
    if time.monotonic() > place.deadline:
        return {"case": named(case), "why": "no time left"}
    try:
        return work(place, case)
    except Exception as error:  # noqa: BLE001  one case must not take the others down
        return {"case": named(case), "why": f"{type(error).__name__}: {error}"[:500]}


def side_by_side(
    place: Place,
    cases: Sequence[Case],
    work: Callable[[Place, Case], dict[str, Any]],
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Work on several cases at once, and pass on each as soon as those before it are done."""
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda case: guarded(place, case, work), cases):
            found.append(row)
            keep(row)
    return found


def predicted(place: Place, case: Case, way: str = "simulated") -> dict[str, Any]:
    """Return what is predicted for a case, traced in one of the ways."""
    name, batch = case
    with open_tracer(f"{CASES}:{name}", environment={**os.environ, **WAYS[way]}) as trace:
        stream = trace(request(place, batch))
    full = with_workspaces(stream, find_calibration(place.gpu, place.torch))
    played = steady_replay(full, AllocatorSettings(), None)
    return {
        "case": named(case),
        "allocated": played.peak_allocated,
        "reserved": played.peak_reserved,
        "method": stream.method,
        "sizes": sizes_of(full),
    }


def compared(place: Place, case: Case) -> dict[str, Any]:
    """Return the prediction of a case alongside what torch's allocator did."""
    guesses = {way: predicted(place, case, way) for way in WAYS}
    result, snapshot = (place.work / f"memory-{named(case)}.{end}" for end in ("json", "pickle"))
    truth = played_for_real(case, result, snapshot)
    recorded = read_snapshot(snapshot)
    simulated = replay_recorded(recorded, AllocatorSettings())
    entries = recorded["device_traces"][0]
    asked = [entry["size"] for entry in entries if entry["action"] == "alloc"]
    sizes = {way: guess.pop("sizes") for way, guess in guesses.items()}
    snapshot.unlink()
    errors = {
        way: {part: guess[part] / truth[part] - 1 for part in GOALS}
        for way, guess in guesses.items()
    }
    if any(abs(parts[part]) > GOALS[part][1] for parts in errors.values() for part in parts):
        # Without the device these are what the error can be found in.
        kept = [[e["action"], e["addr"], e["size"], e["stream"]] for e in entries]
        (place.work / f"requests-{named(case)}.json").write_text(json.dumps(kept))
    return {
        "case": named(case),
        "ways": guesses,
        "truth": truth,
        "errors": errors,
        "simulator": {
            "error": simulated.error,
            "is_exact": simulated.is_exact,
            "first_difference": simulated.first_difference,
        },
        "requests": len(asked),
        "unpredicted": {way: difference(sizes[way], asked) for way in WAYS},
        "ways_part": difference(sizes["device"], [size for size in sizes["simulated"] if size]),
        "cublas": sorted({size for size in asked if size in WORKSPACES}),
    }


def held_to(place: Place, case: Case) -> dict[str, Any]:
    """Return whether the batch recommended for a limited device fits, and a larger one does not."""
    name = case[0]
    calibration_now = find_calibration(place.gpu, place.torch)
    small, _ = calibration_now.reserve_errors or RESERVE_ERRORS
    with open_tracer(f"{CASES}:{name}") as trace:
        model = affine(trace(request(place, 4)), trace(request(place, 5)))
    best = largest_batch(
        lambda batch: with_workspaces(model.at(batch), calibration_now),
        int(LIMIT_BYTES / (1 + small)),
        AllocatorSettings(),
    )
    recommended = best.without_retries or 1
    larger = int(recommended * LARGER) + 1
    fits = [
        played_for_real((name, batch), place.work / f"limit-{name}-{batch}.json", None)["fits"]
        for batch in (recommended, larger)
    ]
    return {
        "case": name,
        "recommended": recommended,
        "fits": fits[0],
        "larger": larger,
        "larger_fits": fits[1],
    }


def played_for_real(case: Case, result: Path, snapshot: Path | None) -> dict[str, Any]:
    """Train a case on the device; without a place for a snapshot under the limit."""
    name, batch = case
    words = [str(SCRIPTS / "memory_case.py"), name, str(batch), str(result), str(snapshot or "-")]
    words += [str(LIMIT_BYTES)] if snapshot is None else []
    done = python(words, timeout=CASE_S)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def request(place: Place, batch: int) -> TraceRequest:
    """Return what is asked of the tracer for this device."""
    capability = place.gpu.compute_capability or TraceRequest().capability
    return TraceRequest(batch=batch, capability=capability)


def sizes_of(stream: MemoryStream) -> list[int]:
    """Return the sizes that are asked for, in their order."""
    return [stream.allocations[i].size for i, born in stream.events if born]


def difference(predicted_sizes: Sequence[int], asked: Sequence[int]) -> dict[str, int] | None:
    """Return where the recorded sizes first leave the predicted ones.

    >>> difference([1, 2], [1, 3, 4])
    {'at': 1, 'predicted': 2, 'recorded': 3}
    """
    real = [size for size in predicted_sizes if size]
    for number, (one, other) in enumerate(zip(real, asked, strict=False)):
        if one != other:
            return {"at": number, "predicted": one, "recorded": other}
    return None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median and largest errors, and whether they are what is aimed at."""
    compared_rows = [row for row in rows if "errors" in row]
    found: dict[str, Any] = {"compared": len(compared_rows)}
    for way in WAYS if compared_rows else ():
        found[way] = {}
        for part, (median, largest) in GOALS.items():
            errors = [abs(row["errors"][way][part]) for row in compared_rows]
            found[way][part] = {
                "median": statistics.median(errors),
                "largest": max(errors),
                "holds": statistics.median(errors) <= median and max(errors) <= largest,
            }
    exact = [row["simulator"]["is_exact"] for row in compared_rows]
    found["simulator_exact"] = sum(exact)
    return found


def calibration(place: Place, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the calibration file of this GPU and torch, to be put among the others."""
    alone = rows[0]
    amounts: dict[str, tuple[int, str]] = {}
    if "truth" in alone:
        why = f"mem_get_info less reserved, after three steps of {alone['case']}"
        amounts["context"] = (alone["truth"]["outside"], why)
    workspaces = [row["cublas"][-1] for row in rows if row.get("cublas")]
    if workspaces:
        amounts["cublas_workspace"] = (statistics.mode(workspaces), "in the recorded requests")
    seen = {
        part: [row["errors"][way][part] for row in rows if "errors" in row for way in WAYS]
        for part in GOALS
    }
    errors: dict[str, Any] = {}
    if seen["allocated"]:
        errors["trace"] = max(map(abs, seen["allocated"]))
        errors["reserve"] = [max(0.0, -min(seen["reserved"])), max(0.0, *seen["reserved"])]
    document = calibration_document(place.gpu.name, place.torch, amounts, errors)
    return {"file": file_name(place.gpu.name, place.torch), "document": document}


def file_name(gpu: str, torch_version: str) -> str:
    """Return the name of a calibration's file.

    >>> file_name("h200", "2.11.0+cu130")
    'h200-torch-2.11.json'
    """
    series = ".".join(torch_version.split(".")[:2])
    return f"{gpu}-torch-{series}.json"


def calibration_document(
    gpu: str,
    torch_version: str,
    amounts: Mapping[str, tuple[int, str]],
    errors: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a calibration file holds, for those who measured.

    Args:
        gpu: the catalogue's name.
        torch_version: with which it was measured.
        amounts: bytes and how they were measured, by name; context, nccl and
            `cublas_workspace`.
        errors: `trace`, the largest relative error of allocated bytes; and `reserve`, the shares by
            which reserved bytes were predicted too small and too large at most.
    """
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "torch": torch_version,
        "source": NumberSource.CALIBRATED.value,
        "amounts": {
            name: {"bytes": count, "low": count, "high": count, "why": why}
            for name, (count, why) in amounts.items()
        },
        "errors": dict(errors),
    }


def named(case: Case) -> str:
    """Return a case's name."""
    return f"{case[0]}-{case[1]}"


def words(row: Mapping[str, Any]) -> str:
    """Return a row in a line."""
    if "errors" not in row:
        return f"{row['case']}: {row.get('why', 'predicted only')}"
    errors = ", ".join(
        f"{part} {error:+.2%} ({way})"
        for way, parts in row["errors"].items()
        for part, error in parts.items()
    )
    simulator = "exact" if row["simulator"]["is_exact"] else f"{row['simulator']['error']:+.2%}"
    return (
        f"{row['case']}: {errors}, simulator {simulator}, "
        f"{format_bytes(row['truth']['reserved'])} reserved"
    )


def result_words(result: Mapping[str, Any]) -> str:
    """Return the stage's result in a line, for the record's table."""
    if "compared" not in result:
        return str(result.get("why", "nothing compared"))
    parts = [
        f"{part} ({way}) median {result[way][part]['median']:.2%}, "
        f"worst {result[way][part]['largest']:.2%}"
        for way in WAYS
        for part in GOALS
        if way in result
    ]
    kept = [row for row in result["limited"] if "fits" in row]
    held = sum(row["fits"] and not row["larger_fits"] for row in kept)
    fit = sum(row["fits"] for row in kept)
    parts.append(f"simulator exact in {result['simulator_exact']} of {result['compared']}")
    parts.append(f"recommended batch fits in {fit} of {len(LIMITED)}, largest in {held}")
    return "; ".join(parts)
