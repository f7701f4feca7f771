"""The callbacks in real trainers: the training ends as without them, and the verdict is right."""

import os

import pytest

from tests.paths import ROOT
from tests.support.programs import python

DATA = """
import sys, time
import torch
import flatout

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.01)  # most of a step is the wait for eight of them
        return {"x": torch.ones(16), "labels": torch.tensor(index % 2)}
"""
TRANSFORMERS = (
    DATA
    + """
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 2)

    def forward(self, x=None, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

asked = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, max_steps=int(sys.argv[1]),
    report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
)
callback = flatout.transformers_callback()
trainer = Trainer(model=Net(), args=asked, train_dataset=Data(), callbacks=[callback])
print("steps", trainer.train().global_step)
"""
)
LIGHTNING = (
    DATA
    + """
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 2)

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = pl.Trainer(
    max_steps=int(sys.argv[1]), accelerator="cpu", callbacks=[flatout.lightning_callback()],
    logger=CSVLogger("."), enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(Net(), torch.utils.data.DataLoader(Data(), batch_size=8))
print("steps", trainer.global_step)
"""
)
MODULES = {"transformers": TRANSFORMERS, "lightning": LIGHTNING}


def trained(folder, name, steps, **variables):
    pytest.importorskip(name)
    (folder / "train.py").write_text(MODULES[name])
    done = python(
        ["train.py", str(steps)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
    )
    assert done.returncode == 0, done.stderr
    assert f"steps {steps}\n" in done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith("flatout: ")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_normal_training_ends_with_where_its_time_went(name, tmp_path):
    said = trained(tmp_path, name, 60)

    assert "of each step waits for data" in said[0]
    assert said[-1] == "flatout: more: flatout measure train.py 60"


@pytest.mark.slow
def test_the_numbers_are_logged_with_those_of_the_training(tmp_path):
    trained(tmp_path, "lightning", 60)

    (table,) = tmp_path.rglob("metrics.csv")
    assert "flatout/data_wait_share" in table.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "variables", "words"),
    [
        (2, {}, ["flatout: too few training steps to say where their time went"]),
        (20, {"FLATOUT_SPEC": "/no/such/trial"}, []),
    ],
)
def test_what_was_not_measured_has_no_verdict(steps, variables, words, tmp_path):
    assert trained(tmp_path, "transformers", steps, **variables) == words


IN_TURN = """
import gc, weakref
import torch
from flatout.callbacks import MeasuredTraining

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()

for _ in range(2):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = MeasuredTraining()
    recorder, session = training.recorder, training.recorder.session
    while recorder.kept is None:
        step()
    heard = session.clock.changes, len(session.segments), dict(session.counts)
    for _ in range(100):
        step()
    assert heard == (session.clock.changes, len(session.segments), session.counts)
    assert "flatout/step_ms" in training.conclude()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
"""


@pytest.mark.slow
def test_what_was_measured_costs_nothing_later_and_its_model_may_go(tmp_path):
    (tmp_path / "train.py").write_text(IN_TURN)

    done = python(
        ["train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("flatout: more: ") == 2
