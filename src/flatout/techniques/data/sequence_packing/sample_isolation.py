"""Find out by trying whether a causal model keeps samples apart that share a row.

That its library looks for samples by their positions says nothing of a model: some never hand the
positions to the mask, and what mixes neighbours by convolution or recurrence has no mask at all.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flatout.agent.hooks.loader import MASK
from flatout.agent.untouched import PLAIN
from flatout.data.padding import packed
from flatout.data.sampler import seeded

if TYPE_CHECKING:
    import torch

LENGTHS = (13, 11, 9, 7)
WIDTH = 29  # no model has as many heads or features: by it outputs of tokens are known
"""Samples that fill two rows, two in each: flash attention of transformers 5.23 looks for samples
where there is a single row, and nowhere else."""
SLACK = 8.0
"""Times what a sample in one row may move those of the other: experts that compute the tokens of
all rows together round them otherwise. All else is equal bit for bit."""
LEAST = 2.0
"""Units in the last place of the largest value: below it a change is rounding too. What mixed the
samples changed by 20 or more of bf16 (RoBERTa; LFM2 46, OPT 62), small models of the test.
What kept them apart, by none."""
WRAPPERS = "torch.distributed."
LIBRARIES = ("accelerate", "bitsandbytes", "deepspeed", "flatout", "peft", "torch", "torchao")
"""Whose hooks a call needs: they gather and move weights."""


def keeps_apart(model: "torch.nn.Module") -> bool:
    """Return whether a sample stays as it is when another one before it in its row changes.

    A few made-up tokens go through the model twice, without gradients and dropout. The model and
    the random streams are left as they were.
    """
    import torch

    inner: Any = getattr(model, "module", model)
    vocabulary = inner.config.get_text_config().vocab_size
    mask = torch.tensor([[int(place < length) for place in range(WIDTH)] for length in LENGTHS])
    # Special tokens have the first or the last numbers of a vocabulary.
    tokens = (torch.arange(mask.numel()).view_as(mask) + vocabulary // 3) % vocabulary
    others = tokens.clone()
    others[0] = (tokens[0] + vocabulary // 3 + 1) % vocabulary
    with untouched(model):
        plain, changed = (_outputs(model, each, mask) for each in (tokens, others))
    pairs = zip(plain, changed, strict=True)
    return bool(plain) and all(_is_apart(one, other) for one, other in pairs)


@contextlib.contextmanager
def untouched(model: "torch.nn.Module") -> Iterator[None]:
    """Let a model be called for its answers alone; it and the random streams stay as they were."""
    import torch

    modules = list(model.modules())
    facts = [_plain_facts(module) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    values = [(b, b.clone()) for held in buffers for b in held.values() if b is not None]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with (
            seeded(0),
            torch.random.fork_rng(list(devices)),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            _without_own_hooks(modules),
        ):
            for module in modules:
                module.training = False  # eval() of a script's own layers may do more
            yield
    finally:
        for module, before, held in zip(modules, facts, buffers, strict=True):
            vars(module).update(before)
            module._buffers.update(held)
        for buffer, value in values:
            buffer.data.copy_(value)
        # Casts that autocast made here have no gradients, and torch 2.9 hands them to the training
        # (pytorch issue 158232).
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _without_own_hooks(modules: "list[torch.nn.Module]") -> Iterator[None]:
    """Take off what the script hooked behind the modules: it counts and collects its batches.

    Not what it hooked before them, which may change what they are given.
    """
    tables: list[dict[int, Any]] = [module._forward_hooks for module in modules]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for key in [key for key, hook in hooks.items() if not _is_of_a_library(hook)]:
                del table[key]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def _is_of_a_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


def _outputs(
    model: "torch.nn.Module", tokens: "torch.Tensor", mask: "torch.Tensor"
) -> "list[torch.Tensor]":
    """Return what all modules say of samples that are packed as those of a training.

    In a sum with what the layers before said, a layer that mixes little would be lost in rounding.
    """
    import torch

    device = next(model.parameters()).device
    made = packed({"input_ids": tokens.to(device), MASK: mask.to(device)})
    assert made is not None, "two of the samples fit into a row"
    rows = made["position_ids"].shape
    found: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(output)
        found.extend(x for x in leaves if _says(x, rows))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        model(**made, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _says(leaf: Any, rows: Any) -> bool:
    """Return whether a part of an output is numbers for each token."""
    return hasattr(leaf, "shape") and leaf.shape[:2] == rows and leaf.is_floating_point()


def _is_apart(plain: "torch.Tensor", changed: "torch.Tensor") -> bool:
    """Return whether the second sample of the first row moved no more than rounding does."""
    import torch

    moved = (changed.double() - plain.double()).abs()
    behind = moved[0, LENGTHS[0] : sum(LENGTHS[:2])].max().item()
    elsewhere = moved[1, : sum(LENGTHS[2:])].max().item()
    unit = torch.finfo(plain.dtype).eps * plain.abs().max().item()
    return bool(behind <= max(SLACK * elsewhere, LEAST * unit))


def _plain_facts(module: "torch.nn.Module") -> dict[str, Any]:
    """Return what a call may change; of torch's own wrappers the mode: a first call starts them."""
    is_wrapper = type(module).__module__.startswith(WRAPPERS)
    return {
        name: value
        for name, value in vars(module).items()
        if name == "training" or (not is_wrapper and isinstance(value, PLAIN))
    }
