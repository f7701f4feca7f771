import copy
import functools
from collections import namedtuple

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.memory.microbatching import Microbatching, find_coupled, in_parts
from tests.rules.rank_facts import rank
from tests.techniques.facts import FULL, gpu, loader, machine, model, profile
from tests.techniques.guarded import checked, played
from tests.techniques.peaks import peak_bytes

Pair = namedtuple("Pair", "logits state")


def network(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))


def gradients(module, call, rows=10):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(call(x), torch.arange(rows) % 4).backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("chunks", [2, 3, 10, 64])
def test_gradients_are_those_of_the_whole_batch_up_to_rounding(chunks):
    plain = network()
    split = copy.deepcopy(plain)

    found = gradients(split, Microbatching(chunks=chunks).forward(split, split))

    torch.testing.assert_close(found, gradients(plain, plain), rtol=1e-4, atol=1e-7)


def test_activations_of_one_part_only_are_held():
    module = nn.Sequential(nn.Linear(8, 512), *(nn.Sigmoid() for _ in range(8)), nn.Linear(512, 1))

    def step(call):
        return lambda: call(torch.randn(1024, 8)).mean().backward()

    step(module)()
    whole, parts = (peak_bytes(step(call)) for call in (module, in_parts(module, module, 8)))

    assert parts < whole / 4


def test_tensors_of_the_batch_are_split_and_all_else_is_given_to_every_part():
    seen = []

    class Model(nn.Linear):
        def forward(self, x, table, *, labels=None, scale=1.0):
            seen.append((x.shape[0], table.shape[0], labels.shape[0], scale))
            return super().forward(x)

    model = Model(4, 2)
    table, labels = torch.ones(3, 4), torch.arange(6)

    in_parts(model, model, 4)(torch.ones(6, 4), table, labels=labels, scale=2.0)

    # At first two samples were run twice as in training, and compared: with one in the other's
    # place, and with one and one.
    assert seen[:4] == [(2, 3, 2, 2.0)] * 4
    assert seen[4:6] == [(1, 3, 1, 2.0)] * 2
    assert seen[6:] == [(2, 3, 2, 2.0), (2, 3, 2, 2.0), (1, 3, 1, 2.0), (1, 3, 1, 2.0)]


@pytest.mark.parametrize(
    "wrap", [lambda t: {"a": t, "b": None}, lambda t: Pair(t, [t, 3]), lambda t: (t, "x")]
)
def test_outputs_keep_their_structure(wrap):
    linear = nn.Linear(4, 2)

    def call(x):
        return wrap(linear(x))

    found = in_parts(call, linear, 3)(torch.ones(7, 4))

    expected = call(torch.ones(7, 4))
    assert type(found) is type(expected)
    assert str(torch.utils._pytree.tree_structure(found)) == str(
        torch.utils._pytree.tree_structure(expected)
    )


def test_without_gradients_the_batch_stays_whole():
    sizes = []
    linear = nn.Linear(4, 2)
    linear.register_forward_hook(lambda _m, args, _o: sizes.append(args[0].shape[0]))

    with torch.no_grad():
        in_parts(linear, linear, 2)(torch.ones(6, 4))

    assert sizes == [6]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_batch_norm_is_refused_unless_it_was_asked_for(norm):
    model = nn.Sequential(nn.Linear(8, 8), norm)

    with pytest.raises(NotApplicable, match=f"1 \\({type(norm).__name__}\\) computes over"):
        Microbatching().forward(model, model)
    assert Microbatching(splits_batch_norm=True).forward(model, model) is not model


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.inner(x)[0])


class Encoder(TimeFirst):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.inner(x))


class Compared(nn.Linear):
    def forward(self, x):
        rows = super().forward(x.mean(1))
        return rows @ rows.T


class Carried(TimeFirst):
    """Returns a state without a batch in front, and depends on it by very little."""

    def forward(self, x):
        out, (state, _) = self.inner(x)
        return 1 + 1e-3 * self.head(out), state


class Barely(TimeFirst):
    """As one at the start of a training, whose output is nearly the same everywhere."""

    def forward(self, x):
        return 1 + 1e-2 * super().forward(x)


class Stateful(TimeFirst):
    """Goes on from a state of as many samples as a batch has."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x):
        state = torch.zeros(1, 12, 16)
        return self.head(self.inner(x, (state, state))[0])


class DrawnState(TimeFirst):
    """Begins with a state of random numbers."""

    def forward(self, x):
        state = torch.randn(1, x.shape[1], 16)
        return self.head(self.inner(x, (state, state))[0])


class Unpaired(nn.Linear):
    """Returns what no tree of torch's knows."""

    def forward(self, x):
        return super().forward(x.mean(1)), object()


class Counted(nn.Linear):
    """Returns a number of the whole batch."""

    def forward(self, x):
        rows = super().forward(x.mean(1))
        return rows, float(rows.argmax(1).float().mean())


OF_TIME = (TimeFirst, Encoder, Carried, Barely, Stateful, DrawnState)
OF_ROWS = [functools.partial(kind, 8, 4) for kind in (Compared, Unpaired, Counted)]


