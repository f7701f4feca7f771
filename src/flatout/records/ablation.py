"""What tunings, comparisons of stored results and surveys find, as records.

`Ablation` is a tuning: trials that differ in one technique each, with verdicts, its staged table
and how well the training is fed (`Feeding`). `Contrast` is two stored results, side by side.
`Survey` is the methods of the articles on one script.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.records.input_files import parse_toml
from flatout.records.json_records import from_plain, to_plain
from flatout.records.messages import Text
from flatout.records.profile import PeakBytes, Profile, profile_from_json
from flatout.records.recipe import Choice, Recipe

FREE_DATA, CORES = "free_data", "cores"
"""What can bind: a step without any wait, or the cores that make the samples."""
FASTER = 1.02
"""A smaller gain between two steps is not called faster: so small a gain is never kept."""
BUSIER = 0.05
"""A smaller rise of the utilisation is not called busier."""
SCHEMA = "flatout.ablation/1"
CONTRAST_SCHEMA = "flatout.contrast/1"
SURVEY_SCHEMA = "flatout.survey/1"
SAME_PEAK = 0.02
"""Peaks that differ by less are equal: fresh processes of one script differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """Rates of one recipe in samples a second, each measured or from measured CPU times."""

    samples_per_s: float
    free_data_per_s: float
    """With batches that were made before, the rest as in this recipe."""
    cores_per_s: float
    """What the usable cores can make and train with this recipe, were none of them ever idle."""
    decode_per_s: float | None = None
    """The same, did making a sample only read and decode; None where it decodes nothing."""
    made_ms: float = 0.0
    """CPU time to make and send one sample."""
    trained_ms: float = 0.0
    """CPU time of training on one sample where the training runs on the same cores, else 0."""

    @property
    def binds(self) -> str:
        """Which of the two limits is the lower one."""
        return FREE_DATA if self.free_data_per_s <= self.cores_per_s else CORES

    @property
    def measured_limit_per_s(self) -> float:
        """The lower one of the two limits, as it was measured apart from the recipe's own rate."""
        return min(self.free_data_per_s, self.cores_per_s)

    @property
    def limit_per_s(self) -> float:
        """The limit, which is no lower than what was reached: a run refutes what it exceeds."""
        return max(self.samples_per_s, self.measured_limit_per_s)

    @property
    def share(self) -> float:
        """The rate over its limit, in [0, 1].

        >>> Feeding(samples_per_s=95, free_data_per_s=200, cores_per_s=100).share
        0.95
        >>> Feeding(samples_per_s=102, free_data_per_s=200, cores_per_s=100).share
        1.0
        """
        return self.samples_per_s / self.limit_per_s if self.limit_per_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return to_plain(self) | {"binds": self.binds, "share": self.share}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """How long the whole training is, as the script says it."""

    steps: float
    source: str
    """Where that is from: words of the command line or of the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRow:
    """One row of the staged table: the recipe up to one technique. The first has none."""

    technique: str = ""
    """The label of what was added; empty for the unchanged script."""
    promise: str = ""
    alone: float | None = None
    """Speed over the unchanged script's with this technique only."""
    alone_source: str = ""
    """`pairs`, `run` (one run), or `screen`: within the recipe, the others being on."""
    samples_per_s: float | None = None
    """With this technique and all before it."""
    utilisation: float | None = None
    """NVML's GPU-Util in [0, 1] on a GPU, else the share of the step in which the CPU trains."""
    peak_bytes: int | None = None
    source: str = ""
    """`pairs`: the middle of several runs, or `run`: one."""


def staged_row(
    profile: Profile, source: str, *, technique: str = "", promise: str = ""
) -> StagedRow:
    """Return the row of a recipe that was timed."""
    peak = profile.peak_bytes
    return StagedRow(
        technique=technique,
        promise=promise,
        samples_per_s=profile.samples_per_s or None,
        utilisation=utilisation_of(profile),
        peak_bytes=peak.allocated or peak.device or None,
        source=source,
    )


def utilisation_of(profile: Profile) -> float:
    """Return what nvidia-smi would show; on a CPU the busy share."""
    util = profile.gpu_util_share
    return profile.device_busy_share if util is None else util


