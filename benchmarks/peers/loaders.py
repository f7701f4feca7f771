"""The loaders, one function each: `name(folder, formats)` yields batches without end.

`folder` holds the photographs, `formats` what `benchmarks.peers.convert` made of them. Everything
is imported where it is used: what is not installed is left out.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.peers import job

Batches = Iterator[torch.Tensor]


class Endless(Sampler[int]):
    """One random epoch after the other: the loader is looked at, not its start."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        """Return numbers without end."""
        random = np.random.default_rng(0)
        while True:
            yield from random.permutation(self.count).tolist()

    def __len__(self) -> int:
        return 10**9


class Classic(Dataset[Any]):
    """One photograph per item, through Pillow, normalised: what most scripts do."""

    def __init__(self, folder: Path) -> None:
        self.paths = job.files(folder)
        self.labels = job.labels(self.paths)
        self.random: Random | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.random is None:
            job.one_thread()
            self.random = Random(torch.initial_seed())
        pixels = job.augment_file(self.paths[index].read_bytes(), self.random)
        return job.normalised(pixels), self.labels[index]


def with_workers(data: Dataset[Any]) -> DataLoader[Any]:
    """Return torch's loader of a data set, without end, with two workers."""
    return DataLoader(
        data,
        job.BATCH,
        sampler=Endless(len(data)),
        num_workers=job.WORKERS,
        persistent_workers=True,
        drop_last=True,
    )


def torch_dataloader(folder: Path, _formats: Path) -> Batches:
    """Torch's DataLoader with two workers."""
    return (images for images, _ in with_workers(Classic(folder)))


class _OfSample:
    """Augments what a peer hands out; each worker has a random state of its own."""

    def __init__(self) -> None:
        self.random: Random | None = None

    def __call__(self, content: bytes) -> torch.Tensor:
        if self.random is None:
            job.one_thread()
            self.random = Random(torch.initial_seed())
        return job.normalised(job.augment_file(content, self.random))


def webdataset(_folder: Path, formats: Path) -> Batches:
    """WebDataset: tar files, a shuffle buffer, torch's workers."""
    import webdataset as wds

    shards = sorted(map(str, (formats / "webdataset").glob("*.tar")))
    augment = _OfSample()
    data = (
        wds.WebDataset(shards, resampled=True, shardshuffle=False)
        .shuffle(500)
        .to_tuple("jpg", "cls")
        .map(lambda sample: (augment(sample[0]), int(sample[1])))
    )
    loader = DataLoader(data, job.BATCH, num_workers=job.WORKERS, persistent_workers=True)
    return (images for images, _ in loader)


class _Paths:
    """Grain's source: the paths."""

    def __init__(self, folder: Path) -> None:
        self.paths = job.files(folder)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Path:
        return self.paths[index]


def grain(folder: Path, _formats: Path) -> Batches:
    """Grain with two reading threads; its processes need an absl main and are left out."""
    import grain as library

    job.one_thread()
    augment = _OfSample()
    data = library.MapDataset.source(_Paths(folder)).seed(0).shuffle().repeat()
    samples = data.map(lambda path: augment(path.read_bytes()).numpy()).batch(job.BATCH)
    options = library.ReadOptions(num_threads=job.WORKERS, prefetch_buffer_size=2 * job.WORKERS)
    return map(torch.from_numpy, samples.to_iter_dataset(options))


def dali(folder: Path, _formats: Path) -> Batches:
    """DALI on the CPU: the decoder that decodes only the crop, two threads."""
    from nvidia.dali import fn, pipeline_def, types

    paths = job.files(folder)

    @pipeline_def(batch_size=job.BATCH, num_threads=job.WORKERS, device_id=None, seed=0)
    def pipeline() -> Any:
        content, label = fn.readers.file(
            files=list(map(str, paths)),
            labels=job.labels(paths),
            random_shuffle=True,
            initial_fill=1024,
        )
        image = fn.decoders.image_random_crop(
            content, device="cpu", random_area=list(job.SCALE), random_aspect_ratio=list(job.RATIO)
        )
        image = fn.resize(image, size=[job.SIDE, job.SIDE], antialias=True)
        image = fn.crop_mirror_normalize(
            image,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in job.MEAN],
            std=[255 * value for value in job.STD],
            mirror=fn.random.coin_flip(),
        )
        return image, label

    built = pipeline()
    built.build()
    while True:
        images, _ = built.run()
        yield torch.from_numpy(np.array(images.as_array()))


