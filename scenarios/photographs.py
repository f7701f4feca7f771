"""Make a folder of ImageNet-like photographs from those that scikit-image and scikit-learn ship.

    python photographs.py FOLDER --count 600 --format jpeg

Each image is a jittered crop of one bundled photograph, about 500 by 375 pixels, and lies in the
folder of the photograph it was cut from, so that there is something to learn. Nothing is
downloaded. The same index always gives the same pixels, and images that exist are left alone, so
an interrupted run goes on where it stopped. Where one of the two packages is missing, its images
are left out. Sources and licences: docs/scenarios.md.
"""

import argparse
import functools
import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

SOURCES = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "retina": ("skimage", "data/retina.jpg"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
"""Class name -> package and path inside it. Every one is part of the package's wheel."""

SIZES = ((500, 375), (375, 500), (500, 333))
SIZE_ODDS = (0.6, 0.2, 0.2)
"""Width and height, and how often: about what ImageNet's photographs look like."""

GREY_NOISE, COLOUR_NOISE = 7.5, 2.5
"""Standard deviation of the sensor-like noise; it brings a JPEG to ImageNet's 75 KB or so."""

SUFFIXES = {"jpeg": ".jpg", "png": ".png"}


def source_path(name):
    """Return where a bundled photograph lies, or None if its package is not installed."""
    package, path = SOURCES[name]
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / path if spec else None


@functools.cache
def source(name):
    """Return one bundled photograph, read once per process."""
    return Image.open(source_path(name)).convert("RGB")


def photograph(index):
    """Return the class name and the pixels of one image; a function of the index alone."""
    name = list(SOURCES)[index % len(SOURCES)]
    random = np.random.default_rng(index)
    whole = source(name)
    width, height = SIZES[random.choice(len(SIZES), p=SIZE_ODDS)]
    scale = min(whole.width / width, whole.height / height) * random.uniform(0.7, 1.0)
    left = random.uniform(0, whole.width - width * scale)
    top = random.uniform(0, whole.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    image = whole.resize((width, height), Image.Resampling.LANCZOS, box=box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for enhance in (ImageEnhance.Color, ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = enhance(image).enhance(random.uniform(0.75, 1.25))
    noisy = np.asarray(image, dtype=np.float32)
    noisy = noisy + random.normal(0, GREY_NOISE, (height, width, 1))
    noisy = noisy + random.normal(0, COLOUR_NOISE, (height, width, 3))
    return name, Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_one(folder, index, suffix):
    """Write one image unless it exists; return whether it was written."""
    name = list(SOURCES)[index % len(SOURCES)]
    path = Path(folder) / name / f"{index:05d}{suffix}"
    if path.exists():
        return False
    image = photograph(index)[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
    options = {"quality": 90, "subsampling": "4:2:0"} if suffix == ".jpg" else {}
    image.save(unfinished, **options)
    unfinished.replace(path)
    return True


def write_photographs(folder, count, suffix=".jpg", processes=None):
    """Write the images with indices below `count` that are missing; return how many."""
    installed = [bool(source_path(name)) for name in SOURCES]
    indices = [index for index in range(count) if installed[index % len(SOURCES)]]
    if not indices:
        raise SystemExit("no photographs: pip install scikit-image scikit-learn")
    write = functools.partial(write_one, folder, suffix=suffix)
    with ProcessPoolExecutor(processes) as pool:
        return sum(pool.map(write, indices, chunksize=16))


def main():
    """Read the arguments and write the images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--format", choices=SUFFIXES, default="jpeg")
    parser.add_argument("--processes", type=int, default=None)
    args = parser.parse_args()
    suffix = SUFFIXES[args.format]
    written = write_photographs(args.folder, args.count, suffix, args.processes)
    images = sorted(args.folder.glob(f"*/[0-9]*{suffix}"))
    mean_kb = sum(path.stat().st_size for path in images) / len(images) / 1e3
    print(f"{args.folder}: {len(images)} images, {written} new, {mean_kb:.0f} KB on average")


if __name__ == "__main__":
    main()
