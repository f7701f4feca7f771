"""JPEG, PNG or raw: bytes to read against time to decode, on your own pictures.

python examples/articles/data_format.py [FOLDER] flatout pack photographs/ photographs.pack # the
fast format
"""

import io
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
if folder:
    pictures = [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.jpg"))[:20]]
else:  # smooth pictures with some noise: what a photograph is to a compressor
    y, x = np.mgrid[0:256, 0:256]
    noise = np.random.default_rng(0).normal(0, 6, (8, 256, 256, 3))
    pictures = [
        Image.fromarray(
            np.clip(np.stack([x, y, (x + y) / 2], -1) + noise[i], 0, 255).astype("uint8")
        )
        for i in range(8)
    ]
sizes, times = {}, {}
for name, options in {"JPEG": {"quality": 90}, "PNG": {}, "BMP": {}}.items():
    files = []
    for picture in pictures:
        file = io.BytesIO()
        picture.save(file, name, **options)
        files.append(file.getvalue())
    begun = time.perf_counter()
    for data in files:
        np.asarray(Image.open(io.BytesIO(data)))
    sizes[name], times[name] = sum(map(len, files)), time.perf_counter() - begun
    print(
        f"{name}: {sizes[name] // len(files):8d} bytes, "
        f"{1e3 * times[name] / len(files):6.2f} ms to decode"
    )
print(
    f"result: PNG takes more bytes than JPEG: {sizes['PNG'] > sizes['JPEG']}; "
    f"raw takes the most: {sizes['BMP'] == max(sizes.values())}"
)
