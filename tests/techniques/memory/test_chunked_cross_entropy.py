import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.core.profile import PeakBytes
from flatout.techniques.memory import chunked_cross_entropy as lever
from flatout.techniques.memory.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    chunked_cross_entropy,
    install,
)
from tests.techniques.facts import GIB, gpu, loader, machine, model, profile
from tests.techniques.guarded import checked, played
from tests.techniques.peaks import peak_bytes

FULL = PeakBytes(allocated=70 * GIB, reserved=75 * GIB, device=76 * GIB)
ROWS, CLASSES = 37, 101


def table(dtype=torch.float32, rows=ROWS, classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(rows, classes, generator=generator)).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[::5] = -100
    return logits.requires_grad_(), target


@pytest.fixture
def replaced():
    undo = install()
    yield
    undo()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("slice_bytes", [1, 4 * CLASSES * 10, 2**20])
def test_loss_and_gradient_match_torch_up_to_rounding(reduction, slice_bytes):
    logits, target = table()
    found = chunked_cross_entropy(logits, target, reduction=reduction, slice_bytes=slice_bytes)
    expected = F.cross_entropy(logits, target, reduction=reduction)

    (ours,) = torch.autograd.grad(found.sum(), logits)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_less_exact_than_torchs_own(dtype):
    logits, target = table(dtype)
    exact = logits.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(exact, target), exact)

    (ours,) = torch.autograd.grad(chunked_cross_entropy(logits, target), logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)

    assert ours.dtype == dtype
    assert torch.dist(ours.double(), truth) <= 1.1 * torch.dist(theirs.double(), truth)


def test_under_autocast_the_loss_is_fp32_as_torchs_is():
    logits, target = table(torch.bfloat16)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = chunked_cross_entropy(logits, target), F.cross_entropy(logits, target)

    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_any_target_the_mean_is_nan_as_torchs_is():
    logits, _ = table()
    nothing = torch.full((ROWS,), -100)

    assert chunked_cross_entropy(logits, nothing).isnan()
    assert F.cross_entropy(logits, nothing).isnan()


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_target_without_a_class_is_an_error(wrong):
    logits, target = table()
    target[3] = wrong

    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        chunked_cross_entropy(logits, target)


@pytest.mark.usefixtures("replaced")
def test_modules_and_functions_use_it_once_it_is_installed():
    lever.SLICED.clear()
    logits, target = table()

    nn.CrossEntropyLoss()(logits, target)
    nn.functional.cross_entropy(logits, target)

    assert {*lever.SLICED} == {(ROWS, CLASSES)}


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize(
    "options",
    [{"weight": torch.ones(CLASSES)}, {"label_smoothing": 0.1}, {"reduction": "mean", "reduce": 1}],
)
@pytest.mark.filterwarnings("ignore")
def test_what_it_does_not_know_is_torchs(options):
    lever.SLICED.clear()
    logits, target = table()

    found = F.cross_entropy(logits, target, **options)

    assert not lever.SLICED
    assert found.isfinite()


@pytest.mark.usefixtures("replaced")
def test_small_tables_probabilities_images_and_evaluation_are_torchs():
    lever.SLICED.clear()
    logits, target = table()

    F.cross_entropy(logits, logits.detach().softmax(1))
    F.cross_entropy(logits.detach(), target)
    F.cross_entropy(torch.randn(2, 5, 3, requires_grad=True), torch.zeros(2, 3, dtype=torch.long))
    with torch.no_grad():
        F.cross_entropy(logits, target)

    assert not lever.SLICED


def test_it_is_undone():
    before = F.cross_entropy

    install()()

    assert F.cross_entropy is before


def test_two_tables_less_are_held_at_the_peak():
    logits, target = table(rows=512, classes=4096)

    def step(loss):
        def run():
            values = logits.clone()  # as a loop holds its output
            loss(values, target).backward()
            logits.grad = None

        return run

    def sliced(values, labels):
        return chunked_cross_entropy(values, labels, slice_bytes=2**18)

    size = logits.numel() * 4
    assert peak_bytes(step(F.cross_entropy)) > 3.9 * size
    assert peak_bytes(step(sliced)) < 2.5 * size


def test_the_widest_layer_decides_whether_it_is_offered():
    host = machine(device=gpu())

    def facts(widest):
        return profile(
            kind="cuda",
            peak_bytes=FULL,
            models=(model(widest_output=widest),),
            loaders=(loader(batch_bytes=16 * 8192),),
        )

    (found,) = ChunkedCrossEntropy.candidates(facts(50257), host)

    assert found.predict(facts(50257), host).peak_bytes == -2 * 4 * 50257 * 8192
    assert ChunkedCrossEntropy.candidates(facts(1000), host) == ()


@pytest.mark.slow
def test_the_guard_finds_rounding_only_in_a_real_script():
    check = checked("roomy_gpt.py", "chunked_cross_entropy", min_mib=0)

    assert check.passed
    assert 0 < max(check.worst.values()) < 0.5


@pytest.mark.slow
def test_a_real_script_without_a_large_table_is_told_so():
    (applied,) = played("roomy_gpt.py", "chunked_cross_entropy").not_applied

    assert applied.status == "not_applicable"
    assert "no cross-entropy of classes over 32 MiB" in applied.why
