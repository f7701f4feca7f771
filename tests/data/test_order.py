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
    spread_windows,
    unevenness,
)

SAMPLES, CLASSES, BATCH = 100_000, 1_000, 256
FROZEN = [0, 2, 1, 5, 4, 3, 6, 7]
FROZEN_SEED = 6805285778459389952
"""Written down once: checkpoints of any version go on with the same order."""
SORTED = np.repeat(np.arange(CLASSES), SAMPLES // CLASSES)


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 100))
def test_every_number_comes_once(samples, seed, epoch):
    assert sorted(permutation(samples, seed=seed, epoch=epoch)) == list(range(samples))


@given(st.integers(0, 20_000), st.integers(1, 16), st.integers(0, 100))
def test_every_number_comes_once_in_blocks_too(samples, block, epoch):
    window = -(-4096 // block) * block

    found = block_permutation(samples, seed=1, epoch=epoch, block=block, window=window)

    assert sorted(found) == list(range(samples))


@given(st.integers(0, 20_000), st.sampled_from([1, 2, 8, 16]), st.integers(0, 100))
def test_every_number_comes_once_in_windows_with_blocks_from_everywhere(samples, block, seed):
    windows = spread_windows(samples, seed=seed, epoch=0, block=block, window=4096)

    assert sorted(np.concatenate(windows)) == list(range(samples))
    # Each window has one block of every stretch: its size differs by one block at most.
    assert max(map(len, windows)) - min(map(len, windows)) <= 2 * block


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

    uniform = unevenness(SORTED[permutation(SAMPLES, seed=1, epoch=0)], BATCH)
    blocks = unevenness(SORTED[store[block_permutation(SAMPLES, seed=1, epoch=0)]], BATCH)

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
    ratio = unevenness(SORTED[buffered(SAMPLES, 1_000, 1_000)], BATCH)

    assert 10 < ratio < 15
    assert ratio > 1.5


def test_blocks_of_a_class_sorted_store_are_refused():
    order = block_permutation(SAMPLES, seed=1, epoch=0)

    assert unevenness(SORTED[order], BATCH) > 1.5


def spread(samples, *, seed, epoch, **options):
    return np.concatenate(spread_windows(samples, seed=seed, epoch=epoch, **options))


@pytest.mark.parametrize(
    ("classes", "block", "window"), [(10, 16, 4096), (100, 16, 8192), (1000, 8, 16_384)]
)
def test_spread_blocks_of_a_sorted_folder_mix_at_least_like_a_shuffled_store(
    classes, block, window
):
    labels = np.repeat(np.arange(classes), SAMPLES // classes)

    found = [
        unevenness(labels[spread(SAMPLES, seed=1, epoch=e, block=block, window=window)], BATCH)
        for e in range(4)
    ]

    assert np.mean(found) <= 1.03


def test_blocks_of_many_small_classes_do_not_fit_into_a_small_window():
    assert unevenness(SORTED[spread(SAMPLES, seed=1, epoch=0)], BATCH) > 1.2


def test_each_number_of_spread_blocks_is_as_likely_in_each_window():
    seen = np.zeros((3, 768), dtype=int)
    for seed in range(600):
        for number, window in enumerate(spread_windows(12_288, seed=seed, epoch=0)):
            seen[number, np.unique(window // 16)] += 1

    # Blocks of one stretch share the windows out among them: two degrees of freedom for each.
    statistic = ((seen - 200) ** 2 / 200).sum()
    low, high = stats.chi2.interval(1 - 1e-3, df=2 * 768)
    assert low < statistic < high


@pytest.mark.parametrize("order", [block_permutation, spread])
def test_batches_do_not_stay_together_from_epoch_to_epoch(order):
    first, second = (order(SAMPLES, seed=1, epoch=epoch) for epoch in range(2))
    batch_of = np.empty(SAMPLES, dtype=int)
    batch_of[second] = np.arange(SAMPLES) // (8 * BATCH)

    stuck = [
        np.bincount(batch_of[first[start : start + BATCH]]).max() / BATCH
        for start in range(0, SAMPLES - BATCH, 7 * BATCH)
    ]

    assert np.mean(stuck) < 0.08  # 0.044 by chance, 0.38 with a buffer of 1,000


@pytest.mark.parametrize("options", [{"block": 0}, {"block": 17}, {"window": 64}, {"block": 10}])
@pytest.mark.parametrize("order", [block_permutation, spread_windows])
def test_blocks_that_mix_badly_are_refused(order, options):
    with pytest.raises(ValueError, match="must be"):
        order(100, seed=0, epoch=0, **options)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1] * 8, 0.0),
        ([0] * 8 + [1] * 8, 5.0),
        ([3] * 16, 1.0),
        ([0, 1, 2], 1.0),
        ([], 1.0),
        (list("aabb") * 4 + ["c"] * 3, 0.0),
    ],
)
def test_unevenness_is_the_spread_of_the_counts_over_that_of_a_shuffle(labels, expected):
    assert unevenness(labels, 4) == pytest.approx(expected)


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
