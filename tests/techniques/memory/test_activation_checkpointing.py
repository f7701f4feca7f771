import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from flatout.agent.recompute import _policy, recomputed
from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.memory.activation_checkpointing import (
    ActivationCheckpointing,
    RecomputedRegion,
    checkpoint_blocks,
    choose_kept,
)
from tests.techniques.facts import FULL, GIB, gpu, machine, model, profile
from tests.techniques.guarded import checked, played
from tests.techniques.peaks import peak_bytes

MODES = ("full", "selective", "budget")


class Block(nn.Module):
    """Has everything that a second run may get wrong: dropout and batch statistics."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + scale * self.drop(self.down(torch.tanh(hidden)))


def stack(depth=4, width=32):
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 4))


def train(network, steps=3):
    """Return everything that training shows."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(64, 8)), torch.arange(64) % 4).backward()
        optimizer.step()
    return [*network.parameters(), *network.buffers(), *(p.grad for p in network.parameters())]


def forward_and_backward(network, rows=512):
    def step():
        network(torch.randn(rows, 8)).square().mean().backward()

    return step


@pytest.mark.parametrize("mode", MODES)
def test_training_is_bit_identical_with_dropout_and_batch_statistics(mode):
    plain = stack()
    checkpointed = ActivationCheckpointing(mode=mode).model(copy.deepcopy(plain))

    found, expected = train(checkpointed), train(plain)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class InPlace(nn.Module):
    """Changes its input, or the result of a product that `selective` keeps."""

    def __init__(self, first):
        super().__init__()
        rest = (nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32))
        self.inner = nn.Sequential(nn.ReLU(inplace=True), *rest) if first else nn.Sequential(*rest)

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [True, False])
def test_operations_in_place_change_nothing_that_a_second_run_is_given(mode, first):
    torch.manual_seed(0)
    blocks = [InPlace(first) for _ in range(3)]
    plain = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4))
    technique = ActivationCheckpointing(mode=mode)
    checkpointed = technique.model(copy.deepcopy(plain))

    found, expected = train(checkpointed), train(plain)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if first:
        with pytest.raises(NotApplicable, match="changes its input in place"):
            technique.end()
    else:
        assert technique.end() == ""


class Moving(nn.Module):
    """Computes with what the call itself moves on.

    Buffers, Python's and numpy's random numbers, a count of its calls, a mask made in the first.
    """

    def __init__(self, width=32):
        super().__init__()
        self.up = nn.utils.spectral_norm(nn.Linear(width, width))
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.register_buffer("book", torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.calls, self.mask, self.means = 0, None, []

    def forward(self, x):
        self.calls += 1
        self.means.append(x.mean().item())
        if self.mask is None:
            self.mask = torch.rand(x.shape[1]).sigmoid()
        x = x * self.mask ** (1 / self.calls)
        with torch.no_grad():
            self.book.data.lerp_(x.mean(0), 0.5)
            self.mean = self.mean.lerp(x.mean(0), 0.5)
        scale = random.uniform(0.5, 1.0) * np.random.uniform(0.5, 1.0)
        return x + scale * self.down(torch.tanh(self.up(x - self.book) + self.mean))


@pytest.mark.parametrize("mode", MODES)
def test_a_second_run_computes_with_what_the_first_one_found(mode):
    torch.manual_seed(0)
    blocks = [Moving() for _ in range(3)]
    plain = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4))
    checkpointed = ActivationCheckpointing(mode=mode).model(copy.deepcopy(plain))

    def trained(network):
        random.seed(2)
        np.random.seed(2)
        tensors = [*train(network), torch.tensor([random.random(), np.random.rand()])]
        return tensors, [(block.calls, block.means) for block in network[1:-1]]

    (found, kept), (expected, wanted) = trained(checkpointed), trained(plain)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert kept == wanted


def test_two_losses_go_backward_through_the_same_blocks_one_after_the_other():
    plain = stack()
    checkpointed = ActivationCheckpointing().model(copy.deepcopy(plain))

    def gradients(network):
        torch.manual_seed(1)
        output = network(torch.randn(16, 8))
        output.square().mean().backward(retain_graph=True)
        output.sum().backward()
        return [*(p.grad for p in network.parameters()), *network.buffers()]

    found, expected = gradients(checkpointed), gradients(plain)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_selective", [False, True])
