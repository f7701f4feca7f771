"""When a technique that is slow to start has paid that back."""

from dataclasses import dataclass, replace

import pytest

from tests.workflow.test_tune import Compiling, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes


@dataclass
class Epochs(Compiling):
    """Epochs of ten steps take 700 ms to start, whatever the techniques are."""

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        if trial.profile is None:
            return trial
        return replace(trial, profile=replace(trial.profile, epoch_start_ms=700.0, epoch_steps=10))


def test_both_steps_are_taken_with_their_part_of_the_epoch_s_start(tmp_path):
    ablation = run(Epochs({"bf16_autocast": 0.5}), tmp_path, only=("bf16_autocast",))

    row = ablation.rows[0]
    assert row.comparison.ratio == pytest.approx(170 / 120, rel=0.05)
    assert row.break_even_steps == pytest.approx(20.0 / 0.05, rel=0.1)
