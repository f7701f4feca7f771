"""The training of a Task on several ranks: one process's side of it."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from flatout.agent.task import Task
from flatout.agent.task_loop import (
    TaskStep,
    batch_size,
    checked,
    checked_loss,
    moved,
    samples_at,
    seed,
    split,
)
from flatout.kernels.module_proof import capture, tensors_in
from flatout.parallel import group
from flatout.parallel.checkpoint import Checkpoints
from flatout.parallel.engines import Replicas, leaves_of, warn_of_batch_statistics, whole_of
from flatout.parallel.pipeline import PipelineStages, split_model, stage_numbers
from flatout.parallel.task_batches import PartOfBatch, TaskBatches
from flatout.parallel.task_model import (
    BuiltModel,
    blocks_in,
    build,
    fill,
    gather_whole,
    parameter_count,
    place_of,
    shard,
)
from flatout.parallel.tensor_plan import Call, TensorPlan, apply_plan, check_ties, plan_for, prove
from flatout.records.errors import UserError
from flatout.records.parallel import ParallelSpec, microbatches_for

PROOF_SAMPLES = 2
"""Samples with which a tensor-parallel plan is proven."""


class _ModelCall(Exception):  # noqa: N818  the way out of a loss once the model was called
    """The arguments with which a loss calls the model."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _StandIn(nn.Module):
    """What a loss gets for the model: it notes the call, or gives what the last stage computed."""

    def __init__(self, root: nn.Module, output: Any = None) -> None:
        super().__init__()
        self.__dict__["stands_for"], self.__dict__["output"] = root, output
        self.__dict__["calls"] = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["calls"] += 1
        if self.output is None:
            raise _ModelCall((args, kwargs))
        if self.calls > 1:
            raise UserError("pp: loss() calls the model twice, which a pipeline cannot do")
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)


def call_of(task: Task, root: nn.Module, batch: Any) -> Call:
    """Return the arguments with which a Task's loss calls its model on a batch.

    Raises:
        UserError: where it does not call the model as a whole.
    """
    try:
        task.loss(_StandIn(root), batch)
    except _ModelCall as called:
        return called.call
    raise UserError(
        f"Task {task.name!r}: loss() never calls model(...) itself, which tp and pp need"
    )


