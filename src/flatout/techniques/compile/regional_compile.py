"""Compile the identical blocks of a model, once for all of them.

What it does: finds groups of sibling blocks with one class and equal parameter shapes, and
compiles each in place: the code compiled for the first serves the others.
When it helps: like torch_compile, for deep stacks of one block, where compiling the whole model
would take longer than it pays back.
What it costs: compilation of one block; nothing is fused across blocks.
How it is checked: gradients match eager's up to rounding. Dropout draws other masks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    process_state,
)
from flatout.techniques.compile.torch_compile import (
    MAX_SHAPES,
    check_compilable,
    compile_in_place,
    compiled_switch,
    saved_ms,
    startup_s,
)
from flatout.techniques.compile.torch_compile.compile_watch import CompileWatch

if TYPE_CHECKING:
    import torch

MIN_BLOCKS = 3
"""From three identical blocks on, compiling one for all is clearly less work."""
MAX_GROUPS = 3
"""Torch keeps 8 versions of one function: one for training and one for evaluation of each group,
and two to spare for first blocks, whose input needs no gradient."""
STARTUP_SHARE = 1 / 2.3
"""Cold start against whole-model compilation: 69 against 158 s for a GPT of 8 blocks on a busy CPU
(measured). The share falls with depth."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionalCompile(Technique):
    """Compile identical blocks once."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
Once the model is on its device, for its repeated blocks:
+ for block in model.blocks:
+     block.compile()
Where their class is one of torch.nn, that does nothing: put torch.compile(block) in their place.
"""

    watch: CompileWatch = process_state(CompileWatch)
    """Hears of what the compiler gives up."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["RegionalCompile"]:
        """Return the technique for models with repeated blocks that no one compiled."""
        if any(model.is_compiled or model.input_shapes > MAX_SHAPES for model in profile.models):
            return ()
        return [cls()] if any(m.repeated_blocks >= MIN_BLOCKS for m in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what whole-model compilation brings, for a fraction of its start-up."""
        blocks = max((model.repeated_blocks for model in profile.models), default=0)
        return Effect(
            step_ms=saved_ms(profile),
            startup_s=STARTUP_SHARE * startup_s(profile),
            why=f"{blocks} identical blocks compiled once",
        )

    def model(self, root: Any) -> Any:
        """Compile the repeated blocks in place."""
        check_compilable(root)
        self.watch.begin(versions_of(chosen_groups(root)))
        if not compile_blocks(root):
            raise NotApplicable(f"the model has no {MIN_BLOCKS} identical sibling blocks")
        return root

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between the blocks as they are and what was compiled of them."""
        groups = [group for root in training.roots for group in chosen_groups(root)]
        blocks = [block for group in groups for block in group]
        for root in training.roots:
            check_compilable(root)
        if not blocks:
            raise NotApplicable(f"the model has no {MIN_BLOCKS} identical sibling blocks")
        self.watch.begin(versions_of(groups))
        return Switch(
            turn=compiled_switch(blocks, self.watch), check=self.watch.check, is_last=True
        )

    def end(self) -> str:
        """Say what was compiled, unless torch gave it up."""
        return self.watch.report()


def compile_blocks(model: "torch.nn.Module") -> int:
    """Compile the model's repeated blocks in place and return how many there are."""
    groups = chosen_groups(model)
    for block in (block for group in groups for block in group):
        compile_in_place(block)
    return sum(map(len, groups))


def chosen_groups(model: "torch.nn.Module") -> list[list["torch.nn.Module"]]:
    """Return the groups of repeated blocks that are compiled: the largest."""
    return sorted(repeated_blocks(model), key=_parameters, reverse=True)[:MAX_GROUPS]


def versions_of(groups: Sequence[Sequence["torch.nn.Module"]]) -> int:
    """Return how many versions of one function the groups need, as `MAX_GROUPS` counts them.

    >>> versions_of([])
    2
    """
    by_class = Counter(type(group[0]) for group in groups)
    return 2 * max(by_class.values(), default=0) + 2


def repeated_blocks(model: "torch.nn.Module") -> Iterator[list["torch.nn.Module"]]:
    """Yield the outermost groups of at least `MIN_BLOCKS` identical sibling blocks.

    Identical means one class and equal parameter shapes. Modules without children are left out:
    a single layer is not worth a compiled region.
    """
    groups: dict[Any, list[torch.nn.Module]] = defaultdict(list)
    for child in model.children():
        if any(True for _ in child.children()):
            groups[_signature(child)].append(child)
    for group in groups.values():
        if len(group) >= MIN_BLOCKS:
            yield group
        else:
            for block in group:
                yield from repeated_blocks(block)


def _signature(block: "torch.nn.Module") -> Any:
    return type(block), tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def _parameters(group: Sequence["torch.nn.Module"]) -> int:
    return sum(p.numel() for block in group for p in block.parameters())


KOREAN = """
Compile identical blocks once.
    같은 블록을 한 번만 컴파일합니다.
Once the model is on its device, for its repeated blocks:
    모델을 디바이스로 옮긴 뒤, 반복되는 블록에:
Where their class is one of torch.nn, that does nothing: put torch.compile(block) in their place.
    torch.nn의 클래스라면 효과가 없으니 그 자리에 torch.compile(block)을 넣으세요.
{n} identical blocks compiled once
    같은 블록 {n}개를 한 번만 컴파일합니다
the model has no {n} identical sibling blocks
    나란히 놓인 같은 블록이 모델에 {n}개 이상 없습니다
"""
