"""A training for one device, run by several ranks: what happens at each of its hook points."""

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from flatout.agent import patching
from flatout.agent.nested import leaves_of
from flatout.agent.task_loop import samples_at
from flatout.agent.untouched import state_kept
from flatout.data.proof.random_streams import Streams
from flatout.kernels.module_proof import tensors_in
from flatout.parallel import group
from flatout.parallel.batches import (
    Feeds,
    Part,
    RankSeeds,
    Share,
    gathered,
    leading,
    part_of_batch,
)
from flatout.parallel.engines import Replicas, Shards, eval_mode, warn_of_batch_statistics
from flatout.parallel.loss_form import (
    CURVED,
    SUM,
    LossForm,
    Nodes,
    are_constant,
    forms_of,
    tables_of,
)

CHECKED_EVERY = 500
"""Steps between two comparisons of the ranks' parameters; at first they are compared after steps
1, 2, 4, 8 and so on."""
CLOSE, OF_HALF = 1e-3, 30
"""Relative difference below which an output is taken for that of its parts put together, and how
often that for 16 bits: single precision leaves 1e-6, and they some 1e-2; a sum or another rule is
off by far more."""
ROUNDED = 1e-5
"""Relative difference below which inputs are the same, and outputs that the same kernels gave."""
MOST_TABLES = 8
"""Losses that are searched for such tables: a training may have several, which take turns."""
MOST_FORMS = 64
"""Losses of whole batches that are kept apart: factors may differ in each step."""
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, and those with names."""


def never_quietly(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function ending the training on an error.

    An error at a hook point leaves a technique out; here each rank would train for itself.
    """

    @functools.wraps(act)
    def acting(*args: Any, **kwargs: Any) -> Any:
        try:
            return act(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever it is, going on would train wrongly
            if group.is_about_another(error):
                time.sleep(group.NAMED_S)
                group.stop(f"{group.LOST} ({str(error).splitlines()[0]})")
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
        self.cuts: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Of the models of such a script: whether a batch's outputs are those of its parts."""
        self.has_whole_batches = False
        """Whether one of them was given a batch that has no equal parts."""
        self.is_sum = False
        """Whether the loss of the backward under way is the sum of the parts' losses."""
        self.weight: float | torch.Tensor = 1.0
        """Of this rank's loss otherwise."""
        self.is_mixed = torch.zeros((), dtype=torch.bool, device=group.device_of_group())
        """Whether the terms of a part's loss were means over different numbers of labels."""
        self.forms: dict[tuple[str, ...], tuple[frozenset[str], int, tuple[Nodes, ...]]] = {}
        """By the nodes of their graphs what losses of whole batches were, of how many samples, and
        the factors of their terms."""
        self.tables: dict[bool, list[frozenset[tuple[int, int]]]] = {False: [], True: []}
        """Of the first losses of whole batches, and of parts, the tables of samples by samples."""
        self.calls = 0
        """Training calls on batches that no loader gave."""
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
        patching.wrap(sys, "excepthook", training._explaining)
        return training

    def _explaining(self, show: Callable[..., None]) -> Callable[..., None]:
        """Return what shows an error; after one in the first part of a batch it says what that is.

        Before it the training took a step with a whole batch. Later parts may be of one sample.
        """

        @functools.wraps(show)
        def explain(*error: Any) -> None:
            show(*error)
            if "mixed torch.Tensor and DTensor" in str(error[1]):
                sys.stderr.write(
                    "flatout: with --zero a model is trained by calls of itself, not of a part or "
                    "another method of it: leave --zero at 0\n"
                )
            if isinstance(error[1], Exception) and group.is_about_another(error[1]):
                sys.stderr.write(f"flatout: {group.LOST}\n")
            elif self.feeds.first_part and not self.feeds.has_trained_on_parts:
                samples, own = self.feeds.first_part
                sys.stderr.write(
                    f"flatout: this was the first batch of which each rank has a part, {own} of "
                    f"{samples} samples: a script that counts on its batch size has to take it "
                    "from the batch, as in len(x)\n"
                )
            elif self.feeds.first_part and self.feeds.worked_on == 1:
                sys.stderr.write(
                    "flatout: this rank had one sample of a batch: what needs several, as batch "
                    "normalisation does, needs larger batches, and drop_last=True in the loader\n"
                )

        return explain

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
            if self.feeds.is_fed:
                self.feeds.worked_on = samples
                output = call(*args, **kwargs)
                numbers = [one for one in tensors_in(output) if one.ndim == 0]
                self.losses += [one for one in numbers if one.is_floating_point()]
                return output
            self._check_inputs((args, kwargs))
            if not samples or samples % self.part.ranks:
                self.has_whole_batches = True
                return call(*args, **kwargs)
            if root not in self.cuts:
                self.cuts[root] = self._can_cut(call, root, samples, (args, kwargs))
            if not self.cuts[root]:
                return call(*args, **kwargs)
            return self._shared_call(call, samples, (args, kwargs))

        return run

    @never_quietly
    def _check_inputs(self, given: Any) -> None:
        """Stop where a script that makes its batches itself makes others on each rank."""
        self.calls += 1
        if not _is_due(self.calls):
            return
        batch = (x for x in tensors_in(given) if x.numel() and not x.requires_grad)
        sums = [_ordered_sum(x) for x in batch]
        # What a frozen model gave may differ in its last bits.
        if group.differs(sums, ROUNDED):
            group.stop(
                "this rank makes other batches than rank 0: the script draws them from a generator "
                "of its own without a seed; give it one, or draw from torch's, numpy's or random's"
            )

    def _shared_call(self, call: Callable[..., Any], samples: int, given: Given) -> Any:
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

    def _can_cut(self, call: Callable[..., Any], root: Any, samples: int, given: Given) -> bool:
        """Return whether the outputs for a batch are those of its parts put together, by trying.

        Numbers have to be means over the samples. They are not where a model compares samples, and
        outputs are not where the first dimension is time, or where they have the samples elsewhere.
        Of a long sequence few rows notice that it is cut: so the other ranks' rows are changed,
        too, and this rank's have to stay what they were.
        """
        size = samples // self.part.ranks
        own = slice(self.part.rank * size, (self.part.rank + 1) * size)
        repeated = [own.start + row % size for row in range(samples)]
        try:
            with state_kept(root), eval_mode(root), torch.no_grad():
                whole = call(*given[0], **given[1])
                args, kwargs = part_of_batch(given, self.part, samples)
                parts = gathered(call(*args, **kwargs), size, self.part)
            with state_kept(root), eval_mode(root), torch.no_grad():
                args, kwargs = samples_at(given, samples, repeated)
                beside = call(*args, **kwargs)
            pairs = zip(leaves_of(whole), leaves_of(parts), strict=True)
            is_same = all(_is_close(*pair) for pair in pairs)
            rows = [
                [x[own] for x in leaves_of(output) if isinstance(x, torch.Tensor) and x.ndim]
                for output in (whole, beside)
            ]
            is_same = is_same and all(
                _is_close(one, other, ROUNDED) for one, other in zip(*rows, strict=True)
            )
        except Exception:  # noqa: BLE001  a model that parts of a batch are too small for
            is_same = False
        agreed = torch.tensor(float(is_same), device=group.device_of_group())
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        if not agreed:
            group.say(
                f"what {type(root).__name__} makes of a batch is not what it makes of its parts, "
                "put together: every rank trains it on whole batches, which gains nothing"
            )
        return bool(agreed)

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward after which every rank has the gradients of the whole batch."""

        @never_quietly
        def prepared(
            tensors: Any, grad_tensors: Any, kwargs: Mapping[str, Any]
        ) -> tuple[Sequence[torch.Tensor], Any]:
            if kwargs.get("inputs") is not None:
                group.stop("backward(inputs=...) leaves parameters out: it cannot be spread")
            outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            scale = self.part.ranks * self._weigh(outputs)
            self.engine.before_backward(outputs)
            if isinstance(scale, float) and scale == 1:
                return outputs, grad_tensors
            if grad_tensors is None:
                grad_tensors = [torch.ones_like(one) for one in outputs]
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
            return outputs, [
                None if one is None else one * torch.as_tensor(scale).to(one) for one in given
            ]

        @functools.wraps(call)
        def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            outputs, grads = prepared(tensors, grad_tensors, kwargs)
            result = call(outputs, grads, *args, **kwargs)
            self._trained(outputs)
            return result

        return run

    def _weigh(self, outputs: Sequence[torch.Tensor]) -> float | torch.Tensor:
        """Return what the loss of this rank's part counts for in that of the whole batch."""
        share, loss = self.feeds.share(), outputs[0]
        self.is_sum, self.weight = False, share.weight
        if self.feeds.is_fed and len(outputs) == 1 and loss.numel() == 1 and share.own:
            form = forms_of(loss, share.own)
            self._look_for_tables(loss, share)
            self.is_sum = self._is_sum(form, share)
            if share.is_part and CURVED in form.forms:
                group.say_once(
                    "the loss is no mean over the samples, but made of one (a root, a ratio): over "
                    "ranks it is the mean of what their parts give, which differs from one process"
                )
            if share.is_part:
                self.weight = self._share_of(form.weight, share)
        return 1.0 if self.is_sum else self.weight

    def _look_for_tables(self, loss: torch.Tensor, share: Share) -> None:
        """Say once that the loss compares the samples of its batch, which ranks have parts of."""
        tables = self.tables[share.is_part]
        if len(tables) == MOST_TABLES:
            return
        tables.append(tables_of(loss, share.own))
        if any(whole & part for whole in self.tables[False] for part in self.tables[True]):
            group.say_once(
                "the loss compares the samples of a batch with each other: each rank compares "
                "those of its part, so it trains with fewer pairs or negatives than one process"
            )

    def _share_of(self, weight: torch.Tensor | None, share: Share) -> torch.Tensor:
        """Return this rank's share by what samples weigh, and by their number where one is lost.

        That may be on one rank alone, where it is compiled: so all ranks ask.
        """
        own = torch.zeros(2, dtype=torch.float64, device=group.device_of_group())
        if weight is not None:
            is_known = ~weight.isnan()
            self.is_mixed = self.is_mixed | ~is_known.to(self.is_mixed.device)
            own += torch.stack((weight.nan_to_num() * bool(share.weight), is_known)).to(own)
        whole = own.clone()
        dist.all_reduce(whole)
        return torch.where(whole[1] == self.part.ranks, own[0] / whole[0], share.weight)

    def _is_sum(self, form: LossForm, share: Share) -> bool:
        """Return whether what backward is called on is a sum over the samples of a part.

        It is where the same nodes, with the same factors, have summed the samples of a whole batch:
        then no factor is one over the samples' number, and no size is theirs by chance. A factor
        that follows a schedule, of one sum among others, is none of the samples' either.
        """
        forms, nodes, sums, _ = form
        names = tuple(name for name, _ in nodes)
        if not share.is_part:
            if len(self.forms) < MOST_FORMS:
                self.forms.setdefault(names, (forms, share.own, sums))
            return False
        whole, samples, factors = self.forms.get(names, (frozenset(), 0, ()))
        if SUM not in forms or SUM not in whole or samples == share.own:
            return False
        if not are_constant(sums, factors, share.own, samples):
            return False
        if len(whole) > 1:
            group.say_once(
                "the loss adds a sum over the samples to something else: over ranks it is averaged "
                "as if it were a mean, so the sum counts for less; divide it by the samples"
            )
        return len(whole) == 1

    @never_quietly
    def _trained(self, outputs: Sequence[torch.Tensor]) -> None:
        """Make the loss that the script prints next that of the whole batch."""
        weight = self.feeds.share().weight
        if self.feeds.is_fed:
            losses = {id(one): one for one in (*self.losses, *outputs) if one.numel() == 1}
            device = group.device_of_group()
            own = [loss.detach().to(device, torch.float64).reshape(()) for loss in losses.values()]
            counted = own if self.is_sum else [self._weighed(loss) for loss in own]
            one = torch.full((), weight, dtype=torch.float64, device=device)
            whole = torch.stack([*counted, one])
            dist.all_reduce(whole)
            for loss, value in zip(losses.values(), whole, strict=False):
                loss.data.copy_(value.reshape(loss.shape))  # autograd, now done, does not see it
            self.odd_weights = torch.maximum(self.odd_weights, (whole[-1] - 1).abs())
            if device.type == "cpu":
                self._check_weights()
        elif self.has_whole_batches and not any(self.cuts.values()):
            group.say_once(
                "a batch that the script makes itself is shared out where all tensors that a model "
                f"is given have as many rows, a multiple of the {self.part.ranks} ranks; these "
                "have not: every rank trains on whole batches, which gains nothing"
            )
        self.losses.clear()
        self.feeds.trained()

    def _weighed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what a loss adds to the batch's: of ignored samples alone it is no number."""
        weight = torch.as_tensor(self.weight, dtype=loss.dtype, device=loss.device)
        return torch.where(weight == 0, 0.0, loss * weight)

    def _check_weights(self) -> None:
        """Stop where the ranks' shares in a batch did not make up one: reading waits for a GPU."""
        if self.odd_weights > CLOSE:
            group.stop(
                "the ranks disagree about which batch a step was made with: the loop draws batches "
                "ahead and they differ in size; give the loader drop_last=True"
            )

    def _say_mixed(self) -> None:
        """Say once where terms of the loss count for other shares than the ranks' samples."""
        if self.is_mixed:
            group.say_once(
                "the loss adds means that are over different numbers of labels: over ranks each "
                "counts by the samples, which differs a little from one process"
            )

    def _check_samples(self) -> None:
        """Say once where the ranks choose other samples than rank 0."""
        own = torch.tensor([float(self.feeds.chosen)], dtype=torch.float64)
        differ = torch.tensor(float(group.differs([own])), device=group.device_of_group())
        dist.all_reduce(differ)
        if differ:
            group.say_once(
                "the ranks choose different samples, so an epoch may have some twice and others "
                "not at all: the sampler draws from a generator of its own without a seed"
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
            self.feeds.stepped()
            if _is_due(steps):
                self.engine.check(optimizer, steps)
                self._check_weights()
                self._check_samples()
                self._say_mixed()

        optimizer.register_step_post_hook(after_step)

    def _scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self.losses.append(outputs)
            return result

        return scaled


def _is_due(count: int) -> bool:
    """Return whether the ranks are compared after so many steps."""
    return count % CHECKED_EVERY == 0 or count.bit_count() == 1


def _is_close(whole: Any, parts: Any, close: float = CLOSE) -> bool:
    """Return whether two outputs are the same but for rounding."""
    if not isinstance(whole, torch.Tensor):
        # Tensors of an object, a distribution say, are not put together.
        held = [*tensors_in(whole), *getattr(whole, "__dict__", {}).values()]
        is_number = isinstance(whole, int | float)
        return whole == parts if is_number else not any(isinstance(x, torch.Tensor) for x in held)
    if whole.shape != parts.shape:
        return False
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(whole, parts)
    is_half = whole.element_size() == 2 or torch.is_autocast_enabled(whole.device.type)
    norm = torch.linalg.vector_norm
    return bool(norm(whole - parts) <= close * (OF_HALF if is_half else 1) * norm(whole))


def _ordered_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return two numbers up to one that change with the values and the order of the samples."""
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    rows = values.double().reshape(len(values) if values.ndim else 1, -1)
    sizes, places = rows.abs().sum(), torch.linspace(0, 1, len(rows)).to(rows)
    return torch.stack((rows.sum(), rows.sum(1) @ places)) / sizes.clamp_min(1e-300)


def _say_ddp(construct: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(construct)
    def say_and_construct(*args: Any, **kwargs: Any) -> None:
        group.say("DataParallel has one device in each rank: the ranks do what it would do")
        construct(*args, **kwargs)

    return say_and_construct
