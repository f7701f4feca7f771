"""Train an autoencoder as a LightningModule, the Trainer's defaults."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH = (16, 4) if "tiny" in sys.argv else (512, 128)


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32))
        self.decoder = nn.Sequential(nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, 784))

    def training_step(self, batch, _number):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
loader = DataLoader(TensorDataset(torch.rand(20_000, 784)), batch_size=BATCH, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=1000, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Autoencoder(), loader)
