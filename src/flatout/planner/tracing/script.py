"""Trace an unmodified script: it runs to the end of its second step, with a GPU of air.

Tensors of the host are real, so that the script reads its data as ever; those on the GPU are fake.
`trace_script` is the parent's side; `install` runs in the child, right after torch's import.
"""

import atexit
import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.agent import patching, undo_journal
from flatout.agent.hooks import loader, model, optimizer, step
from flatout.agent.nested import leaves_of
from flatout.agent.session import Session
from flatout.launch import trial_folders
from flatout.launch.trial_process import TRACE, Ending, ProcessOptions, run_process, scratch_root
from flatout.planner.tracing.script_data import HostData
from flatout.planner.tracing.training_step import STEPS
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, read_json
from flatout.records.json_records import from_plain, to_plain
from flatout.records.memory_stream import (
    Component,
    MemoryStream,
    Phase,
    stream_from_json,
    stream_to_json,
)
from flatout.records.phase_clock import DATA_WAIT
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.records.trial_spec import TrialSpec

if TYPE_CHECKING:
    from torch import nn

    from flatout.planner.tracing.compiled import GraphCall
    from flatout.planner.tracing.recording import Recording

ENTRY = "flatout.planner.tracing.script"
RESULT = "memory.json"
"""Name of the child's result in its folder."""
MODE = "memory"
LIMIT_S = 300.0
"""A trace takes seconds; what takes longer reads its data for real, or hangs."""
ON_HOST = "the script trains on the CPU wherever it runs: this is its memory there, of a real run"
ONE_STEP = (
    "the script took one step and ended: a second one would find gradients and optimizer state "
    "there, and may need more"
)
MORE_STEPS = 3
"""Steps of one optimizer after which a trace ends even if another one never stepped."""
CAUSES = (
    (
        "does not require grad and does not have a grad_fn",
        "the loss comes from nothing that is trained: give torch.utils.checkpoint "
        "use_reentrant=False, whose old form gives no gradients to layers that are fed with data; "
        "without checkpoints, see what detaches the loss",
    ),
    (
        "_broadcast_coalesced",
        "DataParallel on several device_ids is not planned: leave device_ids out to plan one "
        "GPU that takes the whole batch, or give --gpus N for DistributedDataParallel",
    ),
)
"""Words of torch's errors in a trace, and what to do about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What is traced of a target."""

    batch: int | None = None
    """Samples of a micro-batch; None takes the target's own number."""
    recipe: Recipe = Recipe()
    """Techniques that the training runs with."""
    device: str = "cuda"
    """`cuda`, there or not, or `cpu`."""
    capability: tuple[int, int] = (9, 0)
    """Compute capability of the device that is planned for."""
    ranks: int = 1
    """Processes of a script that torchrun would start; the traced one is the first."""
    hosts: int = 1
    """Over which they are spread evenly."""
    limit_s: float = LIMIT_S
    more: int = 0
    """Samples that a second trace of a Task or a configuration has more. It is made at the same
    time where that is possible, for the request that comes next; 0 for none."""

    def __post_init__(self) -> None:
        if self.batch is not None and (type(self.batch) is not int or self.batch < 1):
            raise UserError(f"batch {self.batch!r} cannot be traced; give a whole number > 0")
        if self.device not in ("cuda", "cpu"):
            raise UserError(f"device {self.device!r} cannot be traced; give cuda or cpu")


