"""What a run on a GPU shows: one record of all its stages, whole or not."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import gemm, gpu_memory, ladder
from benchmarks.bench import Record, cells
from benchmarks.stages import Results, worked
from benchmarks.suites import overhead
from flatout.records.ablation import Ablation, Comparison, ablation_from_json
from flatout.records.json_records import from_plain
from flatout.records.profile import profile_from_json
from flatout.records.recipe import Recipe
from flatout.records.statistics import Decision
from flatout.records.units import format_ms, format_share

SLOW, STARVED, TUNED = "slow_compute", "starved_images", "already_tuned"
LEAST_AA, LEAST_PROCESSES = 3, 4
"""Comparisons of the A/A that found no difference, and processes behind the overhead: with fewer
there is no evidence."""
REPEAT = {
    "base": "make bench-gpu-base",
    "starved": "make bench-gpu-starved",
    "gemm": "make bench-gpu-gemm",
    "compute": "make bench-gpu",
    "resnet50": "make bench-gpu-resnet50",
    "vit": "make bench-gpu-vit",
    "small": "make bench-gpu-small",
    "peers": "make bench-gpu-peers",
    "memory": "make bench-gpu-memory",
}
"""The command of each part. Parts have a folder of their own, several that were asked for
together one in common: none replaces another's."""
CLAIMS = {
    "base": "every stage works on one CUDA device, A/A is never called different, "
    "and listening adds at most 1 % to a step",
    "starved": "a training that waits for its photographs gets a proven recipe",
    "compute": "a naive GPT-2 124M reaches 470k tokens/s by tune alone",
    "resnet50": "a naive ResNet-50 reaches 3,500 images/s by tune alone",
    "vit": "a naive ViT-B/16 reaches 3,000 images/s by tune alone",
    "small": "a proven recipe for ResNet-18 on small images and for adapters on a frozen decoder",
    "gemm": "our product is right and at least 95 % of cuBLAS's rate, ahead of torch with what "
    "follows fused in",
    "peers": "all naive scripts train under the defaults of both frameworks",
    "memory": "predicted memory agrees with the device's own counters, traced on the device and "
    "with none in sight",
}


SETS = tuple(CLAIMS)


def known(text: str) -> str:
    """Return the sets that a text names, by comma.

    Raises:
        ArgumentTypeError: if it names another.
    """
    unknown = {"all", *text.split(",")} - {"all", *SETS}
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no set {', '.join(sorted(unknown))}; there are {', '.join(SETS)}"
        )
    return text


def record_of(results: Results, *, part: str = "base") -> Record:
    """Return the record of the stages so far."""
    found = [_tuned_words(results, STARVED)]
    found += [_rung_words(results, rung.name) for rung in ladder.RUNGS]
    tunings = ablations_of(results)
    recipes = [tuning.recipe for tuning in tunings if tuning.confirmation]
    parts = list(CLAIMS) if part == "all" else part.split(",")
    return Record(
        theme="gpu" if part in ("all", "base") else f"gpu_{'_'.join(parts)}",
        claim="; ".join(CLAIMS[one] for one in parts),
        holds=holds(results),
        finding="; ".join(filter(None, found)) or "nothing tuned yet",
        table=[
            ("stage", "result", "time"),
            *(_row(name, entry) for name, entry in results.items()),
        ],
        raw=results,
        repeat=REPEAT.get(part, f"python -m benchmarks.run_gpu --set {part}"),
        recipe=next((recipe for recipe in recipes if recipe.choices), None),
        ablations=tunings,
    )


def ablations_of(results: Results) -> list[Ablation]:
    """Return the tunings that were done: what they predicted is alongside what they measured."""
    tunings = []
    for name, entry in results.items():
        if not worked(results, name) or not name.startswith(("tune", "ladder")):
            continue
        result = entry["result"]
        tunings.append(ablation_from_json(result.get("ablation") or _without_trials(result)))
    return tunings


OTHER_PARTS = (
    "gemm",
    "ladder",
    "peers",
    "memory",
    "photographs",
    *(f"{verb} {STARVED}" for verb in ("measure", "tune")),
)
"""What the names of stages begin with that show something else than flatout on its own."""


def holds(results: Results) -> bool:
    """Return whether everything ran and showed what it is there to show."""
    if not results or not all(worked(results, name) for name in results):
        return False
    found = {name: entry["result"] for name, entry in results.items()}
    reached = all(_is_reached(name, result) for name, result in found.items())
    is_base = any(not name.startswith(OTHER_PARTS) for name in found)
    return reached and (not is_base or {"aa", "overhead"} <= set(found))


