import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flatout.guard.samples import Stream, leaves

Pair = namedtuple("Pair", "image label")


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str


def digest(*values: Any) -> dict[str, list[tuple[int, str]]]:
    stream = Stream()
    for value in values:
        stream.add(value)
    return stream.to_json()


def batch(*, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "tensor": lambda x: x,
    "pair": lambda x: (x, torch.arange(4)),
    "list of tensors": list,
    "mapping": lambda x: {"image": x, "name": ["a", "b", "c", "d"]},
    "named tuple": lambda x: Pair(x, 3),
    "dataclass": lambda x: Graph(x, "g"),
    "array": lambda x: x.numpy(),
    "object array": lambda x: np.array([{"deep": x.numpy()}], dtype=object),
    "many tensors": lambda x: [x + n for n in range(20)],
    "picture": lambda x: Image.fromarray((x[0, 0].numpy() * 40).astype("uint8")),
    "sparse": lambda x: x.to_sparse(),
    "bf16": lambda x: x.bfloat16(),
    "nested tensor": lambda x: torch.nested.as_nested_tensor([x[0, 0], x[1, 0][:2]]),
}


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_equal_contents_have_equal_digests_and_others_do_not(make: Any) -> None:
    ours = digest(make(batch()))

    assert ours
    assert ours == digest(make(batch().clone()))
    assert ours != digest(make(batch(seed=1)))


def test_memory_format_pinning_and_views_do_not_matter() -> None:
    x = batch()
    wide = torch.cat([x, x], dim=1)

    assert digest(x) == digest(x.to(memory_format=torch.channels_last))
    assert digest(x) == digest(wide[:, :3])


def test_dtype_and_shape_matter() -> None:
    x = torch.zeros(4, 6)

    assert digest(x) != digest(x.int())
    assert digest(x) != digest(x.view(4, 2, 3))


def test_order_matters() -> None:
    x = batch()

    assert digest(x) != digest(x.flip(0))


def test_micro_batches_reach_the_digest_of_the_whole() -> None:
    x = batch()

    whole, parts = (
        digest((x, ["a", "b", "c", "d"])),
        digest((x[:2], ["a", "b"]), (x[2:], ["c", "d"])),
    )

    assert whole["[0]"][-1] == parts["[0]"][-1]
    assert whole["[1]"][-1] == parts["[1]"][-1]


def test_a_computed_tensor_is_no_sample() -> None:
    x = torch.ones(3, requires_grad=True)

    assert dict(leaves({"image": x, "feature": 2 * x})) == {"image": x}


def test_what_cannot_be_looked_into_gives_no_digest() -> None:
    assert digest(object()) == {}
    assert digest(random.random) == {}


def test_a_structure_without_end_is_followed_so_far_only() -> None:
    loop: list[Any] = [object()]
    loop.append(loop)

    assert digest(loop) == {}
