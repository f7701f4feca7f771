"""What lies in `other`: evaluation in every step is told apart."""

import pytest

from flatout.analysis.profile import summarise
from flatout.records.json_records import from_plain
from flatout.records.phase_clock import EVAL, FORWARD, NAMES, OTHER
from flatout.records.profile import profile_from_json
from flatout.records.trial_result import TrialResult
from tests.techniques.facts import machine

STEPS = 30


def written(*, eval_s=0.0, marking_s=0.0):
    """Return what a training process wrote whose every step evaluates."""
    seconds = [0.0] * len(NAMES)
    seconds[FORWARD], seconds[OTHER], seconds[EVAL] = 0.06, 0.04 - eval_s, eval_s
    counts = {"evals": int(eval_s > 0), "loader_starts": 0, "batches": 1, "samples": 4}
    counts |= {"backwards": 1, "losses": [1.0]}
    segments = [
        {"who": 0, "seconds": seconds, "end": 10 + 0.1 * (number + 1), **counts}
        for number in range(STEPS)
    ]
    plain = {
        "segments": segments,
        "period": 1,
        "device": {"kind": "cpu", "peak": {}},
        "load": {"delay_share": 0.0, "foreign_share": 0.0},
        "environment": {"threads": 1},
        "loaders": [],
        "models": [],
        "optimizers": [],
        "listening_s_per_step": 0.0,
        "marking_s": marking_s,
        "probes": {},
        "errors": [],
    }
    return from_plain(TrialResult, plain)


@pytest.mark.parametrize("eval_s", [0.0, 0.03])
def test_evaluation_in_every_step_is_a_part_of_the_rest(eval_s):
    profile = summarise(written(eval_s=eval_s), machine())

    assert profile.phases_ms["other"] == pytest.approx(40.0)
    assert profile.eval_ms == pytest.approx(1e3 * eval_s)
    assert profile_from_json(profile.to_json()).eval_ms == profile.eval_ms


def test_the_marks_on_the_device_s_time_line_count_as_listening():
    profile = summarise(written(marking_s=STEPS * 0.002), machine())

    assert profile.overhead_share == pytest.approx(0.02)
