"""fp16 gradients are not scaled, so that small ones become zero."""

from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument
from flatout.analysis.source.training import backwards, is_without_gradients

SCALES = ("scaler", "Scaler", "scale_loss", "accelerat", "deepspeed", "fabric", "amp.initialize")


def check(script: Script) -> Iterator[Issue]:
    """Report fp16 autocasts in files that train and never mention a scaler."""
    if not backwards(script) or any(word in script.text for word in SCALES):
        return
    for call in script.calls("torch.amp.autocast", "torch.cuda.amp.autocast"):
        is_old = script.called(call) == "torch.cuda.amp.autocast"
        dtype = argument(call, "dtype", 1)
        name = "" if dtype is None else script.qualified(script.origin(dtype))
        device = argument(call, "device_type", 0)
        on_gpu = is_old or (device is not None and "cuda" in script.source(device))
        enabled = argument(call, "enabled", 0 if is_old else 2)
        is_on = enabled is None or script.source(enabled) == "True"
        if not (is_on and on_gpu) or is_without_gradients(script, call):
            continue
        if name == "torch.float16" or dtype is None:
            yield Issue(
                node=call,
                because=(
                    "autocast computes in fp16 here, whose smallest number is 6e-8: without a "
                    "GradScaler small gradients become zero"
                ),
                instead="dtype=torch.bfloat16, or a torch.amp.GradScaler around backward and step",
            )