def test_what_is_given_by_name_is_computed_with_and_gets_its_gradient(is_selective):
    def again(block, args, kwargs):
        return recomputed(block, block, args, kwargs, is_selective=is_selective)

    def results(run):
        torch.manual_seed(2)
        block = Block()
        x, scale = (torch.randn(16, 32, requires_grad=True) for _ in range(2))
        output = run(block, (x,), {"scale": scale})
        output.square().sum().backward()
        return [output, x.grad, scale.grad, *(p.grad for p in block.parameters()), *block.buffers()]

    found = results(again)
    expected = results(lambda block, args, kwargs: block(*args, **kwargs))

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_torch_sees_what_is_given_by_name_and_the_devices_of_the_module(monkeypatch):
    """Random streams are put back for the devices of what it sees: inputs may move inside."""
    seen = []
    original = checkpoint._infer_device_type
    monkeypatch.setattr(
        checkpoint, "_infer_device_type", lambda *given: seen.append(given) or original(*given)
    )
    mask = torch.ones(2, 4, requires_grad=True)
    elsewhere = nn.Linear(4, 4, device="meta")

    recomputed(lambda _x, *, mask: mask * 2, elsewhere, (torch.ones(2),), {"mask": mask})

    leaves = [leaf for leaf in tree_leaves(seen) if isinstance(leaf, torch.Tensor)]
    assert any(leaf is mask for leaf in leaves)
    assert {leaf.device.type for leaf in leaves} == {"cpu", "meta"}


ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention.default
EFFICIENT = ATEN._scaled_dot_product_efficient_attention.default
CUDNN = ATEN._scaled_dot_product_cudnn_attention.default


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "is_kept"),
    [
        (FLASH, (1, 2, 3), {}, True),
        (FLASH, (1, 2, 3, 0.0, True), {}, True),
        (FLASH, (1, 2, 3, 0.1, True), {}, False),
        (FLASH, (1, 2, 3), {"dropout_p": 0.1}, False),
        (EFFICIENT, (1, 2, 3, None, True), {}, True),
        (EFFICIENT, (1, 2, 3, None, True, 0.1), {}, False),
        (CUDNN, (1, 2, 3, None, True, 0.0), {}, True),
        (CUDNN, (1, 2, 3, None, True, 0.1), {}, False),
        (ATEN.mm.default, (1, 2), {}, True),
        (ATEN.native_dropout.default, (1, 0.1, True), {}, False),
    ],
)
def test_what_draws_random_numbers_is_never_kept(operator, args, kwargs, is_kept):
    """The second run must draw as many as the first, or later masks are others."""
    kept = checkpoint.CheckpointPolicy.MUST_SAVE

    assert (_policy(None, operator, *args, **kwargs) is kept) == is_kept


@pytest.mark.parametrize(("mode", "most"), [("full", 0.5), ("selective", 0.85), ("budget", 0.8)])
def test_less_memory_is_held_at_the_peak(mode, most):
    plain, checkpointed = stack(depth=8), stack(depth=8)
    checkpoint_blocks(checkpointed, mode=mode)
    for network in (plain, checkpointed):
        forward_and_backward(network)()  # gradients exist from here on, and the budget is known

    before, after = (peak_bytes(forward_and_backward(n)) for n in (plain, checkpointed))

    assert after < most * before


def test_it_is_undone_without_a_trace():
    network = stack()
    before = [set(vars(module)) for module in network.modules()]

    undo = checkpoint_blocks(network)
    undo()

    assert [set(vars(module)) for module in network.modules()] == before


def test_names_in_the_state_dict_stay():
    network = stack()
    names = list(network.state_dict())

    checkpoint_blocks(network)

    assert list(network.state_dict()) == names


def test_a_copy_of_the_model_runs_its_own_blocks():
    network = stack().eval()
    checkpoint_blocks(network)

    other = copy.deepcopy(network).train()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()

    assert other(torch.ones(2, 8, requires_grad=True)).abs().sum() == 0


def test_a_saved_model_loads_without_flatout():
    network = stack()
    checkpoint_blocks(network)
    file = io.BytesIO()

    torch.save(network, file)
    file.seek(0)
    names = {name for name, _ in pickled_names(file.getvalue())}

    assert not any(name.startswith("flatout.") for name in names)
    loaded = torch.load(file, weights_only=False)
    assert not any(isinstance(vars(m).get("forward"), RecomputedRegion) for m in loaded.modules())
    checkpoint_blocks(loaded)
    assert any(isinstance(vars(m).get("forward"), RecomputedRegion) for m in loaded.modules())


def pickled_names(saved):
    import pickletools
    import zipfile

    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        for opcode, argument, _ in pickletools.genops(archive.read(name)):
            if opcode.name == "GLOBAL":
                yield tuple(argument.split())


