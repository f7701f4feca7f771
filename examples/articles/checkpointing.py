"""Gradient checkpointing with use_reentrant=False. As it is often printed, the first layers are not
trained.

The old, reentrant form needs an input that requires a gradient. The data do not, so the
checkpointed layers get none: with nothing after them backward fails ("element 0 of tensors does not
require grad"), with a head it goes on in silence.

    python examples/articles/checkpointing.py
    flatout check train.py
    flatout tune --only activation_checkpointing train.py
"""

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class BigModel(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layer1 = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
        self.layer2 = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for layer in (self.layer1, self.layer2):
            x = (
                layer(x)
                if self.way == "plain"
                else checkpoint(layer, x, use_reentrant=self.way == "reentrant")
            )
        return self.head(x)


def run(way):
    model, held = BigModel(way), []
    torch.manual_seed(1)

    def pack(tensor):
        held.append(tensor.nbytes)
        return tensor

    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        warnings.simplefilter(
            "ignore"
        )  # "None of the inputs have requires_grad=True", which is the fault
        loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], sum(held)


plain, bytes_plain = run("plain")
reentrant, _ = run("reentrant")
right, bytes_right = run("right")
same = all(a.equal(b) for a, b in zip(plain, right, strict=True))
print(
    f"result: gradients are those of the plain model: {same}; "
    f"less is kept: {bytes_right < bytes_plain / 4}; "
    "parameters that the reentrant form leaves without a gradient: "
    f"{sum(g is None for g in reentrant)}"
)
