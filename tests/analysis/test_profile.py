"""From what a training process wrote to a profile: what its device ran."""

from dataclasses import replace

import pytest

from flatout.analysis.profile import summarise, with_kernels_of
from flatout.records.phase_clock import DATA_WAIT, EVAL, FORWARD, OTHER, SAVE
from flatout.records.technique import Numerics
from flatout.records.trial_result import LoaderSeen
from flatout.techniques.compile.torch_compile import TorchCompile
from flatout.tuning.ranking import Search, rank
from tests.support.results import kernel, result, traced
from tests.techniques.facts import gpu, machine

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
SMALL = "void at::native::vectorized_elementwise_kernel<4>"
MODEL = {
    "name": "Net",
    "parameters": 1000,
    "parameter_bytes": 4000,
    "dtypes": ["float32"],
    "modules": 4,
}


def on_gpu(*events, segments=1, lasted_us=100_000.0, who=(0,)):
    """Return the profile of steps of 100 ms with these kernels in the traced ones."""
    facts = traced(*events, segments=segments, lasted_us=lasted_us)
    device = {"kind": "cuda", "name": "a GPU"} | facts
    return summarise(result(device=device, models=[MODEL], who=who), machine(device=gpu()))


def gemm_bound():
    """Return a step whose queue never runs empty, nearly all of it in products."""
    return on_gpu(
        kernel(GEMM, 0.0, 97_000.0, launched=-50.0),
        kernel(SMALL, 97_000.0, 3_000.0, launched=-20.0),
    )


def launch_bound():
    """Return a step in which every kernel is waited for: the device runs a quarter of the time."""
    events = [kernel(SMALL, at, 250.0, launched=at - 2) for at in range(750, 100_000, 1000)]
    return on_gpu(*events)


def candidates(profile):
    search = Search(
        machine=machine(device=gpu()), ceiling=Numerics.PRECISION, only=("torch_compile",)
    )
    return {x.choice.settings["mode"]: x for x in rank(profile, search)}


def test_a_step_of_large_products_is_bound_by_them():
    found = gemm_bound()

    assert found.regime.name == "gemm"
    assert found.regime.shares["gemm"] == pytest.approx(0.97)
    assert found.regime.shares["launch"] == pytest.approx(0.0)
    assert set(found.regime.missing) == {"sync"}


def test_a_step_that_waits_for_its_kernels_is_bound_by_launches():
    found = launch_bound()

    assert found.regime.name == "launch"
    assert found.regime.shares["launch"] == pytest.approx(0.75)
    assert found.regime.shares["bandwidth"] == pytest.approx(0.25)


def test_a_step_of_large_products_is_offered_no_graphs_and_nothing_to_fuse():
    hopes, hopes_of_launches = candidates(gemm_bound()), candidates(launch_bound())

    assert set(hopes) == {"default"}
    assert hopes["default"].ratio < hopes_of_launches["default"].ratio


def test_a_step_that_waits_for_its_kernels_is_promised_more_by_graphs():
    hopes = candidates(launch_bound())

    assert hopes["reduce-overhead"].ratio > 2
    assert hopes["reduce-overhead"].ratio > hopes["default"].ratio
    assert hopes["default"].find_reason_against(1.0) is None


def test_where_nobody_looked_both_modes_are_promised_something():
    facts = result(device={"kind": "cuda", "name": "a GPU"}, models=[MODEL])
    found = summarise(facts, machine(device=gpu()))

    assert found.trace is None
    assert {x.find_reason_against(1.0) for x in candidates(found).values()} == {None}
    assert TorchCompile(mode="reduce-overhead") in TorchCompile.candidates(found, machine())


def test_a_step_of_several_optimizers_has_the_kernels_of_all_of_its_segments():
    events = [kernel(GEMM, at, 40_000.0) for at in range(0, 300_000, 50_000)]

    found = on_gpu(*events, segments=6, lasted_us=300_000.0, who=(0, 1)).trace

    assert (found.steps, found.step_ms) == (3, pytest.approx(100.0))
    assert found.kernels[0].calls_per_step == pytest.approx(2.0)
    assert found.kernels[0].ms_per_step == pytest.approx(80.0)
    assert found.kernels[0].share == pytest.approx(0.8)


def with_copies(**facts):
    """Return the profile of steps that copy their batch while nothing else is noted."""
    found = result(device={"kind": "cuda", "name": "a GPU"} | facts, models=[MODEL])
    for segment in found.segments:
        segment.seconds[OTHER], segment.seconds[FORWARD] = segment.seconds[FORWARD], 0.0
    return summarise(found, machine(device=gpu()))