class TaskTraining:
    """A Task's training on this rank."""

    def __init__(self, task: Task, spec: ParallelSpec, device: torch.device) -> None:
        self.task, self.spec = task, spec
        self.place = place_of(spec, device)
        seed(task.seed)
        self.built = build(task)
        self.root = self.built.root
        self.batches = TaskBatches(task, self.place.part)
        self.pipeline: PipelineStages | None = None
        self.most_samples = 0
        """Of this rank's part of a batch, in a pipeline."""
        self.microbatches = microbatches_for(spec, 1, task.accum_steps)
        self._spread()
        fill(self.built, self.place)
        for part in self.built.parts:
            part.train()
        self.engine: Replicas | None = None
        if spec.engine == "ddp":
            self.engine = Replicas()
            self.engine.add(self.root)
        if spec.dp > 1:
            warn_of_batch_statistics(self.root)
        self.optimizer = self._optimizer()
        self.schedule = task.schedule(self.optimizer) if task.schedule else None
        self.steps = 0
        self.checkpoints = Checkpoints(self, spec.checkpoint) if spec.checkpoint else None

    def _spread(self) -> None:
        """Cut the model into stages, split its products, and shard what is left."""
        built, place, spec = self.built, self.place, self.spec
        plan = None
        if spec.tp > 1 or spec.pp > 1:
            on_meta = next(built.root.parameters()).device
            first = self.batches.peek()
            sample, size = moved(first.batch, on_meta), first.own
            if spec.tp > 1:
                plan = self._proven_plan(samples_at(sample, size, range(min(size, PROOF_SAMPLES))))
            if spec.pp > 1:
                self.most_samples = -(-first.samples // spec.dp)
                self.microbatches = microbatches_for(spec, self.most_samples)
                rows = [0] * -(-self.most_samples // self.microbatches)
                call = call_of(self.task, built.root, samples_at(sample, size, rows))
                stages = split_model(built.root, built.blocks, call, place)
                _check_stage_ties(built, stages)
                built.parts = [stages[number] for number in stage_numbers(place)]
        for part in built.parts:
            blocks = blocks_in(part, built.blocks)
            if plan is not None:
                apply_plan(part, plan, [*blocks], place.mesh["tp"])
            shard(part, [*blocks.values()], place)
        if spec.pp > 1:
            self.pipeline = PipelineStages(built.parts, place, self.microbatches)

    def _proven_plan(self, sample: Any) -> TensorPlan:
        built, spec = self.built, self.spec
        styles, source = plan_for(built.root, built.blocks, spec.tp, spec.tp_plan)
        check_ties(built.ties, styles)
        plan = TensorPlan(
            styles=styles,
            source=source,
            splits_sequence=spec.sequence_parallel,
            splits_loss=spec.loss_parallel,
        )
        if spec.loss_parallel and "colwise_gather" not in styles.values():
            raise UserError(
                "loss_parallel: no product outside the blocks gives the classes; name it "
                "colwise_gather in [parallel.tp_plan]"
            )
        calls = block_calls(built.root, built.blocks, call_of(self.task, built.root, sample))
        prove(built.root, plan, calls, self.place.mesh["tp"])
        group.say(f"tensor parallel: the plan is {source}, and every kind of block was proven")
        return plan

    def _optimizer(self) -> Optimizer:
        optimizer: Optimizer = checked(
            self.task, "optimizer", self.task.optimizer(self.root), Optimizer
        )
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UserError(
                "optimizer() returned a ZeroRedundancyOptimizer, which cannot be spread again: "
                "return the plain one, with zero=1 or zero=2 in [parallel]"
            )
        for parameters in optimizer.param_groups:
            held = [p for p in parameters["params"] if not p.is_meta]
            parameters["params"] = held
            if self.spec.tp > 1:  # whole and split parameters cannot be updated in one call
                parameters.update({key: False for key in ("foreach", "fused") if key in parameters})
        if self.spec.zero != 1:
            return optimizer
        from torch.distributed.optim import ZeroRedundancyOptimizer

        known = signature(type(optimizer).__init__).parameters
        defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
        found: Optimizer = ZeroRedundancyOptimizer(
            optimizer.param_groups, optimizer_class=type(optimizer), **defaults
        )
        return found

    def run(self, steps: int | None = None) -> Iterator[TaskStep]:
        """Train to the end, from the last checkpoint where there is one; yield each step."""
        if self.checkpoints is not None:
            self.checkpoints.load_latest()
        for part in self.batches.parts(steps or self.task.steps, self.steps):
            loss = self.step(part)
            self.steps += 1
            self._check()
            yield TaskStep(number=self.steps, epoch=part.epoch, loss=loss, model=self.root)
            if self.checkpoints is not None:
                self.checkpoints.after_step(part)

    def step(self, part: PartOfBatch) -> Tensor:
        """Train on one batch and return its loss, that of all ranks' parts."""
        batch = moved(part.batch, self.place.device)
        share = self._share(part, batch)
        self.optimizer.zero_grad()
        self.batches.seed_step(part.epoch, part.number, 1 + self.place.index("pp"))
        with self._losses_split():
            if self.pipeline is not None:
                loss = self._pipelined(self.pipeline, part, batch, share)
            else:
                loss = self._accumulated(part, batch, share)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        has_loss = self.pipeline is None or self.pipeline.has_last
        if self.place.index("tp") or not has_loss:
            loss = torch.zeros_like(loss)
        dist.all_reduce(loss)
        return loss

    def _losses_split(self) -> Any:
        if not self.spec.loss_parallel:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def _share(self, part: PartOfBatch, batch: Any) -> float:
        """Return what this rank's mean counts in the mean over the whole batch."""
        if self.task.weight is None or self.spec.dp == 1:
            return part.share
        own = float(self.task.weight(batch)) if part.share else 0.0
        whole = torch.tensor(
            [own if self.place.counts_once else 0.0],
            dtype=torch.float64,
            device=self.place.device,
        )
        dist.all_reduce(whole)
        return own / float(whole) if float(whole) else 0.0

    def _accumulated(self, part: PartOfBatch, batch: Any, share: float) -> Tensor:
        """Run forward and backward of a batch in microbatches; only the last one communicates."""
        # Ranks whose parts differ by a sample have to take as many microbatches.
        count = min(self.microbatches, max(1, part.samples // self.spec.dp))
        pieces = split(batch, part.own, count) if count > 1 else [batch]
        weights = [self._weight(piece) for piece in pieces]
        total: Any = torch.zeros((), dtype=torch.float64, device=self.place.device)
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            is_last = number == count - 1
            if self.spec.engine == "fully_shard":
                self.root.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            loss = checked_loss(self.task, self.task.loss(self.root, piece))
            loss = loss * (share * weight / sum(weights))
            if self.engine is not None and is_last:
                if count > 1:
                    self._refuse_unreached(loss)
                self.engine.before_backward([loss])
            torch.autograd.backward(loss * self.spec.dp)  # the ranks' gradients are averaged
            total = total + whole_of(loss).detach().double()
        return total  # type: ignore[no-any-return]

    def _weight(self, piece: Any) -> float:
        return float(self.task.weight(piece)) if self.task.weight else float(batch_size(piece))

    def _refuse_unreached(self, loss: Tensor) -> None:
        """Stop where a gradient came from an earlier microbatch alone: it would not be sent."""
        reached = {id(leaf) for leaf in leaves_of([loss])}
        for name, parameter in self.root.named_parameters():
            if parameter.grad is not None and id(parameter) not in reached:
                raise UserError(
                    f"{name} has a gradient in some microbatches only: give microbatches=1"
                )

    def _pipelined(
        self, pipeline: PipelineStages, part: PartOfBatch, batch: Any, share: float
    ) -> Tensor:
        """Run a batch through the stages, filled up with samples that count for nothing."""
        samples = -(-self.most_samples // self.microbatches) * self.microbatches
        if part.own > samples:
            raise UserError(f"pp: a batch has {part.own} samples here, more than the first one")
        real = part.own if part.share else 0
        rows = [min(row, part.own - 1) for row in range(samples)]
        filled = samples_at(batch, part.own, rows)
        whole = self._weight(batch)

        def loss_of(output: Any, chosen: list[int]) -> Tensor:
            counted = [row for row in chosen if row < real]
            if not counted:  # backward needs a gradient of nothing from each stage
                found = (one.sum() * 0.0 for one in tensors_in(output) if one.requires_grad)
                return sum(found)  # type: ignore[return-value]
            piece = samples_at(filled, samples, counted)
            kept = _first_rows(output, len(counted), len(chosen))
            loss = checked_loss(self.task, self.task.loss(_StandIn(self.root, kept), piece))
            return loss * (self._weight(piece) / whole * share * self.spec.dp)

        call = call_of(self.task, self.root, filled)
        return pipeline.run(call, samples, loss_of) / self.spec.dp

    def _check(self) -> None:
        """Stop where the model is no longer what it was: after the first step, and now and then."""
        if self.steps == 1:
            count = parameter_count(self.built, self.place)
            if count != len(self.built.parameters):
                group.stop(
                    f"after step 1 the model has {count} parameters of {len(self.built.parameters)}"
                )
        if self.engine is not None and self.steps.bit_count() == 1:
            self.engine.check(self.optimizer, self.steps)

    def whole_model(self) -> nn.Module | None:
        """Return the trained model whole, on the CPU of rank 0; None on others, which take part."""
        is_first = dist.get_rank() == 0
        target = self.task.model() if is_first else None
        gather_whole(self.built, self.place, target)
        if target is None:
            return None
        return target.to(self.place.device)


def block_calls(root: nn.Module, blocks: Sequence[str], call: Call) -> dict[str, Call]:
    """Return the arguments with which each block is called, or the root where there are none.

    Raises:
        UserError: where the model cannot be run on shapes alone.
    """
    if not blocks:
        return {"": call}
    args, kwargs = call
    why = ""

    def run() -> None:
        nonlocal why
        try:
            root(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]

    calls = dict(zip(blocks, capture(root, [*map(root.get_submodule, blocks)], run), strict=True))
    found = {name: one for name, one in calls.items() if one is not None}
    if why and len(found) < len(blocks):
        raise UserError(
            f"tp: {type(root).__name__} cannot be run on shapes alone ({why}), so no plan can be "
            "proven"
        )
    return found


def _check_stage_ties(built: BuiltModel, stages: Sequence[nn.Module]) -> None:
    for names in built.ties:
        holders = [
            number
            for number, stage in enumerate(stages)
            if {*names} & {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        ]
        if len(holders) > 1:
            raise UserError(
                f"pp: {' and '.join(names)} are one parameter in two stages, whose gradients would "
                "not be added up: leave pp at 1, or give each its own"
            )


def _first_rows(output: Any, count: int, size: int) -> Any:
    if count == size:
        return output
    return tree_map(
        lambda one: (
            one[:count] if isinstance(one, Tensor) and one.ndim and one.shape[0] == size else one
        ),
        output,
    )