class ScriptTracer:
    """Traces a script, again for each request."""

    def __init__(self, workload: Workload, environment: Mapping[str, str] = os.environ) -> None:
        self.workload = workload
        self.environment = environment
        self.fixed: int | None = None
        """The batch of a script in which there is nothing to put another one in the place of."""
        self.sizes: Sequence[int] = ()
        """Of the batches of one step, where they are several."""

    def trace(self, asked: TraceRequest) -> MemoryStream:
        """Return the allocations of the script's first steps."""
        if self.fixed is not None and asked.batch not in (None, self.fixed):
            several = _several_batches(self.sizes) if self.sizes else ""
            raise UserError(several or _other_batch(asked.batch, self.fixed))
        reply = self._run(asked)
        is_on_host = "is_empty" in reply
        if is_on_host:
            reply = self._run(replace(asked, device="cpu"))
        if "stream" not in reply:
            raise UserError(reply.get("error", "the script took no step on the GPU"))
        stream = stream_from_json(reply["stream"])
        self.sizes = reply["sizes"] if asked.batch is None else self.sizes
        self.fixed = stream.batch if reply["is_fixed"] or self.sizes else None
        return replace(stream, notes=(*stream.notes, ON_HOST)) if is_on_host else stream

    def _run(self, asked: TraceRequest) -> Mapping[str, Any]:
        environment: Mapping[str, str] = dict(self.environment)
        for technique in catalogue.build(asked.recipe):
            environment = technique.environment(environment)
        if asked.ranks > 1:
            environment = {**environment, **rank_variables(asked.ranks, asked.hosts)}
        options = ProcessOptions(
            entry=ENTRY,
            spec=TrialSpec(mode=MODE, recipe=asked.recipe, details=to_plain(asked)),
            keep=(RESULT,),
            environment=environment,
            limit_s=asked.limit_s,
        )
        with tempfile.TemporaryDirectory(prefix=TRACE, dir=scratch_root()) as name:
            (Path(name) / "spec.json").write_text(
                json.dumps(trial_folders.owner()), encoding="utf-8"
            )
            ending = run_process(self.workload, options, keep=Path(name))
            path = Path(name) / RESULT
            if not path.exists():
                return {"error": _explained(ending)}
            reply: Mapping[str, Any] = read_json(path, MAX_OWN_BYTES)
            return reply


def _explained(ending: Ending) -> str:
    lines = [line.strip() for line in ending.log.splitlines() if line.strip()]
    if ending.why in {"limit", "hang"}:
        return "the script reached no second training step in time; nothing could be predicted"
    last = f": {lines[-1][:300]}" if lines else ""
    return f"the script ended with exit code {ending.exit_code} and took no training step{last}"


def install(spec: TrialSpec) -> None:
    """Set the trace up in the script's process; called by the boot."""
    asked = from_plain(TraceRequest, spec.details)
    changes = (*catalogue.build(spec.recipe), HostData(batch=asked.batch))
    session = Session(spec, changes)
    if spec.undo:
        undo_journal.announce_torch_save()
    session.start()
    for hook_point in (loader, model, optimizer, step):
        hook_point.install(session)
    _ScriptTrace(session, asked).install()


