"""Play levers and write what each left in the process: undone.py FILE [NAME...]."""

import gc
import json
import logging
import os
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils.data
from torch import nn
from torch.nn import functional

from flatout import techniques
from flatout.core.technique import Numerics, Technique, name_of
from flatout.seams.session import Session

OF_TORCH = ("torch", "torch.nn.functional", "torch.autograd", "torch.random", "torch.optim")
CLASSES = (
    *(torch.Tensor, nn.Module, nn.Linear, nn.Parameter, torch.optim.Optimizer, torch.autocast),
    *(torch.utils.data.DataLoader, torch.amp.GradScaler, torch.optim.SGD, torch.optim.AdamW),
)
HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class Net(nn.Module):
    """Pictures to classes, with something for most levers: convolutions, attention, wide layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4))
        )
        self.head = nn.Linear(16, 4099)

    def forward(self, pictures):
        places = functional.gelu(self.conv(pictures)).flatten(2).transpose(1, 2)
        return self.head(self.blocks(places))


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, 4, 4, generator=generator), torch.arange(16) + number


@dataclass(frozen=True, slots=True, kw_only=True)
class Careless(Technique):
    """Shows that what stays is noticed."""

    family = "compute"
    addresses = frozenset({"forward"})
    numerics = Numerics.EXACT

    @classmethod
    def candidates(cls, profile, machine):
        del profile, machine
        return ()

    def predict(self, profile, machine):
        raise NotImplementedError

    def start(self):
        original = functional.gelu
        functional.gelu = lambda *args, **kwargs: original(*args, **kwargs)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  it is to stay open
        torch.set_num_threads(torch.get_num_threads() + 1)


def state():
    """Return what a lever could have changed, by name."""
    found = {}
    for module in (sys.modules[name] for name in OF_TORCH):
        for name, value in vars(module).items():
            if callable(value):
                found[f"{module.__name__}.{name}"] = id(value)
    for kind in CLASSES:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType | property):
                found[f"{kind.__name__}.{name}"] = id(value)
    found["hooks of modules"] = [len(getattr(nn.modules.module, name)) for name in HOOKS]
    steps = sys.modules["torch.optim.optimizer"]
    found["hooks of optimizers"] = [
        len(steps._global_optimizer_pre_hooks),
        len(steps._global_optimizer_post_hooks),
    ]
    return found | of_process()


def of_process():
    autograd = torch._C._autograd
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch.get_num_threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "default dtype": str(torch.get_default_dtype()),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()],
        "hooks of saved tensors": autograd._top_saved_tensors_default_hooks(False) is None,  # noqa: FBT003
        "order of attention": list(torch._C._get_sdp_priority_order()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "garbage collector": [
            gc.isenabled(),
            *gc.get_threshold(),
            len(gc.callbacks),
            gc.get_freeze_count() > 0,
        ],
        "sys.stdout": id(sys.stdout),
        "sys hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.getprofile())],
        "environment": dict(os.environ),
        "ears": [len(logging.getLogger(name).handlers) for name in ("torch", "torch._dynamo")],
        "files": sorted(str(path) for path in Path().rglob("*")),
    }


def train(session):
    """Train a few steps as the seams would, in two epochs."""
    transform = session.transform
    arguments = {"dataset": Pictures(), "batch_size": 4, "num_workers": 0}
    loader = torch.utils.data.DataLoader(**transform("loader", arguments))
    net = transform("model", Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    call = transform("forward", net, net)
    backward = transform("backward", torch.autograd.backward)
    is_new = True
    for _ in range(2):
        for pictures, labels in transform("batches", iter(transform("epoch", loader)), loader):
            optimizer.zero_grad()
            logits = call(pictures)
            backward(functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))
            if is_new:
                optimizer, is_new = transform("optimizer", optimizer), False
            optimizer.step()


def play(technique):
    """Return what became of a lever, and what it left."""
    gc.collect()
    before = state()
    session = Session({"mode": "run", "folder": ""}, [technique])
    error = ""
    try:
        session.start()
        train(session)
    except Exception as problem:  # noqa: BLE001  what a half-played lever leaves counts as well
        error = f"{type(problem).__name__}: {problem}"
    session.conclude()
    status, why = session.status.get(name_of(technique), ("", ""))
    del session
    gc.collect()
    after = state()
    left = {
        name: [str(before[name])[:200], str(after.get(name))[:200]]
        for name in before
        if after.get(name) != before[name]
    }
    return {"status": status, "why": why or error, "left": left}


def main(path, *names):
    settings = {"chunked_cross_entropy": {"min_mib": 0}, "loader_workers": {"num_workers": 1}}
    play(techniques.technique_class("pinned_memory")())  # what torch imports late is there then
    found = {"a lever that cleans up nothing": play(Careless())}
    for name in names or techniques.names():
        found[name] = play(techniques.technique_class(name)(**settings.get(name, {})))
        path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
