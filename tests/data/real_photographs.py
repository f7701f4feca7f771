"""Real photographs, those that scikit-image and scikit-learn ship, as a folder of classes."""

import pytest
from PIL import Image

from scenarios.photographs import SOURCES, source_path

PARTS = {
    "whole": (0, 0, 1, 1),
    "left": (0, 0, 0.6, 1),
    "right": (0.4, 0, 1, 1),
    "top": (0, 0, 1, 0.6),
    "bottom": (0, 0.4, 1, 1),
}
"""Parts of a photograph that are pictures of their own: left, top, right and bottom as shares."""


def write_real(folder):
    """Write parts of every photograph, 1 to 5 of a class: JPEGs as cameras write them.

    Skips the test where a package that ships some of them is not installed.
    """
    for place, (name, (package, _)) in enumerate(SOURCES.items()):
        if source_path(name) is None:
            pytest.skip(f"needs the photographs of {package}")
        image = Image.open(source_path(name)).convert("RGB")
        (folder / name).mkdir(parents=True)
        for part in list(PARTS)[: 1 + place % len(PARTS)]:
            left, top, right, bottom = PARTS[part]
            width, height = image.size
            box = (left * width, top * height, right * width, bottom * height)
            cut = image.crop(tuple(map(round, box)))
            cut.save(folder / name / f"{part}.jpg", quality=95, subsampling="4:2:0")
    return folder
