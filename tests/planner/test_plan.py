"""From a stream to a plan: parts add up, techniques save what they say, the best comes first."""

from dataclasses import replace

import pytest

from flatout.analysis import stream_changes as transforms
from flatout.analysis.stream_changes import loss_indices, regions_of
from flatout.hardware.catalogue import find_gpu
from flatout.planner import memory_options
from flatout.planner.device_model import DeviceModel
from flatout.planner.largest_batch import affine
from flatout.planner.memory_options import Setup, candidates, ladder
from flatout.planner.plan import plan_of
from flatout.planner.replay import replay
from flatout.planner.workspaces import find_calibration, with_workspaces
from flatout.records.memory_stream import Allocation, Component, Phase, repeated
from flatout.records.plan import NumberSource
from flatout.records.recipe import Choice
from flatout.records.units import GIB, MIB
from flatout.techniques.memory.chunked_cross_entropy import chunked_loss
from flatout.techniques.model.lora import low_rank
from flatout.techniques.optimizer.adafactor import with_factored_states
from flatout.techniques.optimizer.eight_bit_optimizer import with_states_in_bytes
from flatout.techniques.optimizer.optimizer_in_backward import with_updates_in_backward
from tests.support.toy import TOKENS, VOCABULARY, WIDTH, toy_stream


def ground(gpu="l4", gpus=1):
    model = find_gpu(gpu)
    return DeviceModel(gpu=model, calibration=find_calibration(model, "2.13.0"), gpus=gpus)


def setup(batch=16, gpu="l4", layers=4, **given):
    here = ground(gpu, given.pop("gpus", 1))
    few, more = (with_workspaces(toy_stream(n, layers), here.calibration) for n in (2, 3))
    at = affine(few, more).at
    return Setup(stream=at(batch), ground=here, at=at, **given)


def peak(stream):
    return max(stream.alive())


def component_bytes(stream, component):
    return sum(a.size for a in stream.allocations if a.component is component)


def test_the_components_of_a_plan_add_up_to_what_is_used():
    plan = plan_of("train.py", setup(gpus=2))

    assert sum(amount.bytes for amount in plan.components.values()) == plan.used.bytes
    assert plan.used.low <= plan.used.bytes <= plan.used.high
    assert plan.allocated.bytes <= plan.reserved.bytes
    assert plan.components["nccl"].source is NumberSource.ASSUMED
    assert plan.fits
    assert plan.spare_bytes == plan.capacity_bytes - plan.used.bytes


def test_the_curve_goes_through_the_peak_and_its_parts_add_up():
    plan = plan_of("train.py", setup())

    assert max(count for _at, count in plan.timeline) == max(
        sum(row) for row in zip(*plan.parts.values(), strict=True)
    )
    assert len(next(iter(plan.parts.values()))) == len(plan.timeline)
    assert [sum(row) for row in zip(*plan.parts.values(), strict=True)] == [
        count for _at, count in plan.timeline
    ]


