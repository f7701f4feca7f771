"""What the measured steps of one run cost (`Profile`), and what bounds a step (`Regime`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.records.finding import Finding
from flatout.records.journey import Journey, Pipeline, WorkerScan
from flatout.records.json_records import from_plain, to_plain
from flatout.records.memory import MemoryStory
from flatout.records.readings import (
    CompileFacts,
    GpuReadings,
    Limits,
    RankFacts,
    SyncPoint,
    TraceSummary,
)

CAUSES = ("input", "sync", "communication", "launch", "gemm", "bandwidth", "compute", "other")
"""What a step may wait for. `compute` is what could not be split into the three before it, `other`
the loop's own code."""
LEAST_LEFT = 1e-3
"""Smallest share of the step that is taken to remain: no clock here tells less from nothing, and
reports show what follows as more than a thousand times."""
SCHEMA = "flatout.profile/1"
MAX_STEPS_KEPT = 200
"""Steps whose phases are kept one by one; a plot needs no more."""
PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "other")
"""The phases of a step. They add up to the step."""


def most_times(share: float) -> float:
    """Return how many times faster a step could be at most, took a share of it no time (Amdahl).

    >>> most_times(0.5), most_times(0.0)
    (2.0, 1.0)
    """
    return 1 / min(1.0, max(LEAST_LEFT, 1 - share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Shares of the step by what bounds them; they add up to at most 1."""

    name: str
    """The cause with the largest share, one of `CAUSES`."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the step by cause; a cause that was not looked for is absent."""
    evidence: tuple[str, ...] = ()
    """One sentence a cause: where its share comes from."""
    amdahl: Mapping[str, float] = field(default_factory=dict)
    """How many times faster the step could be at most, were a phase free; by phase."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Causes whose share is not known, each with what would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The best case of one technique: everything that it acts on takes no time."""

    ratio: float
    """Step over step without it; infinite where nothing bounds the technique."""
    share: float
    """Share of the step that the technique acts on."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Order statistics of one quantity over the measured steps."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Peak memory of the device. On the CPU `allocated` and `reserved` are 0 and unknown."""

    allocated: int = 0
    reserved: int = 0
    device: int = 0
    """What the device holds for this process; on the CPU the peak resident size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """How many times faster the step could be at most, were one cause free. 1 means nothing."""

    free_data: float = 1.0
    free_copies: float = 1.0
    compute_only: float = 1.0
    is_measured: bool = False
    """Whether passes with free data and free copies were run; else they follow from the phases."""
    slowed_share: float = 0.0
    """Share of the whole step by which making batches in workers slows the rest of it, as the run
    with free data showed: part of what free data gives. 0 without workers, or where not measured.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """One `DataLoader` the script built, as it asked for it."""

    address: str
    """Where it was built: the calling functions outside torch, innermost first, and the ordinal
    of the construction there. Stable from run to run; lines are left out so that edits do not
    break it."""
    is_training: bool
    """Whether its batches fed training steps."""
    dataset: str
    dataset_len: int | None
    batch_size: int | None
    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    is_iterable: bool = False
    batch_bytes: int = 0
    """Bytes of the tensors in one batch, median of those seen."""
    batches_drawn: int = 0
    builds: int = 1
    """How often it was built there: more than once where each epoch makes one of its own."""
    epochs_started: int = 0
    fetch_ms: float = 0.0
    """Time to produce one batch, measured in the main process when `num_workers` is 0."""
    effective_workers: int | None = None
    """Workers it really had, the recipe's techniques included; None where that was not recorded."""

    start_method: str = ""
    """How its workers start: `fork`, `spawn` or `forkserver`; empty where none was started."""
    start_reason: str = ""
    """Who chose that method, and where flatout did, why."""
    cuda_at_start: bool = False
    """Whether the training process had initialised CUDA before workers were started."""
    threads_at_start: str = ""
    """Names of Python's other threads in the training process when workers were started."""
    tokenizes: str = ""
    """Where a tokenizer is held: `data set`, `collate_fn`, or empty for nowhere."""
    pad_share: float | None = None
    """Share of the tokens that the attention mask takes out, in the first batches."""
    line: str = ""
    """Where it was built, `train.py:12`; empty in results from before this was kept."""
    sampler: str = ""
    first_batch: str = ""
    """Digest of the first batch's samples and what they hold; empty where it is not known."""
    epoch_samples: tuple[tuple[int, ...], ...] = ()
    """Of each epoch that came to its end the first samples that were chosen, eight at most."""

    @property
    def workers(self) -> int:
        """Worker processes behind the batches of this profile."""
        return self.num_workers if self.effective_workers is None else self.effective_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One root module that was trained."""

    name: str
    parameters: int
    """Number of trainable scalars."""
    parameter_bytes: int
    all_parameters: int = 0
    """Number of scalars, frozen ones too; 0 in results that were written before this was kept."""
    dtypes: tuple[str, ...] = ()
    """Of all parameters, frozen ones too: a base in bf16 computes in bf16."""
    conv_weights: int = 0
    """Number of 4-d convolution weights."""
    is_channels_last: bool = False
    repeated_blocks: int = 0
    """Size of the largest group of sibling modules with the same class and shapes."""
    modules: int = 0
    is_compiled: bool = False
    """Whether it or a part of it is compiled, by the script or by a technique."""
    compiled_by: str = ""
    """The technique that compiled it; empty where the script did, or no one."""
    used_autocast: bool = False
    """Whether it ran under autocast, the script's or a technique's."""
    calls_per_step: float = 1.0
    input_shapes: int = 1
    eval_graph_calls: int = 0
    """Calls in evaluation mode with gradients on: each builds a graph."""
    softmax_modules: int = 0
    """Modules of the script's own whose code takes a softmax: attention written by hand."""
    experts: int = 0
    """Equal modules in a list whose name says that they are experts; 0 for none."""
    expert_parameters: int = 0
    """Parameters in all such lists."""
    attention_backend: str = ""
    """What torch's fused attention ran on in the first call: `flash`, `efficient`, `cudnn` or the
    slow `math`; empty where it was not called, or the model was compiled."""
    attention_why: str = ""
    """Why on `math`."""
    widest_output: int = 0
    """Features that the last linear layer gives: the vocabulary of a language model."""
    head_parameters: int = 0
    """Weights of that layer."""
    odd_parameters: int = 0
    """Weights of the other linear layers whose inputs or outputs are no multiple of 8."""
    finds_unused: bool = False
    """Whether DDP looks for parameters without a gradient in each step."""
    unused_bytes: int | None = None
    """Of those it found in the latest step it noted; None where it did not look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer the script built."""

    name: str
    parameters: int
    is_fused: bool = False
    has_fused_option: bool = False
    is_foreach: bool | None = None
    """As the script asked; None leaves it to torch: on CUDA several at once, on the CPU one."""
    has_foreach_option: bool = False
    parameter_tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RareWork:
    """What the script does in some steps only: plotting, saving, reading. Medians hide it."""

    share: float
    """Of the time of all steps after the warm-up."""
    ms: float
    """By how much such a step is longer than others, in the mean."""
    steps: int
    """How many of them were seen."""
    of_steps: int
    """Among how many."""
    saving_share: float
    """Part of it in torch's functions that save."""
    waiting_share: float = 0.0
    """Part of it in waiting for a batch, such as the first of a file."""

    @property
    def ms_per_step(self) -> float:
        """What it adds to each step in the mean."""
        return self.ms * self.steps / self.of_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Medians over the measured steps of one run."""

    step_ms: Spread
    phases_ms: Mapping[str, float]
    """Milliseconds of the step by `PHASES`; they add up to the median step."""
    samples_per_s: float
    device_kind: str
    device_name: str
    device_busy_share: float
    gpu_util_share: float | None = None
    mfu: float | None = None
    peak_bytes: PeakBytes = PeakBytes()
    ceilings: Ceilings = Ceilings()
    overhead_share: float = 0.0
    """Share of the step that flatout's own listening cost, as estimated in the run."""
    warmup_steps: int = 0
    """Steps that do not count: until they were steady, and later ones that hold evaluations, saves
    or starts of a loader."""
    warmup_ms: float = 0.0
    """Time from the first training step's start until steps were steady: compilation is in here."""
    first_step_ms: float = 0.0
    losses: tuple[float, ...] = ()
    """Loss of every training step from the first on; empty when the script showed none."""
    batches_per_step: float = 1.0
    backwards_per_step: float = 1.0
    samples_per_step: float = 0.0
    eval_ms: float = 0.0
    """Part of `other` in which the trained model, a copy or a large part of it was called without
    training: evaluation, or a teacher. Models of other classes are not told apart."""
    eval_share: float = 0.0
    """Share of the run seen that evaluations took in steps which are left out for that."""
    rare: RareWork | None = None
    """None where no step does much more than the others, or too few were seen."""
    epoch_start_ms: float = 0.0
    """What starting the training loader's iterator costs beyond an ordinary wait, once an epoch;
    0 when no second epoch was seen."""
    epoch_steps: int | None = None
    """Steps of one epoch where the loader's length gives it away."""
    cpu_threads: int = 0
    minor_faults_per_step: float = 0.0
    collection_ms_per_step: float = 0.0
    """What Python's garbage collector took of a step, in the training process."""
    delay_share: float = 0.0
    """Seconds that runnable threads waited for a core, per second of wall time."""
    foreign_share: float = 0.0
    """Share of the machine's core time that other processes used."""
    loaders: tuple[LoaderFacts, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    notes: tuple[str, ...] = ()
    """What the reader should know about how this was measured."""
    findings: tuple[Finding, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    steps_ms: tuple[tuple[float, ...], ...] = ()
    """Of each of the first `MAX_STEPS_KEPT` measured steps the milliseconds by `PHASES`."""
    process_steps_ms: tuple[float, ...] = ()
    """Whole step of each fresh process that was timed, in order: the process is the unit of noise.
    Empty in results that were written before this was kept."""
    journey: Journey | None = None
    memory: MemoryStory | None = None
    syncs: tuple[SyncPoint, ...] = ()
    gpu: GpuReadings | None = None
    limits: Limits | None = None
    ranks: tuple[RankFacts, ...] = ()
    """Every process of a multi-process training; empty for one."""
    pipeline: Pipeline | None = None
    """What a sample costs by leg, and the cores that feed a device; None where no one looked."""
    worker_scan: WorkerScan | None = None
    """Its pace with each number of loader workers; None where no one looked."""
    trace: TraceSummary | None = None
    """What a trace of a few steps showed; None where none was asked for."""
    compiling: CompileFacts | None = None
    """What torch.compile did; None where nothing was compiled."""
    planned_steps: float | None = None
    """Steps of the whole training, where the script says it plainly."""
    regime: Regime | None = None
    """What bounds the step, and what each phase could give at most."""
    invalid: tuple[str, ...] = ()
    """Why not to trust these numbers (foreign load, throttling, a shared device), if so."""

    def share(self, *phases: str) -> float:
        """Return the fraction of the step spent in the given phases."""
        total = sum(self.phases_ms.values())
        return sum(self.phases_ms[name] for name in phases) / total if total else 0.0

    @property
    def lost_to_data(self) -> float:
        """Fraction of the step that data cost: the wait, at most what a run with free data won.

        While the device works off what is queued, a wait of the host costs nothing.
        """
        wait = self.share("data_wait")
        if not self.ceilings.is_measured:
            return wait
        return min(wait, max(0.0, 1 - 1 / self.ceilings.free_data))

    @property
    def samples_per_s_per_rank(self) -> float:
        """Samples a second of one rank: what its own loader, cores and device are held against."""
        return self.samples_per_s / max(1, len(self.ranks))

    @property
    def samples_per_step_per_rank(self) -> float:
        """Samples that one rank trains on in a step."""
        return self.samples_per_step / max(1, len(self.ranks))

    @property
    def whole_step_ms(self) -> float:
        """The median step with its part of the epoch's start: what recipes are compared by."""
        per_step_ms = self.epoch_start_ms / self.epoch_steps if self.epoch_steps else 0.0
        return self.step_ms.median + per_step_ms

    @property
    def beside_steps_share(self) -> float:
        """Share of the run in evaluations and in rare work, which no technique is judged by."""
        return min(1.0, self.eval_share + (self.rare.share if self.rare else 0.0))

    @property
    def training_loaders(self) -> tuple[LoaderFacts, ...]:
        """The loaders that fed training steps."""
        return tuple(loader for loader in self.loaders if loader.is_training)

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.profile/1` mapping."""
        plain = to_plain(self)
        device = {"kind": plain.pop("device_kind"), "name": plain.pop("device_name")}
        return {"schema": SCHEMA, "device": device} | plain


def profile_from_json(plain: Mapping[str, Any]) -> Profile:
    """Return the profile that `Profile.to_json` wrote."""
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} record: schema is {plain.get('schema')!r}")
    device = plain["device"]
    # JSON has no NaN: a loss that was none is written as null.
    losses = [math.nan if loss is None else loss for loss in plain["losses"]]
    own = {"device_kind": device["kind"], "device_name": device["name"], "losses": losses}
    if plain.get("pipeline"):
        # Stored files may have the name that `techniques` had at first.
        stages = [{"techniques": s.get("levers", ()), **s} for s in plain["pipeline"]["stages"]]
        own["pipeline"] = {**plain["pipeline"], "stages": stages}
    return from_plain(Profile, {**plain, **own})
