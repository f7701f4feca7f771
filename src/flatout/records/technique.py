"""The base of all techniques (`Technique`), and what is known of them before they are tried.

Priors are data, not code: `priors.toml`. It says in which order techniques are tried, and never
keeps one out.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from flatout.records.input_files import parse_toml
from flatout.records.machine import Machine
from flatout.records.memory_stream import MemoryStream
from flatout.records.profile import Profile

HOOK_POINT_METHODS = (
    *("environment", "start", "loader", "epoch", "batches"),
    *("model", "forward", "backward", "optimizer", "end"),
)
"""The methods through which a technique acts."""
ANY = "any"
"""The case that holds where a more special one is not known."""


class Numerics(Enum):
    """What a technique may do to the numbers, mildest first. The guard checks it."""

    EXACT = "exact"
    """Bit-identical, given the same samples."""
    ROUNDING = "rounding"
    """The same maths in another order."""
    PRECISION = "precision"
    """Lower precision, inside the guard's band."""
    TRAINING = "training"
    """Changes batch, schedule, order or model; the user must ask for it."""

    @property
    def rank(self) -> int:
        """Position in the order of promises, 0 the mildest."""
        return list(Numerics).index(self)

    def allows(self, other: "Numerics") -> bool:
        """Return whether a ceiling of `self` lets a technique with promise `other` through.

        >>> Numerics.PRECISION.allows(Numerics.EXACT), Numerics.EXACT.allows(Numerics.ROUNDING)
        (True, False)
        """
        return other.rank <= self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A predicted change of one step. Negative is better for both fields."""

    step_ms: float = 0.0
    """For the samples of one step as it is, also where the technique changes the batch."""
    peak_bytes: int = 0
    startup_s: float = 0.0
    """Paid once per process, compilation above all."""
    why: str = ""
    """One clause that explains the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """Settings with which a technique may make a script fit into memory."""

    cost: float
    """Share of the step that it adds, assumed: the cheapest is tried first."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_device: bool = False
    """Whether it acts on a device with a memory of its own only."""
    instead_of: frozenset[str] = frozenset()
    """Techniques that it does not go with; it saves more than each of them."""


class PlannedDevice(Protocol):
    """What a technique may ask of the device that a training is planned for."""

    @property
    def ranks(self) -> int: ...  # noqa: D102
    @property
    def capability(self) -> tuple[int, int] | None: ...  # noqa: D102
    @property
    def host_bandwidth(self) -> float: ...  # noqa: D102  bytes a second
    @property
    def half_flops_per_s(self) -> float: ...  # noqa: D102
    @property
    def has_expandable_segments(self) -> bool: ...  # noqa: D102
    def flops_per_s(self, stream: MemoryStream) -> float: ...  # noqa: D102
    def step_s(self, stream: MemoryStream) -> float: ...  # noqa: D102
    def traffic_s(self, count: int) -> float: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOption:
    """What a technique makes of a traced step's allocations, for `flatout plan`: a stated model."""

    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[MemoryStream], MemoryStream] = lambda stream: stream
    cost: Callable[[MemoryStream, PlannedDevice], float] = lambda *_: 1.0
    """Step time with it over that without."""
    helps: Callable[[MemoryStream, PlannedDevice], bool] = lambda *_: True
    """Returns whether there is anything to win."""
    expands_segments: bool = False
    """Whether the allocator's segments grow with it."""
    group: str = ""
    """Options of one group do the same work; those of one technique always do."""
    is_traceable: bool = True
    """Whether a trace, in which nothing takes time, shows what it does."""
    is_last: bool = False
    """Whether it is considered only where nothing else fits that trains the same."""
    splits_by: str = ""
    """The setting that says into how many parts it splits a batch; `change` is not asked then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTraining:
    """What a technique that is switched while the script trains may act on."""

    roots: Sequence[Any]
    """Root modules, in the order of their first training call."""
    optimizers: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """How one technique is switched between two whole steps of a training that runs."""

    turn: Callable[[bool], None] = lambda _: None
    """Switches the process, the models or the optimizers on or off; they are off at first. Called
    at the end of a whole step, so what it takes belongs to no step."""
    call: Callable[[Callable[..., Any], Any], Callable[..., Any]] | None = None
    """Returns what runs in place of a root's training call while it is on, as `forward` does; asked
    when the script makes such a call."""
    check: Callable[[], None] = lambda: None
    """Asked after steps with it on; raises `NotApplicable` where it did nothing after all."""
    is_last: bool = False
    """Whether it is screened last, as one that compiles for what the others set."""
    comes_rarely: bool = False
    """Whether it acts in a few steps only: then the mean step says more than the middle one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForm:
    """What a technique is in the text of a script; `$name` stands for a setting."""

    loader: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the training `DataLoader`."""
    copy: str = ""
    """An argument of the calls that copy its batches to the device."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the optimizer, if it is one of `optimizers`."""
    optimizers: tuple[str, ...] = ()
    start: str = ""
    """A line after the imports."""
    model: str = ""
    """A line above the loops of the training; `$model` is the model."""
    needs_own_forward: bool = False
    """Whether that line does nothing to a model whose `forward` is torch's own."""
    around_block: str = ""
    """A call of `torch.utils.checkpoint` around each block that a module's loop runs."""
    around_forward: str = ""
    """The header of a block around model and loss; `$device` is the kind of device."""
    only_with: Mapping[str, Any] = field(default_factory=dict)
    """Settings for which this holds; with others no form is known."""


