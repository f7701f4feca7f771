"""Trainings under a spec, compared with one process; run on several ranks at once."""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from flatout.agent.task_loop import training_steps
from flatout.parallel.engines import whole_of
from flatout.parallel.task_training import TaskTraining
from flatout.records.errors import UserError
from flatout.records.parallel import ParallelSpec
from tests.parallel.models import Language, language
from tests.parallel.specs import SPECS


def reference(task):
    """Return losses, first gradients and last parameters of one process."""
    losses, gradients, model = [], {}, None
    for step in training_steps(task):
        losses.append(step.loss.item())
        model = step.model
        if step.number == 1:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def difference(found, expected):
    """Return the largest difference relative to the largest number of each tensor."""
    worst = [
        float((whole_of(one) - expected[name]).abs().max() / expected[name].abs().max())
        for name, one in found.items()
    ]
    return max(worst, default=0.0)


def held(training, of):
    """Return what this rank's parts hold, whole."""
    return {
        name: whole_of(of(parameter)).detach().clone()
        for part in training.built.parts
        for name, parameter in part.named_parameters()
    }


def compared(task, spec):
    training = TaskTraining(task, spec, torch.device("cpu"))
    losses, first = [], {}
    for step in training.run():
        losses.append(step.loss.item())
        if step.number == 1:
            first = held(training, lambda parameter: parameter.grad)
    last = held(training, lambda parameter: parameter)
    expected_losses, gradients, parameters = reference(task)
    found = {
        "loss": max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True)),
        "gradient": difference(first, gradients),
        "parameter": difference(last, parameters),
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, sorted(last)))
    return {key: max(one[key] for one, _ in everyone) for key in found} | {
        "names": sorted({name for _, names in everyone for name in names}),
        "expected_names": sorted(parameters),
    }


def run(name):
    return compared(language(), ParallelSpec(**SPECS[name]))


def uneven_batches():
    """Return the comparison of batches of 7, 7 and 5 samples with weights of their own."""
    found = [
        compared(
            language(batch_size=7, samples=19, loss=masked_loss, weight=targets_in),
            ParallelSpec(**spec),
        )
        for spec in (
            {"dp_replicate": 2},
            {"dp_shard": 2, "zero": 3, "microbatches": 2},
            {"pp": 2, "microbatches": 3},
        )
    ]
    return worst_of(found)


def masked_loss(model, batch):
    tokens, following = batch
    wanted = following.masked_fill(tokens % 3 == 0, -100)
    return cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def targets_in(batch):
    return float((batch[0] % 3 != 0).sum())


def tied_words():
    """Return the comparison of a model whose output layer is its embedding."""
    task = language(ties=True)
    specs = ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}, {"tp": 2})
    return worst_of([compared(task, ParallelSpec(**spec)) for spec in specs])


def learning_rates():
    """Return the comparison of a training whose learning rate has a schedule."""
    task = language(schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    return worst_of([compared(task, ParallelSpec(dp_shard=2, zero=stage)) for stage in (1, 2)])


def own_plan():
    """Return the comparison under a plan that the user wrote."""
    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.gate": "colwise"}
    plan["blocks.*.mlp.down"] = "rowwise"
    return compared(language(), ParallelSpec(tp=2, tp_plan=plan))


def worst_of(found):
    keys = ("loss", "gradient", "parameter")
    return found[0] | {key: max(one[key] for one in found) for key in keys}


def memory():
    """Return what share of all parameters this rank built, holds and updates."""
    task, shares = language(), {}
    for name, spec in {"zero3": {"dp_shard": 2, "zero": 3}, "pp": {"pp": 2}}.items():
        training = TaskTraining(task, ParallelSpec(**spec), torch.device("cpu"))
        held = sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel()
            for part in training.built.parts
            for p in part.parameters()
        )
        whole = sum(shape.numel() for shape, _ in training.built.parameters.values())
        shares[name] = held / whole
    return shares


def communication():
    """Return the reductions of a step with one microbatch and with four, with their bytes."""
    found = {}
    for name, spec in {
        "ddp": {"dp_replicate": 2},
        "zero2": {"dp_shard": 2, "zero": 2},
    }.items():
        found[name] = [reductions(ParallelSpec(**spec, microbatches=count)) for count in (1, 4)]
    return found


def reductions(spec):
    training = TaskTraining(language(), spec, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in training.run(1):
            pass
    names = ("reduce_scatter", "allreduce")
    events = (event.name for event in profiler.events() if event.name.startswith("c10d::"))
    return sum(any(name in event for name in names) for event in events)


REFUSED = {
    "heads": (lambda: language(heads=1), {"tp": 2}),
    "ddp_in_model": (
        lambda: language(model=lambda: DistributedDataParallel(Language().double())),
        {"tp": 2},
    ),
    "replicate_in_model": (lambda: language(model=replicated), {"tp": 2}),
    "zero_redundancy": (
        lambda: language(
            optimizer=lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW)
        ),
        {"tp": 2},
    ),
    "branches": (lambda: language(model=lambda: Branching().double()), {"pp": 2}),
    "too_few_blocks": (
        lambda: language(model=lambda: Language(layers=2).double()),
        {"pp": 2, "schedule": "zbv"},
    ),
    "tied_stages": (lambda: language(ties=True), {"pp": 2}),
    "batch_norm": (lambda: language(model=lambda: Normed().double()), {"pp": 2}),
    "fused": (lambda: language(model=lambda: Fused().double()), {"tp": 2}),
    "wrong_plan": (
        lambda: language(),
        {"tp": 2, "tp_plan": {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}},
    ),
    "unknown_module": (lambda: language(), {"tp": 2, "tp_plan": {"blocks.*.mlp.upp": "colwise"}}),
    "model_unused": (
        lambda: language(loss=lambda model, batch: model.head.weight.sum()),
        {"tp": 2},
    ),
}
"""Trainings that cannot be spread so: a Task, and a spec."""


def refused():
    """Return what is said of each."""
    return {name: refusal(make(), ParallelSpec(**spec)) for name, (make, spec) in REFUSED.items()}


def refusal(task, spec):
    try:
        TaskTraining(task, spec, torch.device("cpu"))
    except UserError as error:
        return str(error)
    return "nothing"


def replicated():
    from torch.distributed._composable.replicate import replicate

    return replicate(Language().double())


class Branching(Language):
    """Looks at values, which a pipeline cannot be cut by."""

    def forward(self, tokens):
        if tokens.sum() > 0:
            return super().forward(tokens)
        return self.head(self.norm(self.words(tokens)))


class Normed(Language):
    def __init__(self):
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(8)


class Fused(torch.nn.Module):
    """Query, key and value are one product, which cannot be cut into equal columns."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(FusedBlock() for _ in range(2))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FusedBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(torch.softmax(query @ key.transpose(1, 2), -1) @ value)
