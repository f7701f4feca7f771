"""The same training, written for Lightning and two ranks."""

import argparse
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save", default="weights.pt")
args = parser.parse_args()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64 * args.steps, 256), torch.randint(10, (64 * args.steps,)))
model = nn.Sequential(
    nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
)
ends = []


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def train_dataloader(self):
        sampler = DistributedSampler(data, shuffle=False)
        return DataLoader(data, batch_size=64 // self.trainer.world_size, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def on_train_batch_end(self, *_):
        ends.append(time.perf_counter())


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
trainer.fit(Training())
if trainer.is_global_zero:
    first = args.steps // 4
    step_ms = 1e3 * (ends[-1] - ends[first]) / (args.steps - first - 1)
    print(f"{step_ms:.3f} ms a step")
    torch.save(model.state_dict(), args.save)
