"""Switch techniques on and off between the steps of a training that runs.

Training calls of the roots, and backward, go through here meanwhile. Where a technique fails there,
it is switched off, the call is made again without it, and the training goes on: its numbers prove
nothing, only its time is read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flatout.agent import patching
from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.technique import RunningTraining, Switch, Technique

SCREEN_LOG = "screen-*.jsonl"
"""What a screen knows so far, line by line: a process that is killed leaves it."""
MAX_WORDS = 300


class OptimizerGroups:
    """Flags in the groups of optimizers that make steps meanwhile, to be put back as they were."""

    def __init__(
        self, optimizers: Sequence[Any], find_obstacle: Callable[[Any], str | None]
    ) -> None:
        """Choose the optimizers that can be switched.

        Raises:
            NotApplicable: if there are none; with the first one's reason.
        """
        obstacles = [find_obstacle(optimizer) for optimizer in optimizers]
        self.optimizers = [
            optimizer for optimizer, why in zip(optimizers, obstacles, strict=True) if why is None
        ]
        self.handles: list[Any] = []
        """Hooks to be taken off with the flags."""
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not self.optimizers:
            raise NotApplicable(next((why for why in obstacles if why), "no optimizer"))

    def turn(self, flags: Mapping[str, Any] | None) -> None:
        """Set flags in all groups, None to put back what was there before."""
        for group, before in self._before:
            group.update(before)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._before.clear()
        if flags is None:
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._before.append((group, {name: group.get(name) for name in flags}))
                group.update(flags)


class SwitchBoard:
    """The techniques that can be switched in this process, and which of them are on."""

    def __init__(self, session: Session, techniques: Mapping[str, Technique]) -> None:
        self.session = session
        self.techniques = techniques
        """By label."""
        self.switches: dict[str, Switch] = {}
        self.on: tuple[str, ...] = ()
        self.refused: dict[str, str] = {}
        """Techniques with nothing to act on, and why."""
        self.failed: dict[str, str] = {}
        """Techniques that raised while they were on or being switched, and what."""
        self.trouble: str = ""
        """What went wrong since the last switch while several were on; empty where nothing did."""
        self._calls: dict[tuple[int, tuple[str, ...]], Callable[..., Any]] = {}

    def begin(self) -> None:
        """Ask each technique for its switch; training calls and backward go through here now."""
        import torch

        session = self.session
        training = RunningTraining(roots=session.roots, optimizers=session.optimizers)
        for label, technique in self.techniques.items():
            switch = self._tried(label, lambda: technique.switch(training))  # noqa: B023
            if switch is not None:
                self.switches[label] = switch
        for root in session.roots:
            call = session.training_calls[id(root)]
            session.training_calls[id(root)] = self._through_switches(root, call)
        patching.wrap(torch.autograd, "backward", self._backward, order=patching.Order.TECHNIQUE)

    def turn_to(self, wanted: Collection[str]) -> None:
        """Switch to a set of techniques; one that raises is off from now on, and noted."""
        self.trouble = ""
        for label in [x for x in self.on if x not in wanted]:
            self._turn(label, is_on=False)
        for label in [x for x in wanted if x not in self.on and x in self.switches]:
            self._turn(label, is_on=True)

    def check(self) -> None:
        """Ask the techniques that are on whether they really act."""
        for label in self.on:
            self._tried(label, self.switches[label].check)

    def fail(self, label: str, why: str) -> None:
        """Switch a technique off for good."""
        self._give_up(label, self.failed, why)

    def refuse(self, label: str, why: str) -> None:
        """Switch a technique off for good that has nothing to act on."""
        self._give_up(label, self.refused, why)

    def _turn(self, label: str, *, is_on: bool) -> None:
        # In the order of the techniques: that is the order in which a recipe applies them.
        wanted = {*self.on, label} if is_on else {*self.on} - {label}
        self.on = tuple(x for x in self.techniques if x in wanted)
        self._tried(label, lambda: self.switches[label].turn(is_on))

    def _tried(self, label: str, act: Callable[[], Any]) -> Any:
        """Return what a technique does; one that raises is off for good, and the screen goes on."""
        try:
            return act()
        except NotApplicable as reason:
            self._give_up(label, self.refused, str(reason))
        except Exception as error:  # noqa: BLE001
            self._give_up(label, self.failed, _words(error))
        return None

    def _give_up(self, label: str, where: dict[str, str], why: str) -> None:
        where.setdefault(label, why)
        switch = self.switches.pop(label, None)
        if switch is not None and label in self.on:
            self.on = tuple(x for x in self.on if x != label)
            self.session.quietly(switch.turn)(False)  # noqa: FBT003

    def _through_switches(self, root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            key = id(root), self.on
            try:
                if key not in self._calls:
                    self._calls[key] = self._composed(root, call)
                return self._calls[key](*args, **kwargs)
            except Exception as error:  # noqa: BLE001  made again without the techniques
                self._saw_failure(error)
            return call(*args, **kwargs)

        return run

    def _composed(self, root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        for label in self.on:
            switch = self.switches[label]
            if switch.call is None:
                continue
            try:
                call = switch.call(call, root)
            except NotApplicable as reason:
                if len(self.session.roots) == 1:
                    self._give_up(label, self.refused, str(reason))
        return call

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return backward(*args, **kwargs)
            except Exception as error:
                if not (self.on and self.session.is_mine()):
                    raise
                self._saw_failure(error)
            return None

        return run

    def _saw_failure(self, error: Exception) -> None:
        """Switch everything off; who is to blame is found out where several were on."""
        import torch

        on, words = self.on, _words(error)
        if len(on) == 1:
            self._give_up(on[0], self.failed, words)
        else:
            self.turn_to(())
            self.trouble = words
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_WORDS]
