"""The search for a way to spread a training, on streams made by hand: the answer is known."""

from dataclasses import replace

import pytest

from flatout.analysis.stream_changes import reached_flops
from flatout.hardware.catalogue import find_gpu
from flatout.parallel.rank_share import StreamColumns
from flatout.parallel.search import (
    NETWORK,
    Cluster,
    Training,
    advise,
    divisors,
    gradients_s,
    inside_of,
    search,
    specs_for,
)
from flatout.records.memory_stream import (
    Allocation,
    Component,
    Mark,
    MemoryStream,
    Phase,
    StreamEvent,
)
from flatout.records.parallel import ParallelSpec
from flatout.records.plan import NumberSource
from flatout.records.readings import RankFacts
from flatout.records.units import GIB, MIB
from tests.techniques.facts import pipeline, profile

GPU = find_gpu("h100")


def stream(batch, *, blocks=4, weight=1024, activation=MIB, flops=1e12):
    """Return two steps of a model of equal blocks between an embedding and a head."""
    rows = []

    def add(size, component, phase, module, shape=(), **more):
        facts = {"component": component, "phase": phase, "module": module, "shape": shape}
        rows.append(Allocation(size=size, step=1, **facts, **more))

    names = ["embedding", *(f"layers.{n}" for n in range(blocks)), "head"]
    size = 4 * weight * weight
    for name in names:
        for component in (Component.PARAMETERS, Component.GRADIENTS):
            add(size, component, Phase.SETUP, name, (weight, weight))
        add(2 * size, Component.OPTIMIZER, Phase.SETUP, name)
    for name in names:
        made = {"operator": "aten.mm", "dtype": "bfloat16"}
        add(batch * activation, Component.ACTIVATIONS, Phase.FORWARD, name, **made)
    events = [StreamEvent(index, born=True) for index in range(len(rows))]
    marks = (Mark(0, Phase.SETUP, 0), Mark(4 * len(names), Phase.FORWARD, 1))
    return MemoryStream(
        allocations=tuple(rows),
        events=events,
        marks=marks,
        device="cuda",
        method="virtual_cuda",
        steps=2,
        batch=batch,
        model_flops=batch * flops,
    )


def training(batch=64, limit=GPU.memory_bytes, *, splits=False, **model):
    return Training(
        at=lambda count: stream(count, **model),
        batch=batch,
        gpu=GPU,
        limit_bytes=limit,
        splits_layers=splits,
    )


def cluster(gpus=4, hosts=1, inside=None, between=NETWORK):
    return Cluster(gpus=gpus, hosts=hosts, inside=inside or inside_of(GPU), between=between)


def test_every_way_uses_all_ranks_and_tensor_parallel_stays_in_a_host():
    found = specs_for(cluster(gpus=4, hosts=2), training(splits=True))

    assert {spec.world_size for spec in found} == {8}
    assert max(spec.tp for spec in found) == 4
    assert any(spec.dp_replicate == 2 and spec.dp_shard == 4 for spec in found)
    assert any(spec.pp > 1 for spec in found)


def test_a_script_is_spread_by_its_data_alone():
    assert {(s.tp, s.pp) for s in specs_for(cluster(), training())} == {(1, 1)}


def test_a_large_step_is_worth_all_gpus():
    here, what = cluster(), training()

    advice = advise(search(here, what), here, what)

    assert (advice.ranks, advice.cause) == (4, "")
    assert advice.verdict.startswith("Use all 4 GPUs")


def test_a_small_model_stays_on_one_gpu_and_the_cause_is_named():
    here, what = cluster(), training(flops=1e6, activation=64)

    advice = advise(search(here, what), here, what)

    assert advice.ranks == 1
    assert advice.verdict.startswith("Stay on one GPU; 4 gain")
    assert "start of operators" in advice.cause or "communication" in advice.cause


