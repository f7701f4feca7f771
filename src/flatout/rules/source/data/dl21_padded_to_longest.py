"""Every text is padded to the longest that the model takes."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, constant, names_in

CONDITIONS = frozenset({"diffusers", "text_encoder", "text_encoders", "unet", "vae"})
"""Words of files in which a text is the condition of another model: it was trained with texts of
one length, and without the padding it gives other images."""
FIXED_SHAPES = frozenset({"XLA", "TPU", "tpu", "xla", "is_tpu", "on_tpu"})
"""A TPU compiles for every new shape: there the full length is right."""


def check(script: Script) -> Iterator[Issue]:
    """Report `padding="max_length"` in the file of a training."""
    if not ({"backward", "DataLoader", "Trainer"} & script.words) or CONDITIONS & script.words:
        return
    for call in script.nodes(ast.Call):
        padding = argument(call, "padding")
        is_tokenizer = "token" in script.source(call.func).lower()
        if padding is None or constant(padding) != "max_length" or not is_tokenizer:
            continue
        branches = (a for a in script.ancestors(call) if isinstance(a, ast.If | ast.IfExp))
        if any(FIXED_SHAPES & names_in(branch.test) for branch in branches):
            continue
        yield Issue(
            node=call,
            because="short texts are filled up to the full length: the model computes the padding",
            instead=(
                "no padding here, and a collate_fn that pads each batch to its own longest text "
                "(DataCollatorWithPadding)"
            ),
        )
