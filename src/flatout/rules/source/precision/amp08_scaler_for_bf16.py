"""A gradient scaler runs with bf16, which needs none."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument

SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")
AUTOCASTS = ("torch.amp.autocast", "torch.cuda.amp.autocast")


def check(script: Script) -> Iterator[Issue]:
    """Report scalers, not switched by a flag, in files whose autocasts are all bf16."""
    dtypes = []
    for call in script.calls(*AUTOCASTS):
        position = 1 if script.called(call) == "torch.amp.autocast" else 99
        dtype = argument(call, "dtype", position)
        dtypes.append("" if dtype is None else script.qualified(script.origin(dtype)))
    if not dtypes or set(dtypes) != {"torch.bfloat16"}:
        return
    for call in script.calls(*SCALERS):
        if argument(call, "enabled") is None:
            yield Issue(
                node=call,
                because=(
                    "bf16 has the range of fp32: the scaler multiplies, checks every gradient and "
                    "waits for the result in each step, for nothing"
                ),
                instead="loss.backward() and optimizer.step(), without a scaler",
            )
