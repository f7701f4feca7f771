"""Streams through the allocator: peaks, retries, what does not fit, what is added to them."""

import pytest

from flatout.hardware.catalogue import find_gpu
from flatout.planner.allocator_settings import parse_settings
from flatout.planner.largest_batch import affine
from flatout.planner.replay import alive_at, components_at, replay
from flatout.planner.workspaces import find_calibration, whole_at, with_workspaces
from flatout.records.memory_stream import (
    Allocation,
    Component,
    Draft,
    NotSteadyError,
    Phase,
    lives_of,
    repeated,
    step_bounds,
)
from flatout.records.units import MIB
from tests.support.toy import toy_stream


def births_after(stream, position):
    return sum(event.born for event in stream.events[position:])


def test_the_peak_is_at_least_what_is_alive_and_at_most_what_is_reserved():
    stream = toy_stream()

    found = replay(stream)

    assert max(stream.alive()) <= found.peak_allocated <= found.peak_reserved
    assert found.fits
    assert found.retries_by_step == (0, 0)


def test_components_at_the_peak_are_all_that_is_alive_there():
    stream = toy_stream()

    found = replay(stream)

    assert sum(components_at(stream, found.peak_at).values()) == stream.alive()[found.peak_at]
    sizes = [stream.allocations[index].size for index in alive_at(stream, found.peak_at)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_device_that_is_just_too_small_first_retries_and_then_is_full():
    stream = toy_stream(16)
    enough = replay(stream).peak_reserved
    needed = replay(stream).peak_allocated

    assert replay(stream, capacity=enough).fits
    assert replay(stream, capacity=enough).steady_retries == 0
    squeezed = [replay(stream, capacity=size) for size in range(needed, enough, 2 * MIB)]
    assert any(one.fits and sum(one.retries_by_step) for one in squeezed)
    assert not replay(stream, capacity=needed - 2 * MIB).fits
    assert replay(stream, capacity=needed - 2 * MIB).full_at is not None


def test_expandable_segments_reserve_no_more_than_pages_beyond_what_is_allocated():
    stream = toy_stream()

    default, expandable = replay(stream), replay(stream, parse_settings("expandable_segments:True"))

    assert expandable.peak_reserved <= default.peak_reserved


def test_repeated_steps_end_as_they_began():
    stream = toy_stream()
    long = toy_stream(steps=5)

    found = repeated(stream, 3)

    assert found.steps == 5
    assert len(found.events) == len(long.events)
    assert found.alive() == long.alive()
    assert [mark[1:] for mark in found.marks] == [mark[1:] for mark in long.marks]
    assert replay(found).peak_reserved == replay(long).peak_reserved


def test_one_step_cannot_be_repeated():
    with pytest.raises(NotSteadyError, match="two traced steps"):
        repeated(toy_stream(steps=1), 2)


def test_a_step_that_leaves_more_behind_than_it_found_cannot_be_repeated():
    stream = toy_stream()
    start, _end = step_bounds(stream, 1)
    draft = Draft(stream)
    draft.add(stream.allocations[0], start + 1, None)

    with pytest.raises(NotSteadyError, match="leaves other sizes"):
        repeated(draft.build(), 1)


def test_an_edited_stream_keeps_every_other_life():
    stream = toy_stream()
    lives = lives_of(stream)
    temporary = next(
        index
        for index, allocation in enumerate(stream.allocations)
        if allocation.phase is Phase.OPTIMIZER and allocation.component is Component.TEMPORARIES
    )
    draft = Draft(stream)
    draft.drop(temporary)
    draft.resize(0, 17)

    found = draft.build("one temporary less")

    assert found.allocations[0].size == 17
    assert len(found.events) == len(stream.events) - 2
    assert births_after(found, 0) == births_after(stream, 0) - 1
    assert found.notes == ("one temporary less",)
    assert [life.death is None for life in lives_of(found)].count(True) >= [
        life.death is None for life in lives
    ].count(True)


def test_what_is_dropped_stays_dropped_whenever_it_was_to_die():
    stream = toy_stream()
    first, second = Draft(stream), Draft(stream)
    first.die_before(0, len(stream.events))
    for draft in (first, second):
        draft.drop(0)
    first.die_before(0, 1)

    assert first.build() == second.build()


def test_other_sizes_alone_leave_the_events_as_they_are():
    stream = toy_stream()
    draft = Draft(stream)
    draft.resize(3, 17)

    found = draft.build("smaller")

    assert (found.events, found.marks) == (stream.events, stream.marks)
    assert found.allocations[3].size == 17
    assert found.notes == ("smaller",)


def test_workspaces_at_another_batch_are_those_that_its_own_stream_would_have():
    def summing(batch):
        stream = toy_stream(batch)
        draft = Draft(stream)
        gradient = Allocation(
            size=4 * 512,
            component=Component.TEMPORARIES,
            phase=Phase.BACKWARD,
            step=1,
            operator="aten.sum.dim_IntList",
            shape=(512,),
            dtype="float32",
            arguments=((64 * batch, 512), (0,), (0,)),
        )
        start, _end = step_bounds(stream, 1)
        draft.add(gradient, start + 20, start + 30)
        return draft.build()

    model = affine(summing(2), summing(3))
    calibration = find_calibration(find_gpu("a100-80"), "2.13.0")

    at = whole_at(model, calibration)

    batches = (1, 2, 7, 300)
    for batch in batches:
        assert at(batch) == with_workspaces(model.at(batch), calibration)
    sums = [a.size for b in batches for a in at(b).allocations if a.operator == "workspace of sum"]
    assert len(sums) == len(batches)
    assert len(set(sums)) > 1  # not so much a sample: its rule has steps


def test_workspaces_of_cublas_are_taken_once_a_thread_and_stay():
    stream = toy_stream()
    calibration = find_calibration(find_gpu("h200"), "2.13.0")

    found = with_workspaces(stream, calibration)

    added = [a for a in found.allocations if a.component is Component.WORKSPACE]
    assert [(a.size, a.phase, a.step) for a in added] == [
        (32 * MIB, Phase.FORWARD, 0),
        (MIB, Phase.FORWARD, 0),
        (32 * MIB, Phase.BACKWARD, 0),
    ]
    assert found.alive()[-1] == stream.alive()[-1] + 65 * MIB
    old = find_calibration(find_gpu("a100-80"), "2.13.0")
    assert with_workspaces(stream, old).alive()[-1] == stream.alive()[-1] + 2 * 8_519_680 + MIB


def test_attention_s_backward_holds_a_sum_in_fp32_only_while_it_runs():
    stream = toy_stream()
    start, _end = step_bounds(stream, 1)
    shape = (2, 4, 64, 32)
    draft = Draft(stream)
    for arguments in (((1,),), (), ()):
        gradient = Allocation(
            size=2 * 4 * 64 * 32 * 2,
            component=Component.TEMPORARIES,
            phase=Phase.BACKWARD,
            step=1,
            operator="aten._scaled_dot_product_flash_attention_backward.default",
            shape=shape,
            dtype="bfloat16",
            arguments=arguments,
        )
        draft.add(gradient, start + 20, start + 30)
    calibration = find_calibration(find_gpu("a100-80"), "2.13.0")

    found = with_workspaces(draft.build(), calibration)

    sums = [a for a in found.allocations if a.operator == "workspace of attention backward"]
    assert [a.size for a in sums] == [4 * (2 * 4 * 64 * 32 + 2 * 4 * 64)]
    assert found.alive()[-1] == stream.alive()[-1] + 2 * 8_519_680 + MIB


def test_a_convolution_holds_its_copies_only_while_it_runs():
    stream = toy_stream()
    start, _end = step_bounds(stream, 1)
    draft = Draft(stream)
    output = Allocation(
        size=2 * 128 * 32 * 32 * 2,
        component=Component.TEMPORARIES,
        phase=Phase.FORWARD,
        step=1,
        operator="aten.convolution.default",
        shape=(2, 128, 32, 32),
        dtype="bfloat16",
        arguments=(
            *((2, 64, 32, 32), (128, 64, 3, 3), ()),
            *((1, 1), (1, 1), (1, 1), (0,), (0, 0), (1,), (0,)),
        ),
    )
    draft.add(output, start + 20, start + 30)
    calibration = find_calibration(find_gpu("a100-80"), "2.13.0")

    found = with_workspaces(draft.build(), calibration)

    copies = [a for a in found.allocations if a.operator == "workspace of convolution"]
    pixels = 2 * 32 * 32
    assert [a.size for a in copies] == [2 * (pixels * 64 + pixels * 128 + 128 * 64 * 9)]
    assert found.alive()[-1] == stream.alive()[-1] + 2 * 8_519_680 + MIB
