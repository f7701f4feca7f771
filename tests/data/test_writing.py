"""Data sets that look into a picture they scaled, or write into it, and the batches they get."""

import copy
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.data.byte_batches.levels import UnfollowableError
from flatout.data.byte_batches.lookup_tracing import Following
from flatout.data.byte_batches.transport import PackingCollate
from tests.data.tails import Pictures, noisy_pictures


@pytest.fixture(scope="module")
def pictures():
    return noisy_pictures()


def scaled(image):
    return np.asarray(image, dtype=np.float32) / 255


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def part_by_number(x):
    c = x[3]
    c *= 0


def part_by_ellipsis(x):
    x[...][:5] = 0


def row_of_row(x):
    x[0][...] = 0


def channel(x):
    x[..., 0][:] = 0.5


def rows(x):
    for row in x:
        row[:4] = 0


def filled(x):
    x.fill(0.25)


def sorted_(x):
    x.sort(axis=0)


def flat(x):
    x.flat[7] = 1


def reshaped(x):
    np.reshape(x, -1)[:100] = 0


def split(x):
    np.split(x, 2)[1][...] = 0


def clipped_out(x):
    np.clip(x, 0, 0.5, out=x)


def clipped_method(x):
    x.clip(0, 0.5, out=x)


def copied_to(x):
    np.copyto(x, 0)


def shuffled(x):
    np.random.seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in scripts: no warning is an error
        np.random.shuffle(x)


def nan_to_num(x):
    np.nan_to_num(x, copy=False, posinf=0)


def filled_diagonal(x):
    np.fill_diagonal(x[:50, :50, 0], 0)


def put(x):
    np.put(x, [1, 2], 9)


def added_at(x):
    np.add.at(x, (0, 0), 1)


def squared(x):
    x **= 2


def taken_as_buffer(x):
    np.lib.stride_tricks.as_strided(x, (4,), (4,))[...] = 0


def from_its_tensor(x):
    torch.from_numpy(x).zero_()


def from_its_tensor_scaled(x):
    t = torch.from_numpy(x)
    t.mul_(2)


def as_array_again(x):
    y = np.asarray(x, dtype=np.float32)
    y -= 0.5


ARRAYS = (
    *(part_by_number, part_by_ellipsis, row_of_row, channel, rows, filled, sorted_, flat),
    *(reshaped, split, clipped_out, clipped_method, copied_to, shuffled, nan_to_num, put),
    *(filled_diagonal, added_at, squared, taken_as_buffer, from_its_tensor, as_array_again),
    *(from_its_tensor_scaled,),
)


def part_zeroed(t):
    t[0].zero_()


def part_added(t):
    t[0] += 1


def part_of_part(t):
    t[0][...] = 0


def selected(t):
    t.select(0, 1).mul_(2)


def unbound(t):
    t.unbind(0)[2].fill_(1)


def narrowed(t):
    t.narrow(1, 2, 5).fill_(1)


def viewed(t):
    t.contiguous().view(-1)[:7] = 0


def detached(t):
    t.detach()[0].zero_()


def as_numpy(t):
    t.numpy()[0] = 0


def through_data(t):
    t.data[1] = 0


def chunked(t):
    torch.chunk(t, 3)[0].zero_()


def rectified(t):
    torch.nn.functional.relu(t[:, 2:8], inplace=True).sub_(1)


def thresholded(t):
    torch.nn.functional.threshold(t, 0.5, 0.0, inplace=True)


def clamped_out(t):
    torch.clamp(t, 0, 0.5, out=t)


def many_at_once(t):
    torch._foreach_mul_([t], 2.0)


def made_float_again(t):
    t.float().div_(2)


def iterated(t):
    for plane in t:
        plane.zero_()


TENSORS = (
    *(part_zeroed, part_added, part_of_part, selected, unbound, narrowed, viewed, detached),
    *(as_numpy, through_data, chunked, rectified, thresholded, clamped_out, many_at_once),
    *(made_float_again, iterated),
)


class Changed:
    """Scale a picture and do something to it on the way."""

    def __init__(self, begin, change):
        self.begin, self.change = begin, change

    def __call__(self, image):
        x = self.begin(image)
        self.change(x)
        return x


