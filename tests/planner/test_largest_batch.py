"""From two traces to any batch, to the largest one, and to one that keeps the global batch."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.planner.allocator_settings import AllocatorSettings, parse_settings
from flatout.planner.largest_batch import (
    NotAffineError,
    accumulation,
    affine,
    difference,
    fits_steadily,
    largest_batch,
    steady_replay,
)
from flatout.planner.plan import formula
from flatout.planner.replay import components_at, replay
from flatout.records.memory_stream import Component
from flatout.records.units import MIB
from tests.support.toy import toy_stream


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 200), first=st.integers(1, 5))
def test_two_traces_give_every_batch_exactly(batch, first):
    model = affine(toy_stream(first), toy_stream(first + 1))

    found, truth = model.at(batch), toy_stream(batch)

    assert not difference(found, truth)[0]
    assert found.allocations == truth.allocations
    assert replay(found) == replay(truth)
    assert found.model_flops == pytest.approx(truth.model_flops)


def test_a_size_that_is_not_affine_shows_in_the_check():
    model = affine(toy_stream(2, odd=3), toy_stream(3, odd=3))

    differing, _ = difference(model.at(9), toy_stream(9, odd=3))

    assert differing == 2 * 4


def test_traces_of_different_computations_are_refused():
    with pytest.raises(NotAffineError, match="one trace"):
        affine(toy_stream(2, layers=3), toy_stream(3, layers=4))
    with pytest.raises(NotAffineError, match="different, known batches"):
        affine(toy_stream(2), toy_stream(2))


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_the_largest_batch_fits_and_one_more_does_not(text):
    model = affine(toy_stream(2), toy_stream(3))
    chosen, capacity = parse_settings(text), 700 * MIB

    found = largest_batch(model.at, capacity, chosen)

    assert found.without_retries
    assert found.with_retries >= found.without_retries
    assert steady_replay(model.at(found.with_retries), chosen, capacity).fits
    assert not steady_replay(model.at(found.with_retries + 1), chosen, capacity).fits
    assert steady_replay(model.at(found.without_retries), chosen, capacity).steady_retries == 0


def test_nothing_fits_a_device_smaller_than_the_parameters():
    found = largest_batch(affine(toy_stream(2), toy_stream(3)).at, 8 * MIB, AllocatorSettings())

    assert found.with_retries is None
    assert found.without_retries is None


@given(total=st.integers(1, 500), largest=st.integers(1, 600))
def test_accumulation_keeps_the_global_batch_in_the_fewest_steps(total, largest):
    found = accumulation(total, largest)

    assert found.micro_batch * found.steps == total
    assert found.micro_batch <= largest
    larger = range(found.micro_batch + 1, min(total, largest) + 1)
    assert not any(total % size == 0 for size in larger)


def bumped(at, batch, size):
    """Return streams of which those of one batch hold more for a moment, as a workspace does."""

    def bumped_at(asked):
        stream = at(asked)
        if asked != batch:
            return stream
        last = stream.allocations[-1]
        return replace(stream, allocations=(*stream.allocations[:-1], replace(last, size=size)))

    return bumped_at


def test_what_is_recommended_was_tried_where_memory_does_not_grow_with_the_batch():
    at, chosen = affine(toy_stream(2), toy_stream(3)).at, AllocatorSettings()
    capacity = 700 * MIB
    plain = largest_batch(at, capacity, chosen)
    uneven = bumped(at, plain.without_retries, 700 * MIB)

    found = largest_batch(uneven, capacity, chosen, own=plain.without_retries - 1)
    wanted = 2 * (plain.without_retries // 2)
    parts = accumulation(
        2 * wanted,
        plain.without_retries,
        lambda size: fits_steadily(bumped(at, wanted, 700 * MIB)(size), capacity, chosen),
    )

    assert found.without_retries < plain.without_retries
    assert fits_steadily(uneven(found.without_retries), capacity, chosen)
    assert parts.micro_batch < wanted
    assert parts.micro_batch * parts.steps == 2 * wanted


def test_the_script_s_own_batch_is_recommended_where_it_fits_and_smaller_ones_do_not():
    at, chosen = affine(toy_stream(2), toy_stream(3)).at, AllocatorSettings()
    capacity = 700 * MIB
    own = largest_batch(at, capacity, chosen).without_retries

    found = largest_batch(lambda batch: at(batch if batch == own else 2 * own), capacity, chosen)
    told = largest_batch(
        lambda batch: at(batch if batch == own else 2 * own), capacity, chosen, own=own
    )

    assert found.without_retries is None
    assert told.without_retries == told.with_retries == own


def test_nothing_is_accumulated_of_less_than_one_sample():
    assert accumulation(8, 0) is None


def test_the_formula_adds_three_terms_and_names_what_it_misses():
    stream = toy_stream()
    at_peak = components_at(stream, replay(stream).peak_at)
    largest = dict.fromkeys(Component, 10)

    estimate, missed = formula(at_peak, largest)

    assert estimate == 30
    assert set(missed) == {p.value for p in at_peak} - {
        "parameters",
        "activations",
        "optimizer",
    }
    assert list(missed.values()) == sorted(missed.values(), reverse=True)
