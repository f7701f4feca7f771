"""Runs of the small trainings, each made once and judged many times."""

import functools
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.agent.guard.pinning import drop_autocast
from flatout.agent.guard.record import GuardRecord
from flatout.guard.judge import judge
from flatout.guard.obstacles import Trials
from flatout.records.ablation import LossCheck
from flatout.records.technique import Numerics
from tests.guard.loop import CASES, Case, Setting, train

PLAIN = Setting()


class Base:
    """The baseline of one training with its repeat and its calibration."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flatout-guard-test-"))
        weakref.finalize(self, shutil.rmtree, self.folder)
        self.case = case
        self.setting = setting
        self.path = self.folder / "baseline.npz"
        self.record = train(self.case, self.path, setting)
        self.repeat = train(self.case, self.folder / "repeat.npz", setting, reference=self.path)
        self.calibration = train(
            self.case, self.folder / "calibration.npz", replace(setting, autocast=True)
        )

    def run(self, setting: Setting) -> GuardRecord:
        """Train once more under another setting, beside this baseline's shadow."""
        return train(self.case, self.folder / "candidate.npz", setting, reference=self.path)

    def calibrate_in_fp32(self) -> None:
        """Take the script without its own autocast for the calibration."""
        undo = drop_autocast()
        try:
            self.calibration = train(self.case, self.folder / "calibration.npz", self.setting)
        finally:
            undo()

    def check(self, candidate: GuardRecord, promise: Numerics, **others: Any) -> LossCheck:
        """Judge a candidate; `others` are the fields of `Trials` that are not these runs'."""
        records = {"baseline": self.record, "calibration": self.calibration, "repeat": self.repeat}
        return judge(Trials(**records | {"candidate": candidate, "promise": promise} | others))


@functools.cache
def base(case: str, setting: Setting = PLAIN) -> Base:
    """Return the baseline runs of a training, made at the first call."""
    return Base(CASES[case], setting)
