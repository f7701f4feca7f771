from tests.rules.source.scenario import codes_in, fixed

NEW_LOSSES = "the epochs after the first train in training mode"
EPOCHS = """
import torch
for epoch in range(3):
    {first}
    for x in loader:
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()
    {last}
"""


def test_a_model_that_is_never_switched_back_is_found_and_switched():
    text = EPOCHS.format(first="pass", last="net.eval()")

    assert codes_in(text) == {"MEM03": [9]}
    assert "range(3):\n    net.train()\n    pass" in fixed(text, "MEM03")


def test_models_that_are_switched_and_others_are_left_alone():
    assert codes_in(EPOCHS.format(first="net.train()", last="net.eval()")) == {}
    assert codes_in(EPOCHS.format(first="pass", last="teacher.eval()")) == {}
    assert codes_in(EPOCHS.format(first="pass", last="pass")) == {}


def test_a_teacher_stays_in_evaluation_mode():
    text = EPOCHS.format(first="net.train()\n    teacher.eval()", last="pass")
    loss = "(net(x) - teacher(x)).sum().backward()"
    below = "net(x).backward()\n        with torch.no_grad():\n            teacher(x)"
    optimizer = "import torch\noptimizer = torch.optim.SGD(net.parameters())"

    assert codes_in(text.replace("net(x).backward()", below)) == {}
    text = text.replace("net(x).backward()", loss)
    assert codes_in(text) == {"MEM03": [5]}
    assert codes_in(text.replace("import torch", optimizer)) == {}


def test_an_epoch_that_evaluates_first_is_switched_before_it_trains():
    text = EPOCHS.format(first="net.eval()", last="pass")

    assert "    net.eval()\n    net.train()\n    for x in loader:" in fixed(text, "MEM03")
