"""What a run on a GPU shows: one record of all its stages, whole or not."""

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

from benchmarks import gemm, gpu_clocks, gpu_commands, gpu_guard, gpu_memory, ladder
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
MOST_BUSY_BEFORE, LEAST_BUSY_AFTER = 0.35, 0.99
"""How busy the device of the starved training is to be, by the article's table: 35 to 95 %."""
PLANS = {
    "right": "tests,memory,sweep,guard,commands",
    "product": "compute",
    "numbers": "base,gemm",
}
"""The three calls that say most, in a quarter of an hour: what is right or wrong, all of it at
once, since nothing is timed; the product; hard numbers. The last two have the device alone."""
PLAN_S = {"right": 240.0, "product": 420.0, "numbers": 300.0}
"""Time for each: a device that was lent is often there for fifteen minutes in all."""
AT_ONCE = ("right",)
"""Plans whose stages are played side by side."""
CLAIMS = {
    "tests": "the tests for a GPU pass",
    "base": "device times agree with a clock that waits for the device, and listening adds at most "
    "1 % to a step",
    "compute": "a naive GPT-2 124M reaches 470k tokens/s by tune alone",
    "sweep": "each technique acts in a real training or says why not, and passes the guard",
    "gemm": "our product is right and at least 95 % of cuBLAS's rate, ahead of torch with what "
    "follows fused in",
    "memory": "predicted memory agrees with the device's own counters, traced on the device and "
    "with none in sight",
    "resnet50": "a naive ResNet-50 reaches 3,500 images/s by tune alone",
    "starved": "a training that keeps its GPU busy for at most 35 % of the time gets to 99 %",
    "vit": "a naive ViT-B/16 reaches 3,000 images/s by tune alone",
    "peers": "all naive scripts train under the defaults of both frameworks",
    "guard": "the unchanged script is never called another training",
    "counters": "the counters show known loads as what they are; reading them adds at most 1 % to "
    "a step of 2 to 5 ms, listening at most 3 %; the unchanged script is called neither faster nor "
    "slower",
    "commands": "every command works on the device, a run with a recipe ends as the plain one, and "
    "memory that runs out ends as the pages say",
    "small": "a proven recipe for ResNet-18 on small images and for adapters on a frozen decoder",
}
"""What each set is there to show, by its name, in the order in which they are worth a GPU's time.
Sets have a folder of their own, several that were asked for together one in common: none replaces
another's."""


SETS = tuple(CLAIMS)
PARTS = dict.fromkeys(rung.part for rung in ladder.RUNGS)


def known(text: str) -> str:
    """Return the sets that a text names, by comma; the name of a plan stands for its own."""
    text = PLANS.get(text, text)
    unknown = {"all", *text.split(",")} - {"all", *SETS}
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no set {', '.join(sorted(unknown))}; there are {', '.join([*PLANS, *SETS])}"
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
        theme="gpu" if part == "all" else f"gpu_{'_'.join(parts)}",
        claim="; ".join(CLAIMS[one] for one in parts),
        holds=holds(results) and stages_in(parts) <= set(results),
        finding="; ".join(filter(None, found)) or "nothing tuned yet",
        table=[
            ("stage", "result", "time"),
            *(_row(name, entry) for name, entry in results.items()),
        ],
        raw=results,
        repeat=f"make bench-gpu SET={part}",
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


STAGES: Mapping[str, tuple[str, ...]] = {
    "tests": ("tests",),
    "base": ("facts", f"measure {SLOW}", f"measure {TUNED}", "clocks", "overhead"),
    "sweep": ("photographs", "sweep"),
    "gemm": ("gemm",),
    "memory": ("memory",),
    "starved": ("photographs", f"measure {STARVED}", f"tune {STARVED}"),
    "peers": ("peers",),
    "guard": ("guard",),
    "counters": ("counters", "sampling", "listening", "aa"),
    "commands": ("commands", "oom"),
    **{part: tuple(f"ladder {x.name}" for x in ladder.RUNGS if x.part == part) for part in PARTS},
}
"""The stages of each set, which fit into one call."""


def stages_in(parts: Collection[str]) -> set[str]:
    """Return the stages of some sets.

    >>> sorted(stages_in(["sweep", "gemm"]))
    ['gemm', 'photographs', 'sweep']
    """
    return {name for part in parts for name in STAGES[part]}


def holds(results: Results) -> bool:
    """Return whether everything ran and showed what it is there to show."""
    return bool(results) and all(
        worked(results, name) and _is_reached(name, entry["result"])
        for name, entry in results.items()
    )


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
    """Return whether a recipe was confirmed, and keeps busy a device that waited before."""
    tuning = ablation_from_json(_without_trials(result))
    if not tuning.recipe.choices or tuning.confirmation is None or tuning.final is None:
        return False
    before, after = (one.device_busy_share for one in (tuning.baseline, tuning.final))
    return before <= MOST_BUSY_BEFORE and after >= LEAST_BUSY_AFTER


REACHED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "tests": gpu_commands.tests_pass,
    "clocks": gpu_clocks.clocks_agree,
    "sweep": gpu_guard.sweep_is_reached,
    "guard": gpu_guard.aa_is_reached,
    "counters": gpu_clocks.counters_are_right,
    "sampling": gpu_clocks.sampling_is_cheap,
    "listening": gpu_clocks.listening_is_cheap,
    "commands": gpu_commands.all_hold,
    "oom": gpu_commands.all_hold,
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
    tuning = ablation_from_json(_without_trials(result))
    after = tuning.final or tuning.baseline
    busy = [format_share(one.device_busy_share) for one in (tuning.baseline, after)]
    recipe = from_plain(Recipe, result["best"]["recipe"]).label
    return f"{_ratio_words(result)}, device busy {busy[0]} -> {busy[1]} ({recipe})"


def _aa_words(result: Mapping[str, Any]) -> str:
    return ", ".join(result["decisions"])


def _gemm_words(result: Mapping[str, Any]) -> str:
    return "; ".join([*map(gemm.words, result["rows"]), *result["missed"]])


def _peers_words(result: Mapping[str, Any]) -> str:
    return ladder.peer_words(result["rows"])


WORDS = {
    "facts": _facts_words,
    "tests": gpu_commands.tests_words,
    "clocks": gpu_clocks.all_words(gpu_clocks.clock_words),
    "sweep": gpu_guard.sweep_words,
    "guard": gpu_guard.aa_words,
    "counters": gpu_clocks.all_words(gpu_clocks.load_words),
    "sampling": gpu_clocks.added_words,
    "listening": gpu_clocks.added_words,
    "commands": gpu_clocks.all_words(gpu_commands.row_words),
    "oom": gpu_clocks.all_words(gpu_commands.row_words),
    "photographs": _photographs_words,
    "measure": _measure_words,
    "tune": _tune_words,
    "overhead": gpu_clocks.added_words,
    "aa": _aa_words,
    "gemm": _gemm_words,
    "ladder": ladder.rung_words,
    "peers": _peers_words,
    "memory": gpu_memory.result_words,
}
"""How a stage's result reads, by the first word of its name."""
