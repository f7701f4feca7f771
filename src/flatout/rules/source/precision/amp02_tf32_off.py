"""Matrix products in fp32 may not use TF32."""

from collections.abc import Iterator

from flatout.analysis.source.edits import insert_after_import, suggested
from flatout.analysis.source.script import Issue, Script
from flatout.rules.source.precision.amp01_full_precision import full_precision_steps

SWITCHES = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")


def check(script: Script) -> Iterator[Issue]:
    """Report the first step of a file that trains in fp32 on a GPU and never allows TF32."""
    if any(word in script.text for word in SWITCHES):
        return
    line = 'torch.set_float32_matmul_precision("high")'
    for part in full_precision_steps(script)[:1]:
        yield Issue(
            node=part.backwards[0],
            because="matrix products run in full fp32: TF32 rounds their inputs and is far faster",
            instead=f"{line} at the start",
            fix=suggested(insert_after_import(script, "torch", line)),
        )
