"""How a training is spread over ranks: the table `[parallel]` of a recipe. Pure.

One rank is at one place of a mesh with the axes pp, dp_replicate, dp_shard and tp, from the
outermost to the innermost: the ranks of one tensor-parallel group are next to each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from flatout.records.errors import UserError, unknown
from flatout.records.json_records import from_plain

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, the outermost first."""
COUNTS = ("microbatches", "checkpoint_every", "restarts")
TP_STYLES = ("colwise", "rowwise", "sequence", "colwise_gather", "replicate")
"""What a module's line in a tensor-parallel plan may say."""
MICROBATCHES_PER_STAGE = 4
"""With four microbatches for each stage the bubble of 1F1B is below a fifth of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """What a pipeline schedule asks of the stages."""

    torch_name: str
    """Its class in `torch.distributed.pipelining`."""
    stages_per_rank: int = 1
    is_v_shaped: bool = False
    """Whether a rank has the first and the last stages, instead of every `pp`-th."""
    needs_multiple_of_pp: bool = False
    """Whether the microbatches have to be a multiple of the ranks."""
    needs_as_many_as_stages: bool = False
    """Whether there have to be at least as many microbatches as stages."""


SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(torch_name="ScheduleGPipe"),
    "1f1b": PipelineSchedule(torch_name="Schedule1F1B", needs_as_many_as_stages=True),
    "interleaved": PipelineSchedule(
        torch_name="ScheduleInterleaved1F1B", stages_per_rank=2, needs_multiple_of_pp=True
    ),
    "looped_bfs": PipelineSchedule(torch_name="ScheduleLoopedBFS", stages_per_rank=2),
    "zero_bubble": PipelineSchedule(
        torch_name="ScheduleInterleavedZeroBubble", stages_per_rank=2, needs_multiple_of_pp=True
    ),
    "zbv": PipelineSchedule(
        torch_name="ScheduleZBVZeroBubble",
        stages_per_rank=2,
        is_v_shaped=True,
        needs_as_many_as_stages=True,
    ),
    "dualpipe_v": PipelineSchedule(
        torch_name="ScheduleDualPipeV",
        stages_per_rank=2,
        is_v_shaped=True,
        needs_as_many_as_stages=True,
    ),
}
"""By the names that a recipe has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """How many ranks each axis has, and what is sharded over them."""

    dp_replicate: int = 1
    """Groups of ranks that each hold the whole model, and a part of every batch."""
    dp_shard: int = 1
    """Ranks that share one copy of the states that `zero` names; each has a part of every batch."""
    tp: int = 1
    """Ranks that share each matrix product (tensor parallel)."""
    pp: int = 1
    """Ranks that have the layers one after the other (pipeline parallel)."""
    zero: int = 0
    """Sharded over `dp_shard`: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    microbatches: int = 0
    """Parts of a rank's batch, run one after the other; 0 chooses, see `microbatches_for`."""
    schedule: str = "1f1b"
    """Order of the microbatches in a pipeline, one of `SCHEDULES`."""
    offload: bool = False
    """Whether what `zero=3` shards is kept, and stepped by the optimizer, in the host's memory."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """Style of each module by its name, `*` for any part of it; empty takes the model's own plan,
    else one that is derived from the model and proven before use."""
    sequence_parallel: bool = False
    """Whether what is between the shared products is split along the sequence over `tp`."""
    loss_parallel: bool = False
    """Whether the last product's output stays split along its classes over `tp`."""
    checkpointing: bool = False
    """Whether the activations inside each block are computed again in backward."""
    compile: bool = False
    """Whether torch.compile is used: per block, or per stage with `tp`."""
    checkpoint: str = ""
    """Folder of checkpoints, from the newest of which the training goes on; empty writes none."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0 writes one at the end of each epoch."""
    restarts: int = 0
    """How often all ranks are started again after one of them failed."""

    def __post_init__(self) -> None:
        for name in (*AXES, *COUNTS):
            value = getattr(self, name)
            least = 0 if name in COUNTS else 1
            if type(value) is not int or value < least:
                raise UserError(f"parallel.{name}={value!r} has to be a whole number >= {least}")
        if self.schedule not in SCHEDULES:
            raise UserError(unknown("parallel.schedule", self.schedule, SCHEDULES))
        for name, style in self.tp_plan.items():
            if style not in TP_STYLES:
                raise UserError(f"parallel.tp_plan.{name}: {unknown('style', style, TP_STYLES)}")
        refusal = find_refusal(self)
        if refusal:
            raise UserError(f"[parallel] {refusal}")

    @property
    def world_size(self) -> int:
        """The ranks that it takes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """The parts into which a batch is cut."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """The stages of the pipeline, over all ranks; 1 without one."""
        return self.pp * SCHEDULES[self.schedule].stages_per_rank if self.pp > 1 else 1

    @property
    def engine(self) -> str:
        """What applies the data-parallel axes, proven exact with what else there is.

        DDP loses parameters under tensor parallelism and fails in a pipeline, and the composable
        `replicate` trains wrongly without an error there; `fully_shard` does neither.

        >>> ParallelSpec(dp_replicate=2).engine, ParallelSpec(dp_replicate=2, tp=2).engine
        ('ddp', 'fully_shard')
        """
        if self.dp == 1 and not self.offload:
            return "none"
        return "ddp" if self.zero < 2 and self.tp == self.pp == 1 else "fully_shard"

    @property
    def label(self) -> str:
        """One line for people.

        >>> ParallelSpec(dp_replicate=2, tp=2).label, ParallelSpec(dp_shard=4, zero=3).label
        ('dp_replicate=2 tp=2', 'dp_shard=4 zero=3')
        """
        shown = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if item.name not in ("tp_plan", "schedule", "checkpoint", *COUNTS[1:])
            and getattr(self, item.name) not in (False, 1 if item.name in AXES else 0)
        ]
        if self.pp > 1:
            shown.append(f"schedule={self.schedule}")
        return " ".join(shown) or "one rank"


def find_refusal(spec: ParallelSpec) -> str | None:
    """Return why a combination is refused, and what to write instead; None where it is exact."""
    return next(chain(_wrong_sharding(spec), _wrong_shape(spec)), None)


def _wrong_sharding(spec: ParallelSpec) -> Iterator[str]:
    zero, shards = spec.zero, spec.dp_shard
    others = " and ".join(name for name in ("tp", "pp") if getattr(spec, name) > 1)
    if zero not in (0, 1, 2, 3):
        yield f"zero={zero}: give 0, 1, 2 or 3"
    if zero == 0 and shards > 1:
        yield f"dp_shard={shards} shards nothing with zero=0: give zero=2, or dp_replicate={shards}"
    if zero > 0 and shards == 1 and not spec.offload:
        yield f"zero={zero} has nothing to shard over: give dp_shard"
    if spec.offload and zero != 3:
        yield "offload keeps in the host's memory what zero=3 shards: give zero=3"
    if zero == 1 and others:
        name = "ZeroRedundancyOptimizer"
        yield f"zero=1 is {name}, which cannot shard what {others} split: give zero=2"
    if zero == 1 and spec.dp_replicate > 1:
        yield "zero=1 shards over all ranks: give dp_replicate=1, or zero=2"


def _wrong_shape(spec: ParallelSpec) -> Iterator[str]:
    schedule, least = SCHEDULES[spec.schedule], spec.microbatches
    if spec.sequence_parallel and spec.tp == 1:
        yield "sequence_parallel needs tp > 1"
    if spec.loss_parallel and spec.tp == 1:
        yield "loss_parallel needs tp > 1"
    if spec.pp > 1 and 0 < least < spec.stages and schedule.needs_as_many_as_stages:
        yield f"schedule={spec.schedule} needs microbatches >= {spec.stages}, one for each stage"
    if spec.pp > 1 and least % spec.pp != 0 and schedule.needs_multiple_of_pp:
        yield f"schedule={spec.schedule} needs microbatches to be a multiple of pp={spec.pp}"
    if spec.restarts > 0 and not spec.checkpoint:
        yield "restarts without checkpoint would begin again: give checkpoint, a folder"
    if spec.compile and spec.tp > 1 and spec.pp > 1:
        yield "compile with tp and pp together is not proven exact: leave one of them out"


def check_world(spec: ParallelSpec, ranks: int) -> None:
    """Refuse a number of ranks for which a spec was not made."""
    if spec.world_size != ranks:
        product = " x ".join(f"{name}={getattr(spec, name)}" for name in AXES)
        raise UserError(
            f"[parallel] {product} needs {spec.world_size} ranks and {ranks} were asked for: "
            f"give --ranks {spec.world_size}, or change the table"
        )


def microbatches_for(spec: ParallelSpec, samples: int, accum_steps: int = 1) -> int:
    """Return the microbatches of a step in which a rank has so many samples.

    Without a pipeline they are the parts whose gradients are added up. In a pipeline there are up
    to four for each stage, so that the bubble stays small.

    >>> microbatches_for(ParallelSpec(pp=2), 64), microbatches_for(ParallelSpec(pp=2), 3)
    (8, 3)
    >>> microbatches_for(ParallelSpec(pp=2, schedule="interleaved"), 64)
    16
    """
    if spec.microbatches:
        return spec.microbatches
    if spec.pp == 1:
        return accum_steps
    schedule = SCHEDULES[spec.schedule]
    count = max(1, min(samples, MICROBATCHES_PER_STAGE * spec.stages))
    if schedule.needs_as_many_as_stages:
        count = max(count, spec.stages)
    return -(-count // spec.pp) * spec.pp if schedule.needs_multiple_of_pp else count


def spec_for(ranks: int, zero: int = 0, *, offload: bool = False) -> ParallelSpec:
    """Return plain data parallelism over so many ranks.

    >>> spec_for(4, zero=3).label, spec_for(1, zero=3, offload=True).label
    ('dp_shard=4 zero=3', 'zero=3 offload=True')
    """
    if offload or (zero and ranks > 1):
        return ParallelSpec(dp_shard=ranks, zero=zero, offload=offload)
    return ParallelSpec(dp_replicate=ranks)


def script_settings(spec: ParallelSpec) -> dict[str, Any]:
    """Return the settings of data parallelism for a script, which offers nothing else."""
    plain = ParallelSpec(
        dp_replicate=spec.dp_replicate,
        dp_shard=spec.dp_shard,
        zero=spec.zero,
        offload=spec.offload,
    )
    if spec != plain:
        more = sorted(spec_to_toml(spec).keys() - spec_to_toml(plain).keys())
        raise UserError(
            f"[parallel] {', '.join(more)}: a script as it is trains data-parallel only, with "
            "dp_replicate, dp_shard, zero and offload; what else there is needs a Task"
        )
    shard = spec.dp_shard if spec.dp_replicate > 1 and spec.zero else 0
    found: dict[str, Any] = {"ranks": spec.world_size, "zero": spec.zero}
    found |= {"shard": shard} if shard else {}
    return found | {"offload": True} if spec.offload else found


def refit(spec: ParallelSpec, ranks: int) -> ParallelSpec:
    """Return the spec for another number of ranks: tp and pp stay where they divide it.

    What is left of the ranks goes to the axis that had data parallelism before. The batch of a
    step is the Task's, so it stays what it was.

    >>> refit(ParallelSpec(dp_shard=2, tp=2, zero=2), 2).label
    'tp=2'
    >>> refit(ParallelSpec(dp_shard=2, zero=3), 4).label
    'dp_shard=4 zero=3'
    >>> refit(ParallelSpec(pp=2, dp_replicate=2), 3).label
    'dp_replicate=3'
    """
    pp = spec.pp if ranks % spec.pp == 0 else 1
    tp = spec.tp if ranks // pp % spec.tp == 0 else 1
    dp = ranks // (pp * tp)
    is_sharded = spec.zero > 0 and dp > 1
    dp_replicate = spec.dp_replicate if is_sharded and dp % spec.dp_replicate == 0 else 1
    if dp_replicate == dp:
        dp_replicate = 1
    return replace(
        spec,
        pp=pp,
        tp=tp,
        dp_replicate=dp_replicate if is_sharded else dp,
        dp_shard=dp // dp_replicate if is_sharded else 1,
        zero=spec.zero if is_sharded else 0,
        microbatches=spec.microbatches if pp == spec.pp else 0,
        sequence_parallel=spec.sequence_parallel and tp > 1,
        loss_parallel=spec.loss_parallel and tp > 1,
    )


def spec_from_toml(plain: Mapping[str, Any]) -> ParallelSpec:
    """Return the spec that the table `[parallel]` of a recipe holds."""
    known = [item.name for item in fields(ParallelSpec)]
    for name in plain:
        if name not in known:
            raise UserError(
                unknown("key", f"parallel.{name}", [f"parallel.{one}" for one in known])
            )
    plan = plain.get("tp_plan", {})
    try:
        return from_plain(ParallelSpec, {**plain, "tp_plan": {} if plan == "auto" else plan})
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"[parallel] {error}") from None


def spec_to_toml(spec: ParallelSpec) -> dict[str, Any]:
    """Return the table of a spec: what differs from the defaults.

    >>> spec_to_toml(ParallelSpec(dp_shard=2, zero=2))
    {'dp_shard': 2, 'zero': 2}
    """
    default = ParallelSpec()
    shown = {item.name: getattr(spec, item.name) for item in fields(spec)}
    return {name: value for name, value in shown.items() if value != getattr(default, name)}