def test_an_untraced_trial_is_described_as_the_traced_one_of_its_recipe():
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0.0, "dur": 2_000.0}
    facts = traced([copy], kernel(GEMM, 10_000.0, 60_000.0), segments=1, lasted_us=100_000.0)
    seen, plain = with_copies(**facts), with_copies()
    assert plain.phases_ms["h2d"] == 0.0 < seen.phases_ms["h2d"]

    found = with_kernels_of(plain, seen)

    assert found.phases_ms == pytest.approx(seen.phases_ms)
    assert (found.trace, found.device_busy_share) == (seen.trace, seen.device_busy_share)
    assert found.ceilings.free_copies == pytest.approx(seen.ceilings.free_copies)
    assert found.notes == seen.notes != plain.notes
    assert with_kernels_of(plain, plain) == plain
    assert with_kernels_of(seen, plain) == seen


def test_on_the_cpu_no_trace_is_made_up():
    found = summarise(result(models=[MODEL]), machine())

    assert found.trace is None
    assert set(found.regime.missing) == {"launch", "gemm", "bandwidth"}


def with_evaluations(seconds, at=(0,)):
    """Return the result of a dozen steps of 0.1 s, some with calls without gradients as well."""
    found = result()
    for number in at:
        found.segments[number].seconds[EVAL] = seconds
        found.segments[number].evals = 1
    return found


@pytest.mark.parametrize("at", [(0,), (6,)])
def test_rollouts_between_the_measured_steps_are_told_where_they_take_much_of_the_run(at):
    profile = summarise(with_evaluations(2.8, at), machine())

    assert profile.step_ms.median == pytest.approx(100.0)
    assert (
        "evaluations or rollouts (calls that train nothing) took 2.80 s of the 4.00 s seen: "
        "the steps that hold them are left out"
    ) in profile.notes


def test_what_an_evaluation_loads_and_computes_around_its_calls_is_part_of_it():
    found = with_evaluations(0.4, at=(6,))
    found.segments[6].seconds[DATA_WAIT] = 2.0
    found.segments[6].seconds[OTHER] += 0.4

    assert summarise(found, machine()).eval_share == pytest.approx(2.8 / 4.0)


def test_a_slow_step_of_the_warm_up_that_calls_a_teacher_is_no_evaluation():
    found = result()
    for segment in found.segments[:3]:  # by then the models that train are known
        segment.seconds[EVAL] = 0.05
    found.segments[1].seconds[FORWARD] += 30.0

    assert summarise(found, machine()).eval_share == 0.0


def test_what_is_done_once_before_the_first_step_ends_is_no_part_of_the_run():
    found = with_evaluations(2.8, at=(6,))
    found.segments[0].seconds[OTHER] += 60.0

    profile = summarise(found, machine())

    assert profile.eval_share == pytest.approx(2.8 / 4.0)
    assert any("took 2.80 s of the 4.00 s" in note for note in profile.notes)


def test_evaluations_after_the_first_measured_step_are_no_warm_up():
    profile = summarise(with_evaluations(2.8, at=(6, 9)), machine())

    assert profile.warmup_steps == 3
    assert profile.warmup_ms == pytest.approx(100.0)


def with_rare_work(phase, at=(5, 7, 9), seconds=0.9, starts=0, period=1):
    found = replace(result(), period=period)
    for number in at:
        found.segments[number].seconds[phase] += seconds
        found.segments[number].loader_starts = starts
    return summarise(found, machine())


@pytest.mark.parametrize(
    ("phase", "saving", "waiting"), [(OTHER, 0.0, 0.0), (SAVE, 1.0, 0.0), (DATA_WAIT, 0.0, 1.0)]
)
def test_what_some_steps_do_outside_the_others_is_told_apart(phase, saving, waiting):
    profile = with_rare_work(phase)

    assert profile.step_ms.median == pytest.approx(100.0)
    assert (profile.rare.steps, profile.rare.saving_share) == (3, pytest.approx(saving))
    assert profile.rare.waiting_share == pytest.approx(waiting)
    assert profile.rare.ms == pytest.approx(900.0)
    assert profile.rare.share == pytest.approx(2.7 / (2.7 + 0.1 * profile.rare.of_steps))


def test_the_collector_s_part_of_a_step_is_that_of_the_time():
    found = replace(result(), collection_s=0.4)
    for number in (5, 7, 9):
        found.segments[number].seconds[OTHER] += 0.9

    profile = summarise(found, machine())

    later_s = 2.7 + 0.1 * (len(found.segments) - 1)
    assert profile.collection_ms_per_step == pytest.approx(100.0 * 0.4 / later_s)


