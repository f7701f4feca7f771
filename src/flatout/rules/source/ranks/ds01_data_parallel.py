"""One process drives several GPUs."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script


def check(script: Script) -> Iterator[Issue]:
    """Report `nn.DataParallel`."""
    for call in script.calls("torch.nn.DataParallel"):
        yield Issue(
            node=call,
            because=(
                "DataParallel copies the model to every GPU in each step and drives all of them "
                "from one Python process: the first GPU fills up, the others wait"
            ),
            instead=(
                "DistributedDataParallel with one process for each GPU: torchrun, a "
                "DistributedSampler, and init_process_group"
            ),
        )
