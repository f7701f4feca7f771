"""Recompute activations in backward instead of keeping them.

What it does: runs the repeated blocks of the model without keeping what happens inside them, and
runs each block again when backward reaches it: all blocks (`full`), all but their matrix products
(`selective`), or only those that save the most bytes per recomputed FLOP (`budget`).
When it helps: activations are what fills the memory: large batches, long sequences, deep models.
What it costs: up to one more forward pass per step.
How it is checked: losses and gradients are bit-identical, dropout and batch statistics included.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.analysis.stream_changes import (
    activation_size,
    checkpointed,
    is_expensive,
    recomputed,
    regions_of,
)
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import MemoryStream
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    PlannedDevice,
    Rescue,
    SourceForm,
    Technique,
    process_state,
)
from flatout.techniques.memory_pressure import activation_bytes, is_tight

if TYPE_CHECKING:
    import torch

Mode = Literal["full", "selective", "budget"]
MIN_BLOCKS = 2
"""Of one block there is nothing to free before it is needed again."""
SAVED_SHARE = {"full": 0.8, "selective": 0.6}
"""Of the activations. Full keeps each block's input and one block: assumed. Selective saves 70 % of
what Megatron kept (published, second-hand); less is taken, its blocks are not everyone's."""
RECOMPUTED_SHARE = {"full": 1.0, "selective": 0.1}
"""Of the forward pass. Full runs it again: 8N instead of 6N FLOPs in all. Selective costs Megatron
2.7 % of the step for GPT-3 (published); small models pay more for their norms and activations."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What Hugging Face's blocks append keys and values to: a second run would append them again."""
FORWARD_SHARE = 1 / 3
"""Of a step's FLOPs: a product costs one in the forward and two in the backward."""
Change = Callable[[MemoryStream], MemoryStream]
Cost = Callable[[MemoryStream, PlannedDevice], float]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing(Technique):
    """Recompute the activations of repeated blocks."""

    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory", "fragmented_memory"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(cost=0.03, settings={"mode": "selective"}),
        Rescue(cost=0.33, settings={"mode": "full"}),
    )
    by_hand: ClassVar[str] = """
Where the model calls its blocks (mode "$mode"):
- x = block(x)
+ x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
"""

    source: ClassVar[SourceForm | None] = SourceForm(
        around_block="torch.utils.checkpoint.checkpoint", only_with={"mode": "full"}
    )

    mode: Mode = "full"
    """`full` keeps the blocks' inputs, `selective` matrix products too, `budget` whole blocks."""
    fraction: float = 0.5
    """For `budget`: share of the blocks' activations that may be kept."""
    regions: "weakref.WeakSet[RecomputedRegion]" = process_state(weakref.WeakSet)
    """Those of the blocks that are checkpointed."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction={self.fraction} must be at least 0 and below 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ActivationCheckpointing"]:
        """Return the modes, the cheapest first, where memory is tight and blocks repeat."""
        blocks = max((model.repeated_blocks for model in profile.models), default=0)
        if blocks < MIN_BLOCKS or not is_tight(profile, machine):
            return ()
        if any(model.is_compiled for model in profile.models):
            return ()
        return [cls(mode="selective"), cls(mode="budget"), cls()]

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        models: Sequence[tuple[str, str, Change, Cost]] = (
            (
                "selective",
                "all but the results of products is made again: traffic, hardly any FLOPs",
                functools.partial(checkpointed, keeps=is_expensive),
                functools.partial(recompute_cost, keeps_expensive=True),
            ),
            (
                "budget",
                "half of the blocks is run twice",
                half_checkpointed,
                lambda stream, device: 1 + (recompute_cost(stream, device) - 1) / 2,
            ),
            (
                "full",
                "every block is run twice: its share of the forward's FLOPs is paid again",
                checkpointed,
                recompute_cost,
            ),
        )
        return [
            MemoryOption(
                settings={"mode": mode},
                why=why,
                change=change,
                cost=cost,
                helps=lambda stream, _: bool(regions_of(stream)),
                group="activations",
            )
            for mode, why, change, cost in models
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect a part of forward once more, and a part of the activations less."""
        kind = "full" if self.mode == "budget" else self.mode
        share = 1 - self.fraction if self.mode == "budget" else 1.0
        forward_ms = profile.step_ms.median * profile.share("forward")
        saved = int(share * SAVED_SHARE[kind] * activation_bytes(profile))
        return Effect(
            step_ms=share * RECOMPUTED_SHARE[kind] * forward_ms,
            peak_bytes=-saved,
            why=f"{share:.0%} of the blocks run forward again, {kind}",
        )

    def model(self, root: Any) -> Any:
        """Checkpoint the repeated blocks in place."""
        checkpoint_blocks(root, mode=self.mode, fraction=self.fraction)
        inner = (vars(module).get("forward") for module in root.modules())
        self.regions.update(each for each in inner if isinstance(each, RecomputedRegion))
        return root

    def end(self) -> str:
        """Say where no block could be run again."""
        writing = bool(self.regions) and all(each.is_kept for each in self.regions)
        self.regions.clear()
        if writing:
            raise NotApplicable("each block changes its input in place: none can be run again")
        return ""


