"""Put several short texts into one row, so that a causal model computes no padding.

What it does: at every training call takes the padded batch apart and packs its samples into fewer
rows; positions begin again with each sample, by which the model keeps samples apart.
When it helps: a causal language model of Hugging Face that computes its own loss, fed with padded
batches.
What it costs: reading the lengths waits for the device once a step; rows of one batch differ in
number from step to step.
How it is checked: as a training technique. Once a model, before its first call: another sample
in its row must leave a sample as it is. The same tokens are then predicted from the same tokens,
so the loss is the same up to rounding; what looks at `logits` sees other shapes.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.agent.hooks.loader import MASK
from flatout.data.padding import LABELS, is_predicted_inside, packed
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state
from flatout.techniques.data.dynamic_padding import COMPUTING, pad_share

MIN_PAD_SHARE = 0.20
"""Below a fifth of padding a row seldom has room for another sample."""
LEFT = 0.1
"""Share of the padding that is left at the rows' ends: assumed, the trial shows it."""
CAUSAL = "ForCausalLM"
POSITIONS = "position_ids"
ATTENTION = ("sdpa", "eager", "flash_attention_2")
"""Attention of Hugging Face that keeps samples apart by their positions, where it is given them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePacking(Technique):
    """Several samples in one row, kept apart by their positions."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    by_hand: ClassVar[str] = """
With Hugging Face, where the training loader is made:
- DataLoader(..., collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
+ DataLoader(..., collate_fn=DataCollatorWithFlattening())
"""

    apart: "weakref.WeakKeyDictionary[Any, str]" = process_state(weakref.WeakKeyDictionary)
    """Of each model that was seen to keep samples apart its attention then. It is not tried again:
    a technique that replaces attention would take the few tokens for the training's."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["SequencePacking"]:
        """Return the technique when a causal model computes much padding."""
        is_causal = any(CAUSAL in model.name for model in profile.models)
        return [cls()] if is_causal and pad_share(profile) >= MIN_PAD_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect computing to shrink with the tokens."""
        spent_ms = sum(profile.phases_ms[name] for name in COMPUTING)
        saved = pad_share(profile) * (1 - LEFT)
        return Effect(
            step_ms=-spent_ms * saved,
            peak_bytes=-int(profile.peak_bytes.allocated * saved / 2),
            why=f"{pad_share(profile):.0%} of the tokens are padding",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Pack what the root is called with, where that can be done."""
        inner = getattr(root, "module", root)
        attention = check_model(inner)
        if self.apart.get(inner) != attention:
            try_apart(root)
            self.apart[inner] = attention
        return packing(call)


def packing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its batch packed; one that cannot be is passed on as it is."""

    def call_packed(*args: Any, **kwargs: Any) -> Any:
        made = packed(kwargs) if not args and _is_packable(kwargs) else None
        if made is None:
            return call(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in (MASK, *made)}
        # With a cache of keys the model no longer looks for samples in a row.
        return call(**rest | made | {"use_cache": False})

    return call_packed


def check_model(inner: Any) -> str:
    """Return the attention of a model that is known to tell samples in one row apart."""
    name = type(inner).__name__
    if not name.endswith(CAUSAL) or not type(inner).__module__.startswith("transformers."):
        raise NotApplicable(f"{name} is no causal language model of Hugging Face")
    parameters = inspect.signature(inner.forward).parameters
    if POSITIONS not in parameters or LABELS not in parameters:
        raise NotApplicable(f"{name} takes no position_ids and labels")
    if not _knows_packing():
        raise NotApplicable("this transformers does not tell samples in a row apart")
    attention = str(getattr(inner.config, "_attn_implementation", ""))
    if attention not in ATTENTION:
        raise NotApplicable(f"attention {attention!r} is not known to heed positions")
    return attention


def try_apart(root: Any) -> None:
    """Make sure that samples in one row do not see each other, by a call of the model."""
    from flatout.techniques.data.sequence_packing.sample_isolation import keeps_apart

    name = type(getattr(root, "module", root)).__name__
    try:
        is_apart = keeps_apart(root)
    except Exception as error:  # the script's model runs here: all of it is an answer
        why = f"{type(error).__name__}: {error}"[:200]
        raise NotApplicable(f"{name} could not be tried on samples in one row: {why}") from error
    if not is_apart:
        raise NotApplicable(
            f"samples in one row of {name} see each other: it was given other tokens before a "
            "sample and said something else of the sample"
        )


def _knows_packing() -> bool:
    """Return whether this version of the library looks for samples by their positions."""
    try:
        from transformers import masking_utils
    except ImportError:
        return False
    return hasattr(masking_utils, "find_packed_sequence_indices")


def _is_packable(kwargs: Mapping[str, Any]) -> bool:
    import torch

    mask, tokens, labels = (kwargs.get(name) for name in (MASK, "input_ids", LABELS))
    values = (mask, tokens, labels)
    return (
        all(isinstance(v, torch.Tensor) and v.dim() == 2 for v in values)
        and len({tuple(v.shape) for v in values if v is not None}) == 1
        and kwargs.get(POSITIONS) is None
        and kwargs.get("inputs_embeds") is None
        and is_predicted_inside(labels, mask)
    )


KOREAN = """
Several samples in one row, kept apart by their positions.
    여러 샘플을 한 줄에 이어 붙이고 위치로 구분합니다.
With Hugging Face, where the training loader is made:
    Hugging Face에서 학습 로더를 만드는 곳:
{name} is no causal language model of Hugging Face
    {name}은(는) Hugging Face의 인과 언어 모델이 아닙니다
{name} takes no position_ids and labels
    {name}이(가) position_ids와 labels를 받지 않습니다
this transformers does not tell samples in a row apart
    설치된 transformers는 한 줄에 이어 붙인 샘플을 구분하지 못합니다
attention {name} is not known to heed positions
    어텐션 {name}이(가) 위치를 지키는지 알 수 없습니다
{name} could not be tried on samples in one row: {why}
    한 줄에 이어 붙인 샘플로 {name}을(를) 시험할 수 없었습니다: {why}
samples in one row of {name} see each other: it was given other tokens before a sample and said
something else of the sample
    {name}에서는 한 줄에 이어 붙인 샘플이 서로 영향을 줍니다. 앞쪽 토큰만 바꾸었는데 샘플의 출력이
    달라졌습니다
"""
