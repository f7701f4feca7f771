"""Equal trials: how far two of them differ in turns, and how far one after the other.

    python -m benchmarks.run turns --only gpt,rnn

Pairs of both kinds alternate, so both see the same machine. Each workload leaves its part of the
record, as in the suite `search`.
"""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench import LIMIT_S, Bench, Record, TrialFailedError
from benchmarks.suites.search import SMOKE_S, workload_of
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import student_quantile
from flatout.records.trial import Outcome
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.tuning.turns import (
    PRIOR_FREEDOM,
    can_take_turns,
    compare_turns,
    noise_of,
    play_in_turns,
)

THEME = "turns"
WORKLOADS = (
    *("gpt", "cnn_arrays", "tabular", "rnn", "encoder_texts", "gan", "diffusion", "cnn_files"),
)
WITH = {"cnn_files": "loader_workers num_workers=2 prefetch_factor=2"}
"""What both sides of a workload's pairs have in use: workers make batches in bursts."""
PAIRS, SMOKE_PAIRS = 8, 2
TIMES_CLOSER = 2.0
"""How much closer equal trials should be in turns, over all workloads."""
MOST_OUTSIDE = 0.05
"""Share of the pairs in turns that their own 95 % intervals should miss at most."""


def run(bench: Bench) -> Record:
    """Measure the chosen workloads, and make the record of all that were on this device."""
    names, parts = bench.chosen(WORKLOADS, "workload")
    for name in names:
        part = measured(name, bench)
        (parts / f"{name}.json").write_text(json.dumps(part), encoding="utf-8")
        bench.say("  " + "  ".join(_row(part)))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(parts.glob("*.json"))]
    return record_of([part for part in found if part["device"] == bench.machine.device.name])


def measured(name: str, bench: Bench) -> dict[str, Any]:
    """Return the log ratios of equal trials of one workload, by pairs of both kinds."""
    is_smoke = bench.budget_s < SMOKE_S
    work = bench.work / name
    work.mkdir(parents=True)
    workload = workload_of(name, work, is_smoke=is_smoke)
    options = TrialOptions(limit_s=LIMIT_S)
    recipe = Recipe(choices=(Choice.from_label(WITH[name]),)) if name in WITH else Recipe()
    under = workload.under(recipe)
    in_turns, apart = [], []
    for number in range(SMOKE_PAIRS if is_smoke else PAIRS):
        trials = [run_trial(under, recipe, bench.machine, options) for _ in range(2)]
        failed = next((each for each in trials if each.outcome is not Outcome.OK), None)
        if failed is not None:
            raise TrialFailedError(f"{name}: {failed.message}")
        if not can_take_turns(trials[0], bench.machine):
            raise TrialFailedError(f"{name} cannot take turns")
        steps_ms = [each.profile.whole_step_ms for each in trials if each.profile]
        first_ms, second_ms = steps_ms
        log_ratio = math.log(first_ms / second_ms)
        apart.append(
            {
                "log_ratio": log_ratio,
                "steps_ms": steps_ms,
                "took_s": sum(each.wall_s for each in trials),
            }
        )
        both = recipe, recipe
        pair = play_in_turns(workload, both, bench.machine, options, number % 2 == 0)
        if not pair:
            raise TrialFailedError(f"{name}: a pair in turns did not count")
        seen = compare_turns(pair)
        in_turns.append(
            {
                "steps_ms": [each.profile.whole_step_ms for each in pair if each.profile],
                "took_s": max(each.wall_s for each in pair),
                "log_ratio": seen.log_ratio,
                "deviation": math.sqrt(seen.variance),
                "freedom": noise_of([seen], []).freedom,
                "turns_s": [each.details["probes"]["turns"]["turns_s"] for each in pair],
            }
        )
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": bench.machine.device.name,
        "in turns": in_turns,
        "one after the other": apart,
    }


def deviation(pairs: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard deviation of pairs whose true difference is nothing."""
    return math.sqrt(sum(pair["log_ratio"] ** 2 for pair in pairs) / len(pairs))


def is_outside(pair: Mapping[str, Any]) -> bool:
    """Return whether a pair in turns differs by more than its own turns allow."""
    limit = student_quantile(0.975, pair.get("freedom", PRIOR_FREEDOM))
    return abs(pair["log_ratio"]) > limit * pair["deviation"]


def record_of(parts: Sequence[Mapping[str, Any]]) -> Record:
    """Judge all parts together."""
    in_turns = [pair for part in parts for pair in part["in turns"]]
    apart = [pair for part in parts for pair in part["one after the other"]]
    outside = sum(map(is_outside, in_turns))
    times = deviation(apart) / deviation(in_turns)
    is_within = outside <= max(1, MOST_OUTSIDE * len(in_turns))
    return Record(
        theme=THEME,
        claim=f"equal trials are {TIMES_CLOSER:.0f} times closer in turns than one after the "
        f"other, and at most {MOST_OUTSIDE:.0%} of the pairs miss the interval of their own turns",
        holds=times >= TIMES_CLOSER and is_within,
        finding=f"{times:.1f} times closer: {100 * deviation(in_turns):.1f} % instead of "
        f"{100 * deviation(apart):.1f} %; {outside} of {len(in_turns)} pairs outside",
        table=[
            ("equal trials of", "in turns", "as expected", "one after the other", "s a pair", "n"),
            *map(_row, parts),
        ],
        raw={"parts": list(parts)},
        notes=(
            "Deviations are those of the log ratio of two equal trials. Expected is what a pair's "
            "own turns say of it, the root of the mean square.",
            "Seconds a pair: in turns, and one after the other.",
        ),
    )


def _row(part: Mapping[str, Any]) -> tuple[str, ...]:
    in_turns, apart = part["in turns"], part["one after the other"]
    expected = math.sqrt(sum(pair["deviation"] ** 2 for pair in in_turns) / len(in_turns))
    took = (sum(pair["took_s"] for pair in pairs) / len(pairs) for pairs in (in_turns, apart))
    shown = (deviation(in_turns), expected, deviation(apart))
    return (
        part["name"],
        *(f"{100 * each:.1f} %" for each in shown),
        ", ".join(f"{seconds:.0f}" for seconds in took),
        str(len(in_turns)),
    )
