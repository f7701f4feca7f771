"""A loader reads files or makes samples in the training process."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import (
    Issue,
    Script,
    argument,
    constant,
    has_unpacked,
    last_name,
)
from flatout.analysis.source.training import step_parts, train_loaders, uses_device

READS = frozenset(
    [
        "open",
        "imread",
        "decode_jpeg",
        "read_image",
        "decode_image",
        "loadtxt",
        "read_csv",
        "loadmat",
    ]
)
"""Functions that read or decode a sample, whatever module they are of."""
READ_CALLS = ("PIL.Image.open", "numpy.load", "torch.load", "torchaudio.load", "librosa.load")
WORKERS = "4"
"""As a start: `flatout tune` finds the number for a machine."""


def check(script: Script) -> Iterator[Issue]:
    """Report loaders without workers whose samples take work: a file, a decoder, a transform."""
    for call in train_loaders(script) if uses_device(script) or not step_parts(script) else ():
        workers = argument(call, "num_workers", 5)
        if has_unpacked(call) or (workers is not None and constant(workers) != 0):
            continue
        dataset = argument(call, "dataset", 0)
        why = dataset is not None and work_of(script, dataset)
        if not why:
            continue
        yield Issue(
            node=call,
            because=f"{why} in the training process: the device waits while a batch is made",
            instead="num_workers=4 or so, at most one a core: they make batches ahead",
            fix=suggested(set_argument(script, call, "num_workers", WORKERS, 5)),
        )


def work_of(script: Script, dataset: ast.expr) -> str:
    """Return what making a sample of a data set does that takes long, "" if that is not known."""
    made = script.origin(dataset)
    name = script.called(made)
    if name in {"torch.utils.data.Subset", "torch.utils.data.ConcatDataset"} and made.args:  # type: ignore[attr-defined]
        return work_of(script, made.args[0])  # type: ignore[attr-defined]
    if name.startswith("torchvision.datasets."):
        return "torchvision makes and transforms each image"
    owner = script.class_of(dataset)
    getter = owner and script.method(owner, "__getitem__")
    for call in ast.walk(getter) if getter else ():
        if isinstance(call, ast.Call):
            read = script.qualified(call.func)
            if read in READ_CALLS or last_name(call.func) in READS:
                return f"{owner.name} reads files"  # type: ignore[union-attr]
    return ""
