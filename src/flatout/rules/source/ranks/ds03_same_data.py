"""Every rank trains on the same samples."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument, constant, has_unpacked
from flatout.analysis.source.training import train_loaders

WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.distributed.fsdp.")
SPLITS = (
    "Accelerator",
    "Fabric",
    "deepspeed",
    "DistributedSampler",
    "Sampler(",
    "rank::",
    "Subset",
)
"""What divides the samples in another way."""


def check(script: Script) -> Iterator[Issue]:
    """Report shuffled loaders without a sampler in files that train on several ranks."""
    if not script.calls(*WRAPPERS) or any(word in script.text for word in SPLITS):
        return
    for call in train_loaders(script):
        has_sampler = any(argument(call, name) is not None for name in ("sampler", "batch_sampler"))
        if has_sampler or has_unpacked(call) or constant(argument(call, "shuffle", 2)) is not True:
            continue
        yield Issue(
            node=call,
            because=(
                "every rank draws from the whole data set in an order of its own: an epoch takes "
                "as long as on one GPU"
            ),
            instead="sampler=DistributedSampler(data) and shuffle=False, with set_epoch each epoch",
        )
