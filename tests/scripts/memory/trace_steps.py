"""Trace training steps on a CUDA device that is not there, and write the streams."""

import json
import sys
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from flatout.planner.tracing.script import explained
from flatout.planner.tracing.trace import trace
from flatout.planner.tracing.training_step import TrainingStep
from flatout.records.memory_stream import stream_to_json
from tests.support.truth_models import (
    MODELS,
    Gpt,
    Recurrent,
    adamw,
    images,
    momentum,
    next_token,
    small_cnn,
    tokens,
)


class Masked(nn.Module):
    """A model whose loss is taken at masked places only, as BERT's pre-training has it."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)

    def forward(self, ids):
        return self.head(self.words(ids))


def masked_loss(model, batch):
    logits, mask = model(batch[0]), batch[1] == 0
    assert torch.isfinite(logits).all()
    return F.cross_entropy(logits[mask], batch[1][mask]) * float(mask.sum().item() > 0)


@torch.library.custom_op("flatout_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(2, 1)


def shapeless_loss(model, batch):
    logits = model(batch[0])
    shapeless(logits.detach().flatten(0, 1))
    return logits.sum()


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(5000, 32, mode="sum")
        self.sparse = nn.Embedding(5000, 32, sparse=True)
        self.head = nn.Linear(64, 10)

    def forward(self, ids):
        return self.head(torch.cat([self.rows(ids), self.sparse(ids).mean(1)], 1))


def half_values(model, batch):
    values = model(batch[0])
    return F.cross_entropy(values[:, 0], batch[1][:, 0] % 10) if values.dim() == 3 else values.sum()


def sharded(subject: TrainingStep, count: int) -> TrainingStep:
    """Return the subject with its model sharded over so many devices, as ZeRO stage 3 does it.

    Every block of a list of blocks is a unit of FSDP2's, and what is left is another.
    """
    build = subject.model

    def build_sharded() -> nn.Module:
        return shard(build().to("cuda"), count)

    return replace(subject, model=build_sharded, world_size=count)


def shard(model: nn.Module, count: int) -> nn.Module:
    """Shard a model in place by `fully_shard`, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (count,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fused(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


def with_values(model, batch):
    counts = torch.bincount(batch[0].flatten()).tolist()
    return sum(part.sum() for part in model(batch[0]).flatten(0, 1).split(counts))


gpt = TrainingStep(model=Gpt, batch=tokens(128), loss=next_token, optimizer=adamw, batch_size=8)
bf16 = replace(gpt, autocast="bfloat16")
SUBJECTS = {
    "gpt": gpt,
    "bf16": bf16,
    "fused": replace(bf16, optimizer=fused),
    "checkpointed": replace(bf16, model=lambda: Gpt(checkpoints="yes")),
    "reentrant": replace(bf16, model=lambda: Gpt(checkpoints="reentrant")),
    "accumulated": replace(bf16, accumulate=2),
    "scaled": replace(gpt, autocast="float16", scales_gradients=True, clip_norm=1.0),
    "cnn": TrainingStep(
        model=small_cnn, batch=images(32), loss=MODELS["small_cnn"].loss, optimizer=momentum
    ),
    "lstm": replace(gpt, model=lambda: Recurrent(nn.LSTM)),
    "gru": replace(gpt, model=lambda: Recurrent(nn.GRU)),
    "masked": replace(gpt, model=Masked, loss=masked_loss),
    "masked_half": replace(gpt, model=Masked, loss=masked_loss, mask_share=0.5),
    "shapeless": replace(gpt, model=Masked, loss=shapeless_loss),
    "summed": replace(gpt, model=Summed, loss=half_values, optimizer=momentum, batch=tokens(20)),
    "compiled": replace(gpt, model=lambda: torch.compile(Gpt())),
    "sharded": sharded(gpt, 8),
    "values": replace(gpt, model=Masked, loss=with_values),
}
if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        try:
            found[name] = stream_to_json(trace(SUBJECTS[name]))
        except RuntimeError as error:
            found[name] = {"error": explained(error)}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
