import numpy as np
import pytest
import torch

from flatout.agent.guard import sketches as module
from flatout.agent.guard.sketches import SIZE, buffer_sketch, sketch, to_numbers


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 63, 64])
def test_a_small_tensor_is_kept_whole(size: int) -> None:
    tensor = random(size)

    assert np.array_equal(to_numbers(sketch(tensor, "bias")), tensor.double().numpy())


def test_the_norm_of_a_difference_is_estimated_within_a_third() -> None:
    ratios = []
    for seed in range(200):
        a, b = random(30, 40, seed=seed), random(30, 40, seed=seed + 1000)
        found = (sketch(a, "weight") - sketch(b, "weight")).norm()
        ratios.append(float(found / (a - b).double().norm()))

    assert min(ratios) > 0.67
    assert max(ratios) < 1.33
    assert abs(np.mean(ratios) - 1) < 0.02


def test_a_sketch_is_linear() -> None:
    a, b = random(50, 50).double(), random(50, 50, seed=1).double()

    together = sketch(a + 3 * b, "weight")

    assert torch.allclose(together, sketch(a, "weight") + 3 * sketch(b, "weight"))


def test_memory_format_does_not_matter() -> None:
    tensor = random(8, 16, 5, 5)
    other = tensor.to(memory_format=torch.channels_last)

    assert torch.equal(sketch(tensor, "weight"), sketch(other, "weight"))


def test_the_name_chooses_the_signs() -> None:
    tensor = random(100, 100)

    assert not torch.equal(sketch(tensor, "a"), sketch(tensor, "b"))
    assert torch.equal(sketch(tensor, "a"), sketch(tensor.clone(), "a"))


@pytest.mark.parametrize("kind", ["constant", "random", "rank one"])
def test_chunks_that_share_signs_stay_unbiased(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4096)
    tensor = {
        "constant": torch.ones(40_000),
        "random": random(40_000),
        "rank one": torch.outer(random(200), random(200, seed=1)),
    }[kind]

    ratios = [float(sketch(tensor, str(n)).norm() / tensor.double().norm()) for n in range(40)]

    assert min(ratios) > 0.7
    assert max(ratios) < 1.3
    assert abs(np.mean(ratios) - 1) < 0.05


def test_the_trainings_random_stream_is_not_touched() -> None:
    module._signs.cache_clear()
    before = torch.get_rng_state()

    sketch(random(100, 100), "weight")

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "tensor",
    [
        random(100, 10).bfloat16(),
        random(100, 10).half(),
        random(100, 10).double(),
        torch.complex(random(100, 10), random(100, 10)),
        random(100, 10).to_sparse(),
        torch.arange(1000),
        random(100, 10) > 0,
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_every_kind_of_tensor_has_a_finite_sketch(tensor: torch.Tensor) -> None:
    found = to_numbers(sketch(tensor, "weight"))

    assert found.shape == (SIZE,)
    assert np.isfinite(found).all()
    assert found.any()


def test_infinities_of_a_mask_are_counted_not_summed() -> None:
    mask = torch.full((20, 20), float("-inf")).triu(1)

    found = to_numbers(buffer_sketch(mask, "mask"))

    assert found[-1] == 190
    assert not found[:-1].any()