def _aa_is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether no comparison saw a difference, and enough saw that there is none."""
    seen = [Decision(word) for word in result["decisions"]]
    is_different = {Decision.KEPT, Decision.WORSE} & set(seen)
    return not is_different and seen.count(Decision.NO_EFFECT) >= LEAST_AA


def _overhead_is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether the whole interval, of enough processes, is below what is allowed."""
    is_enough = len(result["processes"]) >= LEAST_PROCESSES
    return is_enough and bool(result["interval"][1] <= 1 + overhead.MOST_SHARE)


def _tune_is_reached(result: Mapping[str, Any]) -> bool:
    """Return whether a recipe was confirmed."""
    tuning = ablation_from_json(_without_trials(result))
    return bool(tuning.recipe.choices) and tuning.confirmation is not None


REACHED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "aa": _aa_is_reached,
    "overhead": _overhead_is_reached,
    "tune": _tune_is_reached,
    "gemm": gemm.is_reached,
    "ladder": ladder.is_reached,
    "peers": ladder.all_ran,
    "memory": gpu_memory.is_reached,
}
"""How stages are judged, by the first word of their names; the others only have to work."""


def _is_reached(name: str, result: Mapping[str, Any]) -> bool:
    """Return whether a stage shows what it is there to show."""
    reached = REACHED.get(name.partition(" ")[0])
    return reached is None or reached(result)


def _tuned_words(results: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if not worked(results, f"tune {name}"):
        return ""
    return f"{name} {_ratio_words(results[f'tune {name}']['result'])}"


def _rung_words(results: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if not worked(results, f"ladder {name}"):
        return ""
    return f"{name} {ladder.rung_words(results[f'ladder {name}']['result'])}"


def _ratio_words(ablation: Mapping[str, Any]) -> str:
    pair = ablation_from_json(_without_trials(ablation)).confirmation
    return _pair_words(pair) if pair and ablation["best"]["recipe"]["choices"] else "left as it is"


def _without_trials(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "trials"}


def _pair_words(pair: Comparison) -> str:
    ratio, interval, n = cells(pair)
    return f"{ratio} [{interval}], n={n}"


def _row(name: str, entry: Mapping[str, Any]) -> tuple[str, str, str]:
    took = f"{entry['took_s']:.0f} s"
    if entry["status"] != "done":
        first = entry["why"].splitlines()[0] if entry["why"] else ""
        words = f"{entry['status']}: {first}"
        if "result" in entry:  # what there was before it ended
            words += f"; so far {_so_far(name, entry['result'])}"
        return name, words, took
    return name, WORDS[name.partition(" ")[0]](entry["result"]), took


def _so_far(name: str, result: Mapping[str, Any]) -> str:
    """Return what a stage that failed had; a tuning has no verdict then, only trials."""
    if set(result) == {"trials"}:
        return f"{len(result['trials'])} trials"
    return WORDS[name.partition(" ")[0]](result)


def _facts_words(result: Mapping[str, Any]) -> str:
    return f"installed: {', '.join(result['installed'])}"


def _photographs_words(result: Mapping[str, Any]) -> str:
    return str(result["said"])


def _measure_words(result: Mapping[str, Any]) -> str:
    profile = profile_from_json(result["profile"])
    wait, busy = format_share(profile.share("data_wait")), format_share(profile.device_busy_share)
    return f"step {format_ms(profile.step_ms.median)}, data wait {wait}, device busy {busy}"


def _tune_words(result: Mapping[str, Any]) -> str:
    return f"{_ratio_words(result)} ({from_plain(Recipe, result['best']['recipe']).label})"


def _overhead_words(result: Mapping[str, Any]) -> str:
    low, high = (end - 1 for end in result["interval"])
    return f"{result['ratio'] - 1:+.1%} of the step ({low:+.1%} to {high:+.1%})"


def _aa_words(result: Mapping[str, Any]) -> str:
    return ", ".join(result["decisions"])


def _gemm_words(result: Mapping[str, Any]) -> str:
    return "; ".join([*map(gemm.words, result["rows"]), *result["missed"]])


def _peers_words(result: Mapping[str, Any]) -> str:
    return ladder.peer_words(result["rows"])


WORDS = {
    "facts": _facts_words,
    "photographs": _photographs_words,
    "measure": _measure_words,
    "tune": _tune_words,
    "overhead": _overhead_words,
    "aa": _aa_words,
    "gemm": _gemm_words,
    "ladder": ladder.rung_words,
    "peers": _peers_words,
    "memory": gpu_memory.result_words,
}
"""How a stage's result reads, by the first word of its name."""
