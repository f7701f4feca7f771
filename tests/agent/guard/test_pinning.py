import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatout.agent.guard.pinning import (
    drop_autocast,
    drop_dropout,
    keep_random_compile,
    pin_algorithms,
    pin_samples,
)


class Augmented(Dataset):
    """Samples that chance decides, from each of the global streams."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(index), torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor(drawn)


class Batched(Augmented):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def masking_collate(samples: list[Tensor]) -> Tensor:
    stacked = torch.stack(samples)
    return stacked * (torch.rand(stacked.shape) > 0.3)


@pytest.fixture
def _pinned() -> Iterator[None]:
    undo = pin_samples(7)
    yield
    undo()


def samples(dataset: Any, num_workers: int, **options: Any) -> Tensor:
    torch.manual_seed(num_workers)
    random.seed(num_workers)
    np.random.seed(num_workers)
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, **options)
    return torch.cat([batch for _ in range(2) for batch in loader])


@pytest.mark.usefixtures("_pinned")
@pytest.mark.parametrize("dataset", [Augmented(), Batched()], ids=["one by one", "batched"])
@pytest.mark.parametrize("options", [{}, {"collate_fn": masking_collate}], ids=["", "collate"])
def test_pinned_samples_do_not_depend_on_workers(dataset: Any, options: dict[str, Any]) -> None:
    alone, shared = samples(dataset, 0, **options), samples(dataset, 2, **options)

    assert torch.equal(alone, shared)


@pytest.mark.usefixtures("_pinned")
def test_pinned_samples_differ_from_each_other_and_repeat_by_epoch() -> None:
    found = samples(Augmented(), 0)

    assert len({tuple(row.tolist()[1:]) for row in found[:12]}) == 12
    assert torch.equal(found[:12], found[12:])


@pytest.mark.usefixtures("_pinned")
def test_pinned_samples_without_batching_are_pinned_too() -> None:
    first = [batch.tolist() for batch in DataLoader(Augmented(), batch_size=None)]
    again = [batch.tolist() for batch in DataLoader(Augmented(), batch_size=None)]

    assert first == again


@pytest.mark.usefixtures("_pinned")
def test_the_loader_leaves_the_processs_own_streams_alone() -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    iterator = iter(DataLoader(Augmented(), batch_size=4))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    next(iterator)
    found = draws()

    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    assert found == draws()


def test_unpinned_samples_depend_on_workers() -> None:
    assert not torch.equal(samples(Augmented(), 0), samples(Augmented(), 2))


# Dropout.

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
MODULES = {
    "Dropout": nn.Dropout(0.5),
    "Dropout in place": nn.Dropout(0.5, inplace=True),
    "Dropout1d": nn.Dropout1d(0.5),
    "Dropout2d": nn.Dropout2d(0.5),
    "Dropout3d": nn.Dropout3d(0.5),
    "AlphaDropout": nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5),
    "RReLU": nn.RReLU(),
    "RReLU in place": nn.RReLU(inplace=True),
    "LSTM": nn.LSTM(16, 16, 2, dropout=0.5),
    "GRU": nn.GRU(16, 16, 2, dropout=0.5),
    "RNN": nn.RNN(16, 16, 2, dropout=0.5),
    "RNN with relu": nn.RNN(16, 16, 2, dropout=0.5, nonlinearity="relu"),
    "MultiheadAttention": nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True),
    "TransformerEncoderLayer": nn.TransformerEncoderLayer(16, 2, dropout=0.5, batch_first=True),
}
FUNCTIONS = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout of torch": lambda: torch.dropout(X, 0.5, train=True),
    "alpha dropout": lambda: F.alpha_dropout(X, training=True),
    "feature dropout": lambda: torch.feature_dropout(X, 0.5, train=True),
    "rrelu": lambda: F.rrelu(X, training=True),
    "attention by name": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "attention by place": lambda: F.scaled_dot_product_attention(X, X, X, None, 0.5),
}


@pytest.fixture
def _dropless() -> Iterator[None]:
    undo = drop_dropout()
    yield
    undo()


def output(module: nn.Module, *, packed: bool = False) -> Tensor:
    x = X.clone()
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [8, 7, 5, 3], batch_first=True)
    if isinstance(module, nn.Dropout2d | nn.Dropout3d):
        x = x[None, None] if isinstance(module, nn.Dropout3d) else x[None]
    result = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    result = result[0] if isinstance(result, tuple) and not packed else result
    return result[0].data if packed else result


@pytest.mark.usefixtures("_dropless")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_without_dropout_as_it_evaluates(name: str) -> None:
    module = MODULES[name]
    stream = torch.get_rng_state()

    trained = output(module.train())

    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.allclose(trained, output(module.eval()), atol=1e-6)
    module.train()


@pytest.mark.usefixtures("_dropless")
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_lose_their_dropout_too(name: str) -> None:
    module = MODULES[name]

    trained = output(module.train(), packed=True)

    assert torch.allclose(trained, output(module.eval(), packed=True), atol=1e-6)
    module.train()


@pytest.mark.usefixtures("_dropless")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_draws_nothing(name: str) -> None:
    stream = torch.get_rng_state()

    FUNCTIONS[name]()

    assert torch.equal(torch.get_rng_state(), stream)


def test_everything_is_put_back() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(0)
        return [output(module.train()) for module in MODULES.values()] + [
            function() for function in FUNCTIONS.values()
        ]

    before = draw()
    drop_dropout()()
    after = draw()

    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("_dropless")
def test_writing_into_the_result_does_not_reach_the_input() -> None:
    x = torch.ones(3)

    F.dropout(x, 0.5).zero_()

    assert x.sum() == 3


@pytest.mark.usefixtures("_dropless")
def test_the_rates_stay_readable() -> None:
    assert nn.Dropout(0.3).p == 0.3


@pytest.mark.usefixtures("_dropless")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_still_sees_one_graph() -> None:
    def forward(x: Tensor) -> Tensor:
        x = F.rrelu(F.dropout(x, 0.3), training=True)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2).sum()

    torch._dynamo.reset()
    found = torch._dynamo.explain(forward)(X)

    assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_autocast_can_be_switched_off() -> None:
    weight = torch.ones(4, 4)
    undo = drop_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        without = weight @ weight
    undo()
    with torch.autocast("cpu", torch.bfloat16):
        with_autocast = weight @ weight

    assert without.dtype == torch.float32
    assert with_autocast.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_can_be_made_to_draw_as_eager_code() -> None:
    from torch._inductor import config

    before = config.fallback_random
    undo = keep_random_compile()
    during = config.fallback_random
    undo()

    assert during is True
    assert config.fallback_random is before


def test_a_scripts_stopwatch_for_algorithms_is_set_and_read_and_measures_nothing() -> None:
    undo = pin_algorithms()
    try:
        torch.backends.cudnn.benchmark = True
        said, measures = torch.backends.cudnn.benchmark, torch._C._get_cudnn_benchmark()
        other = torch.backends.cudnn.deterministic
    finally:
        undo()

    assert (said, measures, other) == (True, False, False)
    assert torch.backends.cudnn.benchmark is False


def test_a_technique_that_measures_algorithms_is_judged_with_them_measured() -> None:
    undo = pin_algorithms()
    technique: dict[str, Any] = {"__name__": "flatout.techniques.compute.cudnn_autotune"}
    try:
        torch.backends.cudnn.benchmark = False  # the script's own
        exec("import torch; torch.backends.cudnn.benchmark = True", technique)
        measures = torch._C._get_cudnn_benchmark()
    finally:
        vars(torch._C)["_set_cudnn_benchmark"](*[False])
        undo()

    assert measures


def test_fp32_convolutions_are_fp32_and_repeat_while_the_script_reads_what_it_set() -> None:
    cudnn = torch.backends.cudnn
    undo = pin_algorithms()
    try:
        before = (cudnn.deterministic, cudnn.allow_tf32)
        cudnn.allow_tf32, cudnn.deterministic = True, False  # the script's own
        said = (cudnn.deterministic, cudnn.allow_tf32)
        held = (torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_allow_tf32())
        precision = cudnn.conv.fp32_precision
    finally:
        undo()

    assert before == said == (False, True)
    assert held == (True, False)
    assert precision != "tf32"
    assert (cudnn.deterministic, cudnn.allow_tf32) == (False, True)
    assert (torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_allow_tf32()) == (False, True)


@pytest.mark.filterwarnings("default")
def test_sums_on_a_gpu_repeat_and_scripts_and_compilers_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def state() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    import torch._inductor.config

    as_it_was = state()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    undo = pin_algorithms()
    try:
        told = state()
        torch.use_deterministic_algorithms(mode=False)  # the script's own
        held = torch._C._get_deterministic_algorithms()
        is_known = torch._inductor.config.deterministic
        fills = torch._C._get_deterministic_fill_uninitialized_memory()
        torch.use_deterministic_algorithms(mode=True)
        asked = state()
        is_strict = not torch._C._get_deterministic_algorithms_warn_only()
        torch.use_deterministic_algorithms(mode=False)
    finally:
        undo()

    assert told == as_it_was == (False, False, True)
    assert (held, fills) == (True, False)
    assert not is_known  # it is a part of the compiler's cache key
    assert asked == (True, False, True)
    assert is_strict
    assert state() == as_it_was
    assert not torch._C._get_deterministic_algorithms()