def test_evaluation_is_left_alone():
    network = stack().eval()
    checkpoint_blocks(network)
    ran = []
    network[1].norm.register_forward_hook(lambda *_: ran.append(1))

    network(torch.randn(4, 8)).sum().backward()

    assert ran == [1]


def test_a_cache_of_keys_is_not_filled_twice():
    class Cache:
        def update(self):
            raise AssertionError("the cache is used")

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x, *, past_key_values=None, use_cache=True):
            if past_key_values is not None:
                past_key_values.update()
            assert not use_cache
            return self.inner(x)

    blocks = nn.ModuleList(Cached() for _ in range(3))
    checkpoint_blocks(blocks)

    blocks[0](torch.ones(2, 4), past_key_values=Cache(), use_cache=True).sum().backward()


def region(size, flops):
    found = RecomputedRegion(nn.Linear(1, 1), "budget")
    found.cost = (size, flops)
    return found


def test_a_budget_recomputes_what_saves_most_bytes_for_its_flops():
    dear, cheap, middle = region(100, 1000), region(100, 10), region(100, 100)

    choose_kept([dear, cheap, middle], fraction=0.4)

    assert [r.is_kept for r in (dear, cheap, middle)] == [True, False, False]


@pytest.mark.parametrize(("fraction", "kept"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.99, 3)])
def test_a_budget_keeps_as_many_equal_blocks_as_fit(fraction, kept):
    regions = [region(100, 10) for _ in range(4)]

    choose_kept(regions, fraction)

    assert sum(r.is_kept for r in regions) == kept


def test_parts_of_a_list_are_taken_where_no_block_repeats():
    network = nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    )

    undo = checkpoint_blocks(network)

    assert ["forward" in vars(part) for part in network] == [True, True]
    undo()


def test_a_model_without_blocks_is_left_alone():
    with pytest.raises(NotApplicable, match="no 2 sibling blocks"):
        ActivationCheckpointing().model(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about itself
def test_a_compiled_model_is_left_to_its_compiler():
    network = stack()
    network.compile()

    with pytest.raises(NotApplicable, match="activation_memory_budget"):
        ActivationCheckpointing().model(network)


def test_a_script_that_checkpoints_itself_is_left_alone():
    network = stack()
    network[1].gradient_checkpointing = True

    with pytest.raises(NotApplicable, match="checkpoints its activations itself"):
        ActivationCheckpointing().model(network)


def test_it_is_offered_where_memory_is_tight_and_predicts_less():
    host = machine(device=gpu())
    facts = profile(kind="cuda", peak_bytes=FULL, models=(model(repeated_blocks=12),))

    found = ActivationCheckpointing.candidates(facts, host)

    assert [each.mode for each in found] == ["selective", "budget", "full"]
    effects = [each.predict(facts, host) for each in found]
    assert all(effect.peak_bytes < 0 < effect.step_ms for effect in effects)
    assert effects[0].step_ms < effects[1].step_ms < effects[2].step_ms


@pytest.mark.parametrize(
    ("peak", "facts"),
    [
        (PeakBytes(allocated=GIB, reserved=GIB, device=GIB), model(repeated_blocks=12)),
        (FULL, model()),
        (FULL, model(repeated_blocks=12, is_compiled=True)),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(peak, facts):
    known = profile(kind="cuda", peak_bytes=peak, models=(facts,))

    assert ActivationCheckpointing.candidates(known, machine(device=gpu())) == ()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "budget"])
def test_the_guard_finds_nothing_in_a_real_script(mode):
    check = checked("roomy_gpt.py", "activation_checkpointing", mode=mode)

    assert check.passed
    assert set(check.worst.values()) == {0.0}


@pytest.mark.slow
def test_a_trial_of_a_real_script_says_that_it_was_applied():
    trial = played("roomy_gpt.py", "activation_checkpointing")

    assert trial.outcome.value == "ok"
    assert trial.not_applied == ()


@pytest.mark.gpu
def test_device_memory_at_the_peak_is_lower_on_a_gpu():
    peaks = []
    for mode in (None, "full"):
        network = stack(depth=8, width=256).cuda()
        if mode:
            checkpoint_blocks(network, mode=mode)
        torch.cuda.reset_peak_memory_stats()
        network(torch.randn(4096, 8, device="cuda")).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del network

    assert peaks[1] < 0.7 * peaks[0]


def test_a_block_that_was_pickled_alone_runs():
    network = stack()
    checkpoint_blocks(network)

    block = pickle.loads(pickle.dumps(network[1])).eval()

    assert block(torch.ones(2, 32)).shape == (2, 32)