def misleading(stages: Sequence[StagedRow]) -> StagedRow | None:
    """Return the first stage that is busier than the one before and no faster, if there is one.

    >>> slow = StagedRow(samples_per_s=50.0, utilisation=0.32)
    >>> misleading([slow, StagedRow(technique="x", samples_per_s=49.0, utilisation=0.96)]).technique
    'x'
    >>> misleading([slow, StagedRow(technique="x", samples_per_s=90.0, utilisation=0.96)])
    """
    known = [stage for stage in stages if stage.samples_per_s and stage.utilisation is not None]
    for before, stage in pairwise(known):
        is_busier = (stage.utilisation or 0.0) >= (before.utilisation or 0.0) + BUSIER
        if is_busier and (stage.samples_per_s or 0.0) < FASTER * (before.samples_per_s or 0.0):
            return stage
    return None


class Verdict(Enum):
    """What was decided about one technique."""

    KEPT = "kept"
    TOGETHER = "together"
    """It was kept as one with others: the row that names them has the comparison."""
    NO_EFFECT = "no_effect"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    REJECTED = "rejected"
    """The guard saw other training."""
    FAILED = "failed"
    """The trial crashed, hung or ran out of memory."""
    NOT_APPLICABLE = "not_applicable"
    """The technique found nothing here that it could act on, and said why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A speed ratio from interleaved pairs of fresh processes; above 1 the candidate is faster."""

    ratio: float
    interval: tuple[float, float]
    """95 % interval of the ratio."""
    n: int
    blocks: int = 0
    """Blocks of steps of one process that switched between the two, where they count as well."""
    resolution: float = 1.0
    """The smallest gain these pairs could have shown: below it, nothing is known."""
    source: str = "pairs"
    """`pairs` of fresh processes, or `screen`: blocks of steps of one process, n of them."""

    @property
    def covers_one(self) -> bool:
        """Whether the interval covers no difference."""
        return self.interval[0] <= 1.0 <= self.interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """The guard's answer for one recipe."""

    status: str
    """`same` (bit-identical), `within` (inside the promise's limits), `rejected`,
    `on_purpose` (it changes the training, as the user allowed; only damage was looked for),
    `not_compared` (nothing could be compared: fails closed) or `skipped` (not worth checking:
    the technique was not going to be kept)."""
    why: str = ""
    """One line: the check that fired, or what was compared."""
    steps: int = 0
    worst: Mapping[str, float] = field(default_factory=dict)
    """Largest value per check as a share of its limit; above 1 rejects."""
    promise: str = ""
    """The weaker promise that the recipe keeps, where it missed that of its techniques."""

    @property
    def passed(self) -> bool:
        """Whether the recipe may be kept."""
        return self.status in ("same", "within", "on_purpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One technique, tried on top of the recipe so far."""

    choice: Choice
    numerics: str
    verdict: Verdict
    on_top_of: tuple[str, ...] = ()
    """Names of the techniques that were already in the recipe."""
    together_with: tuple[str, ...] = ()
    """Names of techniques that came in with it: the comparison is that of all of them."""
    stage: str = "add"
    """`spread` (a way to train on several devices, against one), `add` (ladder) or `drop` (left out
    of the final recipe). In a drop row the comparison is the final recipe against the recipe
    without this technique: above 1 the technique still pays."""
    comparison: Comparison | None = None
    samples_per_s: float | None = None
    device_busy_share: float | None = None
    gpu_util_share: float | None = None
    """What nvidia-smi showed; None without a GPU."""
    peak_bytes: PeakBytes = PeakBytes()
    loss_check: LossCheck = LossCheck(status="skipped")
    predicted_ratio: float | None = None
    bound_ratio: float | None = None
    """The best case: everything that the technique acts on takes no time. None where unbounded."""
    startup_s: float = 0.0
    """Extra time of the first steps against the recipe so far: compilation."""
    break_even_steps: int | None = None
    """Steps after which `startup_s` is paid back; None where there is nothing to pay back."""
    why: str = ""

    def seen(self, profile: Profile | None) -> "Row":
        """Return the row with what a trial of its recipe showed, where there was one."""
        if profile is None:
            return self
        return replace(
            self,
            samples_per_s=profile.samples_per_s,
            device_busy_share=profile.device_busy_share,
            gpu_util_share=profile.gpu_util_share,
            peak_bytes=profile.peak_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return one row of the `flatout.ablation/1` mapping."""
        plain = to_plain(self)
        del plain["choice"], plain["comparison"]
        return plain | to_plain(self.choice) | _pair_to_json(self.comparison)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of the calibration: a technique's predicted, largest possible and measured ratio."""

    technique: str
    predicted: float
    bound: float | None
    measured: float

    @property
    def error(self) -> float:
        """Measured over predicted: below 1 the technique was promised more than it gave."""
        return self.measured / self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The result of one tuning."""

    workload: str
    """What the user would type after `python`."""
    baseline: Profile
    rows: tuple[Row, ...] = ()
    recipe: Recipe = Recipe()
    """The final recipe; empty when nothing was worth changing."""
    confirmation: Comparison | None = None
    """Whole recipe against baseline, fresh pairs. None when the recipe is empty."""
    final: Profile | None = None
    final_check: LossCheck | None = None
    aa_check: LossCheck | None = None
    """The script against itself: whether it repeats."""
    resolution: float = 1.0
    """The smallest gain that could be shown here."""
    foreign_shares: tuple[float, ...] = ()
    """Part of the cores that other processes used during each timed trial."""
    cost_s: float = 0.0
    stopped: str = ""
    """Why it ended: `finished`, `budget`, `busy budget`, `interrupted`, `machine busy`, `baseline
    failed`, `recipe failed`."""
    notes: tuple[str, ...] = ()
    feeding: Feeding | None = None
    """How far the final recipe is from what its data allow; None where no one looked."""
    needed: tuple[str, ...] = ()
    """Techniques that make the script run at all, where it runs out of memory unchanged, and the
    way it is spread over devices. The baseline and every comparison are with them."""
    stages: tuple[StagedRow, ...] = ()
    """The recipe technique by technique, the unchanged script first; empty where none was kept."""
    training: TrainingLength | None = None
    """How long the whole training is; None where the script does not say it plainly."""

    @property
    def is_spread(self) -> bool:
        """Whether the baseline trains on several devices, by flatout's doing."""
        return any(row.stage == "spread" and row.verdict is Verdict.KEPT for row in self.rows)

    @property
    def kept(self) -> tuple[Row, ...]:
        """The ladder's rungs."""
        return tuple(r for r in self.rows if r.verdict is Verdict.KEPT and r.stage == "add")

    @property
    def calibration(self) -> tuple[Prediction, ...]:
        """What was predicted of each technique alongside what was measured."""
        return tuple(
            Prediction(
                technique=row.choice.technique,
                predicted=row.predicted_ratio,
                bound=row.bound_ratio,
                measured=row.comparison.ratio,
            )
            for row in self.rows
            if row.stage == "add" and row.comparison and row.predicted_ratio
            # The comparison of several techniques says nothing about one of them, and what one does
            # within a recipe nothing about what was predicted of it for the unchanged script.
            if not row.together_with and row.comparison.source == "pairs"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.ablation/1` mapping."""
        plain = to_plain(self)
        del plain["confirmation"]
        best = {"recipe": plain.pop("recipe"), **_pair_to_json(self.confirmation)}
        best |= {"profile": plain.pop("final"), "loss_check": plain.pop("final_check")}
        best |= {"feeding": plain.pop("feeding")}
        calibration = [to_plain(item) | {"error": item.error} for item in self.calibration]
        plain |= {"baseline": {"profile": plain["baseline"]}, "best": best}
        return {"schema": SCHEMA} | plain | {"calibration": calibration}


def _pair_to_json(pair: Comparison | None) -> dict[str, Any]:
    if pair is None:
        return {"ratio": None, "interval": None, "n": 0, "resolution": None}
    return to_plain(pair)


def ablation_from_json(plain: Mapping[str, Any]) -> Ablation:
    """Return the ablation that `Ablation.to_json` wrote."""
    if plain.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} record: schema is {plain.get('schema')!r}")
    best = plain["best"]
    final = best["profile"]
    return from_plain(
        Ablation,
        {
            **plain,
            "baseline": profile_from_json(plain["baseline"]["profile"]),
            "rows": [{**row, "choice": row, "comparison": _pair(row)} for row in plain["rows"]],
            "recipe": best["recipe"],
            "confirmation": _pair(best),
            "final": profile_from_json(final) if final else None,
            "final_check": best["loss_check"],
            "resolution": _or_infinite(plain["resolution"]),
            "feeding": best.get("feeding"),
        },
    )


def _pair(plain: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a comparison, which lie among others; None without one."""
    if plain["ratio"] is None:
        return None
    low, high = plain["interval"]
    resolution = _or_infinite(plain["resolution"])
    return {**plain, "interval": (low, _or_infinite(high)), "resolution": resolution}


def _or_infinite(value: float | None) -> float:
    """Return the number; JSON has no infinity, so an open end is written as null."""
    return math.inf if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of both results."""

    name: str
    baseline: float
    candidate: float
    unit: str
    """`ms`, `s`, `per_s`, `share`, `bytes`, `ratio` or `number`: how they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What the second of two results shows against the first."""

    of: str
    """`profile`, `ablation` or `run`: what both files hold."""
    ratio: float
    """Above 1 the candidate is better: it steps faster, or its recipe gains more."""
    meaning: str
    """What the ratio is a ratio of, in words."""
    interval: tuple[float, float] | None = None
    """95 % interval of the ratio; None where the results hold no repeats."""
    n: tuple[int, int] = (1, 1)
    """Processes (profiles) or pairs (ablations) behind the ratio: baseline, candidate."""
    quantities: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()
    """What the reader should know before trusting the ratio."""

    @property
    def covers_one(self) -> bool:
        """Whether the two cannot be told apart."""
        return self.interval is not None and self.interval[0] <= 1.0 <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.contrast/1` mapping."""
        return {"schema": CONTRAST_SCHEMA} | to_plain(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPart:
    """One technique of a method's recipe."""

    technique: str
    settings: Mapping[str, Any] | None = None
    """None for what it offers for the script, else its defaults."""
    offered: bool = False
    """Whether it is run only with settings that it offers for the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method, or combination of methods, of the articles."""

    name: str
    """Of its message, `method.*`."""
    faster: str = ""
    """What the article says of the speed: `yes`, `no`, or empty for a combination."""
    smaller: str = ""
    """The same of the memory; `maybe`, too."""
    recipes: tuple[tuple[MethodPart, ...], ...] = ()
    """What is run; of several the first that can act on the script."""
    beyond: str = ""
    """The message that says why one process on one device cannot show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyRow:
    """What became of one method."""

    method: str
    faster: str = ""
    smaller: str = ""
    """What the article says."""
    status: str = "not_measured"
    """`measured`; `predicted` (memory only, by a stated formula); `impossible` here; `failed`;
    `not_measured` for lack of time."""
    recipe: Recipe = Recipe()
    numerics: str = ""
    """The weakest promise of its techniques."""
    comparison: Comparison | None = None
    """Samples a second over those of the unchanged script."""
    peak_bytes: PeakBytes = PeakBytes()
    peak_ratio: float | None = None
    """Peak memory over that of the unchanged script, of the middle runs."""
    why: Text = ""

    @property
    def is_faster(self) -> str:
        """Whether it was faster: `yes`, `no` (slower), `same`, or empty where not measured."""
        pair = self.comparison
        if pair is None:
            return ""
        if pair.covers_one:
            return "same"
        return "yes" if pair.ratio > 1 else "no"

    @property
    def is_smaller(self) -> str:
        """Whether it took less memory: `yes`, `no` (more), `same`, or empty where not known."""
        if self.peak_ratio is None:
            return ""
        if abs(self.peak_ratio - 1) < SAME_PEAK:
            return "same"
        return "yes" if self.peak_ratio < 1 else "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All methods on one script.

    Each is tried alone, whether or not it helps. Which methods there are and what the article says
    of each is data: `survey.toml`.
    """

    workload: str
    baseline: Profile
    rows: tuple[SurveyRow, ...] = ()
    cost_s: float = 0.0
    stopped: str = "finished"
    """`finished`, `budget`, `interrupted` or `machine busy`."""

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.survey/1` mapping."""
        plain = to_plain(self)
        for row, shown in zip(self.rows, plain["rows"], strict=True):
            shown |= {"is_faster": row.is_faster, "is_smaller": row.is_smaller}
        baseline = {"profile": plain["baseline"]}
        return (
            {"schema": SURVEY_SCHEMA} | plain | {"baseline": baseline, "loss_check": "not_judged"}
        )


@functools.cache
def methods() -> tuple[Method, ...]:
    """Return the methods in the article's order, the combinations last."""
    text = Path(__file__).with_name("survey.toml").read_text(encoding="utf-8")
    return tuple(from_plain(Method, method) for method in parse_toml(text)["method"])
