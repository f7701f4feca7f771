"""Logits that a loss does without, and that are the real ones for everybody else."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flatout.engine import late_logits
from flatout.engine.late_logits import LateLogits
from flatout.techniques.memory import chunked_cross_entropy as lever
from tests.engine.late_steps import (
    CLASSES,
    STEPS,
    WIDTH,
    Net,
    Raw,
    accumulated,
    autocast,
    backward_twice,
    batch,
    below_python,
    by_module,
    changed_copy,
    changed_in_place,
    checkpointed,
    copied,
    flat,
    frozen_head,
    half,
    hooked,
    measured,
    own_function,
    plainly,
    reshaped,
    retyped,
    scaled,
    shifted,
    sliced_batch,
    softened,
    two_losses,
    upcast,
    with_penalty,
    with_penalty_first,
)

SHARDED = Path(__file__).parent / "scripts" / "sharded_head.py"
LOSSES = [flat, shifted, upcast, by_module, reshaped, sliced_batch, two_losses]
OPTIONS = [
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"ignore_index": 7},
    {"weight": torch.linspace(0.5, 2, CLASSES)},
    {"weight": torch.linspace(0.5, 2, CLASSES), "label_smoothing": 0.2, "ignore_index": 7},
    {"weight": torch.linspace(0.5, 2, CLASSES), "label_smoothing": 0.2, "reduction": "sum"},
]


def trained(step, **options):
    """Return losses, gradients and parameters of a few steps."""
    torch.manual_seed(0)
    net = Net(**options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tokens, target = batch()
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        seen.append(step(net, optimizer, tokens, target).detach())
        seen += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
    return [*seen, *(p.detach() for p in net.parameters())]


@pytest.fixture
def heads():
    """Install the lever, give what became of the layers, and take it back."""
    undo = lever.install(1)
    yield lever.HEADS[-1]
    undo()
    lever.HEADS.clear()
    lever.SLICED.clear()


def assert_alike(ours, theirs, rtol=1e-4, atol=1e-6):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def both(request, step, **options):
    """Return what a training gives without and with the lever, and what became of the layers."""
    theirs = trained(step, **options)
    found = request.getfixturevalue("heads")
    return theirs, trained(step, **options), found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [{}, {"bias": False}, {"bias": False, "tied": True}])
def test_training_without_logits_is_torchs_up_to_rounding(request, loss, shape):
    theirs, ours, heads = both(request, plainly(loss), **shape)

    assert_alike(ours, theirs)
    assert sum(heads.unmade.values()) == STEPS * (2 if loss is two_losses else 1)
    assert not heads.against


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_of_the_loss_is_torchs_up_to_rounding(request, options):
    theirs, ours, heads = both(request, plainly(flat, **options))

    assert_alike(ours, theirs, atol=1e-5)
    assert sum(heads.unmade.values()) == STEPS


def test_under_autocast_it_is_as_near_to_the_truth_as_torchs(request):
    truth = trained(plainly(flat))
    theirs, ours, heads = both(request, autocast)

    assert sum(heads.unmade.values()) == STEPS
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert one.dtype == other.dtype
        assert torch.dist(one, right) <= 1.5 * torch.dist(other, right) + 1e-6


@pytest.mark.parametrize(("dtype", "uses"), [(torch.bfloat16, STEPS), (torch.float16, 0)])
def test_half_precision_is_torchs_up_to_its_rounding(request, dtype, uses):
    theirs, ours, heads = both(request, half(dtype))

    assert sum(heads.unmade.values()) == uses
    assert uses or lever.SLICED
    for one, other in zip(ours, theirs, strict=True):
        assert torch.dist(one.float(), other.float()) <= 0.02 * other.float().norm() + 1e-4


@pytest.mark.parametrize(
    "step",
    [
        *(accumulated, scaled, backward_twice, frozen_head, with_penalty, with_penalty_first),
        *(own_function, hooked, changed_in_place, softened, checkpointed, copied),
        *(measured(torch.no_grad), measured(torch.inference_mode), retyped, below_python),
        changed_copy,
    ],
)
def test_whatever_else_a_script_does_comes_out_as_without(request, step):
    theirs, ours, _ = both(request, step)

    assert_alike(ours, theirs)


@pytest.mark.parametrize("step", [hooked, changed_in_place, softened, checkpointed])
def test_where_the_logits_are_needed_they_are_made(request, step):
    _, _, heads = both(request, step)

    assert not heads.unmade


def right(net, tokens, target, when, seen):
    """Make a step and count the right predictions: before the loss, after it, after the step."""

    def step(net, optimizer, tokens, target):
        optimizer.zero_grad()
        logits = net(tokens)
        if when == "before":
            seen.append(logits.argmax(-1))
        loss = flat(logits, target)
        loss.backward()
        if when == "after":
            seen.append(logits.detach().float().numpy().copy())
        optimizer.step()
        if when == "late":
            seen.append(logits.detach().clone())

    step(net, net.optimizer, tokens, target)


def readings(when):
    torch.manual_seed(0)
    net = Net()
    net.optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tokens, target = batch()
    seen = []
    for _ in range(6):
        right(net, tokens, target, when, seen)
    return [torch.as_tensor(x) for x in seen]


@pytest.mark.parametrize("when", ["before", "after", "late"])
def test_who_reads_the_logits_gets_those_of_the_batch(request, when):
    theirs = readings(when)
    heads = request.getfixturevalue("heads")

    ours = readings(when)

    assert_alike(ours, theirs, rtol=1e-4, atol=1e-5)
    assert heads.against, "who reads them in each step gets them at once"


def test_logits_of_values_that_changed_are_refused_and_never_wrong(heads):
    tokens, target = batch()
    net = Net()
    logits = net(tokens)
    flat(logits, target).backward()
    with torch.no_grad():
        net.head.weight.add_(1.0)

    with pytest.raises(RuntimeError, match="read after the values they are made of were changed"):
        logits.argmax(-1)
    assert sum(heads.unmade.values()) == 1


def test_a_gradient_of_logits_that_nobody_makes_is_refused(heads):
    tokens, target = batch()
    logits = Net()(tokens)
    flat(logits, target)

    with pytest.raises(RuntimeError, match="asked for after a loss"):
        logits.retain_grad()
    assert heads.unmade


@pytest.mark.usefixtures("heads")
def test_a_step_that_counts_no_version_changes_neither_logits_nor_their_loss():
    tokens, target = batch()
    net = Net()
    with torch.no_grad():
        expected = net(tokens)
    logits = net(tokens)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    Raw(net.parameters(), lr=0.5).step()
    net.zero_grad()

    loss = flat(logits, target)
    loss.backward()

    torch.testing.assert_close(loss.detach(), flat(expected, target))
    torch.testing.assert_close(logits.detach(), expected)
    assert net.head.weight.grad.abs().sum() > 0


@pytest.mark.usefixtures("heads")
def test_a_write_that_no_python_sees_is_refused():
    tokens, _ = batch()
    logits = Net()(tokens)

    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(RuntimeError, match="where no function of Python sees it"),
    ):
        logits.mul_(2.0)


@pytest.mark.usefixtures("heads")
def test_a_second_derivative_is_torchs_error():
    tokens, target = batch()
    net = Net()
    loss = flat(net(tokens), target)

    (gradient,) = torch.autograd.grad(loss, net.head.weight, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_weights_that_are_given_back_after_the_layer_are_asked_for_no_logits():
    done = subprocess.run(
        [sys.executable, str(SHARDED)], capture_output=True, text=True, check=False
    )

    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    torch.testing.assert_close(found["ours"], found["theirs"], rtol=1e-4, atol=0.0)
    assert found["sliced"]


def test_processes_of_a_group_get_their_logits_at_once_and_sliced_losses(heads, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    tokens, target = batch()

    logits = Net()(tokens)
    flat(logits, target)

    assert type(logits) is torch.Tensor
    assert lever.SLICED
    assert not heads.unmade


def test_a_cuda_graph_gets_its_logits_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert late_logits._is_captured(SimpleNamespace(is_cuda=True))
    assert not late_logits._is_captured(torch.ones(2))


def test_evaluation_and_narrow_layers_and_few_rows_get_their_logits_at_once(heads):
    tokens, _ = batch()
    net = Net()

    with torch.no_grad():
        assert type(net(tokens)) is torch.Tensor
    assert type(net.body(torch.randn(50, WIDTH))) is torch.Tensor
    assert type(net(tokens[:1])) is torch.Tensor
    assert type(net(tokens)) is LateLogits
    assert not heads.unmade


def test_a_compiled_model_gets_its_logits_at_once(heads):
    tokens, target = batch()
    net = Net()
    net.compile(backend="eager")

    logits = net(tokens)
    flat(logits, target).backward()

    assert type(logits) is torch.Tensor
    assert not heads.unmade


@pytest.mark.filterwarnings("ignore")  # the compiler's own, on its way through Python
def test_a_compiled_loss_of_late_logits_is_torchs(request):
    def step(net, optimizer, tokens, target):
        del optimizer
        loss = torch.compile(flat, backend="eager")(net(tokens), target)
        loss.backward()
        return loss

    theirs, ours, _ = both(request, step)

    assert_alike(ours, theirs)


def test_a_layer_whose_loss_comes_out_otherwise_is_left_alone(request, monkeypatch):
    from flatout.engine import head_loss

    gather = head_loss._gather
    monkeypatch.setattr(
        head_loss, "_gather", lambda made, part, table, x, w: gather(made, part, 2 * table, x, w)
    )

    theirs, ours, heads = both(request, plainly(flat))

    assert_alike(ours, theirs)
    assert not heads.unmade
    assert heads.against == [
        "the gradient of the hidden values came out otherwise on the first batch"
    ]


def test_without_any_target_the_mean_is_nan_and_its_gradients_are_torchs(request):
    def nothing(logits, target):
        return flat(logits, torch.full_like(target, -100))

    theirs, ours, heads = both(request, plainly(nothing))

    assert heads.unmade
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.usefixtures("heads")
def test_a_target_without_a_class_is_torchs_error():
    tokens, target = batch()
    target[2, 2] = CLASSES

    with pytest.raises(IndexError, match="out of bounds"):
        flat(Net()(tokens), target)
