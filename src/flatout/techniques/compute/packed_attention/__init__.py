"""Compute the attention of packed rows inside of each text, without a mask over whole rows.

What it does: packs padded batches as `sequence_packing` does, and lets every attention of the model
look at each text alone: side by side under the causal kernel, or by torch's kernels for variable
lengths and for masks of blocks.
When it helps: packed rows of several short texts: a mask keeps the flash kernels away and computes
all weights of a row, most of which it throws away.
What it costs: gathering queries, keys and values once more; the lengths are read once a step.
How it is checked: each attention of the first call is compared with the masked one, outputs and
gradients, before it is replaced. As a training technique, because packing is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.agent import patching
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.sequence_packing import (
    POSITIONS,
    SequencePacking,
    check_model,
    packing,
)

if TYPE_CHECKING:
    import torch

    from flatout.techniques.compute.packed_attention.sample_attention import How

OPERATOR = "scaled_dot_product_attention"
SDPA = "sdpa"
CHECKPOINTS = ("gradient_checkpointing", "activation_checkpointing")
"""Flags of Hugging Face's on blocks that are computed again in backward."""
_SEEN: "dict[str, InsideTexts]" = {}
"""What was seen in this process, by `now`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAttention(Technique):
    """Packed rows whose attention stays inside of each text."""

    family: ClassVar[str] = "compute"
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
With Hugging Face and flash attention installed, where loader and model are made:
- DataLoader(..., collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
+ DataLoader(..., collate_fn=DataCollatorWithFlattening(return_flash_attn_kwargs=True))
+ model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
"""

    # Written out: whoever reads a recipe resolves this type, and torch is not imported for that.
    how: Literal["padded", "varlen", "flex"] = "padded"
    """`padded` works everywhere; `varlen` and `flex` are torch's kernels for CUDA."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PackedAttention"]:
        """Return the ways for a causal model that computes much padding."""
        if not SequencePacking.candidates(profile, machine):
            return ()
        if profile.device_kind != "cuda":
            return [cls()]
        return [cls(), cls(how="varlen"), cls(how="flex")]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what packing brings: the attention's part comes on top and is not foreseen."""
        effect = SequencePacking().predict(profile, machine)
        return Effect(
            step_ms=effect.step_ms,
            peak_bytes=effect.peak_bytes,
            why=f"{effect.why}; attention inside of each text",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Pack what is not packed yet, and keep attention inside of each text."""
        check_model(root)
        inner = getattr(root, "module", root)
        if str(getattr(inner.config, "_attn_implementation", "")) != SDPA:
            raise NotApplicable("only attention by torch's own operator (sdpa) is replaced")
        if any(vars(m).get(flag) for m in inner.modules() for flag in CHECKPOINTS):
            raise NotApplicable("checkpointed blocks are computed again outside of the forward")
        _SEEN["now"] = attend_inside_texts(inner, how=self.how)
        return packing(call)

    def end(self) -> str:
        """Say how many attentions of the model were replaced."""
        seen = _SEEN.get("now")
        if seen is None:
            return ""
        if not seen.proven:
            reasons = "; ".join(sorted(set(seen.refused.values())))
            raise NotApplicable(reasons or "no packed rows with a mask reached the attention")
        left = "".join(f"; {why}" for why in sorted(set(seen.refused.values())))
        return f"{len(seen.proven)} attentions stay inside of each text ({self.how}){left}"


class InsideTexts:
    """Stands in for torch's attention while a model with packed rows is called."""

    def __init__(self, how: "How") -> None:
        self.how = how
        self.proven: set[int] = set()
        """Attentions of the model, by their order in a call."""
        self.refused: dict[int, str] = {}
        self.number = 0
        self.documents: Any = None
        self.patch: patching.Patch | None = None

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the operator's place for a call with positions."""
        import torch
        from torch.nn import functional

        from flatout.techniques.compute.packed_attention.sample_attention import documents_of

        positions = kwargs.get(POSITIONS)
        if args or torch.compiler.is_compiling():
            return
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            return
        self.number, self.documents = 0, documents_of(positions)
        self.shape = tuple(positions.shape)
        order = patching.Order.TECHNIQUE
        self.patch = self.patch or patching.wrap(functional, OPERATOR, self.attending, order=order)

    def attending(self, original: Any) -> Any:
        """Return what attends in the operator's place."""
        self.original = original
        return self.attend

    def end(self, *_: Any) -> None:
        """Put the operator back."""
        if self.patch is not None:
            self.patch.undo()
            self.patch = self.documents = None

    def attend(
        self,
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attn_mask: "torch.Tensor | None" = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        **rest: Any,
    ) -> "torch.Tensor":
        """Compute one attention: inside of each text where that is proven."""
        number, self.number = self.number, self.number + 1
        fits = (query.shape[0], query.shape[2]) == self.shape and key.shape[2] == query.shape[2]
        original, patch = self.original, self.patch
        if patch is None or attn_mask is None or is_causal or not fits or not self._may(dropout_p):
            result: torch.Tensor = original(
                query, key, value, attn_mask, dropout_p, is_causal, **rest
            )
            return result
        patch.undo()  # what attends below calls the operator itself
        try:
            scale = rest.get("scale")
            if number not in self.proven and number not in self.refused:
                self._prove(number, query, key, value, attn_mask, scale)
            if number in self.refused:
                return original(query, key, value, attn_mask, dropout_p, **rest)  # type: ignore[no-any-return]
            from flatout.techniques.compute.packed_attention.sample_attention import attend_inside

            given = self.documents
            return attend_inside(
                query, key, value, given, how=self.how, scale=scale, dropout_p=dropout_p
            )
        finally:
            patch.apply()

    def _may(self, dropout_p: float) -> bool:
        return self.how == "padded" or dropout_p == 0

    def _prove(self, number: int, *call: Any) -> None:
        from flatout.techniques.compute.packed_attention.sample_attention import find_difference

        query, key, value, mask, scale = call
        why = find_difference(query, key, value, mask, self.documents, how=self.how, scale=scale)
        if why:
            self.refused[number] = why
        else:
            self.proven.add(number)


def attend_inside_texts(model: "torch.nn.Module", how: "How" = "padded") -> InsideTexts:
    """Keep the attention of a model inside of each text, in calls with `position_ids`."""
    inside = InsideTexts(how)
    model.register_forward_pre_hook(inside.begin, with_kwargs=True)
    model.register_forward_hook(inside.end, always_call=True)
    return inside
