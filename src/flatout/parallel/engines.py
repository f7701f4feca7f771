"""What keeps the ranks' models alike: torch's DistributedDataParallel, or FSDP2 in place.

Neither wraps the script's model. DDP's reducer sees every backward and no forward: so
two forwards before one backward, two backwards after them, and networks that train in turns (a
GAN) are reduced as well, which a model wrapped in DDP leaves out in silence.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatout.parallel.group import device_of_group, differs, say_once, stop

BUCKET_BYTES = 250 << 20
"""Bytes that are sent together where a model's state is made alike, as DDP does."""
LOOKED_THROUGH = 8
"""Backwards whose graphs are searched for what is trained and belongs to no model."""
REENTRANT = "CheckpointFunctionBackward"
"""Node of a checkpoint that computes again in a backward of its own."""


def make_alike(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0."""
    found = [tensor.detach() for tensor in tensors]
    if found:
        world = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(world, found, BUCKET_BYTES, 0)  # type: ignore[attr-defined]


class Replicas:
    """A whole model on every rank; DDP averages the gradients while backward runs."""

    def __init__(self) -> None:
        self.engines: list[nn.parallel.DistributedDataParallel] = []
        self.roots: list[nn.Module] = []
        self.covered: set[int] = set()
        self.backwards = 0

    def add(self, root: nn.Module) -> None:
        """Take on a root model: rank 0's values, and its gradients averaged from now on."""
        if not any(one is root for one in self.roots):
            self.roots.append(root)
            make_alike([*root.parameters(), *root.buffers()])
        self._cover(root.parameters())

    def _cover(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Average the gradients of leaves from now on; return those for which that is new."""
        by_id = {id(one): one for one in leaves if one.requires_grad}
        new = [one for key, one in by_id.items() if key not in self.covered]
        if new:
            self.covered |= {*by_id}
            if any(leaf._backward_hooks for leaf in new):
                say_once(
                    "a hook on a parameter sees the gradient of each rank's part: what masks or "
                    "scales it trains as in one process, what clips or measures it does not"
                )
            # DDP expects sparse gradients of embeddings' weights alone.
            modules = (module for root in self.roots for module in root.modules())
            embeddings = (m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag))
            sparse = {id(module.weight) for module in embeddings if module.sparse}
            held = nn.Module()  # nn.ParameterList would make parameters of its own of plain tensors
            for number, leaf in enumerate(new):
                holder = nn.Embedding(1, 1, sparse=id(leaf) in sparse, device="meta")
                holder._parameters["weight"] = leaf  # type: ignore[assignment]
                held.add_module(str(number), holder)
            # Values are alike already; writing them again would spoil a graph that holds them.
            engine = nn.parallel.DistributedDataParallel(
                held, find_unused_parameters=True, init_sync=False
            )
            self.engines.append(engine)
        return new

    def before_epoch(self) -> None:
        """Take on what is trained from now on (a layer thawed), and make the buffers alike.

        Statistics of batch normalisation come from each rank's own part; evaluation and what is
        saved have rank 0's.
        """
        for root in self.roots:
            self.add(root)
        make_alike(buffer for root in self.roots for buffer in root.buffers())

    def before_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect a gradient of each parameter that the outputs depend on; one may have thawed."""
        self.backwards += 1
        for root in self.roots:
            self._cover(root.parameters())
        if self.backwards <= LOOKED_THROUGH:
            self._cover(leaves_of(outputs))
        for engine in self.engines:
            engine._pre_forward()  # type: ignore[no-untyped-call]
            engine.reducer.prepare_for_backward(list(outputs))

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of what the optimizer trains and no model holds, too."""
        new = self._cover(p for group in optimizer.param_groups for p in group["params"])
        for leaf in new:
            average_gradient(leaf)  # of a backward before

    def check(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Stop where the ranks' parameters differ: something trains that backward does not see."""
        sums = [
            torch.stack((p.detach().double().sum(), p.detach().double().abs().sum()))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        if differs(sums):
            stop(
                f"after step {steps} the parameters differ from rank 0's: the script changes them "
                "apart from backward and step, so it cannot be spread over ranks as it is"
            )


def average_gradient(leaf: torch.Tensor) -> None:
    """Give a leaf the mean of its gradients on all ranks; one that is alike already stays."""
    if leaf.grad is not None:
        dist.all_reduce(leaf.grad)
        leaf.grad /= dist.get_world_size()


def leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a backward through the outputs gives gradients to, in the order of the graph."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == REENTRANT:
            stop(
                "checkpoint(use_reentrant=True) hides its parameters from the exchange of the "
                "gradients: give it use_reentrant=False"
            )
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions if following is not None]
    return [*found.values()]


class Shards:
    """A model of which each rank keeps a part (FSDP2, ZeRO-2 or 3), on its device or its host."""

    def __init__(self, ranks: int, shard: int, *, reshards: bool, offloads: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        kind = device_of_group().type
        axes = {"dp_replicate": ranks // shard} if shard < ranks else {}
        axes["dp_shard"] = shard
        self.mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.policy = CPUOffloadPolicy(pin_memory=kind == "cuda") if offloads else OffloadPolicy()
        self.reshards = reshards
        self.roots: list[nn.Module] = []
        self.replaced: dict[int, nn.Parameter] = {}
        self.gone: list[nn.Parameter] = []
        """What was replaced, without its memory: while it is here, no other has its id."""
        self.counts: dict[int, int] = {}
        _read_sums_whole()

    def add(self, root: nn.Module) -> None:
        """Shard a root model in place: its repeated blocks one by one, then what is left."""
        from torch.distributed.fsdp import fully_shard

        if any(one is root for one in self.roots):
            return
        self.roots.append(root)
        make_alike([*root.parameters(), *root.buffers()])
        before = dict(root.named_parameters())
        if any(parameter._backward_hooks for parameter in before.values()):
            stop("the script has hooks on parameters, which shards would lose: leave --zero at 0")
        blocks = blocks_of(root)
        for module in (*blocks, root):
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=self.reshards,
                offload_policy=self.policy,
            )
            module.register_forward_hook(_shard_after_look)
        after = dict(root.named_parameters())
        self.replaced |= {id(before[name]): after[name] for name in before}
        self.counts[id(root)] = len(before)
        _put_in_place(before, self.replaced)
        for parameter in before.values():
            parameter.data = parameter.new_empty(0)
            self.gone.append(parameter)
        _gather_for_parts(root, blocks)
        root.register_state_dict_post_hook(_gather_state)  # type: ignore[no-untyped-call]
        root.register_load_state_dict_pre_hook(_share_state)  # type: ignore[no-untyped-call]

    def before_epoch(self) -> None:
        """Make the buffers alike, as `Replicas.before_epoch` does."""
        make_alike(buffer for root in self.roots for buffer in root.buffers())

    def before_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """FSDP2 sees backward by hooks of its own."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that was made before its model was sharded step on the shards."""
        for group in optimizer.param_groups:
            group["params"] = [self.replaced.get(id(p), p) for p in group["params"]]
        for parameter in list(optimizer.state):
            new = self.replaced.get(id(parameter))
            if new is not None:
                optimizer.state[new] = {
                    name: _shared_as(value, new)
                    for name, value in optimizer.state.pop(parameter).items()
                }
        for leaf in (p for group in optimizer.param_groups for p in group["params"]):
            if not hasattr(leaf, "full_tensor") and leaf.requires_grad:  # no model holds it
                average_gradient(leaf)
                leaf.register_post_accumulate_grad_hook(average_gradient)
        optimizer.register_step_pre_hook(self._shard_all)
        optimizer.register_state_dict_post_hook(_gather_optimizer)
        optimizer.register_load_state_dict_pre_hook(_share_optimizer)

    def _shard_all(self, *_: Any) -> None:
        """Shard again what a call left whole that no backward followed: no step reaches it."""
        from torch.distributed.fsdp import FSDPModule

        for module in (module for root in self.roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def check(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Stop where a parameter vanished, or an optimizer steps on one that is no shard."""
        for root in self.roots:
            count = sum(1 for _ in root.parameters())
            if count != self.counts[id(root)]:
                stop(f"after step {steps} the model has {count} parameters, not all it had")
        if any(id(p) in self.replaced for group in optimizer.param_groups for p in group["params"]):
            stop("an optimizer steps on parameters that were sharded since: make it later")


def _shard_after_look(module: Any, _given: Any, _output: Any) -> None:
    """Shard a module again after a call without gradients, as ZeRO-2 does in backward alone.

    A step, and what the script writes to its parameters, reach the shards.
    """
    if not torch.is_grad_enabled():
        module.reshard()


def _gather_for_parts(root: Any, blocks: Sequence[nn.Module]) -> None:
    """Gather a model's own shards for a part of it that is called alone, as an encoder is.

    Only without gradients: to train so, FSDP2 would have to be told of each part.
    """
    callers: list[nn.Module] = []

    def gather(module: nn.Module, _given: Any) -> None:
        first = next(module.parameters(recurse=False), None)
        if not torch.is_grad_enabled() and hasattr(first, "full_tensor"):
            root.unshard()
            callers.append(module)

    def shard_again(module: nn.Module, _given: Any, _output: Any) -> None:
        if callers and callers[-1] is module:
            callers.pop()
            root.reshard()  # the optimizer may step before the next call

    in_blocks = {id(module) for block in blocks for module in block.modules()}
    for module in root.modules():
        is_between = module is not root and id(module) not in in_blocks
        if is_between and [*module.parameters(recurse=False)]:
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(shard_again, always_call=True)


def _read_sums_whole() -> None:
    """Let a number that is read off a sum over shards, a norm say, be that of all ranks.

    DTensor gives the part of this rank, by which a script would decide otherwise on each.
    """
    from torch.distributed.tensor import DTensor

    def read_whole(op_call: Any, args: Any, kwargs: Any) -> Any:
        return op_call(args[0].full_tensor(), **kwargs)

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, read_whole)


def _put_in_place(before: dict[str, nn.Parameter], replaced: Mapping[int, nn.Parameter]) -> None:
    """Let the script's lists, dicts and objects hold the shards instead of the parameters.

    What clips the gradients of a list of its own would find none there, and say nothing.
    """
    for holder in gc.get_referrers(*before.values()):
        fields = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if holder is before:
            continue
        if isinstance(holder, list):
            holder[:] = [replaced.get(id(one), one) for one in holder]
        elif isinstance(fields, dict):
            fields |= {key: replaced[id(one)] for key, one in fields.items() if id(one) in replaced}
        elif isinstance(holder, tuple | set) and len(holder) > 1 and _all_in(holder, replaced):
            stop(f"the script keeps its parameters in a {type(holder).__name__}: use a list")


def _all_in(holder: Iterable[object], replaced: Mapping[int, object]) -> bool:
    return all(id(one) in replaced for one in holder)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Run a module as in evaluation, and leave its modes as they were."""
    modes = {one: one.training for one in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for one, was_training in modes.items():
            one.training = was_training


def blocks_of(root: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: entries of a list that are of one kind."""
    lists = (
        list(module.values() if isinstance(module, nn.ModuleDict) else module)
        for module in root.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    )
    return [
        block
        for blocks in lists
        if len(blocks) > 1 and len({type(one) for one in blocks}) == 1
        for block in blocks
        if any(True for _ in block.parameters())
    ]


def _gather_state(_module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
    """Give a state as the plain script has it; every rank takes part."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[name] = whole_of(state[name])


def _share_state(module: nn.Module, state: Any, prefix: str, *_others: Any) -> None:
    for name, parameter in module.named_parameters():
        if prefix + name in state:
            state[prefix + name] = _shared_as(state[prefix + name], parameter)


def _gather_optimizer(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    state["state"] = {
        number: {name: whole_of(value) for name, value in one.items()}
        for number, one in state["state"].items()
    }
    return state


def _share_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    shared = {
        number: {name: _shared_as(value, by_number[number]) for name, value in one.items()}
        for number, one in state["state"].items()
    }
    return {**state, "state": shared}


def whole_of(value: Any) -> Any:
    """Return a tensor with what all ranks hold of it, which all have to ask for; others as is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _shared_as(value: Any, parameter: Any) -> Any:
    """Return a tensor of a parameter's shape sharded as the parameter is; others as they are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not isinstance(parameter, DTensor) or not is_plain or value.shape != parameter.shape:
        return value
    shared = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)
    return shared.to(parameter.device)  # where it is offloaded, that is not the mesh's


def warn_of_batch_statistics(root: nn.Module) -> None:
    """Say once that batch normalisation sees a part of the batch only; a frozen one sees none."""
    norms = (m for m in root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    norm = next((m for m in norms if m.training), None)
    if norm is not None and not isinstance(norm, nn.SyncBatchNorm):
        say_once(
            f"{type(norm).__name__} takes its statistics from each rank's part of the batch, "
            "as under DistributedDataParallel: losses differ a little from one process's"
        )
