import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flatout.data.sampler import (
    block_permutation,
    permutation,
    sample_seed,
    seeded,
)

SAMPLES, CLASSES, BATCH = 100_000, 1_000, 256
FROZEN = [0, 2, 1, 5, 4, 3, 6, 7]
FROZEN_SEED = 6805285778459389952
"""Written down once: checkpoints of any version go on with the same order."""
SORTED = np.repeat(np.arange(CLASSES), SAMPLES // CLASSES)


def variance_ratio(labels, batch_size):
    """Return how much more unevenly classes fall into batches than by a uniform shuffle."""
    found = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    whole = len(found) // batch_size * batch_size
    classes = int(found.max()) + 1 if len(found) else 0
    if classes < 2 or whole < 2 * batch_size:
        return 1.0
    rows = found[:whole].reshape(-1, batch_size)
    numbers = np.arange(len(rows))[:, None] * classes + rows
    counts = np.bincount(numbers.ravel(), minlength=len(rows) * classes).reshape(-1, classes)
    shares = np.bincount(found[:whole], minlength=classes) / whole
    # Drawing without replacement: the hypergeometric variance, in all classes together.
    expected = batch_size * shares * (1 - shares) * (whole - batch_size) / (whole - 1)
    measured = ((counts - batch_size * shares) ** 2).mean(axis=0)
    return float(measured.sum() / expected.sum())


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 100))
def test_every_number_comes_once(samples, seed, epoch):
    assert sorted(permutation(samples, seed=seed, epoch=epoch)) == list(range(samples))


@given(st.integers(0, 20_000), st.integers(1, 16), st.integers(0, 100))
def test_every_number_comes_once_in_blocks_too(samples, block, epoch):
    window = -(-4096 // block) * block

    found = block_permutation(samples, seed=1, epoch=epoch, block=block, window=window)

    assert sorted(found) == list(range(samples))


def test_the_order_is_a_function_of_seed_and_epoch_and_nothing_else():
    first = permutation(1000, seed=3, epoch=2)
    np.random.seed(0)
    np.random.rand(7)

    assert np.array_equal(first, permutation(1000, seed=3, epoch=2))
    assert not np.array_equal(first, permutation(1000, seed=3, epoch=3))
    assert not np.array_equal(first, permutation(1000, seed=4, epoch=2))


def test_the_order_of_a_seed_stays_the_same_over_versions():
    assert permutation(8, seed=0, epoch=0).tolist() == FROZEN
    assert sample_seed(0, 1, 2) == FROZEN_SEED


def test_each_number_is_as_likely_at_each_slot():
    orders = np.stack([permutation(12, seed=5, epoch=epoch) for epoch in range(6000)])
    counts = np.stack([np.bincount(orders[:, slot], minlength=12) for slot in range(12)])

    assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def buffered(samples, shard, size, seed=1):
    """Return the order of a shuffle buffer over shards in random order, as tar loaders have it."""
    random = np.random.default_rng(seed)
    starts = random.permutation(samples // shard) * shard
    held, out = [], []
    for sample in (start + place for start in starts for place in range(shard)):
        if len(held) < size:
            held.append(sample)
            continue
        place = int(random.random() * len(held))
        out.append(held[place])
        held[place] = sample
    random.shuffle(held)
    return np.array([*out, *held])


def test_blocks_of_a_shuffled_store_mix_like_a_uniform_shuffle():
    store = permutation(SAMPLES, seed=9, epoch=0)

    uniform = variance_ratio(SORTED[permutation(SAMPLES, seed=1, epoch=0)], BATCH)
    blocks = variance_ratio(SORTED[store[block_permutation(SAMPLES, seed=1, epoch=0)]], BATCH)

    assert uniform == pytest.approx(1.0, abs=0.03)
    assert blocks == pytest.approx(1.0, abs=0.03)


def test_counts_of_classes_in_blocked_batches_pass_the_chi_square_test():
    labels = np.arange(SAMPLES) % 10
    store = permutation(SAMPLES, seed=9, epoch=0)
    order = store[block_permutation(SAMPLES, seed=2, epoch=0)]

    rows = labels[order][: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([np.bincount(row, minlength=10) for row in rows])
    # Of each batch the statistic with 9 degrees of freedom: their sum has 9 a batch.
    statistic = ((counts - BATCH / 10) ** 2 / (BATCH / 10)).sum()
    low, high = stats.chi2.interval(1 - 1e-3, df=9 * len(rows))
    assert low < statistic * (SAMPLES - 1) / (SAMPLES - BATCH) < high


def test_a_buffer_of_1000_over_class_sorted_shards_is_about_12_times_worse_and_refused():
    ratio = variance_ratio(SORTED[buffered(SAMPLES, 1_000, 1_000)], BATCH)

    assert 10 < ratio < 15
    assert ratio > 1.5


def test_blocks_of_a_class_sorted_store_are_refused():
    order = block_permutation(SAMPLES, seed=1, epoch=0)

    assert variance_ratio(SORTED[order], BATCH) > 1.5


def test_batches_do_not_stay_together_from_epoch_to_epoch():
    first, second = (block_permutation(SAMPLES, seed=1, epoch=epoch) for epoch in range(2))
    batch_of = np.empty(SAMPLES, dtype=int)
    batch_of[second] = np.arange(SAMPLES) // (8 * BATCH)

    stuck = [
        np.bincount(batch_of[first[start : start + BATCH]]).max() / BATCH
        for start in range(0, SAMPLES - BATCH, 7 * BATCH)
    ]

    assert np.mean(stuck) < 0.08  # 0.044 by chance, 0.38 with a buffer of 1,000


@pytest.mark.parametrize("options", [{"block": 0}, {"block": 17}, {"window": 64}, {"block": 10}])
def test_blocks_that_mix_badly_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        block_permutation(100, seed=0, epoch=0, **options)


def test_a_seeded_block_draws_the_same_and_leaves_the_streams_alone():
    import random

    import torch

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    plain = [drawn(), drawn()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = drawn()
    with seeded(sample_seed(0, 3, 5)):
        one = drawn()
    with seeded(sample_seed(0, 3, 5)):
        two = drawn()
    second = drawn()

    assert [first, second] == plain
    assert one == two
    assert one not in plain
