"""Train a naive script's model with the defaults of a framework, print the time of its steps.

python framework_defaults.py --framework transformers --script naive_gpt2 -- --batch-size 16

Only what the framework does on its own: no precision, no compile, nothing that was asked for.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time

import torch
from torch import nn


class WithLoss(nn.Module):
    """The model with its loss inside, as the Trainer of transformers wants it."""

    def __init__(self, model, loss_of):
        super().__init__()
        self.model = model
        self.loss_of = loss_of

    def forward(self, inputs, labels):
        return {"loss": self.loss_of(self.model(inputs), labels)}


class Stopwatch:
    """Times steps from the end of one to the end of the next."""

    def __init__(self):
        self.ends = []

    def tick(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def with_transformers(data, model, loss_of, args, clock):
    """Train with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            clock.tick()

    def collate(samples):
        inputs, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.steps,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(
            model=WithLoss(model, loss_of),
            args=settings,
            train_dataset=data,
            data_collator=collate,
            callbacks=[Tick()],
        ).train()


def with_lightning(data, model, loss_of, args, clock):
    """Train with lightning.Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = model

        def training_step(self, batch, _index):
            inputs, labels = batch
            return loss_of(self.inner(inputs), labels)

        def on_train_batch_end(self, *_args):
            clock.tick()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=args.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
        trainer.fit(Module(), loader)


RUNNERS = {"transformers": with_transformers, "lightning": with_lightning}


def main():
    """Train, then print the milliseconds of every step but the first ones."""
    cut = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(RUNNERS), required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--warm-up", type=int, default=5)
    own = parser.parse_args(sys.argv[1:cut])
    sys.argv = [own.script, *sys.argv[cut + 1 :]]
    script = importlib.import_module(own.script)
    args = script.parse_arguments()
    data, model = script.parts(args)
    clock = Stopwatch()
    RUNNERS[own.framework](data, model, script.loss_of, args, clock)
    steps = [1e3 * (b - a) for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"steps_ms": steps[own.warm_up :], "batch_size": args.batch_size}))


if __name__ == "__main__":
    main()
