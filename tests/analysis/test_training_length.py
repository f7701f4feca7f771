import pytest

from flatout.analysis.training_length import find_length

ARGPARSE = """
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=0, help="0 for no limit")
parser.add_argument("--eval-steps", type=int, default=500)
for epoch in range(args.epochs):
    for step, batch in enumerate(loader):
        pass
"""


def steps(text, arguments=(), epoch_steps=22):
    found = find_length(text, arguments, epoch_steps)
    return found and found.steps


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (ARGPARSE, (), 110),
        (ARGPARSE, ("--data", "folder", "--epochs", "100"), 2200),
        (ARGPARSE, ("--steps=7", "--epochs", "100"), 7),
        (ARGPARSE, ("--epochs", "100", "--start-epoch", "90"), 220),
        (ARGPARSE, ("--start-epoch", "5"), None),
        (ARGPARSE, ("trainer.max_epochs=3",), 66),
        ("num_epochs = 3\nfor e in range(num_epochs): pass", (), 66),
        ("for epoch in range(30):\n    train()", (), 660),
        ("max_iters = 600000\nwhile True: pass", (), 600_000),
        ("max_iters = 600000\nwhile True: pass", ("--max_iters=100",), 100),
        ("TrainingArguments(num_train_epochs=3, save_steps=500)", (), 66),
        ("for step in range(200):\n    step_once()", (), 200),
    ],
)
def test_the_length_is_read_as_scripts_say_it(text, arguments, expected):
    assert steps(text, arguments) == expected


def test_the_source_is_named_as_the_user_wrote_it():
    assert find_length(ARGPARSE, ("--epochs", "100"), 22).source == "--epochs 100"
    assert find_length(ARGPARSE, (), 22).source == "epochs = 5"
    resumed = find_length(ARGPARSE, ("--start-epoch=2",), 22)
    assert (resumed.steps, resumed.source) == (66, "epochs = 5, --start_epoch 2")


@pytest.mark.parametrize(
    ("text", "epoch_steps"),
    [
        ("", 22),
        (ARGPARSE, None),
        ("epochs = 3\nif fast:\n    epochs = 1", 22),
        ("for i in range(10): pass", 22),
        ("sample(model, steps=50)", 22),
        ("scheduler = WarmUp(num_steps=100)", 22),
        ("while True:\n    for step in range(8): accumulate()", None),
        ("def f(:", 22),
        ("num_steps = 9\nfor epoch in range(3):\n    for i in range(num_steps): pass", 22),
    ],
)
def test_what_is_not_plain_is_no_answer(text, epoch_steps):
    assert steps(text, epoch_steps=epoch_steps) is None