def test_a_slow_link_is_named_as_the_cause():
    slow = replace(inside_of(GPU), bytes_per_s=1e8, overlap=0.0)
    here, what = cluster(inside=slow), training(flops=1e10)

    advice = advise(search(here, what), here, what)

    assert advice.ranks == 1
    assert "exposed communication over a slow link (0.1 GB/s, assumed)" in advice.cause


def test_a_profile_of_several_ranks_counts_the_samples_of_one_and_the_cores_of_all():
    pipe = pipeline(decode=2.0)
    one = profile(samples_per_step=16.0, pipeline=replace(pipe, usable_cores=8))
    rank = RankFacts(rank=0, step_ms=100.0, phases_ms={}, samples_per_s=160.0)
    four = replace(
        one, samples_per_step=64.0, ranks=(rank,) * 4, pipeline=replace(pipe, usable_cores=2)
    )

    alone, spread = (replace(training(), profile=seen) for seen in (one, four))

    assert spread.costs == alone.costs
    assert spread.samples_per_s_of_host == alone.samples_per_s_of_host == 8 / 2e-3


def test_a_batch_without_a_sample_for_each_part_is_rejected_in_a_line():
    here, what = cluster(gpus=4), training(batch=2)

    found = search(here, what)

    reasons = {plan.spec.label: plan.why for plan in found.plans}
    assert reasons["dp_replicate=4"] == "a global batch of 2 has no sample for each of 4 parts"
    assert "4 no way" in advise(found, here, what).verdict.replace("on ", "")


def test_the_reason_against_the_asked_gpus_is_that_of_their_first_way():
    here, what = cluster(gpus=3), training(batch=64, splits=True, blocks=2)

    advice = advise(search(here, what), here, what)

    assert advice.ranks == 1
    assert advice.cause == "a global batch of 64 is no multiple of 3 parts"


def test_ranks_of_a_script_may_have_a_sample_more_than_others():
    ways = {plan.spec.label: plan for plan in search(cluster(gpus=3), training(batch=64)).plans}

    found = ways["dp_replicate=3"]

    assert found.fits
    assert str(found.why).startswith("22 samples a rank")


def accumulating(batch, parts=4):
    """Return the step of a loop that adds up the gradients of so many micro-batches."""
    whole = stream(batch)
    return replace(whole, micro_batches=parts, model_flops=parts * whole.model_flops)


def test_the_samples_of_a_step_are_those_of_all_its_micro_batches():
    seen = profile(samples_per_step=256.0, pipeline=replace(pipeline(decode=2.0), usable_cores=8))
    here = cluster(gpus=1, hosts=2)
    what = replace(training(batch=64), at=accumulating, micro_batches=4, profile=seen)

    found = search(here, what)

    # What was measured of one device is what is said of one device.
    assert found.best[1].step_ms.value == pytest.approx(seen.step_ms.median, rel=0.01)
    assert advise(found, here, what).batch == 256
    assert what.samples_per_s_of_host == 4000


def test_what_does_not_fit_one_gpu_names_the_fewest_that_suffice():
    # 6 layers of 4 MiB, four times with gradients and AdamW: 96 MiB; activations 6 MiB a sample.
    here, what = cluster(), training(batch=64, limit=330 * MIB)

    found = search(here, what)
    advice = advise(found, here, what)

    assert 1 not in found.best
    assert min(found.best) == 2
    assert advice.verdict.startswith(("You need 2", "Use all 4"))


def test_more_gpus_than_asked_are_named_where_the_asked_do_not_suffice():
    here, what = cluster(gpus=2), training(batch=64, limit=150 * MIB)

    advice = advise(search(here, what), here, what)

    assert advice.ranks > 2
    assert advice.verdict.startswith(f"You need {advice.ranks} GPUs: on 2 GPUs no way fits")


