"""Inside a training process: switch flatout's listening on and off, block by block, and time both.

Everything a measurement installs is installed; then each attribute that it replaced is put back
and replaced again at the script's own `zero_grad`, which is wrapped in both states. One process
thus holds both sides of the comparison, a fraction of a second apart, which separates one percent
where whole processes differ by several. The order of each pair of blocks is drawn at random.
"""

import atexit
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from flatout.records.trial_spec import TrialSpec

RESULT = "switched.json"
ABSENT = object()


def install(spec: TrialSpec) -> None:
    """Install a measurement as a trial does, and the switch around it."""
    import torch
    from torch.utils.data import dataloader

    from flatout.agent import entry
    from flatout.agent.recorder import Recorder

    places = [
        *(torch, torch.Tensor, torch.autograd, torch.nn.Module, torch.amp.GradScaler),
        *(torch.optim.Optimizer, dataloader.DataLoader, dataloader._BaseDataLoaderIter),
        *(dataloader._utils.fetch, dataloader._utils.worker, dataloader._utils.pin_memory),
        *(vars(dataloader._utils.fetch)[name] for name in FETCHERS),
    ]
    before = [dict(vars(place)) for place in places]
    # The run goes on after the trial would have seen enough; its checks cost what they cost.
    Recorder.finish = lambda *_: None  # type: ignore[assignment,method-assign]
    session = entry.install(spec)
    switch = Switch(session, spec, list(zip(places, before, strict=True)))
    zero_grad = torch.optim.Optimizer.zero_grad

    def marked(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        switch.step_began()
        zero_grad(optimizer, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = marked  # type: ignore[method-assign]
    atexit.register(switch.write)


FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")


class Switch:
    """Puts the originals back and the listeners in again, and keeps the step times of both."""

    def __init__(self, session: Any, spec: TrialSpec, places: list[Any]) -> None:
        self.session, self.places = session, places
        self.path = Path(spec.folder) / RESULT
        self.warmup, self.block = spec.details["warmup"], spec.details["block"]
        self.random = random.Random(spec.details["seed"])
        self.owner = os.getpid()
        self.patches: list[tuple[Any, str, Any, Any]] = []
        self.hooks: list[tuple[Any, dict[Any, Any]]] = []
        self.blocks: list[tuple[bool, list[float]]] = []
        self.order: list[bool] = []
        self.changes = [0, 0]
        self.seen = 0
        self.since = 0.0
        self.is_on = True

    def step_began(self) -> None:
        """Time the step that ended; at the end of a block, go to the next state."""
        now = time.perf_counter()
        self.seen += 1
        if self.seen == self.warmup:
            self.find_patches()
            self.start_block()
        elif self.seen > self.warmup:
            times = self.blocks[-1][1]
            times.append(round(now - self.since, 6))
            if len(times) > self.block:  # one more than counts: the first one is left out
                self.changes[self.is_on] += self.session.clock.changes - self.changes_before
                self.start_block()
        self.since = time.perf_counter()

    def start_block(self) -> None:
        """Switch to the next state of a randomly ordered pair."""
        if not self.order:
            self.order = self.random.sample([True, False], 2)
        self.set(is_on=self.order.pop())
        self.blocks.append((self.is_on, []))
        self.changes_before = self.session.clock.changes

    def find_patches(self) -> None:
        """Find everything that differs from before the installation, root classes included."""
        import torch
        from torch.optim import optimizer

        self.session.fire("sampling")  # all of them are in their places then
        for place, before in self.places:
            for name, value in list(vars(place).items()):
                original = before.get(name, value)  # what is new is torch's own, made when needed
                if original is not value and callable(value) and name != "zero_grad":
                    self.patches.append((place, name, original, value))
        for kind in {type(root) for root in self.session.roots} - {torch.nn.Module}:
            call = vars(kind).get("__call__")
            if call is not None and call.__module__.startswith("torch"):
                self.patches.append((kind, "__call__", ABSENT, call))
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            hooks = getattr(optimizer, name)
            self.hooks.append((hooks, dict(hooks)))

    def set(self, *, is_on: bool) -> None:
        """Put the listeners in, or the originals back."""
        if is_on == self.is_on:
            return
        self.is_on = is_on
        for place, name, original, patched in self.patches:
            value = patched if is_on else original
            if value is ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, value)
        for hooks, ours in self.hooks:
            hooks.clear()
            hooks.update(ours if is_on else {})
        if is_on and self.session.sampler.skips_left:
            self.session.fire("skipping")

    def write(self) -> None:
        """Leave the times of whole blocks, the first step of each left out."""
        if os.getpid() != self.owner:
            return
        whole = [(is_on, times[1:]) for is_on, times in self.blocks if len(times) > self.block]
        plain = {"blocks": whole, "changes": {"off": self.changes[0], "on": self.changes[1]}}
        self.path.write_text(json.dumps(plain), encoding="utf-8")
