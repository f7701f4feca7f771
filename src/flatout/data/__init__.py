"""The input pipeline: where samples lie, in which order they come, and how they reach the loop.

    import flatout.data

    data = flatout.data.open("photographs.packed", transform=augment)

Opening imports torch; packing does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.data.crop_batches import cropped
    from flatout.data.random_crops import Crops, normalised
    from flatout.data.reader import BatchThreads, PackedDataset, collate
    from flatout.data.reader import open_packed as open  # noqa: A004  `flatout.data.open`
    from flatout.data.resident_pictures import load_pictures
    from flatout.data.sampler import GlobalOrder, OrderOptions
    from flatout.data.seeding import Seeded

__all__ = [
    "BatchThreads",
    "Crops",
    "GlobalOrder",
    "OrderOptions",
    "PackedDataset",
    "Seeded",
    "collate",
    "cropped",
    "load_pictures",
    "normalised",
    "open",
]

_PLACES = {
    "BatchThreads": ("flatout.data.reader", "BatchThreads"),
    "Crops": ("flatout.data.random_crops", "Crops"),
    "cropped": ("flatout.data.crop_batches", "cropped"),
    "load_pictures": ("flatout.data.resident_pictures", "load_pictures"),
    "normalised": ("flatout.data.random_crops", "normalised"),
    "open": ("flatout.data.reader", "open_packed"),
    "collate": ("flatout.data.reader", "collate"),
    "PackedDataset": ("flatout.data.reader", "PackedDataset"),
    "GlobalOrder": ("flatout.data.sampler", "GlobalOrder"),
    "Seeded": ("flatout.data.seeding", "Seeded"),
    "OrderOptions": ("flatout.data.sampler", "OrderOptions"),
}
"""Public name -> module and the name there; imported when first asked for."""


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