def test_workers_bursts_epochs_starts_rare_forwards_and_a_single_step_are_no_rare_work():
    assert with_rare_work(DATA_WAIT, period=2).rare is None
    assert with_rare_work(DATA_WAIT, starts=1).rare is None
    assert with_rare_work(FORWARD).rare is None
    assert with_rare_work(OTHER, at=(7,)).rare is None
    assert with_rare_work(OTHER, seconds=0.15).rare is None


@pytest.mark.parametrize("load", [{"foreign_share": 0.4}, {"steal_share": 0.4}])
def test_steps_that_wait_for_a_core_that_others_have_do_no_rare_work(load):
    found = result()
    for number in (5, 7, 9):
        found.segments[number].seconds[OTHER] += 0.9
    cores = replace(machine(), usable_cores=2)

    assert summarise(found, cores).rare.share < 0.8
    assert summarise(replace(found, load=load), cores).rare is None
    little = {name: share / 10 for name, share in load.items()}
    assert summarise(replace(found, load=little), cores).rare is not None


def test_garbage_collections_are_no_rare_work():
    found = result()
    for number in (5, 7, 9):
        found.segments[number].seconds[OTHER] += 0.9

    half = summarise(replace(found, collection_s=1.35), machine()).rare

    assert half.ms == pytest.approx(450.0)
    assert summarise(replace(found, collection_s=2.8), machine()).rare is None


def test_a_stall_counts_in_steps_that_were_not_looked_into():
    found = result()
    for number in (5, 7, 9):
        found.segments[number].seconds[DATA_WAIT] += 0.9
        found.segments[number].is_sampled = False

    assert summarise(found, machine()).rare.waiting_share == pytest.approx(1.0)


FACTS = {
    "dataset": "Photos",
    "dataset_len": 96,
    "batch_size": 8,
    "num_workers": 0,
    "effective_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "steps_per_epoch": 12,
}


@pytest.mark.parametrize(("asked", "had", "fetch_ms"), [(2, 0, 100.0), (0, 2, 0.0)])
def test_a_batch_s_making_is_measured_where_the_recipe_left_no_workers(asked, had, fetch_ms):
    found = result()
    for segment in found.segments:
        segment.seconds[DATA_WAIT] = 0.1
    facts = FACTS | {"num_workers": asked, "effective_workers": had}
    seen = LoaderSeen("main:1", facts, is_training=True)

    profile = summarise(replace(found, loaders=(seen,)), machine())

    assert profile.loaders[0].fetch_ms == pytest.approx(fetch_ms)


@pytest.mark.parametrize(
    ("begun_at", "steps"), [([], 12), ([0, 1], 12), ([0, 12, 24], 12), ([0, 5, 10], 5)]
)
def test_epochs_that_the_script_leaves_early_are_as_long_as_it_makes_them(begun_at, steps):
    seen = LoaderSeen("main:1", FACTS, is_training=True, begun_at=begun_at)

    profile = summarise(replace(result(), loaders=(seen,)), machine())

    assert profile.epoch_steps == steps


def test_a_teacher_that_most_steps_call_is_a_part_of_them_and_an_evaluation_is_not():
    found = with_evaluations(0.02, at=range(12))
    for number, starts in ((5, 1), (8, 0)):  # a new epoch; a real evaluation
        found.segments[number].loader_starts = starts
    found.segments[8].evals, found.segments[8].seconds[EVAL] = 40, 2.8

    profile = summarise(found, machine())

    assert profile.step_ms.median == pytest.approx(120.0)
    assert profile.eval_ms == pytest.approx(20.0)
    # The step takes 2.9 s, of which 0.12 s are an ordinary one's.
    assert profile.eval_share == pytest.approx(2.8 / (11 * 0.12 + 2.9))


def test_a_loader_that_a_thread_draws_from_is_told_as_that():
    profile = summarise(replace(result(), draws_elsewhere=True), machine())
    batchless = replace(result(), draws_elsewhere=True)
    for segment in batchless.segments:
        segment.batches = 0

    assert any("another kind" in note for note in profile.notes)
    assert any("in a thread" in note for note in summarise(batchless, machine()).notes)


def test_a_model_on_several_gpus_is_told_what_its_numbers_are_of():
    found = result(device={"kind": "cuda", "name": "a GPU", "count": 2}, models=[MODEL])

    assert any("on 2 GPUs" in note for note in summarise(found, machine(device=gpu())).notes)


def test_short_evaluations_and_those_that_count_are_not_called_left_out():
    short = summarise(with_evaluations(0.1), machine())
    counted = summarise(with_evaluations(0.1, at=range(12)), machine())

    assert not any("left out" in note for note in (*short.notes, *counted.notes))
