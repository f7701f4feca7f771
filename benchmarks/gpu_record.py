"""What a run on a GPU shows: one record of all its stages, whole or not."""

from collections.abc import Mapping
from typing import Any

from benchmarks.bench import Record, cells
from benchmarks.stages import Results, worked
from benchmarks.suites import overhead
from flatout.core.ablation import Comparison, ablation_from_json
from flatout.core.profile import profile_from_json
from flatout.core.recipe import recipe_from_json
from flatout.core.units import format_ms, format_share

SLOW, STARVED, TUNED = "slow_compute", "starved_images", "already_tuned"


def record_of(results: Results) -> Record:
    """Return the record of the stages so far."""
    found = [_tuned_words(results, name) for name in (SLOW, STARVED, TUNED)]
    tuned = results.get(f"tune {SLOW}", {})
    recipe = tuned["result"]["best"]["recipe"] if worked(results, f"tune {SLOW}") else None
    return Record(
        theme="gpu",
        claim="every stage works on one CUDA device, A/A is never called different, "
        "and listening adds at most 1 % to a step",
        holds=holds(results),
        finding="; ".join(filter(None, found)) or "nothing tuned yet",
        table=[
            ("stage", "result", "time"),
            *(_row(name, entry) for name, entry in results.items()),
        ],
        raw=results,
        repeat="make bench-gpu",
        recipe=recipe_from_json(recipe) if recipe else None,
    )


def holds(results: Results) -> bool:
    """Tell whether everything ran and the two checks of flatout itself passed."""
    if not results or not all(worked(results, name) for name in results):
        return False
    if "aa" not in results or "overhead" not in results:
        return False
    different = set(results["aa"]["result"]["decisions"]) & {"kept", "worse"}
    return not different and results["overhead"]["result"]["ratio"] <= 1 + overhead.MOST_SHARE


def _tuned_words(results: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if not worked(results, f"tune {name}"):
        return ""
    return f"{name} {_ratio_words(results[f'tune {name}']['result'])}"


def _ratio_words(ablation: Mapping[str, Any]) -> str:
    pair = ablation_from_json({k: v for k, v in ablation.items() if k != "trials"}).confirmation
    return _pair_words(pair) if pair and ablation["best"]["recipe"]["choices"] else "left as it is"


def _pair_words(pair: Comparison) -> str:
    ratio, interval, n = cells(pair)
    return f"{ratio} [{interval}], n={n}"


def _row(name: str, entry: Mapping[str, Any]) -> tuple[str, str, str]:
    took = f"{entry['took_s']:.0f} s"
    if entry["status"] != "done":
        first = entry["why"].splitlines()[0] if entry["why"] else ""
        return name, f"{entry['status']}: {first}", took
    return name, WORDS[name.partition(" ")[0]](entry["result"]), took


def _facts_words(result: Mapping[str, Any]) -> str:
    return f"installed: {', '.join(result['installed'])}"


def _photographs_words(result: Mapping[str, Any]) -> str:
    return str(result["said"])


def _measure_words(result: Mapping[str, Any]) -> str:
    profile = profile_from_json(result["profile"])
    wait, busy = format_share(profile.share("data_wait")), format_share(profile.device_busy_share)
    return f"step {format_ms(profile.step_ms.median)}, data wait {wait}, device busy {busy}"


def _tune_words(result: Mapping[str, Any]) -> str:
    return f"{_ratio_words(result)} ({recipe_from_json(result['best']['recipe']).label})"


def _overhead_words(result: Mapping[str, Any]) -> str:
    low, high = (end - 1 for end in result["interval"])
    return f"{result['ratio'] - 1:+.1%} of the step ({low:+.1%} to {high:+.1%})"


def _aa_words(result: Mapping[str, Any]) -> str:
    return ", ".join(result["decisions"])


WORDS = {
    "facts": _facts_words,
    "photographs": _photographs_words,
    "measure": _measure_words,
    "tune": _tune_words,
    "overhead": _overhead_words,
    "aa": _aa_words,
}
"""How a stage's result reads, by the first word of its name."""
