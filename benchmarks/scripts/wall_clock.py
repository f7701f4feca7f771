"""Train an ordinary script and write its times by the wall clock: what flatout's are held against.

    python wall_clock.py RESULT STEPS SCRIPT ARGUMENTS...

After some steps that do not count, so many run as they are, and the device is waited for before
the first and after the last: their time is exact, and nothing disturbs them. In so many more it is
waited for at each edge of a phase: forward and backward are then each what the device needs. It
knows nothing of flatout. The moment at which each step ended is kept as well.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as optimizers

WARMUP = 20


def wait():
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Times:
    """Counts the steps, and waits for the device where it is time to."""

    def __init__(self, result, steps):
        self.result, self.steps = result, steps
        self.made = 0
        self.ends_s = []
        self.began_s = self.as_they_are_s = 0.0
        self.phases_s = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.phase, self.since_s = "", 0.0

    @property
    def waits(self):
        """Whether the phases are timed now."""
        return self.made >= WARMUP + self.steps

    def enter(self, phase):
        """Begin a phase and end the one before."""
        if not self.waits or phase == self.phase:
            return
        wait()
        now = time.perf_counter()
        if self.phase:
            self.phases_s[self.phase] += now - self.since_s
        self.phase, self.since_s = phase, now

    def stepped(self):
        """Note the end of a step, and write all times after the last."""
        self.enter("")
        self.made += 1
        self.ends_s.append(time.perf_counter())
        if self.made == WARMUP:
            self.result.with_suffix(".begun").touch()
            wait()
            self.began_s = time.perf_counter()
        elif self.made == WARMUP + self.steps:
            wait()
            self.as_they_are_s = time.perf_counter() - self.began_s
            # Not before: in a step of many small modules its calls are a part of the time.
            register_module_forward_pre_hook(
                lambda module, _args: self.enter("forward") if module.training else None
            )
        elif self.made == WARMUP + 2 * self.steps:
            self.write()

    def write(self):
        """Write the times, and end here."""
        found = {
            "step_ms": 1e3 * self.as_they_are_s / self.steps,
            "phases_ms": {name: 1e3 * s / self.steps for name, s in self.phases_s.items()},
            "ends_s": self.ends_s,
        }
        self.result.write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)


def main():
    """Time the script."""
    result, steps, script, *arguments = sys.argv[1:]
    times = Times(Path(result), int(steps))
    backward = torch.Tensor.backward

    def timed(tensor, *args, **kwargs):
        times.enter("backward")
        backward(tensor, *args, **kwargs)
        times.enter("")

    torch.Tensor.backward = timed
    optimizers.register_optimizer_step_pre_hook(lambda *_: times.enter("optimizer"))
    optimizers.register_optimizer_step_post_hook(lambda *_: times.stepped())
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        times.write()  # one that is interrupted leaves the moments of its steps


if __name__ == "__main__":
    main()
