"""A script with CUDA streams of its own: stand-ins, and the device is `meta`."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from flatout.data.byte_batches.transport import PackingCollate
from flatout.data.proof import aliases
from flatout.records.errors import NotApplicable
from flatout.techniques.data import device_prefetch, device_preprocess
from flatout.techniques.data.device_cache import DeviceCache
from flatout.techniques.data.device_prefetch import DevicePrefetch
from flatout.techniques.data.device_preprocess import DevicePreprocess
from tests.data.plain_pictures import Plain
from tests.techniques.data.samples import Numbers, gpu_in_sight

DEVICE = torch.device("meta")
CURRENT, SIDE = (SimpleNamespace(device=DEVICE, name=name) for name in ("current", "side"))


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's calls about streams, noted; whatever is replaced is put back."""
    calls = []
    monkeypatch.setattr(aliases, "_SEEN", [])
    monkeypatch.setattr(aliases, "_GIVEN", [])
    monkeypatch.setattr(torch.cuda.StreamContext, "__init__", as_it_is)
    monkeypatch.setattr(torch.cuda.StreamContext, "__enter__", lambda context: context.stream)
    monkeypatch.setattr(torch.cuda.StreamContext, "__exit__", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: calls.append(("set", stream)))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "__enter__", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: CURRENT)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: calls.append(("record", stream))
    )
    aliases.watch()
    return calls


def as_it_is(context, stream):
    context.stream = stream


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device):
        self.device, self.waits = device, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        self.waits += 1


def enter_context():
    with torch.cuda.stream(SIDE):
        pass


def enter_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(SIDE))


def enter_stream():
    with torch.cuda.Stream(DEVICE):
        pass


ENTRANCES = [
    enter_context,
    enter_stack,
    enter_stream,
    lambda: torch.cuda.set_stream(SIDE),
    lambda: torch.cuda.set_stream(stream=SIDE),
]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_script_that_enters_a_stream_is_noticed(enter):
    assert aliases.reason() == ""

    enter()

    assert aliases.reason() == aliases.REASON


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", ["torch.cuda.graphs", "flatout.techniques.data.device_prefetch"])
def test_streams_that_torch_or_a_technique_enters_do_not_count(name):
    exec(
        "with torch.cuda.stream(stream): pass\ntorch.cuda.set_stream(stream)",
        {"__name__": name, "torch": torch, "stream": SIDE},
    )

    assert aliases.reason() == ""


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("stream", [None, CURRENT])
def test_no_stream_and_the_current_one_do_not_count(stream):
    with torch.cuda.stream(stream):
        pass

    assert aliases.reason() == ""


def test_what_is_noticed_is_still_done_and_noticing_twice_changes_nothing(cuda):
    once = torch.cuda.set_stream

    aliases.watch()
    torch.cuda.set_stream(SIDE)

    assert torch.cuda.set_stream is once
    assert ("set", SIDE) in cuda


def test_the_first_stream_waits_for_the_batches_before_and_keeps_their_memory(cuda):
    kept = aliases.given({"x": torch.empty(2, device=DEVICE), "n": torch.zeros(1)})
    aliases.given([torch.empty(2, device=DEVICE)])  # let go of at once

    enter_context()
    enter_context()

    assert kept["x"].device == DEVICE
    assert cuda == [("wait", DEVICE), ("record", SIDE)]


class Prefetcher:
    """Moves the next batch on a stream of its own, as apex's example does."""

    def __init__(self, batches):
        self.batches = batches
        self.preload()

    def preload(self):
        self.next = next(self.batches, None)
        with torch.cuda.stream(SIDE):
            pass

    def __iter__(self):
        while self.next is not None:
            batch = self.next
            self.preload()
            yield batch


@pytest.mark.parametrize("workers", [0, 1])
def test_images_for_a_prefetcher_by_hand_are_scaled_on_the_cpu(cuda, workers):
    noise = np.random.default_rng(0)
    pictures = [
        Image.fromarray(noise.integers(0, 256, (50, 60, 3), dtype=np.uint8)) for _ in range(8)
    ]
    dataset = Plain(pictures)
    wanted = list(DataLoader(dataset, 2))
    loader = DataLoader(dataset, 2, num_workers=workers)
    loader.collate_fn = PackingCollate(loader.collate_fn, DEVICE)

    found = [images for images, _ in Prefetcher(iter(loader))]

    assert [images.device.type for images in found] == ["meta", "cpu", "cpu", "cpu"]
    assert all(torch.equal(a, b) for a, (b, _) in zip(found[1:], wanted[1:], strict=True))
    assert cuda == [("wait", DEVICE), ("record", SIDE)]


@pytest.mark.usefixtures("cuda")
def test_batches_for_a_prefetcher_by_hand_are_copied_by_it(monkeypatch):
    given = [torch.full((2,), float(number)) for number in range(4)]
    copy = device_prefetch._SideStreamCopy(DEVICE)
    copy.torch = SimpleNamespace(
        Tensor=torch.Tensor,
        strided=torch.strided,
        cuda=SimpleNamespace(
            stream=contextlib.nullcontext,
            current_stream=lambda _: SimpleNamespace(wait_stream=lambda _: None),
        ),
    )

    found = list(Prefetcher(iter(device_prefetch._AheadIterator(iter(given), copy))))

    # The second was on its way when the stream was entered: it is waited for.
    assert [batch.device.type for batch in found] == ["meta", "meta", "cpu", "cpu"]
    assert found[2:] == given[2:]
    assert copy.side.waits == 1


def kept_set(technique, **options):
    dataset = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    asked = {"dataset": dataset, "batch_size": 4, **options}
    return DataLoader(**technique.loader(asked)), asked


@pytest.mark.usefixtures("cuda")
def test_rows_for_a_prefetcher_by_hand_are_handed_out_on_the_cpu(monkeypatch):
    technique, sent_back = DeviceCache(), []
    loader, asked = kept_set(technique)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda leaf: sent_back.append(leaf) or leaf.clone())

    found = list(Prefetcher(iter(technique.batches(iter(loader), loader))))

    assert len(sent_back) == 4  # two tensors of two batches; the first came before
    assert torch.equal(torch.cat([x for x, _ in found]), asked["dataset"].tensors[0])
    assert aliases.REASON in technique.end()


@pytest.mark.usefixtures("cuda")
def test_the_loader_has_its_workers_back_in_the_next_epoch():
    technique = DeviceCache()
    loader, asked = kept_set(technique, num_workers=2, pin_memory=False)
    enter_context()

    with pytest.raises(NotApplicable, match="streams of its own"):
        technique.epoch(loader)
    with pytest.raises(NotApplicable, match="streams of its own"):
        technique.loader(asked)

    assert loader.num_workers == 2


@pytest.mark.usefixtures("cuda")
def test_techniques_say_that_they_are_left_out(monkeypatch):
    for technique in (device_prefetch, device_preprocess):
        gpu_in_sight(monkeypatch, technique)("cuda:1")
    assert (DevicePrefetch().end(), DevicePreprocess(on_device=True).end()) == ("", "")
    enter_context()

    with pytest.raises(NotApplicable, match="streams of its own"):
        DevicePrefetch().batches(iter(()), DataLoader(Numbers(), num_workers=1))
    with pytest.raises(NotApplicable, match="streams of its own"):
        DevicePreprocess(on_device=True).epoch(DataLoader(Numbers()))
    assert aliases.REASON in DevicePrefetch().end()
    assert aliases.REASON in DevicePreprocess(on_device=True).end()
    assert DevicePreprocess().end() == ""