class _ScriptTrace:
    """Follow the session and write the stream once there were enough steps."""

    def __init__(self, session: Session, asked: TraceRequest) -> None:
        self.session, self.asked = session, asked
        self.stack = contextlib.ExitStack()
        self.names: dict[int, str] = {}
        self.number = 0
        self.first: int | None = None
        self.flops = 0.0
        self.since = 0.0
        self.is_written = False
        self.batch: int | None = None
        """Samples of the batch drawn last, which may be one of an evaluation."""
        self.trained: int | None = None
        """Samples of the largest batch that a step has trained on."""
        self.draws = self.backwards = 0
        """Of the step that runs."""
        self.sizes: set[int] = set()
        """Of the batches that were drawn to train on in it."""
        self.drawn: Sequence[int] = ()
        """Those of the step that ended last, where they are several."""
        self.micro_batches = 1
        """Of the step that ended last. A batch may have several losses, or come with another."""
        self.steps = STEPS
        self.calls: dict[int, GraphCall | None] = {}
        """The latest call of each compiled root."""
        self.recording: Recording = self._begin()

    def _begin(self) -> "Recording":
        """Set the device up and start to record, for the rest of the process."""
        from flatout.planner.tracing import trace

        asked = self.asked
        recording = self.stack.enter_context(
            trace.scene(asked.device, capability=asked.capability, is_whole=False, moved=self.moved)
        )
        trace.follow(recording, self.name_of, self.at)
        if recording.fake is not None:
            from flatout.planner.tracing.simulated_ranks import pretended_ranks

            self.stack.enter_context(pretended_ranks(self.reduces))
        self.stack.enter_context(recording)
        return recording

    def install(self) -> None:
        """Listen to the session."""
        on, enter = self.session.on, self.recording.enter
        enter(Phase.SETUP, 0)
        if self.asked.device == "cpu":
            # What samples are made of comes and goes with each of them, here or in a worker. What a
            # data set keeps from its first sample is missed with it.
            clock = self.session.clock
            self.recording.looks_away = lambda: clock.stack[-1] == DATA_WAIT
        on("batch", self.drew)
        on("root", self.found)
        on("forward", self.forward)
        on("backward", self._backward)
        on("backward_end", self.backward_end)
        on("segment", self.stepped)
        patching.wrap(sys, "excepthook", self._refusing)
        atexit.register(self.ended)

    def _refusing(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook of what ends the script, which refuses the trace for it."""

        def crashed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            previous(kind, error, trace)
            self.refuse(error.with_traceback(trace))

        return crashed

    def reduces(self, bucket: Any) -> None:
        """Name a bucket of gradients; their order is settled from the second step on only."""
        from flatout.analysis.stream_changes import BUCKETS

        self.steps = STEPS + 1
        recording = self.recording
        recording.know(bucket, Component.GRADIENTS)
        birth = recording.find(bucket)
        if birth is not None:
            birth.operator = BUCKETS

    def at(self) -> Any:
        """Return the phase around an optimizer's step."""
        inside = self.recording.phase
        is_inside = inside in (Phase.BACKWARD, Phase.FORWARD) and self.session.clock.stack[-1] == 2
        return (inside if is_inside else Phase.DATA), self.number

    def name_of(self, module: "nn.Module") -> str:
        """Return a module's dotted name, empty for one outside the roots."""
        return self.names.get(id(module), "")

    def found(self, root: "nn.Module") -> None:
        """Name the modules of a new root."""
        from flatout.planner.tracing import trace

        self.names |= trace.know_model(self.recording, root)
        if trace.is_compiled(root):
            self.recording.note(trace.COMPILED)
            self.calls[id(root)] = None

    def drew(self, batch: Any, _: str) -> None:
        """A batch was drawn: what goes to the device next is input."""
        import torch

        recording = self.recording
        self.batch = self.session.last_size or self.batch
        self.draws += 1
        is_trained = torch.is_grad_enabled() and all(r.training for r in self.session.roots)
        if is_trained and self.session.last_size:
            self.sizes.add(self.session.last_size)
        recording.enter(Phase.DATA, self.number)
        for leaf in leaves_of(batch):
            if hasattr(leaf, "untyped_storage"):
                recording.saw_inside(leaf, "batch")

    def forward(self, root: "nn.Module", args: Any, kwargs: Any) -> None:
        """A root is called: its tensors are inputs, unless they were made by another root."""
        from flatout.agent.samples import leading_size
        from flatout.planner.tracing.compiled import call_of

        recording = self.recording
        if id(root) in self.calls:
            self.calls[id(root)] = call_of(root, args, kwargs, recording.device)
        recording.enter(Phase.FORWARD, self.number)
        for leaf in (*args, *kwargs.values()):
            if hasattr(leaf, "untyped_storage") and leaf.grad_fn is None:
                recording.know(leaf, Component.INPUTS)
                self.batch = self.batch or leading_size(leaf)

    def _backward(self, _: Any) -> None:
        """A loss goes back."""
        self.backwards += 1
        self.recording.enter(Phase.BACKWARD, self.number)

    def backward_end(self) -> None:
        """Gradients are there."""
        from flatout.planner.tracing import trace

        for root in self.session.roots:
            trace.know_gradients(self.recording, root.parameters())

    def stepped(self, segment: Any) -> None:
        """A step has ended; after enough of them the trace is written and the process ends.

        Of several optimizers each has to step twice, and the trace ends where the first one does.
        """
        recording, counts = self.recording, self.session.counts
        self.first = segment.who if self.first is None else self.first
        self.trained = max(self.trained or 0, self.batch or 0) or None
        if segment.who == self.first:
            self.number += 1
            self.flops, self.since = recording.flops - self.since, recording.flops
            self.micro_batches = max(1, min(self.draws, self.backwards))
            self.drawn = sorted(self.sizes) if len(self.sizes) > 1 else ()
            self.draws = self.backwards = 0
            self.sizes.clear()
        recording.enter(Phase.DATA, self.number)
        is_whole = segment.who == self.first and min(counts.values()) >= self.steps
        is_whole = is_whole and self.session.knows_optimizers
        if self.number >= self.steps and (is_whole or self.number >= self.steps + MORE_STEPS):
            self._write()
            os._exit(0)

    def moved(self, replaced: Mapping[int, "nn.Parameter"]) -> None:
        """Give the optimizers the parameters that `Module.to` and its like replaced."""
        for each in self.session.optimizers:
            for group in each.param_groups:
                group["params"] = [replaced.get(id(p), p) for p in group["params"]]

    def _write(self) -> None:
        """Write the stream, or that nothing was on the device."""
        from flatout.planner.tracing import trace
        from flatout.planner.tracing.compiled import bounded

        for root in self.session.roots:
            trace.know_model(self.recording, root)
        asked = self.asked.batch
        host = self._host_data()
        batch = self.trained
        if asked is not None and batch != asked:
            is_all = batch is not None and batch < asked and batch in host.sizes
            words = _too_few(asked, batch) if is_all else _other_batch(asked, batch)
            self._put({"error": words})
            return
        for text in host.said:
            self.recording.note(text)
        stream = trace.stream_of(self.recording, steps=self.number, batch=batch, flops=self.flops)
        stream = replace(stream, micro_batches=self.micro_batches)
        calls, fake = [call for call in self.calls.values() if call], self.recording.fake
        if calls and fake is not None:
            stream = bounded(stream, calls, fake)
        if stream.device == "cuda" and not any(a.size for a in stream.allocations):
            self._put({"is_empty": True})
        else:
            reply = {"is_fixed": not host.own, "sizes": self.drawn}
            self._put({"stream": stream_to_json(stream), **reply})

    def _put(self, reply: Mapping[str, Any]) -> None:
        """Write the reply; the first one counts."""
        if self.is_written:
            return
        self.is_written = True
        text = json.dumps(reply)
        (Path(self.session.spec.folder) / RESULT).write_text(text, encoding="utf-8")

    def _host_data(self) -> HostData:
        return next(t for t in self.session.techniques if isinstance(t, HostData))

    def refuse(self, error: BaseException) -> None:
        """Say in one line why the script could not be traced."""
        is_between = self.number > 0 and self.recording.phase is Phase.DATA
        if is_between and self.number >= STEPS:
            # Between steps, as an evaluation or a checkpoint is: the steps before it count.
            self._write()
            return
        what = f"what follows step {self.number}" if is_between else "the training step"
        if not self.number and self.recording.phase in (Phase.SETUP, Phase.DATA):
            what = "the script, before its first step,"
        is_ours = isinstance(error, UserError)
        self._put({"error": str(error) if is_ours else explained(error, what)})

    def ended(self) -> None:
        """Say that the script ended without enough steps."""
        asked, sizes = self.asked.batch, self._host_data().sizes
        if self.number:
            if self.number < STEPS:
                self.recording.note(ONE_STEP)
            self._write()
        elif asked is not None and sizes and max(sizes) < asked:
            self._put({"error": _too_few(asked, max(sizes))})


def _too_few(asked: int, samples: int | None) -> str:
    return f"the data set has only {samples} samples, which make no batch of {asked}"


def _several_batches(sizes: Sequence[int]) -> str:
    return (
        f"a step draws batches of {' and '.join(map(str, sizes))} samples, and how they grow "
        "together is not known; pass the script's own option for the batch after its name"
    )


def _other_batch(asked: int, found: int | None) -> str:
    return (
        f"the script makes batches of {found or 'an unknown number of'} samples itself, and not "
        f"of {asked}: it takes them from no DataLoader with a batch_size; pass the script's own "
        "option for the batch after its name"
    )


def rank_variables(world_size: int, hosts: int = 1) -> Mapping[str, str]:
    """Return the variables that torchrun sets for the first rank of so many on so many hosts."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // hosts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "plan",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def explained(error: BaseException, what: str = "the training step") -> str:
    """Return one line about an exception: the user's line it came from, and what it says."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    said = " ".join(str(error).split())[:300]
    if isinstance(error, DataDependentOutputException):
        return f"{what} reads values{place} that a trace does not have ({said})"
    text = f"{what} failed while it was traced{place}: {type(error).__name__}: {said}"
    if isinstance(error, KeyError) and error.args[0] in rank_variables(1):
        return f"{text}; torchrun sets that: give --gpus N to plan the first of N processes"
    cause = next((why for words, why in CAUSES if words in said), "nothing could be predicted")
    return f"{text}; {cause}"


def _is_users(name: str) -> bool:
    """Return whether a file is neither installed, nor the interpreter's, nor ours."""
    homes = (Path(flatout.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
    path = Path(name).resolve()
    is_inside = any(path.is_relative_to(home) for home in homes)
    return not (name.startswith("<") or "site-packages" in path.parts or is_inside)
