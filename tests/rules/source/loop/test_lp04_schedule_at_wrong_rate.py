import pytest

from tests.rules.source.scenario import codes_in

LOOP = """
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
scheduler = {made}
for epoch in range(epochs):
    for x in loader:
        optimizer.zero_grad()
        model(x).backward()
        {before}
        optimizer.step()
        {after}
    {outer}
"""
STEP = "scheduler.step()"
COSINE = "CosineAnnealingLR(optimizer, args.epochs)"
CYCLE = "OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=len(loader))"


def found(made, before="pass", after="pass", outer="pass"):
    return codes_in(LOOP.format(made=made, before=before, after=after, outer=outer))


def test_a_schedule_of_epochs_that_steps_on_every_batch_is_found():
    assert found(COSINE, after=STEP) == {"LP04": [11]}


def test_an_epoch_of_a_fold_may_be_a_single_step_on_all_data():
    text = LOOP.format(made=COSINE, before="pass", after=STEP, outer="pass")
    folds = text.replace("epoch in range(epochs)", "fold in range(5)")

    assert codes_in(folds.replace("x in loader", "epoch in range(args.epochs)")) == {}


def test_a_schedule_of_batches_that_steps_once_an_epoch_is_found():
    assert found(CYCLE, outer=STEP) == {"LP04": [12]}


def test_a_schedule_that_steps_before_the_optimizer_is_found():
    assert found(CYCLE, before=STEP) == {"LP04": [9]}


@pytest.mark.parametrize(
    "places",
    [
        {"made": COSINE, "outer": STEP},
        {"made": CYCLE, "after": STEP},
        {"made": "CosineAnnealingLR(optimizer, epochs * len(loader))", "after": STEP},
        {"made": "StepLR(optimizer, 1000)", "after": STEP},
        {"made": "make(optimizer)", "after": STEP},
    ],
)
def test_schedules_at_their_own_rate_are_left_alone(places):
    assert found(**places) == {}