def test_what_fits_in_no_other_way_is_offloaded_where_it_is_a_script():
    # Nothing but the activations, of 32 samples a rank, and the parameters of root and two blocks.
    room = (32 * 6 + 16) * MIB
    here, what = cluster(gpus=2), training(batch=64, limit=room)

    found = search(here, what)
    advice = advise(found, here, what)

    assert advice.spec == ParallelSpec(dp_shard=2, zero=3, offload=True)
    assert advice.ranks == advice.asked == 2
    assert "in the host's memory, which is slow. Without that: You need 4 GPUs" in advice.verdict
    (first, *others) = found.plans
    assert (first.spec, first.peak_bytes.value) == (advice.spec, room)
    assert not any(plan.fits for plan in others)
    for other in (replace(what, splits_layers=True), training(batch=64)):
        assert not any(plan.spec.offload for plan in search(here, other).plans)


def test_sharding_takes_less_memory_the_more_is_sharded():
    found = {p.spec.label: p.peak_bytes.value for p in search(cluster(), training()).plans}

    assert found["dp_shard=4 zero=2"] < found["dp_replicate=4"]
    whole = stream(16)
    states = sum(a.size for a in whole.allocations if a.phase is Phase.SETUP)
    assert found["dp_replicate=4"] == states + 16 * 6 * MIB


def test_zero_3_has_the_root_and_two_blocks_whole_and_tensor_parallel_splits_the_blocks():
    plans = {p.spec.label: p for p in search(cluster(gpus=4), training(splits=True)).plans}

    # Embedding and head are the root, of 4 MiB of parameters each, as each of the four blocks.
    sharded = plans["dp_shard=4 zero=3"].peak_bytes.value
    assert sharded == (6 * 16 / 4 + 16 * 6 + 8 + 8) * MIB
    outside, inside = 2 * 16 / 2 + 32 * 2, (4 * 16 / 2 + 32 * 4) / 2
    split = plans["dp_shard=2 tp=2 zero=3"].peak_bytes.value
    assert split == (outside + inside + 8 + 8 / 2) * MIB


def test_a_pipeline_holds_a_stage_and_as_many_microbatches_as_are_in_flight():
    plans = {p.spec.label: p for p in search(cluster(gpus=2), training(splits=True)).plans}

    found = plans["pp=2 microbatches=8 schedule=1f1b"]

    # Half of the layers: three of 16 MiB states, and 2 of 8 microbatches of 8 samples in flight.
    assert found.peak_bytes.value == 3 * 16 * MIB + 2 * 8 * 3 * MIB
    assert found.shares["bubble"].value > 0


def test_columns_at_another_batch_are_those_of_its_own_stream():
    what, spec = training(splits=True), ParallelSpec(pp=2, tp=2)
    first = what.columns(64)

    second, own = what.columns(16), StreamColumns(what.at(16), what.layout)

    assert first is what.columns(64)
    assert second.work(spec, 1) == own.work(spec, 1) != first.work(spec, 1)
    assert second.peak_bytes(spec, 0, 2) == own.peak_bytes(spec, 0, 2)
    assert (second.batch, second.flops) == (own.batch, own.flops)


def test_stages_hold_the_layers_of_a_list_with_others_between_them():
    gapped = {"embedding": "0", "head": "10"} | {f"layers.{n}": str(2 * n + 2) for n in range(4)}

    def renamed(batch):
        whole = stream(batch)
        rows = tuple(replace(row, module=gapped[row.module]) for row in whole.allocations)
        return replace(whole, allocations=rows)

    what = replace(training(splits=True), at=renamed)
    columns = what.columns(64)

    held = [columns.held(ParallelSpec(pp=2), stage) for stage in range(2)]
    assert what.layout.blocks == 6
    assert (held[0] | held[1]).all()
    assert held[0].sum() == held[1].sum()


def test_tensor_parallel_needs_widths_that_it_divides():
    plans = search(cluster(gpus=3), training(batch=63, splits=True)).plans

    reasons = {plan.spec.label: plan.why for plan in plans if not plan.fits}

    assert reasons["tp=3"] == "tp=3 does not divide a weight of width 1024"


