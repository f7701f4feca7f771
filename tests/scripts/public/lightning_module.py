"""Train an autoencoder with Lightning: data module, validation, checkpoint and CSV logger."""

import argparse
import json

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Waves(lightning.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        phase = torch.rand(320, 1, generator=generator) * 6.28
        waves = torch.sin(phase + torch.linspace(0, 12, 64))
        self.train_set = TensorDataset(waves[:256], phase[:256])
        self.val_set = TensorDataset(waves[256:], phase[256:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class AutoEncoder(lightning.LightningModule):
    def __init__(self, width, lr, dropout):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 4)
        )
        self.decoder = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", F.mse_loss(self(x), x), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


class KeepLosses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output-dir", default="output")
    args = parser.parse_args()

    lightning.seed_everything(7)
    kept = KeepLosses()
    trainer = lightning.Trainer(
        max_epochs=args.max_epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True), kept],
        logger=CSVLogger(args.output_dir),
        default_root_dir=args.output_dir,
        log_every_n_steps=4,
    )
    trainer.fit(AutoEncoder(args.width, args.lr, args.dropout), datamodule=Waves(args.batch_size))
    with open(f"{args.output_dir}/losses.json", "w") as file:
        json.dump(kept.losses, file)


if __name__ == "__main__":
    main()