def checkpoint_blocks(
    model: "torch.nn.Module", *, mode: Mode = "full", fraction: float = 0.5
) -> Callable[[], None]:
    """Checkpoint the model's repeated blocks in place and return what takes that back.

    Parameters, names and state_dict stay as they are; copies of the model are checkpointed too.

    Raises:
        NotApplicable: if there is nothing to checkpoint; the text says why.
    """
    groups = find_groups(model)
    regions = [[RecomputedRegion(block, mode) for block in group] for group in groups]
    for region in (region for group in regions for region in group):
        region.block.__dict__["forward"] = region
    if mode == "budget":
        _choose_after_first_call(model, regions, fraction)

    def undo() -> None:
        for region in (region for group in regions for region in group):
            region.block.__dict__.pop("forward", None)

    return undo


class RecomputedRegion:
    """Stands for the forward of one block."""

    def __init__(self, block: "torch.nn.Module", mode: Mode) -> None:
        self.block = block
        self.mode = mode
        self.is_kept = False
        """Whether this block keeps its activations after all."""
        self.cost: tuple[int, int] | None = None
        """Bytes kept and FLOPs to run again, in `budget` mode."""
        self.is_looked_at = False
        """Whether it is known to leave its input as it is: a second run is given that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; in training its activations are not kept."""
        import torch

        from flatout.agent.recompute import recomputed, saved_cost, writes_into

        forward, block = self.forward, self.block
        if self.is_kept or not block.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = _without_cache(kwargs)
        if not self.is_looked_at:
            self.is_looked_at = True
            # It takes another forward, for blocks with such a module alone.
            may_write = any(getattr(m, "inplace", False) for m in block.modules())
            self.is_kept = may_write and writes_into(forward, block, args, kwargs)
            if self.is_kept:
                return forward(*args, **kwargs)
        if self.mode == "budget" and self.cost is None:
            self.cost = saved_cost(forward, block, args, kwargs)
        is_selective = self.mode == "selective"
        return recomputed(forward, block, args, kwargs, is_selective=is_selective)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward."""
        return type(self.block).forward(self.block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecomputedRegion":
        """Follow the block: the copy of a model must not run the original's blocks."""
        other = RecomputedRegion(copy.deepcopy(self.block, memo), self.mode)
        other.is_kept, other.cost = self.is_kept, self.cost
        other.is_looked_at = self.is_looked_at
        return other

    def __reduce__(self) -> Any:
        """Be pickled as the block's own forward: a saved model must load without flatout."""
        return getattr, (self.block, "forward")


def find_groups(model: "torch.nn.Module") -> list[list["torch.nn.Module"]]:
    """Return the groups of blocks to checkpoint: identical siblings, else the parts of a list."""
    import torch

    from flatout.agent.describe import is_compiled
    from flatout.techniques.compile.regional_compile import repeated_blocks

    if is_compiled(model):
        raise NotApplicable(
            "the model is compiled, and torch.compile chooses itself what it keeps: "
            "set torch._functorch.config.activation_memory_budget below 1"
        )
    groups = list(repeated_blocks(model))
    if not groups:
        lists = (
            m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)
        )
        groups = [found for parts in lists if len(found := _with_children(parts)) >= MIN_BLOCKS]
        inner = {
            id(m) for group in groups for block in group for m in block.modules() if m is not block
        }
        groups = [group for group in groups if not any(id(block) in inner for block in group)]
    if not groups:
        raise NotApplicable(f"the model has no {MIN_BLOCKS} sibling blocks")
    _check_blocks([block for group in groups for block in group])
    return groups


def _with_children(parts: "torch.nn.Module") -> list["torch.nn.Module"]:
    return [part for part in parts.children() if any(True for _ in part.children())]


def _check_blocks(blocks: "Sequence[torch.nn.Module]") -> None:
    if any(_is_replaced(block) for block in blocks):
        raise NotApplicable("something else runs in place of the blocks' forward already")
    if any(getattr(m, "gradient_checkpointing", False) for b in blocks for m in b.modules()):
        raise NotApplicable("the script checkpoints its activations itself")