def process_state(make: Callable[[], Any]) -> Any:
    """Return a field for what a technique holds while it acts in one process; it is no setting."""
    return field(default_factory=make, init=False, repr=False, compare=False)


class Technique(ABC):
    """Base of every technique. Subclasses are final, frozen dataclasses of their settings.

    What one holds while it acts (what it noted, and how that is undone) is in fields made by
    `process_state`, which `bind` makes for each process: no module has a state of its own.

    The methods below `predict` are the four hook points (and the process around them). Each takes a
    value and returns one; a subclass overrides only those it needs. Raise
    `flatout.records.errors.NotApplicable` with the reason when there is nothing to change: the
    original value is then used and the trial reports the technique as not applied.
    """

    __slots__ = ()

    family: ClassVar[str]
    """Folder name under `techniques/`, from the module that a class is in."""
    excludes_family: ClassVar[bool] = False
    """Whether no other technique of its family can act with it: a model is compiled once."""
    addresses: ClassVar[frozenset[str]]
    """Phases, finding codes or codes of loader faults this technique can help with."""
    numerics: ClassVar[Numerics]
    """The promise the guard and the contract test check."""
    moves_random_stream: ClassVar[bool] = False
    """Whether the same seed draws other dropout masks (channels_last and inductor do)."""
    extra: ClassVar[str] = ""
    """What it needs alongside flatout itself, as an extra of `pyproject.toml`."""
    by_hand: ClassVar[str] = ""
    """What to change in the script to have the same without flatout: lines that start with `- `
    are taken out, with `+ ` put in, others are plain words. `$name` stands for a setting."""
    source: ClassVar["SourceForm | None"] = None
    """The same for `flatout patch`, which writes it; None where no place in a text is clear."""
    stages: ClassVar[tuple[str, ...]] = ()
    """Stages of a sample (`flatout.records.journey.STAGES`) that it takes away or makes cheaper."""
    keeps_samples: ClassVar[bool] = False
    """Whether it keeps what these stages made, which is of no use where each epoch differs."""
    prepared_by: ClassVar[str] = ""
    """The command that makes what it reads, as `flatout pack`; nothing runs it for the user."""
    sets: ClassVar[tuple[str, ...]] = ()
    """What flatout sets through it elsewhere: `num_workers` and `threads`, which are then its
    settings, and `persistent_workers`. One technique for each."""
    calibrates_guard: ClassVar[bool] = False
    """Whether the guard sees from it how bf16 rounds each tensor of the unchanged training."""
    rescues: ClassVar[tuple["Rescue", ...]] = ()
    """How it makes a script run that ran out of memory."""
    partners: ClassVar[frozenset[str]] = frozenset()
    """Families whose techniques change what it brings: screened together, it is asked how."""

    def __init_subclass__(cls) -> None:
        cls.family = cls.__module__.rpartition(".")[0].rpartition(".")[2]

    @classmethod
    @abstractmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Technique"]:
        """Return the settings worth a trial for this profile on this machine; empty for none."""

    @abstractmethod
    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Estimate the change before running anything."""

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return the settings with which `flatout plan` considers it, if it saves memory."""
        return ()

    def bind(self) -> "Technique":
        """Return what acts in one process: the same settings, with a state of their own."""
        return replace(self)  # type: ignore[type-var]  # subclasses are dataclasses

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment that the process starts with."""
        return variables

    def start(self) -> None:  # noqa: B027  doing nothing is the default at every hook point
        """Set process-wide switches; called once, right after torch was imported."""

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a training `DataLoader`, keyed by parameter name."""
        return arguments

    def epoch(self, loader: Any) -> Any:
        """Return the training loader, right before an iterator of it is created or reset."""
        return loader

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Return the iterator the loop draws from, given the one of a training loader."""
        return batches

    def model(self, root: Any) -> Any:
        """Return the root module, changed in place; called before its first training call."""
        return root

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Return what runs in place of a training call of the root module."""
        return call

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in place of every outermost `torch.autograd.backward`.

        Asked once, at the first one. When it returns, the gradients must be as the script expects
        them: clipping and logging come next.
        """
        return call

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer, changed in place; called before its first step."""
        return optimizer

    def switch(self, training: RunningTraining) -> Switch:
        """Return how it is switched on and off while the script trains.

        Called once, some steps into a training that runs without it. Raise `NotApplicable` where
        there is nothing to change. A technique that overrides neither this nor `turn_in_fetcher` is
        only ever measured in processes of its own.
        """
        raise NotImplementedError

    def turn_in_fetcher(self, fetcher: Any, is_on: bool) -> None:  # noqa: FBT001  as `Switch.turn`
        """Switch it on or off in the process that makes the samples, before its next batch.

        For techniques on the data, which a screen lets act from the start and keeps off. `fetcher`
        is what draws from the data set there; `fetcher.dataset` may be set. The process is the
        training's own, or a worker that was forked from it.
        """
        raise NotImplementedError

    def end(self) -> str:
        """Look back when the training or the trial ends; return what a reader should know.

        Raise `NotApplicable` where the technique turned out to have done nothing after all: what is
        decided inside a call (a compiler that gave up) shows in no other hook point.
        """
        return ""

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, for the recipe."""
        kept = [item.name for item in fields(self) if item.init]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in kept}


def name_of(technique: Technique | type[Technique]) -> str:
    """Return the name of a technique: that of its module."""
    kind = technique if isinstance(technique, type) else type(technique)
    return kind.__module__.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniquePrior:
    """What is known about one technique in one case."""

    speedup: float = 1.0
    """Of the part of the step that it acts on."""
    spread: float = 1.25
    """How far that may be off, as a factor: one standard deviation of its logarithm."""
    source: str = "nothing is known but the step that was measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierResult:
    """What one tuning on this machine found of one technique."""

    at: str
    """When the tuning ended, UTC."""
    script: str
    device: str
    technique: str
    predicted: float
    ratio: float
    interval: tuple[float, float | None]
    """None above where one pair left it open."""
    n: int
    verdict: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def prior_of(technique: str, case: str = ANY) -> TechniquePrior:
    """Return what is known about a technique in a case, else in any, else nothing.

    >>> prior_of("bf16_autocast", "cpu").speedup, prior_of("bf16_autocast", "cuda").speedup
    (2.0, 1.6)
    >>> prior_of("loader_workers").spread
    1.25
    """
    known = priors().get(technique, {})
    general = case.partition("_")[0]
    return known.get(case) or known.get(general) or known.get(ANY) or TechniquePrior()


def case_of(profile: Profile) -> str:
    """Return the case of a profile: the kind of its device, and low precision apart."""
    is_lowered = any(
        model.used_autocast or {"bfloat16", "float16"} & {*model.dtypes} for model in profile.models
    )
    return f"{profile.device_kind}_lowered" if is_lowered else profile.device_kind


@functools.cache
def priors() -> Mapping[str, Mapping[str, TechniquePrior]]:
    """Return all priors, by technique and case."""
    text = Path(__file__).with_name("priors.toml").read_text(encoding="utf-8")
    return {
        technique: {case: TechniquePrior(**facts) for case, facts in cases.items()}
        for technique, cases in parse_toml(text).items()
    }


def prior_for(technique: Technique | type[Technique], profile: Profile) -> TechniquePrior:
    """Return what is known about a technique on such a device before it is tried."""
    return prior_of(name_of(technique), case_of(profile))


def can_switch(technique: Technique | type[Technique]) -> bool:
    """Return whether a technique can be switched on and off while a script trains."""
    kind = technique if isinstance(technique, type) else type(technique)
    return kind.switch is not Technique.switch or is_switched_in_fetcher(kind)


def is_switched_in_fetcher(technique: Technique | type[Technique]) -> bool:
    """Return whether a technique is switched where the samples are made."""
    kind = technique if isinstance(technique, type) else type(technique)
    return kind.turn_in_fetcher is not Technique.turn_in_fetcher


def hook_points_of(technique: Technique | type[Technique]) -> frozenset[str]:
    """Return the names of the hook point methods that a technique overrides."""
    kind = technique if isinstance(technique, type) else type(technique)
    return frozenset(n for n in HOOK_POINT_METHODS if getattr(kind, n) is not getattr(Technique, n))
