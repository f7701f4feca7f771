"""A Task's model on one rank: built without memory, split, sharded, and then filled.

Every rank builds the model on the meta device; only rank 0 builds it on the CPU too, and sends one
parameter after the other, of which each rank keeps what is its own. So no rank but the first ever
holds more than its share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flatout.agent.task import Task
from flatout.data.proof.random_streams import Streams
from flatout.parallel.batches import Part, agree_on_streams
from flatout.parallel.engines import blocks_of, whole_of
from flatout.records.errors import UserError
from flatout.records.parallel import AXES, ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank is in the mesh."""

    mesh: DeviceMesh
    spec: ParallelSpec
    device: torch.device

    def index(self, axis: str) -> int:
        """Return this rank's number along an axis."""
        return int(self.mesh.get_local_rank(axis))

    @property
    def part(self) -> Part:
        """Which part of every batch is this rank's: ranks of one tp or pp group share theirs."""
        rank = self.index("dp_replicate") * self.spec.dp_shard + self.index("dp_shard")
        return Part(rank, self.spec.dp)

    @property
    def counts_once(self) -> bool:
        """Whether this rank stands for its part where ranks are summed over."""
        return self.index("tp") == 0 and self.index("pp") == 0


def place_of(spec: ParallelSpec, device: torch.device) -> Place:
    """Return this rank's place in a mesh over all ranks, all of which have to call this."""
    sizes = tuple(getattr(spec, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    return Place(mesh=mesh, spec=spec, device=device)


@dataclass(slots=True, kw_only=True)
class BuiltModel:
    """A model without values, and where they come from."""

    root: nn.Module
    """The whole structure; on the meta device where that is possible."""
    source: nn.Module | None
    """The same with values; on rank 0 only."""
    parameters: Mapping[str, tuple[torch.Size, torch.dtype]]
    buffers: Mapping[str, tuple[torch.Size, torch.dtype]]
    ties: Sequence[Sequence[str]]
    """Names under which one parameter is found, where there is more than one."""
    blocks: Sequence[str]
    """Names of the repeated blocks."""
    saved: frozenset[str]
    """Names in its state: a stage would save buffers too that are not to be saved."""
    parts: list[nn.Module] = field(default_factory=list)
    """What this rank runs: the root, or its stages of a pipeline."""


def build(task: Task) -> BuiltModel:
    """Return a Task's model without values; afterwards the random streams are rank 0's.

    Raises:
        UserError: where it is spread already by the Task itself.
    """
    before = Streams()
    root = _without_memory(task)
    before.set_back()
    refuse_spread_model(root)  # before rank 0 alone builds it: what spreads waits for the others
    source = task.model() if dist.get_rank() == 0 else None
    agree_on_streams()
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return BuiltModel(
        root=root,
        source=source,
        parameters={n: (p.shape, p.dtype) for n, p in root.named_parameters()},
        buffers={n: (b.shape, b.dtype) for n, b in root.named_buffers()},
        ties=[names for names in by_tensor.values() if len(names) > 1],
        blocks=block_names_of(root),
        saved=frozenset(root.state_dict()),
        parts=[root],
    )


def _without_memory(task: Task) -> nn.Module:
    """Return the model on the meta device; with memory where it holds more than parameters."""
    try:
        with torch.device("meta"):
            root = task.model()
    except (RuntimeError, NotImplementedError, ValueError):
        return task.model()  # its constructor looks at values
    if not isinstance(root, nn.Module):
        raise UserError(
            f"Task {task.name!r}: model() returned a {type(root).__name__}; "
            "it has to return a torch Module"
        )
    tensors = (*root.parameters(), *root.buffers())
    plain = (
        value
        for module in root.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    )
    if any(not one.is_meta for one in tensors) or any(one.is_meta for one in plain):
        return task.model()
    return root


def refuse_spread_model(root: nn.Module) -> None:
    """Refuse a model that the Task has spread itself: twice is wrong, some ways in silence.

    The composable `replicate` under tensor parallelism trains wrongly without an error, and DDP
    loses parameters of the state there.
    """
    for name, module in root.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
            if kind in kinds:
                raise UserError(
                    f"model() returned {name or 'a model'} wrapped in {kind}: return the plain "
                    "model, the table [parallel] says how it is spread"
                )
        if "DDP" in kinds:  # the class that the composable replicate gives a module
            raise UserError(
                f"model() applied the composable replicate to {name or 'the model'}, which trains "
                "wrongly with tp: return the plain model, with dp_replicate in [parallel]"
            )
    if any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        raise UserError("model() returned a model whose parameters are sharded: return it plain")


def shard(part: nn.Module, blocks: Sequence[nn.Module], place: Place) -> None:
    """Compute activations again, compile and shard a part in place, in the order that works.

    Recomputation is inside what is compiled, and both are inside what FSDP gathers.
    """
    spec = place.spec
    if spec.checkpointing:
        for block in blocks:
            block.forward = _checkpointed(block.forward)
    if spec.compile:
        for one in [part] if spec.tp > 1 or not blocks else blocks:
            one.forward = torch.compile(one.forward)
    if spec.engine == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        mesh = place.mesh["dp_replicate", "dp_shard"]
        # In a pipeline every microbatch would gather the parameters again.
        reshards = spec.zero == 3
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(part, mesh=mesh, reshard_after_forward=reshards)


def block_names_of(root: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks, those inside another one left out."""
    blocks = {id(block) for block in blocks_of(root)}
    names: list[str] = []
    for name, module in root.named_modules():
        if id(module) in blocks and not any(name.startswith(f"{one}.") for one in names):
            names.append(name)
    return names


def blocks_in(part: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the blocks that a part holds, by their names in the whole model."""
    held = dict(part.named_modules())
    return {name: held[name] for name in names if name in held}


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def fill(built: BuiltModel, place: Place) -> None:
    """Give the parts memory and rank 0's values, one tensor after the other."""
    for part in built.parts:
        part.to_empty(device=place.device)
        _tie(part, built.ties)
    for part in built.parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            _set(built.root, name, parameter)
    for kind, tensors in (("parameters", built.parameters), ("buffers", built.buffers)):
        held = [dict(getattr(part, f"named_{kind}")()) for part in built.parts]
        given = dict(getattr(built.source, f"named_{kind}")()) if built.source else {}
        for name, (shape, dtype) in tensors.items():
            whole = torch.empty(shape, dtype=dtype, device=place.device)
            if name in given:
                whole.copy_(given[name].detach())
            dist.broadcast(whole, 0)
            for one in (of_part[name] for of_part in held if name in of_part):
                copy_into(one, whole)
    built.source = None


def _tie(part: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make one parameter again of what had several names: `to_empty` makes one for each."""
    for first, *others in ties:
        held = dict(part.named_parameters(remove_duplicate=False))
        for name in others:
            if first in held and name in held:
                _set(part, name, held[first])


def _set(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    owner = root.get_submodule(path)
    if owner._parameters.get(attribute) is not parameter:
        owner._parameters[attribute] = parameter


def copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into one of which this rank may hold a part."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(whole)
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        where = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        target.to_local().copy_(whole[where])


def gather_whole(built: BuiltModel, place: Place, target: nn.Module | None) -> None:
    """Copy all parameters and buffers into a whole model of rank 0's; others give None."""
    for kind, tensors in (("parameters", built.parameters), ("buffers", built.buffers)):
        held = [dict(getattr(part, f"named_{kind}")()) for part in built.parts]
        taken = dict(getattr(target, f"named_{kind}")()) if target is not None else {}
        for name, (shape, dtype) in tensors.items():
            own = next((of_part[name] for of_part in held if name in of_part), None)
            whole = None if own is None else whole_of(own.detach())
            ranks = torch.tensor(
                [dist.get_rank() if own is not None else dist.get_world_size()],
                device=place.device,
            )
            dist.all_reduce(ranks, dist.ReduceOp.MIN)
            if whole is None:
                whole = torch.empty(shape, dtype=dtype, device=place.device)
            dist.broadcast(whole.contiguous(), int(ranks))
            if name in taken:
                with torch.no_grad():
                    taken[name].copy_(whole)


def parameter_count(built: BuiltModel, place: Place) -> int:
    """Return the parameters of the whole model by what the ranks hold now."""
    names = {name for part in built.parts for name, _ in part.named_parameters()}
    count = torch.tensor([len(names & built.parameters.keys())], device=place.device)
    dist.all_reduce(count, group=place.mesh["pp"].get_group())
    return int(count)