def batch_bits(dataset, *, packs, workers=0, **options):
    torch.manual_seed(1)
    random.seed(1)
    loader = DataLoader(dataset, 3, num_workers=workers, **options)
    if packs:
        loader.collate_fn = PackingCollate(loader.collate_fn)
    found = [
        (x.dtype, x.shape, x.stride(), x.contiguous().view(torch.uint8).numpy().tobytes())
        for batch in loader
        for x in batch
    ]
    return found, loader.collate_fn


CASES = [(scaled, change) for change in ARRAYS] + [(tensor, change) for change in TENSORS]


@pytest.mark.parametrize(("begin", "change"), CASES)
def test_what_is_written_into_a_scaled_picture_is_never_lost(pictures, begin, change):
    dataset = Pictures(pictures, Changed(begin, change))

    plain, _ = batch_bits(dataset, packs=False)
    packed, _ = batch_bits(dataset, packs=True)

    assert packed == plain


@pytest.mark.parametrize(
    ("begin", "change"), [(scaled, part_by_number), (scaled, filled), (tensor, part_zeroed)]
)
def test_the_same_in_a_worker(pictures, begin, change):
    dataset = Pictures(pictures, Changed(begin, change))

    plain, _ = batch_bits(dataset, packs=False, workers=1)
    packed, _ = batch_bits(dataset, packs=True, workers=1)

    assert packed == plain


def looked_at(x):
    assert x[0, 0, 0] >= 0
    assert x.max() <= 1
    assert x.shape == (50, 60, 3)
    assert (x >= 0).all()
    assert np.mean(x) > 0
    assert len(x) == 50


def test_a_picture_that_is_only_looked_at_still_travels_as_bytes(pictures):
    dataset = Pictures(pictures, Changed(scaled, looked_at))

    plain, _ = batch_bits(dataset, packs=False)
    packed, plan = batch_bits(dataset, packs=True)

    assert packed == plain
    assert plan.trouble == ""
    assert plan.packed == 2


def rare(image):
    x = scaled(image)
    if x[0, 0, 0] > 0.5:
        x[0].fill(0)
    return x


def test_pictures_of_which_some_are_written_into_make_one_batch(pictures):
    plain, _ = batch_bits(Pictures(pictures, rare), packs=False)
    packed, plan = batch_bits(Pictures(pictures, rare), packs=True)

    assert packed == plain
    assert plan.trouble == ""


def test_a_picture_whose_view_is_in_use_is_not_written_into(pictures):
    with Following().opened():
        x = scaled(pictures[0])
        turned = x.T

        with pytest.raises(UnfollowableError, match="while a view of it is in use"):
            x[0].fill(0)
        assert turned.shape == (3, 60, 50)


SAME_ANSWER = {
    "equal": lambda x: (x == 0.2).sum(),
    "unequal": lambda x: (x != 0.2).sum(),
    "less": lambda x: (x < 0.5).sum(),
    "in a condition": lambda x: np.where(x > 0.5, 1, 0).sum(),
    "instance": lambda x: isinstance(x, np.ndarray),
    "in": lambda x: x[0, 0, 0] in x,
    "length": len,
    "rows": lambda x: [row.sum() for row in x],
    "number": lambda x: float(x[:1, :1, :1][0, 0, 0]),
    "negative": lambda x: (-x).sum(),
    "power": lambda x: (x**2).sum(),
    "whole": lambda x: (x // 0.1).sum(),
    "product": lambda x: (x[:, :, 0] @ x[:, :, 0].T).sum(),
    "text": repr,
    "copied": lambda x: copy.copy(x).sum() + copy.deepcopy(x).sum(),
    "pickled": lambda x: type(pickle.loads(pickle.dumps(x))),
    "no such name": lambda x: hasattr(x, "nothing_such"),
}


@pytest.mark.parametrize("ask", SAME_ANSWER.values(), ids=SAME_ANSWER)
def test_whatever_is_asked_of_a_scaled_picture_has_the_arrays_answer(pictures, ask):
    wanted = ask(scaled(pictures[0]))

    with Following().opened():
        found = ask(scaled(pictures[0]))

    assert found == wanted


def test_a_scaled_picture_is_true_or_false_as_its_array_is(pictures):
    with Following().opened():
        x = scaled(pictures[0])
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x)
        with pytest.raises(TypeError, match="only"):
            float(x)
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)


def test_setting_what_an_array_has_cannot_be_followed(pictures):
    with Following().opened():
        x = scaled(pictures[0])

        with pytest.raises(UnfollowableError, match="shape"):
            x.shape = (-1,)
