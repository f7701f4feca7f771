"""A shuffled order that costs nothing: the set is stored shuffled, and each epoch shuffles chunks
and a window.

python examples/articles/shuffling.py flatout pack photographs/ photographs.pack
"""

from itertools import pairwise

import torch

SAMPLES, CHUNK, WINDOW = 4096, 64, 512


def order(epoch):
    """Yield indices: whole chunks in random order, mixed in a window of a few of them."""
    generator = torch.Generator().manual_seed(epoch)
    window = []
    for chunk in torch.randperm(SAMPLES // CHUNK, generator=generator).tolist():
        window += range(chunk * CHUNK, (chunk + 1) * CHUNK)
        while len(window) >= WINDOW:
            place = int(torch.randint(len(window), (), generator=generator))
            window[place], window[-1] = window[-1], window[place]
            yield window.pop()
    rest = torch.randperm(len(window), generator=generator).tolist()
    yield from (window[place] for place in rest)


first, second = list(order(0)), list(order(1))
neighbours = sum(abs(a - b) == 1 for a, b in pairwise(first))  # 2 of 4096 in a full shuffle
print(
    "result: each sample once an epoch: "
    f"{sorted(first) == sorted(second) == list(range(SAMPLES))}; "
    f"another order each: {first != second}; "
    f"neighbours that stay together, in percent: {100 * neighbours / SAMPLES:.0f}"
)
