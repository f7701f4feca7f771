"""Send images as bytes and scale them once per batch, where they are used.

What it does: where a sample's floating-point tensor is arithmetic on an image of bytes
(`/ 255`, `- mean`, `/ std`, in numpy, torch or torchvision), the workers send the bytes, one tensor
per field of the batch; the arithmetic is done for the whole batch in the training process, or on
the device.
When it helps: the step waits for data, and images are scaled one by one: that and moving four bytes
per value cost as much as decoding a photograph.
What it costs: a tenth of a millisecond per image in the training process; nothing where nothing
can be followed.
How it is checked: values are bit-identical; on the script's own samples before the first batch, and
by construction after it: each of the 256 levels goes through the script's own arithmetic.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.training_device import batch_device
from flatout.analysis.feeding import MIN_WAIT_SHARE, fed_change_ms, loading
from flatout.data.proof import aliases
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import LoaderFacts, Profile
from flatout.records.technique import Effect, Numerics, Technique

if TYPE_CHECKING:
    import torch

    from flatout.data.byte_batches.transport import PackingCollate
    from flatout.data.proof.joint_proof import Collate

REFUSED = "_flatout_not_bytes"
"""On a loader: why its batches do not travel as bytes."""
SAVED_MS_PER_MB = 1.6
"""CPU time saved per megabyte of floating point that is not made and not moved by a worker: 0.44 to
0.79 ms to scale an image of 0.60 MB and 0.54 ms to move three quarters of it, less 0.1 ms to scale
it in the batch (measured on 2 cores)."""
MOST_SAVED = 0.35
"""Largest part of a loader's work that this can be: 1.2 of the 3.5 ms of a classic pipeline."""
NOTHING = "no floating-point tensor of a batch is plain arithmetic on an image of bytes"
MIN_SAMPLE_BYTES = 1 << 16
"""Samples below this size are no images whose transport costs anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePreprocess(Technique):
    """Let batches of images travel as bytes and scale them in one go."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "h2d"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("transform", "normalise", "collate", "transport")
    by_hand: ClassVar[str] = """
In the data set, return the bytes; after the loader, scale the whole batch at once:
- return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std
+ return torch.from_numpy(pixels).permute(2, 0, 1)
+ images = (images.to(device).float() / 255 - mean) / std
"""

    on_device: bool = False
    """Scale on the CUDA device, so that bytes are what is copied there. The loop then receives
    batches that are on the device already."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DevicePreprocess"]:
        """Return the technique where a loop waits for samples large enough to be images."""
        loaders = [x for x in profile.training_loaders if not x.is_iterable]
        is_waiting = profile.share("data_wait") >= MIN_WAIT_SHARE
        if not is_waiting or not any(map(_may_be_images, loaders)):
            return ()
        return [cls(on_device=profile.device_kind == "cuda")]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take the scaling and three quarters of the transport off what the workers do."""
        loaded_bytes = sum(x.batch_bytes for x in profile.training_loaders)
        work_ms = loading(profile, machine.usable_cores).total_ms
        saved_ms = SAVED_MS_PER_MB * loaded_bytes / 1e6 * profile.batches_per_step
        saved_share = min(saved_ms / work_ms, MOST_SAVED) if work_ms else 0.0
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=saved_share),
            why=f"about {saved_share:.0%} of {work_ms:.1f} ms of loading is scaling and transport",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that the loader's batches can travel as bytes, and let them."""
        if self.on_device:
            _follow_training(loader)
        return send_bytes(loader, _device() if self.on_device else None)

    def way(self, loader: Any) -> "Bytes | None":
        """Return what is proven, with the ways of other techniques."""
        if _find_obstacle(loader):
            return None
        return Bytes(device=_device() if self.on_device else None)

    def end(self) -> str:
        """Say that images were not scaled on the device, if that was so."""
        why = aliases.reason() if self.on_device else ""
        return f"{why}: images were scaled on the CPU from then on" if why else ""


def waits_for_pictures(profile: Profile) -> bool:
    """Return whether the loop waits for samples that may be pictures, as floats or as bytes."""
    return profile.share("data_wait") >= MIN_WAIT_SHARE and any(
        x.batch_bytes >= MIN_SAMPLE_BYTES / 4 * max(1, x.batch_size or 1)
        for x in profile.training_loaders
        if not x.is_iterable
    )


def waits_for_pillow(profile: Profile) -> bool:
    """Return whether it does, and what is compiled can be put under Pillow here."""
    if not waits_for_pictures(profile) or importlib.util.find_spec("PIL") is None:
        return False
    from flatout.kernels.compiled import has_compiler

    return has_compiler()