def test_the_largest_tensors_of_the_peak_come_with_their_lines():
    plan = plan_of("train.py", setup())

    sizes = [tensor.bytes for tensor in plan.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert {tensor.line for tensor in plan.largest if tensor.kind != "workspace"} == {"train.py:7"}
    assert plan.largest[0].shape == (16 * TOKENS, VOCABULARY)
    assert plan.peak_phase in ("forward", "backward")


def test_what_does_not_fit_says_how_to_keep_its_batch():
    plan = plan_of("train.py", setup(batch=4096, gpu="2GiB"), fit=True)

    assert not plan.fits
    assert plan.spare_bytes < 0
    assert plan.accumulating.micro_batch * plan.accumulating.steps == 4096
    assert plan.accumulating.micro_batch <= plan.largest_batch.without_retries
    assert plan_of("t", setup(batch=plan.largest_batch.without_retries, gpu="2GiB")).fits
    assert plan.ladder[0].fits
    assert "accumulate=" in plan.ladder[0].choices[0]


def test_micro_batches_leave_room_for_the_gradients_of_those_before_them():
    given = setup(batch=64, layers=60)
    part = given.at(32)
    gradients = component_bytes(part, Component.GRADIENTS) // 2

    stream = transforms.accumulated(part)
    ways = {rung.choices: rung for rung in ladder(given)}

    assert 0.9 * gradients < peak(stream) - peak(part) <= gradients
    assert component_bytes(stream, Component.GRADIENTS) == 2 * gradients
    assert repeated(stream, 1).steps == 3  # the last step ends as it began
    told = ways["batch=32 accumulate=2 (by hand)",].peak_bytes - given.ground.outside.bytes
    assert told == replay(stream).peak_reserved


def test_a_batch_that_no_device_holds_does_not_fit_and_is_counted_whole():
    plan = plan_of("train.py", setup(batch=100_000, layers=0, gpu="h200"))

    assert not plan.fits
    assert plan.allocated.bytes > 2 * 100_000 * TOKENS * VOCABULARY * 4


def test_retries_are_told_of_one_step_however_many_were_traced(monkeypatch):
    def retrying(*given, **more):
        return replace(replay(*given, **more), retries_by_step=(5, 2, 2))

    monkeypatch.setattr(memory_options, "replay", retrying)

    assert plan_of("train.py", setup()).retries == 2


def test_buckets_hold_gradients_that_a_script_sets_to_zero_and_keeps():
    plain = toy_stream()
    kept = [
        replace(a, component=Component.TEMPORARIES)
        if a.component is Component.GRADIENTS and a.step == 1
        else a
        for a in plain.allocations
    ]

    found = transforms.with_buckets(replace(plain, allocations=tuple(kept)))

    (bucket,) = (a for a in found.allocations if a.operator == transforms.BUCKETS)
    assert bucket.size == component_bytes(plain, Component.GRADIENTS) // 2


def test_micro_batches_are_recommended_that_fit_themselves():
    given = setup(batch=4096, gpu="2GiB")
    usual = plan_of("train.py", given, fit=True).accumulating.micro_batch

    def uneven(batch):
        stream = given.at(batch)
        last = replace(stream.allocations[-1], size=2 * GIB if batch == usual else 0)
        return replace(stream, allocations=(*stream.allocations[:-1], last))

    found = plan_of("train.py", replace(given, at=uneven), fit=True).accumulating

    assert found.micro_batch == usual // 2


def test_the_ladder_puts_first_what_fits_and_is_fastest():
    found = ladder(setup(batch=320, gpu="3GiB", layers=12))

    keys = [(not r.fits, r.changes_training, r.fits and round(r.time_ratio, 2)) for r in found]
    assert keys == sorted(keys)
    assert [r.choices for r in found if not r.choices] == [()]
    assert all(r.saved_bytes > 0 for r in found if r.choices)
    assert len({r.choices for r in found}) == len(found)


def test_techniques_are_put_together_where_none_suffices():
    found = ladder(setup(batch=1, gpu="608MiB", layers=150))
    single = [r for r in found if len(r.choices) == 1]
    several = [r for r in found if len(r.choices) > 1]

    assert not any(r.fits and not r.changes_training for r in single)
    assert several
    assert several[0].peak_bytes < min(r.peak_bytes for r in single if not r.changes_training)


def test_of_techniques_put_together_the_fewest_that_fit_are_taken():
    here = setup(batch=16, gpu="1000MiB", layers=40)
    options = {option.label: option.model for option in candidates()}

    found = next(r for r in ladder(here) if len(r.choices) > 1)

    fewer = here.stream
    for label in found.choices[:-1]:
        fewer = options[label].change(fewer)
    limit = here.ground.limit(here.stream)
    assert found.fits
    assert len(found.choices) > 2
    assert not replay(fewer, here.ground.settings, capacity=limit).fits


def test_a_batch_in_parts_is_played_at_few_sizes_and_split_as_little_as_fits():
    here = setup(batch=4096, gpu="2GiB", layers=8)
    asked = set()

    def noted(batch):
        asked.add(batch)
        return here.at(batch)

    found = ladder(replace(here, at=noted))

    limit, settings = here.ground.limit(here.stream), here.ground.settings
    halves = [4096 >> n for n in range(1, 13)]
    parts = {size: transforms.accumulated(here.at(size)) for size in halves}
    most = next(size for size in halves if replay(parts[size], settings, capacity=limit).fits)
    rung = next(r for r in found if "accumulate" in "".join(r.choices))
    assert rung.fits
    assert rung.choices == (f"batch={most} accumulate={4096 // most} (by hand)",)
    assert len(asked) < len(halves) - 3


def test_offloading_to_the_host_is_named_where_nothing_else_fits():
    offloaded = ("data_parallel ranks=1 zero=3 offload=True",)
    split = ladder(setup(batch=320, gpu="3GiB", layers=12))

    found = ladder(setup(batch=1, gpu="1100MiB", layers=150))

    assert not any(offloaded[0] in rung.choices for rung in split)
    assert (found[0].choices, found[0].fits) == (offloaded, True)
    assert found[0].time_ratio > 1
    (choice,) = map(Choice.from_label, found[0].choices)
    assert choice.settings == {"ranks": 1, "zero": 3, "offload": True}


def test_gradients_that_ranks_have_yet_to_average_are_not_used_early():
    def is_offered(stream, gpus):
        here = ground(gpus=gpus)
        technique = next(one for one in candidates() if one.label == "optimizer_in_backward")
        return technique.model.helps(stream, here)

    alone = toy_stream(2, 2)

    assert is_offered(alone, gpus=1)
    assert not is_offered(alone, gpus=2)
    assert not is_offered(transforms.with_buckets(alone), gpus=1)


@pytest.mark.parametrize("why", ["added up", "clipped", "unscaled"])
def test_gradients_that_are_needed_together_are_not_used_early(why):
    stream = toy_stream(2, 2)
    mark = next(m for m in stream.marks if m.phase is Phase.BACKWARD and m.step == 1)
    operator = {"clipped": "aten._foreach_norm.Scalar", "unscaled": "aten.reciprocal.default"}
    norm = Allocation(
        size=4,
        component=Component.TEMPORARIES,
        phase=Phase.BACKWARD,
        step=1,
        operator=operator.get(why, ""),
    )
    marks = (*stream.marks, mark) if why == "added up" else stream.marks
    changed = replace(stream, allocations=(*stream.allocations, norm), marks=marks)
    technique = next(one for one in candidates() if one.label == "optimizer_in_backward")

    assert technique.model.helps(stream, ground())
    assert not technique.model.helps(changed, ground())


def test_a_technique_that_was_traced_is_not_modelled():
    smaller = toy_stream(8)
    label = "activation_checkpointing mode=full"

    found = ladder(setup(batch=16, traced={label: smaller}))

    rung = next(r for r in found if r.choices == (label,))
    assert rung.source is NumberSource.TRACED
    rest = ground().outside.bytes
    assert rung.peak_bytes - rest == pytest.approx(replay(smaller).peak_reserved, abs=40 * MIB)


def test_what_was_replayed_for_one_ladder_is_known_to_the_next(monkeypatch):
    here = setup(batch=512, layers=8)
    first = ladder(here)
    label = first[0].choices[0]
    played, really = [], memory_options.replay

    def noted(stream, *arguments, **options):
        played.append(stream)
        return really(stream, *arguments, **options)

    monkeypatch.setattr(memory_options, "replay", noted)

    same, traced = ladder(here), ladder(replace(here, traced={label: here.stream}))

    assert same == first
    assert {id(stream) for stream in played} == {id(here.stream)}
    assert label not in {rung.choices[0] for rung in traced if rung.choices}  # it saves nothing


def test_checkpointing_frees_what_is_inside_blocks_and_keeps_their_results():
    stream = toy_stream(16, layers=12)

    full = transforms.checkpointed(stream)
    selective = transforms.checkpointed(stream, keeps=transforms.is_expensive)

    assert peak(full) < peak(selective) < peak(stream)
    assert full.alive()[-1] == stream.alive()[-1]
    regions = regions_of(stream)
    assert {region.block for region in regions} == {f"blocks.{number}" for number in range(12)}
    assert len(regions) == 2 * 12
    assert all(len(region.inner) == 2 for region in regions)


def test_a_fused_optimizer_has_no_temporaries_and_in_backward_no_gradients():
    stream = toy_stream(1)

    fused = transforms.without_optimizer_temporaries(stream)
    backward = with_updates_in_backward(stream)

    assert len(fused.events) == len(stream.events) - 2 * 2 * 5
    assert backward.alive()[-1] == stream.alive()[-1] - component_bytes(
        toy_stream(1, steps=1), Component.GRADIENTS
    )
    assert peak(backward) < peak(fused) < peak(stream)


def test_other_optimizers_shrink_their_state_as_their_papers_say():
    stream = toy_stream(1)
    state = component_bytes(stream, Component.OPTIMIZER)

    eight_bit = component_bytes(with_states_in_bytes(stream), Component.OPTIMIZER)
    factored = component_bytes(with_factored_states(stream), Component.OPTIMIZER)

    assert eight_bit == pytest.approx(state * (1 + 4 / 256) / 4, rel=1e-3)
    assert factored < 0.01 * state


def test_lora_leaves_gradients_of_thin_matrices_only():
    stream = toy_stream(1)

    found = low_rank(stream, rank=16)

    expected = 2 * 4 * 16 * ((VOCABULARY + 256) + 4 * (256 + 1024))
    assert component_bytes(found, Component.GRADIENTS) == expected


@pytest.mark.parametrize(("stage", "parts"), [(1, 1), (2, 2), (3, 3)])
def test_zero_spreads_one_more_component_a_stage(stage, parts):
    stream = toy_stream(1)
    order = (Component.OPTIMIZER, Component.GRADIENTS, Component.PARAMETERS)

    found = transforms.sharded(stream, stage, 8)

    shares = [component_bytes(found, c) / component_bytes(stream, c) for c in order]
    assert shares == pytest.approx([1 / 8] * parts + [1.0] * (3 - parts))


def test_zero_3_has_the_root_and_two_blocks_whole():
    stream = toy_stream(1)
    root, block = 4 * VOCABULARY * WIDTH, 4 * WIDTH * 4 * WIDTH

    found = transforms.sharded(stream, 3, 8)

    gathered = [a.size for a in found.allocations if a.operator == "all_gather"]
    assert gathered == [root + 2 * block]


def test_zero_reduces_gradients_without_buckets_from_stage_2_on():
    stream = transforms.with_buckets(toy_stream(1))
    views = [
        replace(a, operator=transforms.BUCKETS) if a.component is Component.GRADIENTS else a
        for a in toy_stream(1).allocations
    ]
    only_copy = replace(toy_stream(1), allocations=tuple(views))

    left = [
        any(a.operator == transforms.BUCKETS for a in transforms.sharded(of, stage, 8).allocations)
        for of, stage in ((stream, 1), (stream, 2), (stream, 3), (only_copy, 2))
    ]

    assert left == [True, False, False, True]


def test_a_chunked_loss_makes_log_probabilities_in_parts_and_keeps_the_logits():
    stream = toy_stream(64)
    table = 4 * 64 * TOKENS * VOCABULARY

    found = chunked_loss(stream, 8)

    # Torch's own holds log-probabilities and the gradient of the logits, ours the logits and that.
    assert peak(found) == pytest.approx(peak(stream) + table / 8, abs=table / 8)
    assert peak(toy_stream(64)) > 2 * table
    assert {stream.allocations[i].shape for i in loss_indices(stream)} == {
        (64 * TOKENS, VOCABULARY)
    }


def test_recompute_costs_at_most_a_third_of_the_flops_and_its_traffic():
    option = next(c for c in candidates() if c.label.endswith("mode=full"))

    ratio = option.model.cost(toy_stream(64, layers=24), ground("h200"))

    assert 1.05 < ratio < 1.6


def test_a_plan_for_a_gpu_that_is_too_small_for_the_context_does_not_fit():
    plan = plan_of("train.py", setup(gpu="256MiB"), fit=True)

    assert not plan.fits
    assert plan.largest_batch.with_retries is None
    assert plan.capacity_bytes == GIB // 4
