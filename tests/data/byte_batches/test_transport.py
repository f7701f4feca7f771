import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from flatout.agent.nested import leaves_of
from flatout.data.byte_batches import transport
from flatout.data.byte_batches.arrays import LazyArray
from flatout.data.byte_batches.levels import UnfollowableError
from flatout.data.byte_batches.lookup_tracing import Following
from flatout.data.byte_batches.packed import Packed, restored
from flatout.data.byte_batches.transport import PackingCollate
from tests.data.plain_pictures import plain_loader
from tests.data.tails import TAILS, Pictures, numpy_arithmetic, standardised


@pytest.fixture(scope="module")
def pictures():
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (50, 60, 3), dtype=np.uint8) for _ in range(14)]
    return [Image.fromarray(pixels) for pixels in made]


@pytest.fixture
def sent(monkeypatch):
    """What left the workers, as the training process got it."""
    seen = []
    original = transport.unpack

    def note(batch, device=None):
        seen.append([type(leaf) for leaf in leaves_of(batch)])
        return original(batch, device)

    monkeypatch.setattr(transport, "unpack", note)
    return seen


def batches(dataset, *, packs, workers=0, **options):
    torch.manual_seed(1)
    random.seed(1)
    loader = DataLoader(dataset, 6, shuffle=True, num_workers=workers, **options)
    if packs:
        loader.collate_fn = PackingCollate(loader.collate_fn)
    found = [batch for _ in range(2) for batch in loader]
    return found, loader.collate_fn, torch.rand(1).item()


def forms(found):
    """Return what a model could tell apart: type, strides and every bit."""
    return [
        (x.dtype, x.shape, x.stride(), x.contiguous().view(torch.uint8).numpy().tobytes())
        for batch in found
        for x in batch
    ]


@pytest.mark.parametrize("tail", TAILS)
def test_each_way_to_scale_a_picture_travels_as_bytes_and_arrives_bit_by_bit(pictures, sent, tail):
    plain, _, after_plain = batches(Pictures(pictures, tail), packs=False)
    packed, plan, after_packed = batches(Pictures(pictures, tail), packs=True)

    assert forms(packed) == forms(plain)
    assert after_packed == after_plain
    assert plan.trouble == ""
    assert sent == [[Packed, torch.Tensor]] * 6


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_workers_send_bytes_through_the_ring(pictures, sent, options):
    dataset = Pictures(pictures, numpy_arithmetic)

    plain, _, _ = batches(dataset, packs=False, workers=2, **options)
    packed, _, _ = batches(dataset, packs=True, workers=2, **options)

    assert forms(packed) == forms(plain)
    assert sent == [[Packed, torch.Tensor]] * 6


@pytest.mark.slow
def test_spawned_workers_do_the_same(pictures, sent):
    dataset = Pictures(pictures[:7], numpy_arithmetic)

    packed, _, _ = batches(dataset, packs=True, workers=1, multiprocessing_context="spawn")
    plain, _, _ = batches(dataset, packs=False, workers=1, multiprocessing_context="spawn")

    assert forms(packed) == forms(plain)
    assert sent == [[Packed, torch.Tensor]] * 4


def test_what_is_no_function_of_single_bytes_is_computed_as_ever(pictures, sent):
    dataset = Pictures(pictures, standardised)

    plain, _, _ = batches(dataset, packs=False)
    packed, plan, _ = batches(dataset, packs=True)

    assert forms(packed) == forms(plain)
    assert plan.trouble == ""
    assert all(Packed not in kinds for kinds in sent)


def test_pictures_of_different_sizes_fail_in_the_collations_own_words(pictures):
    mixed = [pictures[0], pictures[1].resize((64, 64))] * 3
    errors = []

    for packs in (False, True):
        with pytest.raises(RuntimeError) as caught:
            batches(Pictures(mixed, numpy_arithmetic), packs=packs)
        errors.append(str(caught.value))

    assert errors[0] == errors[1]


def test_an_error_of_the_data_set_is_its_own_and_following_goes_on(pictures, sent):
    class Picky(Pictures):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError("no such picture")
            return super().__getitem__(index)

    loader = DataLoader(Picky(pictures, numpy_arithmetic), 2, num_workers=1)
    loader.collate_fn = PackingCollate(loader.collate_fn)
    iterator = iter(loader)

    assert next(iterator)[1].tolist() == [0, 1]
    with pytest.raises(KeyError, match="no such picture"):
        next(iterator)
    assert next(iterator)[1].tolist() == [4, 5]
    assert sent[-1] == [Packed, torch.Tensor]


def test_a_data_set_that_swallows_errors_cannot_swallow_ours(pictures):
    def forgiving(image):
        pixels = np.asarray(image, dtype=np.float32) / 255
        turned = pixels.T
        try:
            pixels -= 0.5
        except Exception:  # noqa: BLE001  as people write it
            return torch.zeros(1)
        return torch.from_numpy(np.ascontiguousarray(turned))

    plain, _, _ = batches(Pictures(pictures, forgiving), packs=False)
    packed, plan, _ = batches(Pictures(pictures, forgiving), packs=True)

    assert forms(packed) == forms(plain)
    assert "while a view of it is in use" in plan.trouble
    assert not plan.is_on


