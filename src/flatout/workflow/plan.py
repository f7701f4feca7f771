"""The command `plan`: will a step fit a GPU that you do not have, and what would help."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flatout.agent.worker_start import can_fork
from flatout.analysis import stream_changes as transforms
from flatout.data.proof.forked import ForkedError, begun_in_fork
from flatout.hardware.catalogue import CATALOGUE, UNNAMED, GpuModel, find_gpu, model_of
from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import clean_up_stale_trials
from flatout.parallel.cost import Link
from flatout.parallel.links import PROBE_S, link_from, measure_links
from flatout.parallel.search import Cluster, Training, advise, inside_of, search
from flatout.planner import plan as planner
from flatout.planner.allocator_settings import settings_of_environment
from flatout.planner.device_model import DeviceModel
from flatout.planner.largest_batch import (
    Affine,
    NotAffineError,
    affine,
    difference,
    steady_replay,
)
from flatout.planner.memory_options import Setup, ladder, replay_as_it_is
from flatout.planner.memory_trace import HF, Trace, open_tracer
from flatout.planner.replay import snapshot_of, write_snapshot
from flatout.planner.tracing.script import LIMIT_S, TraceRequest
from flatout.planner.workspaces import (
    find_calibration,
    whole_at,
    with_environment,
    with_workspaces,
)
from flatout.records import catalogue as techniques
from flatout.records.errors import UserError
from flatout.records.input_files import read_json
from flatout.records.json_records import from_plain, to_plain
from flatout.records.machine import Device
from flatout.records.memory_stream import MemoryStream, Phase
from flatout.records.messages import Sentence, recognised, words
from flatout.records.plan import MAX_BATCH, LargestBatch, ParallelAdvice, ParallelPlan, Plan
from flatout.records.profile import Profile, profile_from_json
from flatout.records.recipe import Choice, Recipe
from flatout.records.secrets import hide_in_words
from flatout.records.technique import hook_points_of

TECHNIQUES_S = 10.0
"""Time for tracing techniques: the first ones of the ladder then stand on traces, the rest on
models. A technique is begun as long as it is not over."""
TECHNIQUE_LIMIT_S = 30.0
"""Time for the trace of one technique. One that cuts a step into a thousand parts takes minutes;
its model is used instead."""
MOST_TECHNIQUES = 4
"""Ways that are traced for real at most: a reader tries one or two."""
MOST_SHRINKS = 3
"""How often the largest batch is corrected by its own check trace before that is said."""
GPU_KINDS = ("cuda", "rocm")
TASK = ".py:"
"""In a target that names a Task, or another thing in a file."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned for."""

    gpu: str | None = None
    """Name or size; None takes this machine's own."""
    batch: int | None = None
    """Samples of a micro-batch; None takes the script's own."""
    fit: bool = False
    """Whether the largest batch is looked for."""
    gpus: int = 1
    """Of each host."""
    recipe: Recipe = Recipe()
    """Techniques that the training runs with already."""
    hosts: int = 1
    profile: Profile | None = None
    """Of the training on the planned kind of GPU: it calibrates the times of ways to spread it."""
    links: Link | None = None
    """Between the ranks of a host, as a probe measured it."""

    def __post_init__(self) -> None:
        asked = ("--batch", self.batch), ("--gpus", self.gpus), ("--hosts", self.hosts)
        for name, value in asked:
            if value is not None and value < 1:
                raise UserError(f"{name} {value} leaves nothing to plan; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made of."""

    plan: Plan
    stream: MemoryStream
    """With workspaces, at the planned batch."""
    ground: DeviceModel

    def write_snapshot(self, path: Path) -> None:
        """Write the predicted run for torch's memory viewers."""
        write_snapshot(snapshot_of(self.stream, self.ground.settings), path)


def plan(
    target: str,
    arguments: tuple[str, ...] = (),
    options: PlanOptions = PlanOptions(),
    tell: Tell = lambda _: None,
) -> Planned:
    """Trace a target without a GPU and say whether it fits one.

    It is a script, `file.py:name` of a Task, a Subject or a function that returns one, or `hf:` and
    the path of a transformers configuration.

    Raises:
        UserError: if the GPU is unknown, or nothing can be predicted; says why.
    """
    if options.gpu is None and "--gpu" in arguments:
        raise UserError("--gpu comes after the script, whose own option it then is; put it before")
    clean_up_stale_trials()
    ground = ground_of(options)
    if options.profile is not None:
        _check_device(options.profile, ground.gpu)
    with open_tracer(target, arguments) as trace:
        is_step = target.startswith(HF) or TASK in target
        tracer = _Tracer(trace=trace, options=options, ground=ground, tell=tell, is_step=is_step)
        bare = tracer.traced(options.batch, "two steps", more=1)
        stream = tracer.whole(bare)
        if not any(mark.phase is Phase.BACKWARD for mark in stream.marks):
            raise UserError(
                "no backward pass was seen, so there is no training step to plan; "
                "'flatout measure' shows whether the script makes steps at all"
            )
        model, notes = tracer.model(bare)
        at = whole_at(model, ground.calibration) if model else None
        setup = Setup(stream=stream, ground=ground, at=at, finds_batches=options.fit)
        ways = _Ways()
        if ground.ranks > 1:
            tell("looking for ways to spread it")
            ways = _ways_and_ladder(setup, options, splits_layers=is_step)
        tried: tuple[str, ...] = ()
        # Where it fits once it is spread, what would fit it on one GPU is not needed.
        if not any(way.fits for way in ways.plans):
            setup, tried = tracer.with_techniques(setup)
        tell("replaying")
        shown = " ".join([target, *hide_in_words(arguments)])
        found = planner.plan_of(shown, setup, fit=options.fit)
        if model is not None and options.fit:
            found = tracer.checked(found, model, setup)
    here = f"{Path.cwd()}{os.sep}"
    largest = tuple(replace(t, line=t.line.removeprefix(here)) for t in found.largest)
    found = replace(
        found,
        notes=(*found.notes, *ways.notes, *notes, *tried),
        largest=largest,
        parallel=ways.plans,
        advice=ways.advice,
    )
    return Planned(
        plan=found,
        stream=stream,
        ground=ground,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """Ways to spread the training, and how many GPUs are worth it; or why there are none."""

    plans: tuple[ParallelPlan, ...] = ()
    advice: ParallelAdvice | None = None
    notes: tuple[str, ...] = ()


def _ways_and_ladder(setup: Setup, options: PlanOptions, *, splits_layers: bool) -> _Ways:
    """Return the ways to spread the training, and play the ladder of one GPU meanwhile.

    The setup keeps what was played; a copy of this process looks for the ways.
    """

    def ways() -> _Ways:
        return _ways(setup, options, splits_layers=splits_layers)

    if can_fork() and threading.active_count() == 1:
        # What fails there says so here.
        with (
            suppress(OSError, ForkedError),
            begun_in_fork(lambda: to_plain(ways()), LIMIT_S) as result,
        ):
            ladder(replace(setup, finds_batches=False))
            return from_plain(_Ways, result())
    return ways()


def _ways(setup: Setup, options: PlanOptions, *, splits_layers: bool) -> _Ways:
    """Return the ways to spread the training over the GPUs that there are."""
    stream, ground = setup.stream, setup.ground
    if setup.at is None or stream.batch is None:
        return _Ways(notes=(words("plan.no_ways"),))
    if transforms.holds_shards(stream):
        return _Ways(notes=(words("plan.own_shards"),))
    alone = replay_as_it_is(setup)
    training = Training(
        at=setup.at,
        batch=stream.batch * ground.ranks if stream.spreads_itself else stream.batch,
        gpu=ground.gpu,
        limit_bytes=ground.limit(stream),
        outside_bytes=ground.outside.bytes,
        reserved_ratio=alone.peak_reserved / max(1, alone.peak_allocated),
        splits_layers=splits_layers,
        profile=options.profile,
        micro_batches=stream.micro_batches,
    )
    inside = options.links or inside_of(ground.gpu)
    cluster = Cluster(gpus=options.gpus, hosts=options.hosts, inside=inside)
    found = search(cluster, training)
    return _Ways(plans=tuple(found.plans), advice=advise(found, cluster, training))


def read_profile(path: Path) -> Profile:
    """Read the profile that `flatout measure --json` wrote."""
    try:
        return profile_from_json(read_json(path))
    except OSError as error:
        raise UserError(f"cannot read the profile {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no profile: {error}") from None


def _check_device(profile: Profile, gpu: GpuModel) -> None:
    """Refuse to calibrate the times of one device by the profile of another."""
    device = Device(kind=profile.device_kind, name=profile.device_name, memory_bytes=0)
    is_gpu = profile.device_kind in GPU_KINDS
    if not is_gpu or gpu.name not in (UNNAMED, model_of(device).name):
        raise UserError(
            f"the profile is of {profile.device_name} and the plan for {gpu.full_name}: measure on "
            "that GPU, or leave --profile out, and times come from its data sheet"
        )


def read_links(path: Path, ranks: int, tell: Tell) -> Link:
    """Return the link between the ranks of this host, measured first where that was not done."""
    if not path.exists():
        devices = len(read_machine(torch=False).devices)
        # On the CPU gloo is measured: two processes show what it costs.
        count = min(ranks, devices) if devices else 2
        if devices == 1:
            raise UserError("--links measures between GPUs, and this machine has one")
        if count < 2:
            raise UserError("--links measures between GPUs of a host; give --gpus 2 or more")
        tell(f"measuring what {count} ranks exchange, for {PROBE_S:.0f} s at most")
        measure_links(path, count)
    try:
        return link_from(read_json(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the links {path}: {error}") from None


def ground_of(options: PlanOptions) -> DeviceModel:
    """Return the device that is planned for, with what is known of it.

    Raises:
        UserError: if there is none here and none was named.
    """
    gpu = find_gpu(options.gpu) if options.gpu else _own_gpu()
    return DeviceModel(
        gpu=gpu,
        calibration=with_environment(find_calibration(gpu, _torch_version()), os.environ),
        settings=settings_of_environment(os.environ),
        gpus=options.gpus,
        hosts=options.hosts,
    )


def _own_gpu() -> GpuModel:
    device = read_machine(torch=False).device
    if device.kind not in GPU_KINDS:
        raise UserError(
            f"there is no GPU here to plan for; name one: --gpu {' | '.join(CATALOGUE)}, "
            "or its memory, as --gpu 24GiB"
        )
    return model_of(device)


def _torch_version() -> str:
    with suppress(PackageNotFoundError):
        return version("torch")
    return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracer:
    """Traces one target at several batches and with several techniques."""

    trace: Trace
    options: PlanOptions
    ground: DeviceModel
    tell: Tell
    is_step: bool
    """Whether the target is a training step and nothing else: one repeats the other."""

    def traced(
        self,
        batch: int | None,
        what: str,
        choice: Choice | None = None,
        *,
        more: int = 0,
    ) -> MemoryStream:
        """Return one traced stream, without workspaces."""
        self.tell(f"tracing {what}")
        recipe = self.options.recipe if choice is None else self.options.recipe.plus(choice)
        request = TraceRequest(
            batch=batch,
            recipe=recipe,
            capability=self.ground.gpu.compute_capability or TraceRequest().capability,
            ranks=self.ground.ranks,
            hosts=self.ground.hosts,
            limit_s=LIMIT_S if choice is None else TECHNIQUE_LIMIT_S,
            more=more,
        )
        found = self.trace(request)
        return transforms.with_buckets(found) if self.ground.ranks > 1 else found

    def whole(self, stream: MemoryStream) -> MemoryStream:
        """Return a traced stream with workspaces, which do not grow by so much a sample."""
        return with_workspaces(stream, self.ground.calibration)

    def model(self, stream: MemoryStream) -> tuple[Affine | None, tuple[str, ...]]:
        """Return the stream at every batch, or why that cannot be said."""
        if stream.batch is None:
            return None, (words("plan.no_batch"),)
        try:
            found = self._affine(stream)
        except (NotAffineError, UserError) as error:
            return None, (words("plan.no_other_batch", why=str(error)),)
        if not found.bytes_per_sample:
            return None, (words("plan.same_batch"),)
        return found, ()

    def _affine(self, stream: MemoryStream) -> Affine:
        """Return the stream at every batch; a batch of one may take paths of its own."""
        assert stream.batch is not None
        batch = stream.batch + 1
        more = self.traced(batch, f"a batch of {batch}")
        try:
            return affine(stream, more)
        except NotAffineError:
            if stream.batch != 1:
                raise
        return affine(more, self.traced(3, "a batch of 3"))

    def with_techniques(self, setup: Setup) -> tuple[Setup, tuple[str, ...]]:
        """Return the setup with the first ways of the ladder traced, where the step does not fit.

        What a script cannot do is then known before anybody relies on it. The notes say why a
        technique was left out, or why it is on its model.
        """
        limit = self.ground.limit(setup.stream)
        if steady_replay(setup.stream, self.ground.settings, limit).fits:
            return setup, ()
        traced: dict[str, MemoryStream] = {}
        refused: set[str] = set()
        notes: list[str] = []
        ends_at = time.monotonic() + TECHNIQUES_S
        for label, choice in self._techniques(setup).items():
            if len(traced) == MOST_TECHNIQUES or time.monotonic() > ends_at:
                break
            try:
                self._check_quick(choice, setup.stream.traced_s)
                found = self.whole(self.traced(setup.stream.batch, f"it with {label}", choice))
            except UserError as error:
                notes.append(words("plan.not_traced", technique=label, why=str(error)))
                continue
            refusal = _refusal(found, choice) or _uselessness(found, setup.stream, label)
            if refusal:
                refused.add(label)
                notes.append(refusal)
            else:
                traced[label] = found
        return replace(setup, traced=traced, refused=frozenset(refused)), tuple(notes)

    def _check_quick(self, choice: Choice, traced_s: float) -> None:
        """Refuse to trace a batch in more parts than can be traced in time for certain."""
        parts = parts_of(choice)
        if self.is_step and parts * traced_s > 2 * TECHNIQUE_LIMIT_S:
            raise UserError(words("plan.too_many_parts", n=str(parts)))

    def _techniques(self, setup: Setup) -> Mapping[str, Choice]:
        """Return the techniques of the ladder that a trace can show, in its order."""
        rungs = ladder(replace(setup, finds_batches=False))
        found = {label: traceable_choice(label) for rung in rungs for label in rung.choices}
        return {label: choice for label, choice in found.items() if choice is not None}

    def checked(self, found: Plan, model: Affine, setup: Setup) -> Plan:
        """Trace at the largest batch; where it shows more than was said, take the batch back."""
        batches = found.largest_batch
        for _ in range(MOST_SHRINKS):
            batch = batches.without_retries if batches else None
            if batches is None or batch in (None, MAX_BATCH):
                return found
            try:
                traced = self.traced(batch, f"the largest batch, {batch}")
                off, of = difference(model.at(batch), traced)
            except (NotAffineError, UserError) as error:
                why = words("plan.not_compared", batch=str(batch), why=str(error))
                return replace(found, checked=why)
            limit = self.ground.limit(traced)
            played = steady_replay(self.whole(traced), self.ground.settings, limit)
            if played.fits and not played.steady_retries:
                about = {"batch": str(batch), "n": str(off), "of": str(of)}
                return replace(found, checked=words("plan.checked", **about))
            less = batch * 99 // 100 or None
            known = batch if played.fits else less
            batches = replace(batches, without_retries=less, with_retries=known)
            found = _with_batches(found, batches, setup)
        return replace(found, checked=words("plan.does_not_hold"))


def _with_batches(found: Plan, batches: LargestBatch, setup: Setup) -> Plan:
    """Return the plan with other largest batches, and with what follows from them."""
    most = batches.without_retries
    ways = (
        way if way.choices or not way.largest_batch else replace(way, largest_batch=most)
        for way in found.ladder
    )
    return replace(
        found,
        largest_batch=batches,
        ladder=tuple(ways),
        accumulating=found.accumulating and planner.accumulating(setup, most),
    )


REFUSED = "traced.does_not_apply"
"""The message of a trace in which a technique changed nothing."""
BY_HAND = "(by hand)"
"""In the labels of what no recipe can do."""
TRACED_HOOK_POINTS = frozenset({"model", "forward", "optimizer", "end"})
"""Hook points that a trace goes through; what acts elsewhere too, it would show in part only. At
the end a technique tells what became of it, and changes nothing."""


def traceable_choice(label: str) -> Choice | None:
    """Return the technique that a rung's label names, where a trace can show what it does.

    >>> traceable_choice("activation_checkpointing mode=full").settings
    {'mode': 'full'}
    >>> traceable_choice("zero stage=3 gpus=8 (by hand)") is None
    True
    """
    name = label.split()[0]
    if BY_HAND in label or name not in techniques.names():
        return None
    kind = techniques.technique_class(name)
    hook_points = hook_points_of(kind)
    if not hook_points or not hook_points <= TRACED_HOOK_POINTS:
        return None
    shows_it = all(option.is_traceable for option in kind.memory_options())
    return Choice.from_label(label) if shows_it else None


def parts_of(choice: Choice) -> int:
    """Return into how many parts a technique cuts a batch, each traced for itself.

    >>> parts_of(Choice.from_label("microbatching chunks=16"))
    16
    """
    options = techniques.technique_class(choice.technique).memory_options()
    return max((int(choice.settings.get(o.splits_by, 1)) for o in options), default=1)


def _refusal(stream: MemoryStream, choice: Choice) -> str:
    """Return the note that says why a technique changed nothing; empty if it acted."""
    said = [note for note in map(recognised, stream.notes) if isinstance(note, Sentence)]
    refused = (note for note in said if note.code == REFUSED)
    return next((x for x in refused if x.fields["technique"] == choice.technique), "")


def _uselessness(found: MemoryStream, stream: MemoryStream, label: str) -> str:
    if max(found.alive()) < max(stream.alive()):
        return ""
    return words("plan.useless", technique=label, n=str(found.steps))