@pytest.mark.parametrize("make", [*OF_TIME, *OF_ROWS])
def test_what_is_no_batch_of_samples_is_run_whole_and_said(make):
    torch.manual_seed(0)
    plain, technique = make(), Microbatching(chunks=2)
    split = copy.deepcopy(plain)
    call, x = technique.forward(split, split), torch.randn(12, 6, 8)

    for run in (plain, call):
        torch.manual_seed(1)
        out = run(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()

    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(NotApplicable, match="not what it makes of its parts"):
        technique.end()


class Balanced(nn.Linear):
    """Leaves a term of the loss for the script to add."""

    def forward(self, x):
        shares = super().forward(x).softmax(1)
        self.extra = shares.mean(0).square().sum()
        return shares


class GoesOn(TimeFirst):
    """Goes on from where its last call ended."""

    def __init__(self):
        super().__init__()
        self.inner, self.state = nn.LSTM(8, 16, batch_first=True), None

    def forward(self, x):
        out, state = self.inner(x[:, None], self.state)
        self.state = tuple(part.detach() for part in state)
        return self.head(out)


class OwnNorm(nn.Linear):
    """Normalises by the batch in training."""

    def __init__(self):
        super().__init__(8, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        rows = super().forward(x)
        if self.training:
            self.mean.lerp_(rows.detach().mean(0), 0.1)
        return rows - (rows.mean(0) if self.training else self.mean)


class Rectifying(nn.Linear):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.relu_())


OF_EIGHT = [functools.partial(kind, 8, 4) for kind in (Balanced, Rectifying)]


@pytest.mark.parametrize("make", [*OF_EIGHT, GoesOn, OwnNorm])
def test_a_model_on_which_calls_leave_something_is_run_whole_and_said(make):
    torch.manual_seed(0)
    plain, technique = make(), Microbatching(chunks=2)
    split = copy.deepcopy(plain)
    call, x = technique.forward(split, split), torch.randn(8, 8)

    for module, run in ((plain, plain), (split, call)):
        for _ in range(2):
            loss = run(x.clone()).square().mean() + getattr(module, "extra", 0.0)
            loss.backward()

    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, plain.buffers(), split.buffers()))
    with pytest.raises(NotApplicable, match="or leaves something on the model"):
        technique.end()


class Sampling(nn.Linear):
    """Draws in evaluation too."""

    def forward(self, x):
        mean = super().forward(x)
        return {"mean": mean, "drawn": mean + torch.randn_like(mean)}


def test_what_is_drawn_says_nothing_about_parts():
    model, sizes, technique = Sampling(8, 4), [], Microbatching(chunks=2)
    model.register_forward_hook(lambda _m, args, _o: sizes.append(args[0].shape[0]))

    technique.forward(model, model)(torch.randn(8, 8))

    assert sizes[-2:] == [4, 4]
    assert technique.end() == ""


def test_frozen_batch_norm_and_norms_of_a_sample_couple_nothing():
    model = nn.Sequential(nn.BatchNorm1d(8).eval(), nn.LayerNorm(8), nn.InstanceNorm1d(8))

    assert find_coupled(model) is None


def test_it_is_offered_where_memory_is_tight_with_fewer_parts_than_samples():
    host = machine(device=gpu())
    facts = profile(kind="cuda", peak_bytes=FULL, samples_per_step=4)

    (found,) = Microbatching.candidates(facts, host)

    assert found == Microbatching(chunks=2)
    assert found.predict(facts, host).peak_bytes < 0 < found.predict(facts, host).step_ms
    assert Microbatching.candidates(profile(kind="cuda", samples_per_step=4), host) == ()


def test_logits_stay_whole_and_parts_of_them_stay_in_the_heap_of_a_cpu():
    def told(kind, batch_bytes=8_000, **changes):
        net = model(**{"widest_output": 20_000, "head_parameters": 2_000_000} | changes)
        facts = profile(
            kind=kind,
            models=(net,),
            loaders=(loader(batch_bytes=batch_bytes),),
            peak_bytes=PeakBytes(allocated=400_000_000),
        )
        return Microbatching(chunks=2).predict(facts, machine()).peak_bytes

    # 500 rows of 20000 classes: 40 MB, four of them at the peak; 8 kB are parameters and gradients.
    inside = (400_000_000 - 8_000 - 4 * 40_000_000) // 2
    assert told("cuda") == -inside
    assert told("cpu") == 40_000_000 - inside
    assert told("cpu", widest_output=1000) == -(400_000_000 - 8_000) // 2
    # Pictures: as many tokens would not have fitted into what was held.
    assert told("cpu", batch_bytes=2_000_000) == -(400_000_000 - 8_000) // 2


def test_a_rank_s_batch_is_split_not_that_of_all_ranks():
    ranks = tuple(rank(number) for number in range(4))
    facts = profile(kind="cuda", peak_bytes=FULL, samples_per_step=16.0, ranks=ranks)

    assert Microbatching.candidates(facts, machine(device=gpu())) == [Microbatching(chunks=2)]


@pytest.mark.slow
def test_the_guard_finds_rounding_only_in_a_real_script():
    check = checked("roomy_gpt.py", "microbatching", chunks=3)

    assert check.passed
    assert 0 < max(check.worst.values()) < 0.5


@pytest.mark.slow
def test_a_real_script_with_batch_norm_is_told_why_not():
    trial = played("roomy_gpt.py --batch-norm", "microbatching")

    (applied,) = trial.not_applied
    assert applied.status == "not_applicable"
    assert "BatchNorm" in applied.why


def test_parts_run_under_the_autocast_of_the_script_itself():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(8, 6, 16)

    def trained(call):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(x)
        out.float().square().mean().backward()
        return [parameter.grad for parameter in layer.parameters()]

    plain = trained(layer)
    torch.testing.assert_close(trained(in_parts(layer, layer, 2)), plain, rtol=0.1, atol=0.02)