def test_every_number_says_where_it_comes_from():
    plan = search(cluster(), training()).plans[0]

    assert plan.step_ms.source is NumberSource.ASSUMED
    assert plan.peak_bytes.source is NumberSource.SIMULATED
    assert {one.source for one in plan.shares.values()} == {NumberSource.ASSUMED}


def test_zero_3_sends_half_as_much_again_as_ddp():
    free = replace(inside_of(GPU), latency_s=0.0)
    here = cluster(inside=free)
    layout = training().layout

    ddp = gradients_s(ParallelSpec(dp_replicate=4), here, layout, (GIB, GIB))
    zero2 = gradients_s(ParallelSpec(dp_shard=4, zero=2), here, layout, (GIB, GIB))
    zero3 = gradients_s(ParallelSpec(dp_shard=4, zero=3), here, layout, (GIB, GIB))

    assert zero2 == pytest.approx(ddp)
    assert zero3 == pytest.approx(1.5 * ddp)


def frozen(batch):
    """Return the step of a model of which the head alone is trained."""
    whole = stream(batch)
    rows = tuple(
        replace(row, size=0)
        if row.component in (Component.GRADIENTS, Component.OPTIMIZER) and row.module != "head"
        else row
        for row in whole.allocations
    )
    return replace(whole, allocations=rows)


def test_frozen_parameters_have_no_gradients_to_exchange_and_are_not_stepped_on():
    here = cluster(inside=replace(inside_of(GPU), latency_s=0.0, overlap=0.0))

    few, all_of_them = (
        {plan.spec.label: plan for plan in search(here, what).plans}
        for what in (replace(training(flops=1e6), at=frozen), training(flops=1e6))
    )

    def exchanged_s(plans, label):
        plan = plans[label]
        return plan.shares["communication"].value * plan.step_ms.value

    # One of six layers is trained: gradients are a sixth; all parameters are gathered as before.
    ddp, zero3 = "dp_replicate=4", "dp_shard=4 zero=3"
    assert exchanged_s(few, ddp) == pytest.approx(exchanged_s(all_of_them, ddp) / 6)
    assert exchanged_s(few, zero3) == pytest.approx(exchanged_s(all_of_them, zero3) * 13 / 18)
    columns = replace(training(), at=frozen).columns(64)
    assert columns.stepped_on(ParallelSpec()) == pytest.approx(1024 * 1024)


def test_a_script_that_accumulates_exchanges_in_each_backward():
    here = cluster(inside=replace(inside_of(GPU), latency_s=0.0, overlap=0.0))
    found = [
        next(p for p in search(here, what).plans if p.spec.label == "dp_replicate=4")
        for what in (training(flops=1e6), replace(training(flops=1e6), micro_batches=3))
    ]

    once, thrice = (plan.shares["communication"].value * plan.step_ms.value for plan in found)
    assert thrice == pytest.approx(3 * once)


@pytest.mark.parametrize(("share", "reached"), [(0.0, 0.8 * 67), (1.0, 0.4 * 495), (0.5, 84.3)])
def test_what_may_be_in_tf32_is_computed_on_tensor_cores(share, reached):
    rows = tuple(replace(row, dtype="float32") for row in stream(8).allocations)

    found = reached_flops(GPU, replace(stream(8), allocations=rows, tf32_share=share))

    assert found == pytest.approx(reached * 1e12, rel=0.01)


def test_groups_that_cross_hosts_share_the_adapters():
    here = cluster(gpus=8, hosts=2)

    assert here.link(1, 8) is here.inside
    assert here.link(8, 2).bytes_per_s == NETWORK.bytes_per_s / 8
    assert here.link(1, 16).bytes_per_s == NETWORK.bytes_per_s


def test_a_thousand_ranks_are_searched():
    here, what = cluster(gpus=8, hosts=128), training(batch=1024, splits=True, blocks=32)

    found = search(here, what)

    assert len(found.plans) > 40
    assert max(found.best) == 1024
    assert divisors(1024)[-1] == 1024
