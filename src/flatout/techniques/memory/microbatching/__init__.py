"""Run each batch in parts, so that only one part's activations exist at a time.

What it does: splits the arguments of each training call of the root along the batch, runs the parts
one after the other without keeping their activations, and joins their outputs. The loop, its loss
and its optimizer see the whole batch.
When it helps: the batch does not fit, and the script has no accumulation of its own.
What it costs: one more forward pass per step, and smaller matrix products.
How it is checked: losses and gradients are the whole batch's up to rounding. Dropout draws other
masks. Models with batch norm are refused: their statistics would be those of a part. Whether parts
give the outputs of the whole, and how their losses make that of a model which computes its own, is
tried on the script's batches.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    Rescue,
    Technique,
    process_state,
)
from flatout.techniques.memory.chunked_cross_entropy import TABLES_HELD, logits_bytes
from flatout.techniques.memory_pressure import activation_bytes, is_tight, kept_bytes

if TYPE_CHECKING:
    import torch

    from flatout.techniques.memory.microbatching.own_loss import OwnLoss

SPLIT_COST = 0.05
"""Of forward and backward: smaller products, and joining the outputs. Assumed."""
CHUNKS = (2, 8)
"""Offered: half is the cheapest, an eighth leaves little of the activations."""
LEAST_PART = 8
"""One in so many bytes of the activations is split at least, whatever the logits are taken for."""
FORWARD_SHARE = 1 / 3
"""Of a step's FLOPs: what each part's second forward adds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatching(Technique):
    """Run each batch in parts."""

    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(cost=0.35, settings={"chunks": 2}),
        Rescue(cost=0.4, settings={"chunks": 8}),
    )
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
In the loop, with a loss that is a mean over samples, for $chunks parts of equal size:
- model_loss(batch).backward()
+ for part in batch.chunk($chunks):
+     (model_loss(part) / $chunks).backward()
"""

    chunks: int = 4
    """Parts of a batch."""
    splits_batch_norm: bool = False
    """Go on with batch norm: each part is normalised by its own statistics, another training."""
    own: "list[OwnLoss]" = process_state(list)
    """Of each model that is run in parts, what became of its own loss."""

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ValueError(f"chunks={self.chunks} must be at least 2")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Microbatching"]:
        """Return halves and eighths where memory is tight and the batch has as many samples."""
        if not is_tight(profile, machine):
            return ()
        per_call = profile.samples_per_step_per_rank / max(1.0, profile.backwards_per_step)
        return [cls(chunks=chunks) for chunks in CHUNKS if chunks <= per_call]

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="the loop stays as it is; each part's forward is run again",
                cost=lambda *_: 1 + FORWARD_SHARE,
                splits_by="chunks",
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward twice, and the activations of one part; the logits are joined again."""
        forward_ms = profile.step_ms.median * profile.share("forward")
        compute_ms = profile.step_ms.median * profile.share("forward", "backward")
        logits = logits_bytes(profile)
        held = activation_bytes(profile)
        # The rows of the tables are guessed: they never take all of it, and the trial decides.
        split = max(held // LEAST_PART, held - TABLES_HELD * logits)
        saved = int((1 - 1 / self.chunks) * split)
        return Effect(
            step_ms=forward_ms + SPLIT_COST * compute_ms,
            peak_bytes=kept_bytes(profile, logits, logits // self.chunks) - saved,
            why=f"activations of a {self.chunks}th of the batch, forward twice",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Split the calls, unless a sample's result depends on the others."""
        coupled = find_coupled(root)
        if coupled is not None and not self.splits_batch_norm:
            raise NotApplicable(
                f"{coupled} computes over the whole batch; parts would train otherwise "
                "(splits_batch_norm = true does it all the same)"
            )
        from flatout.techniques.memory.microbatching.own_loss import OwnLoss

        self.own.append(OwnLoss())
        return in_parts(call, root, self.chunks, self.own[-1])

    def end(self) -> str:
        """Return where a model's own loss could not be made of those of parts."""
        trouble = next((own.trouble for own in self.own if own.trouble), "")
        if trouble:
            raise NotApplicable(trouble)
        return ""


def find_coupled(model: "torch.nn.Module") -> str | None:
    """Return the name and kind of a module that mixes the samples of a batch, or None."""
    import torch

    for name, module in model.named_modules():
        is_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
        tracks = getattr(module, "track_running_stats", False)
        is_batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if is_norm and module.training and (is_batch_norm or tracks):
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def in_parts(
    call: Callable[..., Any], model: "torch.nn.Module", chunks: int, own: "OwnLoss | None" = None
) -> Callable[..., Any]:
    """Return a call of a module that runs its batch in parts and joins the outputs.

    Tensors whose first size is that of the first tensor are split, all else goes to every part. A
    loss that the model computes itself is made of the parts'; where no weights of them give the
    batch's, or parts of the first batch do not give its outputs, batches are run whole.

    Raises, when called:
        ValueError: if the outputs cannot be joined.
    """
    import torch

    from flatout.techniques.memory.microbatching.own_loss import OwnLoss, scalars_of

    root = weakref.ref(model)  # the call is kept longer than the model may live
    own = own or OwnLoss()

    @functools.wraps(call)
    def call_in_parts(*args: Any, **kwargs: Any) -> Any:
        from flatout.agent.recompute import recomputed
        from flatout.agent.task_loop import batch_size, split

        size = batch_size((args, kwargs))
        if not torch.is_grad_enabled() or size < 2:
            return call(*args, **kwargs)
        module: Any = root()
        kwargs = without_cache(module, kwargs)
        parts = split((args, kwargs), size, chunks)
        if own.trouble or not own.joins(call, module, (args, kwargs), parts):
            return call(*args, **kwargs)
        outputs = [recomputed(call, module, *part) for part in parts]
        if not scalars_of(outputs[0]):
            return join(outputs, size)
        weights = own.weights(call, module, (args, kwargs), parts)
        return call(*args, **kwargs) if weights is None else join(outputs, size, weights)

    return call_in_parts


def without_cache(module: "torch.nn.Module", kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with a cache for generating switched off if no one asked.

    Hugging Face's models return one by default, in training too: an object that nothing joins.
    """
    is_on = getattr(getattr(module, "config", None), "use_cache", False)
    takes_it = "use_cache" in inspect.signature(module.forward).parameters
    is_open = is_on and takes_it and "use_cache" not in kwargs
    return {**kwargs, "use_cache": False} if is_open else kwargs


def join(outputs: Sequence[Any], size: int, weights: Sequence[float] | None = None) -> Any:
    """Return one output of those of the parts."""
    import torch
    from torch.utils import _pytree

    flat = [_pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    joined: list[Any] = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        first = column[0]
        if isinstance(first, torch.Tensor) and not first.dim() and weights is not None:
            pairs = zip(weights, column, strict=True)
            joined.append(sum(w * part for w, part in pairs if w))  # no label: a mean of nothing
            continue
        if isinstance(first, torch.Tensor) and first.dim():
            joined.append(torch.cat(column))
        elif first is None or isinstance(first, bool | int | float | str):
            joined.append(first)
        else:
            raise ValueError(_refusal(first))
        if isinstance(first, torch.Tensor) and joined[-1].shape[0] != size:
            raise ValueError(_refusal(first))
    return _pytree.tree_unflatten(joined, structure)


def _refusal(value: Any) -> str:
    shape = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else "an object"
    return (
        f"microbatching cannot join what the model returned: {shape} ({type(value).__name__}) "
        "without a batch. A model that returns such a thing, or a cache, cannot be split: take it "
        "out of the output, or accumulate gradients in the loop"
    )


KOREAN = """
Run each batch in parts.
    배치를 나누어 실행합니다.
In the loop, with a loss that is a mean over samples, for {n} parts of equal size:
    루프 안에서, 손실이 샘플의 평균이고 같은 크기 {n}개로 나눌 때:
the loop stays as it is; each part's forward is run again
    루프는 그대로 두고, 나눈 부분마다 순전파를 다시 실행합니다
activations of a {n}th of the batch, forward twice
    활성값을 배치의 {n}분의 1만큼만 두고 순전파를 두 번 실행합니다
{name} computes over the whole batch; parts would train otherwise (splits_batch_norm = true does it
all the same)
    {name}이(가) 배치 전체에 걸쳐 계산하므로 나누면 학습이 달라집니다(splits_batch_norm = true이면
    그래도 나눕니다)
microbatching cannot join what the model returned: {what} without a batch. A model that returns such
a thing, or a cache, cannot be split: take it out of the output, or accumulate gradients in the loop
    모델이 돌려준 것 가운데 배치 차원이 없는 {what}을(를) microbatching이 합칠 수 없습니다. 이런
    값이나 캐시를 돌려주는 모델은 나눌 수 없으니, 출력에서 빼거나 루프에서 그래디언트를 누적하세요
a tensor of shape {shape}
    형태 {shape} 텐서
"""