def send_bytes(loader: Any, device: "torch.device | str | None" = None) -> Any:
    """Let a `DataLoader`'s images travel as bytes; the loop receives what it received before.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Args:
        loader: A `torch.utils.data.DataLoader` over a map-style data set.
        device: Where the values are computed and handed out; the CPU by default, and once the
            script enters CUDA streams of its own.

    Raises:
        NotApplicable: if nothing in a batch is followed back to bytes, or it came out different.
    """
    import torch

    from flatout.data.byte_batches.transport import find_plan
    from flatout.data.proof.batches import can_be_compared
    from flatout.data.proof.joint_proof import find_trouble

    target = None if device is None else torch.device(device)
    if target is not None and target.type == "cuda":
        aliases.watch()
    if find_plan(loader.collate_fn) is not None:
        return loader
    known, way = loader.__dict__, Bytes(device=target)
    if REFUSED not in known:
        known[REFUSED] = can_be_compared(loader) or _find_obstacle(loader)
        known[REFUSED] = known[REFUSED] or find_trouble(loader, way)
    if known[REFUSED]:
        raise NotApplicable(known[REFUSED])
    loader.collate_fn = way.plan(loader.collate_fn)
    return loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """How a loader's images travel as bytes; proven together with other techniques."""

    device: "torch.device | None" = None
    name: ClassVar[str] = "device_preprocess"

    def plan(self, collate: "Collate") -> "PackingCollate":
        """Return the script's collation, with what is followed sent as bytes."""
        from flatout.data.byte_batches.transport import PackingCollate

        return PackingCollate(collate, self.device)

    def prepare(self) -> None:
        """Import what every process needs."""
        importlib.import_module("flatout.data.byte_batches.transport")

    def undo_here(self) -> None:
        """Do nothing: only its own collation makes a batch in this way."""

    def try_under(self, collate: "Collate") -> "tuple[Collate, Callable[[], str]]":
        """Collate as bytes; return what tells then why that did not come to pass, if so."""
        plan = self.plan(collate)
        return plan, lambda: "" if plan.packed else plan.trouble or NOTHING


def _find_obstacle(loader: Any) -> str:
    """Return why it need not be tried: what would come of it would not be seen."""
    from torch.utils.data import DataLoader

    from flatout.data.proof.dataset_facts import find_catcher

    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} has a way of its own to hand out its batches"
    catcher = find_catcher(loader.dataset)
    if catcher:
        return f"{catcher} goes on after errors of any kind: one of following would not be seen"
    return ""


def _may_be_images(loader: LoaderFacts) -> bool:
    return loader.batch_bytes >= MIN_SAMPLE_BYTES * max(1, loader.batch_size or 1)


def _follow_training(loader: Any) -> None:
    """Let batches that travel as bytes already go where the training is by now.

    An earlier epoch may have been drawn before the model was known.
    """
    from flatout.data.byte_batches.transport import find_plan

    plan = find_plan(loader.collate_fn)
    if plan is not None:
        plan.device = batch_device()


def _device() -> "torch.device":
    """Return the training's CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise NotApplicable("there is no CUDA device to scale images on")
    device = batch_device()
    if device.type != "cuda":
        raise NotApplicable(f"the training runs on {device}, which is no CUDA device")
    aliases.check()
    return device


KOREAN = """
Let batches of images travel as bytes and scale them in one go.
    이미지 배치를 바이트로 보내 한 번에 스케일링합니다.
In the data set, return the bytes; after the loader, scale the whole batch at once:
    데이터셋은 바이트를 돌려주고, 로더 뒤에서 배치 전체를 한 번에 스케일링합니다:
no floating-point tensor of a batch is plain arithmetic on an image of bytes
    배치의 부동소수점 텐서 가운데 바이트 이미지를 산술 연산만 한 것이 없습니다
about {share} of {ms} ms of loading is scaling and transport
    데이터 로딩 {ms} ms 중 약 {share}가 스케일링과 전송입니다
{why}: images were scaled on the CPU from then on
    {why}. 그때부터는 이미지를 CPU에서 스케일링했습니다
{loader} has a way of its own to hand out its batches
    {loader}이(가) 자체 방식으로 배치를 내줍니다
{name} goes on after errors of any kind: one of following would not be seen
    {name}이(가) 어떤 오류가 나도 계속 진행해, 연산을 따라가다 난 오류를 알 수 없습니다
there is no CUDA device to scale images on
    이미지를 스케일링할 CUDA 디바이스가 없습니다
"""
