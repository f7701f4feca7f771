from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.records.readings import Limits
from flatout.records.technique import Numerics, RunningTraining
from flatout.techniques.memory.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    chunked_cross_entropy,
    install,
    saved_ms,
    table_bytes,
)
from flatout.techniques.memory.chunked_cross_entropy.sliced_loss import kernels_for
from flatout.tuning.ranking import Search, rank
from tests.kernels.interpreter import needs_triton, printed
from tests.techniques.facts import FULL, GIB, gpu, loader, machine, model, profile
from tests.techniques.guarded import checked, played
from tests.techniques.peaks import peak_bytes

ROWS, CLASSES = 37, 101


def table(dtype=torch.float32, rows=ROWS, classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(rows, classes, generator=generator)).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[::5] = -100
    return logits.requires_grad_(), target


@pytest.fixture
def sliced():
    """Replace torch's function; rows and classes of the tables that were sliced."""
    found = set()
    undo = install(sliced=found)
    yield found
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [101, 50257])
@pytest.mark.parametrize("is_part_of_wider_rows", [False, True])
def test_on_a_gpu_kernels_give_what_float64_does(dtype, classes, is_part_of_wider_rows):
    made, target = table(dtype, rows=257, classes=classes + 7 * is_part_of_wider_rows)
    logits, target = made.detach().cuda()[:, :classes].requires_grad_(), target.cuda() % classes
    target[::5] = -100
    assert kernels_for(logits) is not None
    exact = logits.detach().double().requires_grad_()

    found, expected = chunked_cross_entropy(logits, target), F.cross_entropy(exact, target)
    (ours,) = torch.autograd.grad(found, logits)
    (theirs,) = torch.autograd.grad(expected, exact)

    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    close = {"rtol": 2 * torch.finfo(dtype).eps + 1e-5, "atol": 1e-7}
    torch.testing.assert_close(ours.double(), theirs, **close)


ROUNDED = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-7}


@needs_triton
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("classes", [7, 4096, 4233])
def test_the_kernels_agree_with_float64(kind, classes):
    loss, gradient = printed("interpret_rows.py", TRITON_INTERPRET="1")[f"{kind} {classes}"]

    assert loss < ROUNDED["float32"]
    assert gradient < ROUNDED[kind]


@needs_triton
@pytest.mark.parametrize(
    "case", ["rows of a wider table", "rows far apart", "columns", "hidden classes"]
)
def test_the_kernels_take_any_strides_and_hidden_classes(case):
    found = printed("interpret_rows.py", TRITON_INTERPRET="1")

    assert max(found[case]) < ROUNDED["float32"]
    assert found["can run"]


def test_classes_as_bytes_are_left_to_torch_which_takes_them(sliced):
    logits, target = table()
    bytes_of = target.clamp(min=0).byte()

    found = F.cross_entropy(logits, bytes_of)

    assert torch.equal(found, F.cross_entropy(logits.detach(), bytes_of.long()))
    assert sliced == set()


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


def test_a_second_derivative_is_torchs_error():
    logits, target = table()
    loss = chunked_cross_entropy(logits, target)

    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


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


def test_modules_and_functions_use_it_once_it_is_installed(sliced):
    logits, target = table()

    nn.CrossEntropyLoss()(logits, target)
    nn.functional.cross_entropy(logits, target)

    assert sliced == {(ROWS, CLASSES)}


@pytest.mark.parametrize(
    "options",
    [{"weight": torch.ones(CLASSES)}, {"label_smoothing": 0.1}, {"reduction": "mean", "reduce": 1}],
)
@pytest.mark.filterwarnings("ignore")
def test_what_it_does_not_know_is_torchs(sliced, options):
    logits, target = table()

    found = F.cross_entropy(logits, target, **options)

    assert not sliced
    assert found.isfinite()


def test_small_tables_probabilities_images_and_evaluation_are_torchs(sliced):
    logits, target = table()

    F.cross_entropy(logits, logits.detach().softmax(1))
    F.cross_entropy(logits.detach(), target)
    F.cross_entropy(torch.randn(2, 5, 3, requires_grad=True), torch.zeros(2, 3, dtype=torch.long))
    with torch.no_grad():
        F.cross_entropy(logits, target)

    assert not sliced