def test_a_buffer_that_is_filled_anew_does_not_change_earlier_samples():
    buffer = np.zeros((64, 64, 3), np.uint8)

    class Reused(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            buffer[...] = index
            return torch.from_numpy(buffer).float() / 255

    loader = DataLoader(Reused(), 4)
    plain = next(iter(loader))
    loader.collate_fn = PackingCollate(loader.collate_fn)

    assert torch.equal(next(iter(loader)), plain)


def test_a_stream_of_batches_uses_the_same_few_blocks_again(pictures, monkeypatch):
    owners = []
    original = transport.restored
    monkeypatch.setattr(
        transport,
        "restored",
        lambda packed, device: (owners.append(packed.bytes.data_ptr()), original(packed, device))[
            1
        ],
    )
    loader = DataLoader(Pictures(pictures * 10, numpy_arithmetic), 4, num_workers=1)
    loader.collate_fn = PackingCollate(loader.collate_fn)

    for batch in loader:
        del batch

    assert len(owners) == 35
    assert len(set(owners)) <= 6


def first_batches(pictures, collate):
    """Return the first batch as the script makes it and with bytes sent, and the loader."""
    loader = DataLoader(Pictures(pictures, numpy_arithmetic), 7, collate_fn=collate)
    random.seed(3)
    plain = next(iter(loader))
    loader.collate_fn = PackingCollate(collate)
    random.seed(3)
    return plain, next(iter(loader)), loader


def test_a_collation_of_the_scripts_own_gets_what_it_can_stack(pictures, sent):
    def own(samples):
        return {"x": torch.stack([x for x, _ in samples]), "n": len(samples)}

    plain, found, _ = first_batches(pictures, own)

    assert found["n"] == 7
    assert torch.equal(found["x"], plain["x"])
    assert sent == [[Packed, int]]


class Own:
    """A batch as torch's documentation has it, which nobody can pickle."""

    def __init__(self, samples):
        self.x = torch.stack([x for x, _ in samples])
        self.then = lambda: None


def test_a_batch_of_the_scripts_own_class_is_made_the_ordinary_way(pictures):
    plain, found, loader = first_batches(pictures, Own)

    assert type(found.x) is torch.Tensor
    assert torch.equal(found.x, plain.x)
    assert "a Own of the script's own holds a picture" in loader.collate_fn.trouble


def test_other_threads_and_later_code_see_numpy_as_it_is(pictures):
    with Following().opened():
        assert isinstance(np.asarray(pictures[0], dtype=np.float32), LazyArray)

    assert type(np.asarray(pictures[0], dtype=np.float32)) is np.ndarray
    assert type(torch.from_numpy(np.array(pictures[0])).float()) is torch.Tensor


def test_writing_into_a_scaled_picture_cannot_be_followed(pictures):
    with Following().opened():
        scaled = np.asarray(pictures[0], dtype=np.float32) / 255

        with pytest.raises(UnfollowableError):
            scaled[0, 0] = 0.0


def test_levels_are_looked_up_where_the_arithmetic_would_round_otherwise():
    values = torch.arange(256, dtype=torch.uint8).repeat(1, 3, 1, 1)
    levels = torch.rand(3, 256)
    wrong = Packed(values, levels, 1, [("divide", np.float32(255), False)])

    assert torch.equal(restored(wrong), levels[None, :, None])


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
def test_a_gpu_gives_the_same_bits(pictures, tail):
    plain, _, _ = batches(Pictures(pictures, tail), packs=False)
    torch.manual_seed(1)
    random.seed(1)
    loader = DataLoader(Pictures(pictures, tail), 6, shuffle=True, pin_memory=True)
    loader.collate_fn = PackingCollate(loader.collate_fn, torch.device("cuda"))

    found = [batch for _ in range(2) for batch in loader]

    assert all(batch[0].is_cuda for batch in found)
    assert all(
        torch.equal(a[0].cpu(), torch.as_tensor(b[0])) for a, b in zip(found, plain, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"persistent_workers": True}])
def test_a_gpu_gets_the_pictures_of_each_batch_while_workers_go_on(options):
    loader = plain_loader(workers=2, **options)
    loader.collate_fn.device = torch.device("cuda")
    originals = loader.dataset.pictures

    found = []
    for _ in range(3):
        for values, numbers in loader:
            torch.cuda._sleep(5_000_000)  # copies wait behind it while workers go on
            found.append((values, numbers))

    assert len(found) == 36
    for values, numbers in found:
        wanted = [torch.as_tensor(numpy_arithmetic(originals[n])) for n in numbers.tolist()]
        assert values.is_cuda
        assert torch.equal(values.cpu(), torch.stack(wanted))