def litdata(_folder: Path, formats: Path) -> Batches:
    """LitData: chunked binary files, torch's workers."""
    from litdata import StreamingDataLoader, StreamingDataset

    augment = _OfSample()
    data = StreamingDataset(
        str(formats / "litdata"),
        shuffle=True,
        drop_last=True,
        transform=lambda sample: augment(sample["image"]),
    )
    loader = StreamingDataLoader(data, batch_size=job.BATCH, num_workers=job.WORKERS)
    while True:
        yield from loader


def mosaicml(_folder: Path, formats: Path) -> Batches:
    """MosaicML Streaming: its shards on the local disk, torch's workers."""
    torchvision_without_operators()
    import streaming

    augment = _OfSample()

    class Shards(streaming.StreamingDataset):  # type: ignore[misc,unused-ignore]
        def __getitem__(self, index: int) -> Any:
            return augment(super().__getitem__(index)["image"])

    data = Shards(local=str(formats / "mosaicml"), shuffle=True, batch_size=job.BATCH)
    loader = DataLoader(
        data, job.BATCH, num_workers=job.WORKERS, drop_last=True, persistent_workers=True
    )
    while True:
        yield from loader


DECLARED: list[torch.library.Library] = []
"""What goes out of scope is declared no more."""


def torchvision_without_operators() -> None:
    """Declare two operators that torchvision asks for and a torch without CUDA does not have."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    DECLARED.append(library)


def spdl(folder: Path, _formats: Path) -> Batches:
    """SPDL's pipeline of threads around the decoder and the resizing that are quickest there."""
    import simplejpeg
    from spdl.pipeline import PipelineBuilder

    job.one_thread()
    paths, random = job.files(folder), Random(0)

    def augmented(number: int) -> Any:
        pixels = simplejpeg.decode_jpeg(paths[number].read_bytes(), "RGB")
        return job.augment_pixels(pixels, random)

    def together(samples: list[Any]) -> torch.Tensor:
        return job.normalised_batch(torch.from_numpy(np.stack(samples)))

    builder = PipelineBuilder().add_source(Endless(len(paths)))
    builder = builder.pipe(augmented, concurrency=job.WORKERS).aggregate(job.BATCH)
    pipeline = builder.pipe(together).add_sink(job.WORKERS).build(num_threads=job.WORKERS)
    with pipeline.auto_stop():
        yield from pipeline


def decoding(folder: Path, _formats: Path) -> Batches:
    """No loader: simplejpeg in two threads; its pixels are thrown away, nothing is handed out."""
    import simplejpeg

    paths = job.files(folder)
    contents = [path.read_bytes() for path in paths]
    batch = torch.zeros(job.BATCH, 3, job.SIDE, job.SIDE)
    numbers = iter(Endless(len(paths)))

    def decode(chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            simplejpeg.decode_jpeg(contents[number], "RGB")
        return batch

    with ThreadPoolExecutor(job.WORKERS) as pool:
        waiting = deque[Future[torch.Tensor]]()
        while True:
            chosen = [next(numbers) for _ in range(job.BATCH)]
            waiting.append(pool.submit(decode, chosen))
            if len(waiting) > job.WORKERS:
                yield waiting.popleft().result()


def ffcv(_folder: Path, formats: Path) -> Batches:
    """FFCV on the original JPEG files."""
    return _ffcv(formats / "jpeg.beton")


def ffcv_raw(_folder: Path, formats: Path) -> Batches:
    """FFCV on pixels of short side 256."""
    return _ffcv(formats / "raw.beton")


def _ffcv(path: Path) -> Batches:
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor
    from ffcv.transforms import ToTorchImage as Channels

    mean, std = (255 * np.array(values, np.float32) for values in (job.MEAN, job.STD))
    image = [
        RandomResizedCropRGBImageDecoder((job.SIDE, job.SIDE)),
        RandomHorizontalFlip(),
        NormalizeImage(mean, std, np.float32),
        ToTensor(),
        Channels(convert_back_int16=False),
    ]
    loader = Loader(
        str(path),
        batch_size=job.BATCH,
        num_workers=job.WORKERS,
        order=OrderOption.RANDOM,
        drop_last=True,
        os_cache=True,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    while True:
        yield from (images for images, _ in loader)


PEERS: dict[str, Callable[[Path, Path], Batches]] = {
    "torch DataLoader": torch_dataloader,
    "WebDataset": webdataset,
    "Grain": grain,
    "DALI": dali,
    "LitData": litdata,
    "MosaicML Streaming": mosaicml,
    "SPDL": spdl,
    "FFCV": ffcv,
    "FFCV raw 256": ffcv_raw,
}
CEILINGS: dict[str, Callable[[Path, Path], Batches]] = {"decoding alone": decoding}
"""What bounds a class of loaders on these cores."""
