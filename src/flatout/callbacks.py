"""Callbacks that say at the end of a normal training where its time went.

`Trainer(callbacks=[flatout.transformers_callback()])` and
`Trainer(callbacks=[flatout.lightning_callback()])`. The training itself is measured, in its own
process, until there are enough steps; it is neither stopped nor changed.
"""

import os
import shlex
import sys
from importlib import import_module
from typing import Any

import torch  # noqa: F401  first: in a trial its import installs hook points, which need the agent

from flatout import rules
from flatout.agent.bootstrap import SPEC_VARIABLE
from flatout.agent.hooks import collectives, loader, model, optimizer, step
from flatout.agent.recorder import Recorder
from flatout.agent.session import Session
from flatout.analysis.profile import summarise
from flatout.analysis.regime import with_regime
from flatout.analysis.steps import MIN_STEPS
from flatout.hardware.machine import read_machine
from flatout.records.messages import messages
from flatout.records.profile import Profile
from flatout.records.secrets import hide_in_words
from flatout.records.trial_result import TrialResult
from flatout.records.trial_spec import TrialSpec
from flatout.reporting.profile.sentences import headline, warnings


class RecorderOfWhole(Recorder):
    """A recorder that keeps its result and lets the training go on when it has seen enough."""

    kept: TrialResult | None = None

    def finish(self, why: str) -> None:
        """Keep the result and listen no more."""
        self.write(why)
        self.session.leave()

    def _save(self, name: str, result: TrialResult) -> None:
        if name == "result":
            self.kept = result


class MeasuredTraining:
    """Measures the training of this process, from when it is made.

    Nothing within a trial of flatout, nor in one of several ranks, which it cannot stop together.
    """

    profile: Profile | None = None
    """What was measured, once the training has ended."""

    def __init__(self) -> None:
        self.recorder: RecorderOfWhole | None = None
        if SPEC_VARIABLE in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return
        session = Session(TrialSpec(mode="measure", prefix=sys.prefix))
        for hook_point in (loader, model, optimizer, step, collectives):
            hook_point.install(session)
        self.recorder = RecorderOfWhole(session)
        self.recorder.install()

    def conclude(self) -> dict[str, float]:
        """Print where the time went and what to type next; return the numbers for a tracker."""
        if self.recorder is None:
            return {}
        try:
            self.recorder.finish("done")
            lines = self._read(self.recorder.kept)
        except Exception as error:  # noqa: BLE001  a training that has ended well stays so
            lines = [f"no verdict: {type(error).__name__}: {error}"]
        sys.stdout.write("".join(f"flatout: {line}\n" for line in lines))
        if self.profile is None:
            return {}
        return {
            "flatout/step_ms": self.profile.step_ms.median,
            "flatout/samples_per_s": self.profile.samples_per_s,
            "flatout/data_wait_share": self.profile.share("data_wait"),
        }

    def _read(self, result: TrialResult | None) -> list[str]:
        """Return the lines of the verdict, and keep the profile."""
        if result is None or len(result.segments) < MIN_STEPS:
            return ["too few training steps to say where their time went"]
        machine = read_machine(torch=False)
        self.profile = rules.add_findings(with_regime(summarise(result, machine)), machine)
        say = messages("en")
        sentences = (headline(self.profile), *warnings(self.profile))
        return [
            *map(say.text, sentences),
            f"more: flatout measure {shlex.join(hide_in_words(sys.argv))}",
        ]


def transformers_callback() -> Any:
    """Return a `transformers.TrainerCallback`; its `training.profile` has the numbers."""
    from transformers import TrainerCallback

    class TransformersVerdict(TrainerCallback):
        """Prints the verdict when `Trainer.train` has ended."""

        def __init__(self) -> None:
            self.training = MeasuredTraining()

        def on_train_end(self, *_args: Any, **_rest: Any) -> None:
            """Print it."""
            self.training.conclude()

    return TransformersVerdict()


def lightning_callback() -> Any:
    """Return a Lightning `Callback` that logs to the trainer's loggers, too.

    Of `lightning` or `pytorch_lightning`, whichever the script has imported.
    """
    is_older = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if is_older else "lightning.pytorch").Callback

    class LightningVerdict(base):  # type: ignore[misc]
        """Prints and logs the verdict when `Trainer.fit` has ended."""

        def __init__(self) -> None:
            self.training = MeasuredTraining()

        def on_train_end(self, trainer: Any, _module: Any) -> None:
            """Print it, and log its numbers at the last step."""
            numbers = self.training.conclude()
            for logger in trainer.loggers if numbers else ():
                logger.log_metrics(numbers, step=trainer.global_step)

    return LightningVerdict()
