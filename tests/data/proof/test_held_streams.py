"""A batch that is made a second time has the draws that the script's own batch has."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from flatout.data.byte_batches.transport import PackingCollate
from tests.data.test_writing import batch_bits

SIDE = 40
AT_MODULE = np.random.default_rng(0)


class Drawing(Dataset):
    """Noise on pictures, drawn from a generator; a rare one is written to in place."""

    def __init__(self, generator, draw, rare=4):
        self.held = {"of noise": [generator]}
        self.draw, self.rare = draw, rare

    def __len__(self):
        return 9

    def __getitem__(self, index):
        value = float(self.draw(self.held["of noise"][0]))
        pixels = torch.full((3, SIDE, SIDE), index, dtype=torch.uint8).float() / 255
        if index == self.rare:
            part = pixels[:2]
            pixels[:, 0] = 0.5  # cannot be followed: the batch is made again
            assert part[0, 0, 0] == 0.5
        return pixels, torch.tensor(value)


class Lazily(Drawing):
    """Makes its generator with its first sample, as those do that are copied to workers."""

    def __getitem__(self, index):
        if self.held["of noise"][0] is None:
            self.held["of noise"][0] = np.random.default_rng(5)
        return super().__getitem__(index)


class AtModule(Drawing):
    def __getitem__(self, index):
        pixels, _ = super().__getitem__(index)
        return pixels, torch.tensor(AT_MODULE.random())


class MadeWithTheFirst(Drawing):
    """Makes its generator with its first sample, in the very batch that is made again."""

    rng = None

    def __init__(self):
        super().__init__(None, of_numpy, rare=1)

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(5)
        self.held["of noise"][0] = self.rng
        return super().__getitem__(index)


def of_numpy(generator):
    return generator.random()


def of_torch(generator):
    return torch.rand(1, generator=generator)


GENERATORS = {
    "numpy": lambda: Drawing(np.random.default_rng(3), of_numpy),
    "numpy's older": lambda: Drawing(np.random.RandomState(3), lambda g: g.rand()),
    "torch": lambda: Drawing(torch.Generator().manual_seed(3), of_torch),
    "python": lambda: Drawing(random.Random(3), of_numpy),
    "made late": lambda: Lazily(None, of_numpy),
    "made with the first sample": MadeWithTheFirst,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_of_the_data_set_draw_no_more_than_the_scripts(make, workers):
    plain, _ = batch_bits(make(), packs=False, workers=workers)
    packed, plan = batch_bits(make(), packs=True, workers=workers)

    assert packed == plain
    if not workers:
        assert "while a view of it is in use" in plan.trouble


def test_so_do_those_of_the_scripts_module():
    AT_MODULE.bit_generator.state = np.random.default_rng(8).bit_generator.state
    plain, _ = batch_bits(AtModule(random.Random(1), of_numpy), packs=False)
    AT_MODULE.bit_generator.state = np.random.default_rng(8).bit_generator.state
    packed, _ = batch_bits(AtModule(random.Random(1), of_numpy), packs=True)

    assert packed == plain


class Mixing:
    """A collation that draws."""

    def __init__(self):
        self.generator = np.random.default_rng(2)

    def __call__(self, samples):
        pixels, drawn = default_collate(samples)
        return pixels, drawn + self.generator.random()


def closed_over():
    generator = np.random.default_rng(2)

    def collate(samples):
        pixels, drawn = default_collate(samples)
        return pixels, drawn + generator.random()

    return collate


@pytest.mark.parametrize("make", [Mixing, closed_over])
def test_so_do_those_of_the_collation(make):
    class Late(Drawing):
        def __getitem__(self, index):
            return super().__getitem__(index)

    def writing(collate):
        def then_write(samples):
            pixels, drawn = collate(samples)
            if drawn.shape[0] and samples[0][0][0, 5, 5] > 2 / 255:
                part = pixels[:2]
                pixels[:, :, 0] = 0  # after the draw
                assert not part[0, 0, 0, 0]
            return pixels, drawn

        return then_write

    plain, _ = batch_bits(
        Late(random.Random(1), of_numpy, rare=-1), packs=False, collate_fn=writing(make())
    )
    packed, plan = batch_bits(
        Late(random.Random(1), of_numpy, rare=-1), packs=True, collate_fn=writing(make())
    )

    assert packed == plain
    assert "while a view of it is in use" in plan.trouble


def test_a_loader_that_is_iterated_again_goes_on_from_where_it_was():
    found = []
    for packs in (False, True):
        loader = DataLoader(Drawing(np.random.default_rng(3), of_numpy), 3)
        if packs:
            loader.collate_fn = PackingCollate(loader.collate_fn)
        found.append([drawn.tolist() for _ in range(3) for _, drawn in loader])

    assert found[0] == found[1]
