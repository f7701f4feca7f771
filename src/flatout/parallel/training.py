"""A training for one device, run by several ranks: what happens at each of its hook points."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from flatout.agent import patching
from flatout.data.proof.random_streams import Streams
from flatout.parallel import group
from flatout.parallel.batches import Feeds, Part, RankSeeds, gathered, leading, part_of_batch
from flatout.parallel.engines import Replicas, Shards, warn_of_batch_statistics

CHECKED_EVERY = 500
"""Steps between two comparisons of the ranks' parameters; at first they are compared after steps
1, 2, 4, 8 and so on."""
CLOSE = 1e-3
"""Relative difference below which a loss is taken for the mean of its parts' losses: single
precision leaves 1e-6, a sum or another rule is off by far more."""


def never_quietly(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function ending the training on an error.

    An error at a hook point leaves a technique out; here each rank would train for itself.
    """

    @functools.wraps(act)
    def acting(*args: Any, **kwargs: Any) -> Any:
        try:
            return act(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever it is, going on would train wrongly
            group.stop(f"cannot spread this training: {type(error).__name__}: {error}")

    return acting


class ParallelTraining:
    """This rank's side of the training."""

    def __init__(self, part: Part, engine: "Replicas | Shards") -> None:
        self.part = part
        self.engine = engine
        self.feeds = Feeds(part)
        self.roots: list[Any] = []
        self.own_streams: Streams | None = None
        """Inside models of a script without a loader: where this rank's draws have come to."""
        self.odd_weights = torch.zeros((), dtype=torch.float64, device=group.device_of_group())
        """How far from one the ranks' shares in a batch added up to, at worst."""
        self.averages_parts: bool | None = None
        """Of such a script: whether its loss is the mean of the parts' losses; None: not asked."""
        self.losses: list[torch.Tensor] = []
        """What models gave as their own losses since the last backward, and what a GradScaler was
        given: the script prints them, and backward is called on what was made of them."""

    @classmethod
    @never_quietly
    def join(
        cls, ranks: int, *, zero: int, shard: int, offloads: bool
    ) -> "ParallelTraining | None":
        """Return this rank's side; None where this process is no rank."""
        if not group.join(ranks, uses_host=offloads):
            return None
        engine: Shards | Replicas = Replicas()
        if zero:
            engine = Shards(ranks, shard or ranks, reshards=zero == 3, offloads=offloads)
        training = cls(Part(dist.get_rank(), ranks), engine)
        patching.wrap(torch.amp.GradScaler, "scale", training._scale)
        patching.wrap(torch.nn.DataParallel, "__init__", _say_ddp)
        return training

    @never_quietly
    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a loader's arguments with streams of their own for this rank's workers.

        Not those of a stream of samples: every rank reads all of it, and has to read the same.
        """
        is_stream = isinstance(arguments.get("dataset"), IterableDataset)
        if is_stream or not arguments.get("num_workers") or not self.part.rank:
            return arguments
        seeds = RankSeeds(self.part.rank, arguments.get("worker_init_fn"))
        return {**arguments, "worker_init_fn": seeds}

    @never_quietly
    def epoch(self, loader: Any) -> None:
        """Begin an iterator of a loader."""
        if self.roots:
            self.engine.before_epoch()
        is_training = torch.is_grad_enabled() and all(root.training for root in self.roots)
        self.feeds.begin(loader, is_training=is_training)

    @never_quietly
    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Return the iterator with the parts noted."""
        return self.feeds.iterate(batches, loader)

    @never_quietly
    def model(self, root: Any) -> None:
        """Take on a root model before its first training call."""
        if any(True for _ in root.parameters()):
            self.engine.add(root)
            self.roots.append(root)
            if self.part.ranks > 1:
                warn_of_batch_statistics(root)

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Return a training call; of a script without a loader each rank takes its part of it."""
        if self.part.ranks == 1:
            return call

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            samples = leading([*args, *kwargs.values()])
            if self.feeds.has_drawn:
                self.feeds.worked_on = samples
                output = call(*args, **kwargs)
                self.losses += [one for one in _leaves(output) if one.ndim == 0]
                return output
            if self.averages_parts is False or not samples or samples % self.part.ranks:
                return call(*args, **kwargs)
            if self.averages_parts is None:
                self.averages_parts = self._averages_parts(call, root, samples, (args, kwargs))
                if not self.averages_parts:
                    group.say(
                        "the model's own loss is not the mean of its parts' losses: every rank "
                        "trains on whole batches, which gains nothing"
                    )
                    return call(*args, **kwargs)
            return self._shared_call(call, samples, (args, kwargs))

        return run

    def _shared_call(
        self, call: Callable[..., Any], samples: int, given: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Any:
        """Call with this rank's part of the inputs, and return the outputs of all."""
        args, kwargs = part_of_batch(given, self.part, samples)
        script = Streams()
        if self.own_streams is not None:
            self.own_streams.set_back()
        elif self.part.rank:
            torch.manual_seed((torch.initial_seed() + self.part.rank) % 2**63)
        output = call(*args, **kwargs)
        self.own_streams = Streams()
        script.set_back()
        return gathered(output, samples // self.part.ranks, self.part)

    def _averages_parts(
        self,
        call: Callable[..., Any],
        root: Any,
        samples: int,
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> bool:
        """Return whether numbers that the model returns are means over the samples, by trying."""
        streams, states = Streams(), {m: m.training for m in root.modules()}
        root.eval()
        try:
            with torch.no_grad():
                whole = _numbers(call(*given[0], **given[1]))
                args, kwargs = part_of_batch(given, self.part, samples)
                parts = _numbers(
                    gathered(call(*args, **kwargs), samples // self.part.ranks, self.part)
                )
        finally:
            for module, was_training in states.items():
                module.training = was_training
            streams.set_back()
        return len(whole) == len(parts) and all(
            abs(one - other) <= CLOSE * max(abs(one), abs(other))
            for one, other in zip(whole, parts, strict=True)
        )

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward after which every rank has the gradients of the whole batch."""

        @never_quietly
        def prepared(
            tensors: Any, grad_tensors: Any, kwargs: Mapping[str, Any]
        ) -> tuple[Sequence[torch.Tensor], Any]:
            if kwargs.get("inputs") is not None:
                group.stop("backward(inputs=...) leaves parameters out: it cannot be spread")
            outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            scale = self.feeds.weight() * self.part.ranks
            self.engine.before_backward(outputs)
            if scale == 1:
                return outputs, grad_tensors
            if grad_tensors is None:
                return outputs, [torch.full_like(one, scale) for one in outputs]
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
            return outputs, [None if one is None else one * scale for one in given]

        @functools.wraps(call)
        def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            outputs, grads = prepared(tensors, grad_tensors, kwargs)
            result = call(outputs, grads, *args, **kwargs)
            self._trained(outputs)
            return result

        return run

    @never_quietly
    def _trained(self, outputs: Sequence[torch.Tensor]) -> None:
        """Make the loss that the script prints next that of the whole batch."""
        weight = self.feeds.weight()
        if self.feeds.has_drawn:
            losses = {id(one): one for one in (*self.losses, *outputs) if one.numel() == 1}
            device = group.device_of_group()
            own = [loss.detach().to(device, torch.float64).reshape(()) for loss in losses.values()]
            whole = torch.stack([*own, torch.ones((), dtype=torch.float64, device=device)]) * weight
            dist.all_reduce(whole)
            for loss, value in zip(losses.values(), whole, strict=False):
                loss.data.copy_(value.reshape(loss.shape))  # autograd, now done, does not see it
            self.odd_weights = torch.maximum(self.odd_weights, (whole[-1] - 1).abs())
            if device.type == "cpu":
                self._check_weights()
        self.losses.clear()
        self.feeds.trained()

    def _check_weights(self) -> None:
        """Stop where the ranks' shares in a batch did not make up one: reading waits for a GPU."""
        if self.odd_weights > CLOSE:
            group.stop(
                "the ranks disagree about which batch a step was made with: the loop draws batches "
                "ahead and they differ in size; give the loader drop_last=True"
            )

    @never_quietly
    def optimizer(self, optimizer: Any) -> None:
        """Take on an optimizer before its first step."""
        self.engine.adopt(optimizer)
        steps = 0

        @never_quietly
        def after_step(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps % CHECKED_EVERY == 0 or steps.bit_count() == 1:
                self.engine.check(optimizer, steps)
                self._check_weights()

        optimizer.register_step_post_hook(after_step)

    def _scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self.losses.append(outputs)
            return result

        return scaled


def _leaves(output: Any) -> list[torch.Tensor]:
    """Return the tensors of real numbers in a model's output, in order."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.is_floating_point()]


def _numbers(output: Any) -> list[float]:
    return [float(one) for one in _leaves(output) if one.ndim == 0]


def _say_ddp(construct: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(construct)
    def say_and_construct(*args: Any, **kwargs: Any) -> None:
        group.say("DataParallel has one device in each rank: the ranks do what it would do")
        construct(*args, **kwargs)

    return say_and_construct
