"""What was put off when a batch left as bytes, and is done where the batch is used.

A device has its first batch compared with the CPU's, and is left out of it where they differ.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flatout.data.colours import Colours, coloured
from flatout.data.scaling import CHANNELS, Cut, scaled
from flatout.data.sending import sent
from flatout.data.unmade import Order, laid_out

COMPARED = 4
"""Pictures on which a device's scaling is compared: the CPU takes some 15 ms for each."""
PICTURE_DIMS = 3
"""Of a picture; one more is a batch's."""
CPU = torch.device("cpu")
_ALIKE: dict[tuple[str, str], bool] = {}
"""By kind of device and of work: whether it did a first batch's as the CPU does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed:
    """What is still to be done to the bytes of a batch; by default nothing."""

    colours: Sequence[Colours] = ()
    """Changes of colour, one entry for each picture; empty for none."""
    cuts: Sequence[Cut] = ()
    """How each picture is scaled before that; the bytes are their windows then."""
    order: Order = ()
    """With cuts: the order of a picture's axes, of height, width and channel."""

    def done(
        self, values: torch.Tensor, axis: int | None, device: torch.device | None
    ) -> torch.Tensor:
        """Return the batch's bytes, on the device or, where it does not do it alike, on the CPU.

        Args:
            values: uint8, as they left.
            axis: of the channels, as far as it is known.
            device: None for the CPU.
        """
        place = CPU if device is None else device
        if self.cuts:
            pictures = scaled_on(place, values.view(-1, CHANNELS), self.cuts)
            values = laid_out(pictures, self.order)
        if self.colours:
            assert axis is not None, "the channels of a picture whose colours wait are known"
            values = changed_on(place, values, axis, self.colours)
        return values


def scaled_on(device: torch.device, windows: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Return the pictures scaled, (pictures, height, width, 3)."""

    def is_alike() -> bool:
        few = cuts[:COMPARED]
        part = windows[: sum(cut.pixels for cut in few)]
        return torch.equal(scaled(part.to(device), few).cpu(), scaled(part, few))

    place = device if _is_trusted(device, "scaling", is_alike) else CPU
    return scaled(sent(windows, place), cuts)


def changed_on(
    device: torch.device, values: torch.Tensor, axis: int, colours: Sequence[Colours]
) -> torch.Tensor:
    """Return the pictures with their colours changed."""
    change = functools.partial(
        coloured, axis=axis, colours=colours, has_batch=values.dim() > PICTURE_DIMS
    )

    def is_alike() -> bool:
        return torch.equal(change(values.to(device)).cpu(), change(values.cpu()))

    kinds = sorted({kind for one in colours for kind, _ in one})
    place = device if _is_trusted(device, f"colours {kinds}", is_alike) else CPU
    return change(sent(values, place))


def _is_trusted(device: torch.device, work: str, is_alike: Callable[[], bool]) -> bool:
    if device.type == "cpu":
        return True
    key = (device.type, work)
    if key not in _ALIKE:
        _ALIKE[key] = is_alike()
    return _ALIKE[key]