class Scripted(nn.Module):
    """What compilers of whole models find in one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4100)

    def forward(self, hidden, target):
        logits = F.linear(hidden, self.head.weight) + self.head(hidden)
        return F.cross_entropy(logits, target)


@pytest.mark.filterwarnings("ignore")  # some versions of torch advise another compiler
@pytest.mark.parametrize(
    "compiled",
    [
        torch.jit.script,
        torch.fx.symbolic_trace,
        lambda net: torch.jit.trace(net, (torch.ones(8, 4).requires_grad_(), torch.arange(8))),
    ],
)
def test_a_model_that_is_scripted_or_traced_is_torchs(request, compiled):
    net = Scripted()
    given = torch.randn(8, 4, requires_grad=True), torch.arange(8)
    expected = torch.autograd.grad(net(*given), net.head.weight)
    request.getfixturevalue("sliced")

    found = torch.autograd.grad(compiled(net)(*given), net.head.weight)

    torch.testing.assert_close(found, expected)


def test_under_functorch_the_loss_is_torchs(sliced):
    logits, target = table()

    found = torch.func.grad(F.cross_entropy)(logits.detach(), target)

    (expected,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    torch.testing.assert_close(found, expected)
    assert len(sliced) == 1, "the plain one"


def test_a_switch_slices_while_it_is_on():
    technique = ChunkedCrossEntropy(min_mib=0)
    switch = technique.switch(RunningTraining(roots=[], optimizers=[]))
    logits, target = table()
    before = F.cross_entropy

    switch.turn(True)  # noqa: FBT003  as the screen calls it
    with pytest.raises(NotApplicable, match="no cross-entropy of classes over 0 MiB"):
        switch.check()
    F.cross_entropy(logits, target)
    switch.check()
    switch.turn(False)  # noqa: FBT003

    assert F.cross_entropy is before
    assert technique.sliced == {(ROWS, CLASSES)}


def test_it_is_undone():
    technique = ChunkedCrossEntropy()
    before = F.cross_entropy

    technique.start()
    with pytest.raises(NotApplicable, match="no cross-entropy of classes"):
        technique.end()

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


class Gpt(nn.Module):
    """One block, a head that shares its weight with the embedding, and the loss inside."""

    def __init__(self, classes=8192, width=32):
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        logits = self.head(self.block(self.tokens(tokens)))
        shifted = logits[..., :-1, :].contiguous()
        targets = tokens[..., 1:].reshape(-1)
        return logits, F.cross_entropy(shifted.view(-1, shifted.size(-1)), targets)


def test_a_small_gpt_trains_with_sliced_losses(request):
    net, tokens = Gpt(), torch.randint(8192, (8, 129), generator=torch.Generator().manual_seed(0))

    def step():
        net.zero_grad()
        _, loss = net(tokens)
        loss.backward()

    step()
    expected = [p.grad.clone() for p in net.parameters()]
    sliced = request.getfixturevalue("sliced")
    step()

    assert sliced == {(8 * 128, 8192)}
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


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


def language(*, rows, widest=50257, **changes):
    """Return what a tuning knows of a language model: no trace, no limits, memory to spare."""
    held = PeakBytes(allocated=40 * GIB, reserved=40 * GIB, device=41 * GIB)
    known = {
        "kind": "cuda",
        "peak_bytes": held,
        "models": (model(widest_output=widest),),
        "loaders": (loader(batch_bytes=16 * rows),),
    }
    return profile(**known | changes)


def test_it_is_offered_for_its_speed_where_tables_take_a_part_of_the_step():
    host = machine(device=replace(gpu(), name="NVIDIA H100 80GB HBM3"))
    rows = 32 * 1024

    (found,) = ChunkedCrossEntropy.candidates(language(rows=rows), host)

    passes_ms = 1e3 * 3 * 4 * rows * 50257 / 3350e9
    effect = found.predict(language(rows=rows), host)
    assert effect.step_ms == pytest.approx(-passes_ms)
    assert passes_ms > 2
    (ranked,) = rank(
        language(rows=rows),
        Search(machine=host, ceiling=Numerics.ROUNDING, only=("chunked_cross_entropy",)),
    )
    assert ranked.find_reason_against(smallest=1.02) is None


def test_small_tables_are_offered_for_their_memory_alone():
    host = machine(device=gpu())

    assert ChunkedCrossEntropy.candidates(language(rows=1024), host) == ()
    (found,) = ChunkedCrossEntropy.candidates(language(rows=1024, peak_bytes=FULL), host)
    assert found.predict(language(rows=1024, peak_bytes=FULL), host).step_ms == 0


def test_a_measured_memory_counts_more_than_a_data_sheet_or_an_assumption():
    limits = Limits(memory_bytes_per_s=1e9)
    held = PeakBytes(device=4 * GIB)
    assumed = language(rows=512, widest=20001, kind="cpu", peak_bytes=held)
    table = 4 * 512 * 20001

    assert saved_ms(assumed, machine()) == pytest.approx(1e3 * 3 * table / 10e9)
    assert saved_ms(replace(assumed, limits=limits), machine()) == pytest.approx(3e3 * table / 1e9)


def test_pictures_are_no_tokens_a_table_is_no_larger_than_what_was_held():
    held = PeakBytes(allocated=GIB, reserved=GIB, device=GIB)
    pictures = language(rows=10**7, widest=10450, peak_bytes=held)

    assert table_bytes(pictures) <= GIB / 4


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
