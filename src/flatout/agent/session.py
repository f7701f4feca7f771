"""The session of one training process: hook points fire events, techniques transform values."""

import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.agent.describe import describe, describe_optimizer
from flatout.agent.events import EVENTS, Listener
from flatout.agent.step_sampler import MAX_NOTED, StepSampler
from flatout.analysis.steps import find_anchor, trainings_of
from flatout.records.errors import NotApplicable
from flatout.records.phase_clock import Clock
from flatout.records.technique import Technique, hook_points_of, name_of
from flatout.records.trial_result import LoaderSeen, Segment
from flatout.records.trial_spec import TrialSpec

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")
NO_THREAD = -1
"""Identifies no thread: the session is over."""
FED_SHARE = 1 / 8
"""A loader of which fewer training calls have batches, against the one of which most have, feeds
none: the first batch of an evaluation set is shown, or its shape is printed."""
FEW_FEEDINGS = 8
"""After as many more, one that took part in a single one feeds none either."""
FEW_OF_SEVERAL = 2
"""The same where another loader took part in more."""
RECENT = 200
"""Segments by which is seen which optimizers take turns."""
MAX_ERRORS = 20
"""Probe failures kept; more of the same say nothing new."""


class Session:
    """Listen at the hook points of this process and apply the recipe there.

    Listeners never change anything, and one that fails is recorded and skipped: the training goes
    on. A technique that fails leaves the value as it was and is recorded as failed.
    """

    optimizer_count = 0
    """Optimizers that the script built so far, also those that are gone."""
    root_count = 0
    """Roots that were found, also those that are gone."""
    last_size = 0
    """Samples of the last batch that was looked into."""
    scaler: Any = None
    is_marked = False
    """Whether the script delimits its steps itself, with `flatout.step`."""
    knows_roots = False
    """Whether the search for roots is over."""
    trains_unseen = False
    """Whether an optimizer that began after that search trains parameters that no root holds."""
    trains_elsewhere = False
    """Whether a thread other than the main one made a backward, which no one listens to."""
    draws_elsewhere = False
    """The same of drawing batches."""
    stepped_inside = False
    """Whether an optimizer stepped inside the backward that runs."""
    feedings = 0
    """Training calls with batches, those that were drawn before them or other ones."""
    wants_more = False
    """Whether a probe asks for more steps than a measurement needs."""
    steps: Any = None
    """What listens to the optimizers; kept by their hook point."""

    def __init__(self, spec: TrialSpec, techniques: Iterable[Technique] = ()) -> None:
        self.spec = spec
        self.is_recording = spec.mode not in ("run", "memory")
        self.techniques = tuple(technique.bind() for technique in techniques)
        self.clock, self.segment = Clock(), Segment()
        self.segments: list[Segment] = []
        # Segments by the optimizer that ended them; in `places`, of which there are few, one that
        # is built again goes on for one that is gone.
        self.counts: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.recent: deque[int] = deque(maxlen=RECENT)
        self._roots: list[Callable[[], torch.nn.Module | None]] = []
        self.training_calls: dict[int, Callable[..., Any]] = {}
        self.loaders: dict[str, LoaderSeen] = {}
        self.errors: list[str] = []
        self.status: dict[str, tuple[str, str]] = {}
        # By technique and hook point: why it was refused there, "" where it acted at least once.
        self._refused: dict[tuple[str, str], str] = {}
        self.unscaled: Any = {}
        """The loss that the script scaled, by the scaled one; kept by the step hook point."""
        self.drawn: dict[str, bool] = {}
        """The loaders that gave batches since the last training call, in epochs under way, and of
        each whether a call that trains nothing came after its latest one."""
        self.tested: set[str] = set()
        """Those that gave one more after such a call: they are evaluated on."""
        self.kept: set[str] = set()
        """Those that gave all of their batches while nothing was called with any."""
        self.fed: dict[str, tuple[int, int]] = {}
        """By loader which feeding was its first, and how many it took part in."""
        self.sampler = StepSampler(self, spec.skips_below_s)
        self.model_facts: list[dict[str, Any]] = []
        # Facts of the model of each call in evaluation mode whose graph nothing has used yet.
        self.eval_graphs: list[dict[str, Any]] = []
        self.optimizer_facts: list[dict[str, Any]] = []
        # By their place in the order of construction; loops may build any number.
        self._optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
            weakref.WeakValueDictionary()
        )
        # The optimizers that `optimizer_facts` are of.
        self._described: list[Callable[[], Any]] = []
        self.in_backward: set[int] = set()
        """Optimizers that step inside backward; its end is that of their step."""
        self._unreported: list[Segment] = []
        """Segments that listeners have not seen yet: those of skipped steps wait."""
        self.listeners: dict[str, list[Listener]] = {name: [] for name in EVENTS}
        """By event; a hook point looks here before it calls `fire`, which is what a step feels."""
        self.signs = _open_signs(spec.folder)
        """What the supervisor looks at: a counter, and whether a batch is waited for."""
        self.thread = threading.get_ident()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def keeps_roots(self) -> bool:
        """Return whether roots live on when the script has let go of them.

        What is measured is looked at to the end. The real run may train one model after the other,
        of which two do not fit; so may what is measured, once the first ones are known.
        """
        return self.spec.mode != "run" and not self.knows_roots

    @property
    def knows_optimizers(self) -> bool:
        """Return whether every optimizer has ended a step, those inside backward one together."""
        return len(self.counts) + max(0, len(self.in_backward) - 1) >= len(self.optimizers)

    @property
    def roots(self) -> list["torch.nn.Module"]:
        """The live models that training calls began at, in order."""
        return [found for ref in self._roots if (found := ref()) is not None]

    @property
    def optimizers(self) -> list["torch.optim.Optimizer"]:
        """The live optimizers that the script built, in order."""
        return list(self._optimizers.values())

    @property
    def made_steps(self) -> int:
        """Training steps so far: of optimizers that take turns the one that steps least counts.

        One that lives and steps no more is of a training that is over, and its steps count too.
        """
        if len(self.places) < 2:
            return sum(self.places.values())
        whos = list(self.recent)
        running = whos[trainings_of(whos)[-1]]
        over = (made for who, made in self.places.items() if who not in running)
        return self.places.get(find_anchor(running), self.places[whos[-1]]) + sum(over)

    @property
    def last_scale(self) -> float:
        """The GradScaler's scale for the gradients now being accumulated; 1 without a scaler.

        Reading it synchronises with the device: for untimed runs only.
        """
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def start(self) -> None:
        """Let the techniques set their process-wide switches."""
        for technique in self.techniques:
            if hook_points_of(technique) & {"environment", "start"}:
                self._apply_start(technique)

    def on(self, event: str, listener: Listener) -> None:
        """Call `listener` at every `event`; an exception in it is recorded, never raised."""
        if event not in self.listeners:
            raise ValueError(f"no event {event!r}; there are {', '.join(EVENTS)}")
        # New lists: one may be under way, and a listener may end another, or itself.
        self.listeners[event] = [*self.listeners[event], listener]

    def off(self, event: str, listener: Listener) -> None:
        """Call a listener no more; one that does not listen is left alone."""
        self.listeners[event] = [one for one in self.listeners[event] if one != listener]

    def fire(self, event: str, *args: Any) -> None:
        """Tell the listeners of an event."""
        for listener in self.listeners[event]:
            try:
                listener(*args)
            except Exception as error:  # noqa: BLE001, PERF203  a failing probe never ends training
                self.note_failure(listener, error)

    def quietly(self, listener: Callable[..., Any]) -> Listener:
        """Return the function with its exceptions recorded instead of raised."""

        @functools.wraps(listener)
        def quiet(*args: Any, **kwargs: Any) -> None:
            try:
                listener(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  a failing probe must never end the training
                self.note_failure(listener, error)

        return quiet

    def note_failure(self, listener: Callable[..., Any], error: Exception) -> None:
        """Record what a listener raised."""
        name = getattr(listener, "__qualname__", type(listener).__name__)
        self.note_error(f"{name}: {type(error).__name__}: {error}")

    def note_error(self, text: str) -> None:
        """Record the failure of a probe."""
        if len(self.errors) < MAX_ERRORS and text[:300] not in self.errors:
            self.errors.append(text[:300])

    def is_mine(self) -> bool:
        """Return whether this is the training process's own thread.

        Loader workers inherit the patches, and autograd's device threads recompute checkpointed
        forwards: neither is a step of the loop.
        """
        # No getpid: a forked child has passed through `_forked` before it gets here.
        return threading.get_ident() == self.thread

    def transform(
        self, hook_point: str, value: Value, *context: Any, only: Technique | None = None
    ) -> Value:
        """Return the value after every technique that acts at this hook point changed it."""
        for technique in self.techniques if only is None else (only,):
            if hook_point in hook_points_of(technique):
                value = self._apply(technique, hook_point, value, context)
        return value

    def touches(self, hook_point: str) -> bool:
        """Return whether any technique of the recipe acts at a hook point."""
        return any(hook_point in hook_points_of(technique) for technique in self.techniques)

    def note_status(self, technique: Technique, status: str, why: str = "") -> None:
        """Record what became of a technique; once applied, later refusals do not change that."""
        name = name_of(technique)
        if status != "failed" and self.status.get(name, ("",))[0] in ("applied", "failed"):
            return
        self.status[name] = (status, why)

    def conclude(self) -> None:
        """Let the techniques that were applied say at the end whether they really acted.

        One that acts at several hook points and was refused at one of them whenever it was asked
        did not: half of a technique is another one.
        """
        for (name, _hook_point), why in self._refused.items():
            if why and self.status.get(name, ("",))[0] == "applied":
                self.status[name] = ("not_applicable", why)
        for technique in self.techniques:
            name = name_of(technique)
            if "end" in hook_points_of(technique) and self.status.get(name, ("",))[0] == "applied":
                try:
                    self.status[name] = ("applied", technique.end())
                except NotApplicable as reason:
                    self.status[name] = ("not_applicable", str(reason))
                except Exception as error:  # noqa: BLE001  as at every hook point: the trial says so
                    self.status[name] = ("failed", f"{type(error).__name__}: {error}"[:500])

    def add_optimizer(self, optimizer: "torch.optim.Optimizer") -> None:
        """Remember an optimizer, by weak reference."""
        self._optimizers[self.optimizer_count] = optimizer
        self.optimizer_count += 1

    def add_root(self, module: "torch.nn.Module", number: int | None = None) -> None:
        """Remember a root, in the place of one that is over where it has its number."""
        place = len(self._roots) if number is None else number
        found = (lambda: module) if self.keeps_roots else weakref.ref(module)
        self._roots[place : place + 1] = [found]
        self.root_count += 1

    def note_root(self, module: "torch.nn.Module") -> None:
        """Describe a root as the script made it, before the recipe changes it."""
        self.quietly(lambda: self.model_facts.append(describe(module)))()

    def note_optimizer(self, optimizer: "torch.optim.Optimizer") -> None:
        """Describe an optimizer as the script made it, before the recipe changes it.

        One like another that is gone takes its place: loops make theirs again.
        """

        def note() -> None:
            facts, own = describe_optimizer(optimizer), weakref.ref(optimizer)
            for place, (known, of) in enumerate(
                zip(self.optimizer_facts, self._described, strict=True)
            ):
                if known == facts and of() is None:
                    self._described[place] = own
                    return
            self.optimizer_facts.append(facts)
            self._described.append(own)

        self.quietly(note)()

    def number_of(self, optimizer: Any) -> int:
        """Return the place of an optimizer in the order of construction, -1 when unknown."""
        return next((n for n, one in self._optimizers.items() if one is optimizer), -1)

    def lives(self, number: int) -> bool:
        """Return whether an optimizer lives; of one that was never built here that is assumed."""
        return number in self._optimizers or not 0 <= number < self.optimizer_count

    def note_used_graphs(self) -> None:
        """Note that evaluations' graphs are needed: for forces, or for an attack on the model."""
        for facts in self.eval_graphs:
            facts["eval_graph_calls"] -= 1
        self.eval_graphs.clear()

    def note_drawn(self, address: str) -> None:
        """Note that a loader gave a batch."""
        if self.drawn.get(address):
            self.tested.add(address)
        self.drawn[address] = False

    def note_drained(self, address: str) -> None:
        """Note that a loader has no batch left: those that nothing was called with may be kept."""
        if not self.drawn.pop(address, True) and address not in self.tested:
            self.kept.add(address)
        self.tested.discard(address)

    def note_tested(self) -> None:
        """Note a call that trains nothing: it may be given what was drawn last."""
        self.drawn = dict.fromkeys(self.drawn, True)

    def note_trained_batches(self) -> None:
        """Mark the loaders whose batches the training calls are given, by this one too.

        One that gave more after a call that trains nothing was evaluated on, between the drawing of
        a batch and its use. One that takes part in few feedings only was looked at in passing.
        """
        fed = [address for address in self.drawn if address not in self.tested]
        self.drawn.clear()
        self.tested.clear()
        if any(address in self.fed for address in fed):
            self.kept.clear()
        if not fed and sum(self.segment.calls) > 1:
            return  # the same batch again
        self.feedings += 1
        for address in fed or self.kept:
            first, count = self.fed.get(address, (self.feedings, 0))
            self.fed[address] = first, count + 1
        shares = {a: n / (self.feedings - first + 1) for a, (first, n) in self.fed.items()}
        least = FED_SHARE * max(shares.values(), default=0.0)
        is_fed_again = any(count > 1 for _first, count in self.fed.values())
        few = FEW_OF_SEVERAL if is_fed_again else FEW_FEEDINGS
        for address, (first, count) in self.fed.items():
            is_rare = count == 1 and self.feedings - first > few
            if address in self.loaders:
                self.loaders[address].is_training = shares[address] >= least and not is_rare

    def end_segment(self, who: int) -> None:
        """Close the running segment: an outermost optimizer step, or backward, has ended."""
        sampler = self.sampler
        if sampler.ends:
            self.record_noted()
        segment = self.segment
        segment.who = who
        segment.seconds = self.clock.lap()
        segment.end = self.clock.since
        self._record(segment)
        sampler.recorded(segment)
        self.segment = Segment(is_sampled=not sampler.skips_left)
        self.eval_graphs.clear()
        self.beat()
        if self.listeners["lap"]:
            self.fire("lap", segment)
        if segment.is_sampled or len(self._unreported) > MAX_NOTED:
            ended, self._unreported = self._unreported, []
            for one in ended if self.listeners["segment"] else ():
                self.fire("segment", one)
            self.fire("segments", ended)

    def leave(self) -> None:
        """Listen no more, and let the models go: the training goes on for any time."""
        self.thread = NO_THREAD
        self._roots.clear()
        self.training_calls.clear()

    def forget(self) -> None:
        """Begin the record again: what was found so far were not the script's own steps."""
        self.segments.clear()
        self.counts.clear()
        self.places.clear()
        self.recent.clear()
        self._unreported.clear()
        self.sampler.reset()

    def record_noted(self) -> None:
        """Record the skipped steps of which only the end was noted."""
        for segment in self.sampler.take_noted():
            self._record(segment)

    def beat(self) -> None:
        """Show the supervisor that the training is alive."""
        self.signs[0] = (self.signs[0] + 1) % 256

    def _record(self, segment: Segment) -> None:
        if self.is_recording:
            self.segments.append(segment)
        self._unreported.append(segment)
        who, made = segment.who, self.places
        self.counts[who] = self.counts.get(who, 0) + 1
        if who not in made:
            gone = next((one for one in made if not self.lives(one)), who)
            made[who] = made.pop(gone, 0)
        made[who] += 1
        self.recent.append(who)

    def _apply(
        self, technique: Technique, hook_point: str, value: Value, context: tuple[Any, ...]
    ) -> Value:
        try:
            changed: Value = getattr(technique, hook_point)(value, *context)
        except NotApplicable as reason:
            self._refused.setdefault((name_of(technique), hook_point), str(reason))
            self.note_status(technique, "not_applicable", str(reason))
            return value
        except Exception as error:  # noqa: BLE001  the value stays as it was, and the trial says so
            self.note_status(technique, "failed", f"{type(error).__name__}: {error}"[:500])
            return value
        self._refused[name_of(technique), hook_point] = ""
        self.note_status(technique, "applied")
        return changed

    def _apply_start(self, technique: Technique) -> None:
        try:
            technique.start()
        except NotApplicable as reason:
            self.note_status(technique, "not_applicable", str(reason))
        except Exception as error:  # noqa: BLE001  a trial says so and goes on
            self.note_status(technique, "failed", f"{type(error).__name__}: {error}"[:500])
        else:
            # A technique that acts at other hook points too is applied when it did.
            if not hook_points_of(technique) - {"environment", "start", "end"}:
                self.note_status(technique, "applied")

    def _forked(self) -> None:
        """Start an empty record: a forked child may train too (it is then a trainer of its own)."""
        if self.thread == NO_THREAD:
            return
        self.thread = threading.get_ident()
        self.clock, self.segment = Clock(), Segment()
        self.forget()
        self.sampler.below_s = 0.0
        self.errors.clear()
        self.trains_elsewhere = self.draws_elsewhere = False


def _open_signs(folder: str) -> "mmap.mmap | bytearray":
    path = Path(folder) / "heartbeat"
    if not folder or not path.exists():
        return bytearray(2)  # no one looks
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
