"""The flags of the article as Lightning spells them today, each compared with plain torch.

    Trainer(gpus=8, distributed_backend="ddp")  is now  Trainer(devices=8, strategy="ddp")
    Trainer(precision=16)                       is now  Trainer(precision="bf16-mixed")
    Trainer(profile=True)                       is now  Trainer(profiler="simple")

A flag does what plain torch does by hand: the weights after training are equal. With two ranks each
takes every other sample of a batch, so their batches of 16 are one batch of 32. Lightning's own
sampler shuffles even where the loader does not, so this script gives each rank one that does not.

    pip install lightning
    python examples/articles/lightning_flags.py
    flatout tune train.py                              # reaches Lightning's Trainer unchanged
"""

import logging
import os
import warnings

import lightning
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


class Regression(lightning.LightningModule):
    """A small network, the same in every training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch):
        """Return the loss of a batch."""
        features, targets = batch
        return nn.functional.mse_loss(self.layers(features), targets)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def by_hand(dtype=None):
    """Train in plain torch and return the weights."""
    model = Regression()
    optimizer = model.configure_optimizers()
    for batch in DataLoader(DATA, batch_size=32):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model.training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def by_flags(batch_size=32, sampler=None, **flags):
    """Train with Lightning's flags and return the weights."""
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(model, DataLoader(DATA, batch_size=batch_size, sampler=sampler))
    return nn.utils.parameters_to_vector(model.parameters()).detach(), trainer


profiler = SimpleProfiler()
same = torch.equal(by_flags(devices=1, profiler=profiler)[0], by_hand())
steps = len(profiler.recorded_durations["run_training_batch"])
mixed = torch.equal(by_flags(devices=1, precision="bf16-mixed")[0], by_hand(torch.bfloat16))
rank = int(os.environ.get("LOCAL_RANK", "0"))  # Lightning starts this script again as rank 1
spread, trainer = by_flags(
    batch_size=16,
    sampler=DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=False),
    devices=2,
    strategy="ddp",
    use_distributed_sampler=False,
)
if trainer.is_global_zero:
    print(
        f"result: Trainer trains as by hand: {same}; bf16-mixed as autocast: {mixed}; "
        f"two ranks as one: {torch.allclose(spread, by_hand(), atol=1e-6)}; "
        f"{steps} steps in the profile"
    )
