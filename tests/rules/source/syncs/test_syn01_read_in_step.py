import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import READ

SAME_LOSSES = (READ, f"{READ}        total += loss.item()\n")
IS_ON_GPU = True
STEP = """
import torch
total = 0.0
for step, (x, y) in enumerate(loader):
    out = model(x.cuda())
    loss = criterion(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {line}
model.eval()
"""


def script(line):
    return STEP.format(line=line)


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.item()",
        "losses.append(float(loss))",
        "print(step, loss)",
        "print(f'loss {loss:.3f}')",
        "correct = (out.argmax(1) == y).sum().item()",
        "scores = out.detach().cpu()",
        "scores = torch.sigmoid(out).tolist()",
        "if rank == 0: print(loss.item())",
    ],
)
def test_a_read_in_every_step_is_found(line):
    assert codes_in(script(line))["SYN01"] == [10]


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.detach()",
        "if step % 100 == 0: print(loss.item())",
        "if args.log_every: print(loss.item())",
        "print(step, len(y), out.shape)",
        "seen = int(x.size(0))",
        "total += values.item()",
    ],
)
def test_rare_reads_and_reads_of_other_things_are_left_alone(line):
    assert "SYN01" not in codes_in(script(line))


@pytest.mark.parametrize(
    "backward",
    [
        "scaler.scale(loss).backward()",
        "(loss / steps).backward()",
        "(other + 0.5 * loss).backward()",
    ],
)
def test_a_loss_that_is_scaled_or_divided_for_its_backward_is_read_too(backward):
    text = script("total += loss.item()").replace("loss.backward()", backward)

    assert codes_in(text)["SYN01"] == [10]


def test_a_step_in_a_function_that_a_loop_calls_is_a_step():
    text = """
import torch
def train_step(x):
    loss = model(x.cuda())
    loss.backward()
    optimizer.step()
    return loss.item()
for x in loader:
    optimizer.zero_grad()
    train_step(x)
"""
    assert codes_in(text)["SYN01"] == [7]


def test_without_a_device_there_is_nothing_to_wait_for():
    assert "SYN01" not in codes_in(script("total += loss.item()").replace("x.cuda()", "x"))


def test_the_fix_keeps_a_sum_on_the_device_only_where_it_is_shown_alone():
    assert "total += loss.detach()" in fixed(script("total += loss.item()"), "SYN01")
    shown = "mean = total / len(loader)\nprint(f'{mean:.3f}')\n"
    assert "total += loss.detach()" in fixed(script("total += loss.item()") + shown, "SYN01")
    begun = script("total += loss.item()").replace("total = 0.0", "losses, total = [], 0.0")
    assert "total += loss.detach()" in fixed(begun, "SYN01")


@pytest.mark.parametrize(
    "use",
    [
        "history.append(round(total))",
        "mean = total / len(loader)\nhistory.append(mean)",
        "history[0] = total",
    ],
)
def test_a_sum_that_is_kept_for_a_plot_stays_a_number(use):
    text = f"{script('total += loss.item()')}{use}\n"

    assert fixed(text, "SYN01") == text


def test_a_sum_that_is_returned_stays_a_number():
    text = """
import torch
def train():
    total = 0.0
    for x in loader:
        loss = model(x.cuda())
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)
"""
    assert "SYN01" in codes_in(text)
    assert fixed(text, "SYN01") == text


@pytest.mark.parametrize(
    "line",
    [
        "actions = out.argmax(1).cpu()\n    obs = envs.step(actions)",
        "obs = self.env.step(out.cpu().numpy())",
    ],
)
def test_an_action_has_to_reach_its_environment(line):
    assert "SYN01" not in codes_in(script(line))
    assert "SYN01" in codes_in(script(line.replace("env", "early_stop")))
