import random
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flatout.agent.guard import samples
from flatout.agent.guard.recorder import GuardRecorder
from flatout.agent.guard.samples import Memory, SampleStream, is_on_device, leaves
from tests.guard.loop import FakeSession

Pair = namedtuple("Pair", "image label")


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str


def digest(*values: Any) -> dict[str, list[tuple[int, str]]]:
    stream = SampleStream()
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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Take tensors for a device's; return those whose contents were read."""
    found: list[torch.Tensor] = []
    plain = samples._tensor_contents

    def noted(tensor: Any) -> Any:
        found.append(tensor)
        return plain(tensor)

    monkeypatch.setattr(samples, "_tensor_contents", noted)
    monkeypatch.setattr(samples, "is_on_device", lambda leaf: isinstance(leaf, torch.Tensor))
    return found


def test_a_tensor_on_a_device_is_read_once_as_batch_and_as_argument(
    reads: list[torch.Tensor],
) -> None:
    memory = Memory()
    batches, arguments = SampleStream(memory), SampleStream(memory)

    for seed in range(3):
        x = batch(seed=seed)
        batches.add((x, torch.arange(4)))
        arguments.add({"args": [x]})
        memory.forget()

    assert len(reads) == 2 * 3
    expected = digest(*({"args": [batch(seed=seed)]} for seed in range(3)))
    assert arguments.to_json() == expected


def test_a_tensor_that_was_changed_or_is_another_one_is_read_anew(
    reads: list[torch.Tensor],
) -> None:
    memory = Memory()
    x = batch()
    SampleStream(memory).add(x)
    x.add_(1.0)
    changed, copied = SampleStream(memory), SampleStream(memory)

    changed.add(x)
    copied.add(x.clone())

    assert len(reads) == 3
    assert changed.to_json() == copied.to_json() == digest(batch() + 1.0)


def test_a_digest_that_stood_elsewhere_reads_anew(reads: list[torch.Tensor]) -> None:
    memory = Memory()
    batches, arguments = SampleStream(memory), SampleStream(memory)
    arguments.add(batch(seed=1))
    x = batch()
    batches.add(x)

    arguments.add(x)

    assert len(reads) == 3
    assert arguments.to_json() == digest(batch(seed=1), batch())


def test_only_what_lies_on_a_device_and_tells_its_changes_is_read_once() -> None:
    with torch.inference_mode():
        silent = torch.empty(2, device="meta")

    assert is_on_device(torch.empty(2, device="meta"))
    assert not is_on_device(torch.empty(2))
    assert not is_on_device(silent)
    assert not is_on_device([torch.empty(2, device="meta")])


def test_the_recorder_reads_a_batch_on_a_device_once_in_each_step(
    reads: list[torch.Tensor], tmp_path: Path
) -> None:
    session, model = FakeSession(), torch.nn.Linear(4, 2)
    recorder = GuardRecorder(session, {}, tmp_path / "record.npz")  # type: ignore[arg-type]
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(3, 4) for _ in range(3)]

    with session.hooked():
        for x in batches:
            session.fire("batch", x, "loader")
            stepper.zero_grad()
            session.backward(session.forward(model, x).square().mean())
            stepper.step()

    assert len(reads) == len(batches)
    assert recorder._memory._passed == {}
    seen = recorder._samples["loader"].to_json().values()
    assert list(recorder._arguments["root0"].to_json().values()) == list(seen)