def _is_replaced(block: "torch.nn.Module") -> bool:
    """Return whether a block has another forward than its class; pickled regions come as that."""
    forward = vars(block).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(block).forward


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave Hugging Face's key-value cache out, as their own checkpointing does."""
    if not any(hasattr(kwargs.get(name), "update") for name in CACHES):
        return kwargs
    return {
        name: None if name in CACHES else False if name == "use_cache" else value
        for name, value in kwargs.items()
    }


def _choose_after_first_call(
    model: "torch.nn.Module", regions: list[list[RecomputedRegion]], fraction: float
) -> None:
    """Let the first call run all blocks again and weigh them; then keep what the budget allows."""

    def choose(_model: Any, _args: Any, _output: Any) -> None:
        known = [region for group in regions for region in group if region.cost]
        if known:
            handle.remove()
            choose_kept(known, fraction)

    handle = model.register_forward_hook(choose)


def choose_kept(regions: Sequence[RecomputedRegion], fraction: float) -> None:
    """Mark the regions that keep their activations: those that save few bytes for their FLOPs.

    Blocks are recomputed in the order of bytes saved per FLOP until what the others keep is
    within the fraction of all.
    """
    by_worth = sorted(regions, key=_bytes_per_flop, reverse=True)
    kept = sum(_bytes(region) for region in regions)
    limit = fraction * kept
    for region in by_worth:
        region.is_kept = kept <= limit
        if not region.is_kept:
            kept -= _bytes(region)


def _bytes(region: RecomputedRegion) -> int:
    return region.cost[0] if region.cost else 0


def _bytes_per_flop(region: RecomputedRegion) -> float:
    return _bytes(region) / max(1, region.cost[1]) if region.cost else 0.0


def half_checkpointed(stream: MemoryStream) -> MemoryStream:
    """Checkpoint the half of the blocks that holds most: FLOPs are taken to follow bytes."""
    held: dict[str, int] = {}
    for region in regions_of(stream):
        size = sum(stream.allocations[index].size for index in region.inner)
        held[region.block] = held.get(region.block, 0) + size
    order = sorted(held, key=lambda block: -held[block])
    return checkpointed(stream, order[: -(-len(order) // 2)])


def recompute_cost(
    stream: MemoryStream, device: PlannedDevice, *, keeps_expensive: bool = False
) -> float:
    """Return the ratio from the FLOPs of the share of activations that is made again."""
    again = recomputed(stream, keeps=is_expensive if keeps_expensive else lambda _: False)
    added = device.traffic_s(sum(allocation.size for allocation in again))
    if not keeps_expensive:
        total = activation_size(stream) or 1
        share = min(1.0, sum(allocation.size for allocation in again) / total)
        added += share * FORWARD_SHARE * stream.model_flops / device.flops_per_s(stream)
    step = device.step_s(stream)
    return 1 + added / step if step else 1.0


KOREAN = """
Recompute the activations of repeated blocks.
    반복되는 블록의 활성값을 다시 계산합니다.
Where the model calls its blocks (mode "{mode}"):
    모델이 블록을 호출하는 곳(mode "{mode}"):
all but the results of products is made again: traffic, hardly any FLOPs
    행렬 곱의 결과만 남기고 나머지를 다시 만듭니다. 메모리 트래픽은 늘지만 연산량은 거의 늘지
    않습니다
half of the blocks is run twice
    블록의 절반을 두 번 실행합니다
every block is run twice: its share of the forward's FLOPs is paid again
    모든 블록을 두 번 실행합니다. 순전파에서 블록이 차지하는 연산을 한 번 더 합니다
{share} of the blocks run forward again, {kind}
    블록의 {share}가 순전파를 다시 실행합니다({kind})
the model is compiled, and torch.compile chooses itself what it keeps: set
torch._functorch.config.activation_memory_budget below 1
    모델이 컴파일되어 있어 무엇을 보관할지 torch.compile이 정합니다.
    torch._functorch.config.activation_memory_budget을 1보다 작게 설정하세요
the model has no {n} sibling blocks
    나란히 놓인 블록이 모델에 {n}개 이상 없습니다
each block changes its input in place: none can be run again
    모든 블록이 입력을 제자리에서 바꾸므로 다시 실행할 수 없습니다
something else runs in place of the blocks' forward already
    다른 코드가 이미 블록의 forward를 대신하고 있습니다
the script checkpoints its activations itself
    스크립트가 활성값 체크포인트를 직접 씁니다
"""
