"""A training on a GPU computes in fp32."""

import re
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script
from flatout.analysis.source.training import StepPart, step_parts, trains, uses_device

LOWER = re.compile(
    r"autocast|bfloat16|bf16|float16|fp16|GradScaler|deepspeed|Accelerator|Fabric|precision|apex"
    r"|MixedPrecision|torchao|(?<![a-zA-Z])(amp|half)(?![a-zA-Z])"
)
"""Words of a file that has something to do with lower precision already."""


def check(script: Script) -> Iterator[Issue]:
    """Report the first step of a file that trains on a GPU and never lowers the precision."""
    for part in full_precision_steps(script)[:1]:
        yield Issue(
            node=part.backwards[0],
            because="forward and backward run in fp32; tensor cores are far faster in bf16",
            instead='with torch.autocast("cuda", torch.bfloat16): around model and loss',
        )


def full_precision_steps(script: Script) -> list[StepPart]:
    """Return the steps of a training on a GPU that never lowers the precision."""
    if not uses_device(script) or LOWER.search(script.text):
        return []
    return step_parts(script) if trains(script) else []  # else gradients of something else
