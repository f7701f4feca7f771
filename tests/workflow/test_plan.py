"""Plans of real targets, traced in real processes."""

import contextlib
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest

from flatout.analysis.stream_changes import BUCKETS, BUCKETS_ASSUMED, with_buckets
from flatout.hardware.catalogue import CATALOGUE
from flatout.records.errors import UserError
from flatout.records.messages import code_of
from flatout.records.plan import NumberSource
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.documents import write_json
from flatout.workflow import plan as verb
from flatout.workflow.plan import PlanOptions, ground_of, plan, traceable_choice
from flatout.workflow.run import read_plan
from tests.paths import ROOT
from tests.support.toy import toy_stream
from tests.techniques.facts import gpu, machine, profile

SCRIPTS = ROOT / "tests/scripts/whole"
SUBJECT = f"{SCRIPTS / 'planned.py'}:subject"
TASK = f"{SCRIPTS / 'planned.py'}:task"


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_a_subject_is_planned_and_its_largest_batch_is_checked_by_a_trace():
    found = plan(SUBJECT, (), PlanOptions(gpu="2GiB", fit=True)).plan

    assert found.fits
    assert found.batch == 16
    assert found.checked.startswith(f"a trace at a batch of {found.largest_batch.without_retries}")
    assert ": 0 of " in found.checked
    assert found.components["parameters"].bytes == pytest.approx(4 * 5_722_504, rel=0.01)
    assert found.components["optimizer"].bytes == pytest.approx(
        2 * found.components["parameters"].bytes, rel=0.01
    )


@pytest.mark.smoke
@pytest.mark.slow
def test_the_batch_that_is_found_fits_and_a_larger_one_does_not():
    found = plan(SUBJECT, (), PlanOptions(gpu="2GiB", fit=True)).plan
    largest = found.largest_batch

    at_most = plan(SUBJECT, (), PlanOptions(gpu="2GiB", batch=largest.without_retries)).plan
    beyond = plan(SUBJECT, (), PlanOptions(gpu="2GiB", batch=largest.with_retries + 2)).plan

    assert at_most.fits
    assert not at_most.retries
    assert not beyond.fits
    assert beyond.way_out is not None


def test_a_batch_that_its_own_trace_takes_back_is_taken_back_in_every_line(monkeypatch):
    asked = []

    def trace(request):
        asked.append(request.batch)
        return toy_stream(request.batch or 8, odd=300)  # sizes that two traces do not foretell

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("train.py", (), PlanOptions(gpu="2GiB", fit=True)).plan

    assert found.largest_batch.without_retries < min(asked[2:])
    # None of these fitted even with retries.
    assert found.largest_batch.with_retries == found.largest_batch.without_retries
    as_it_is = next(way for way in found.ladder if not way.choices)
    assert as_it_is.largest_batch == found.largest_batch.without_retries
    assert "does not hold" in found.checked


def test_what_does_not_fit_is_traced_with_the_techniques_that_exist(tmp_path):
    planned = plan(SUBJECT, (), PlanOptions(gpu="1500MiB", batch=256))

    rungs = {rung.choices: rung for rung in planned.plan.ladder}
    traced = [
        rung for rung in rungs.values() if rung.source is NumberSource.TRACED and rung.choices
    ]
    assert not planned.plan.fits
    assert traced
    assert all(rung.saved_bytes > 0 for rung in traced)
    write_json(planned.plan.to_json(), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == planned.plan  # as `flatout run --plan` has it


def test_a_task_s_data_is_read_for_its_shapes():
    found = plan(TASK, (), PlanOptions(gpu="l4")).plan

    assert found.fits
    assert found.batch == 16


def test_a_batch_of_one_that_takes_a_path_of_its_own_does_not_hide_the_others():
    found = plan(f"{SCRIPTS / 'planned.py'}:alone", (), PlanOptions(gpu="2GiB", fit=True)).plan

    assert found.batch == 1
    assert found.largest_batch.without_retries > 1
    assert ": 0 of " in found.checked


@pytest.mark.slow
def test_more_gpus_take_more_memory_each():
    one = plan(SUBJECT, (), PlanOptions(gpu="l4")).plan
    two = plan(SUBJECT, (), PlanOptions(gpu="l4", gpus=2)).plan

    assert "nccl" in two.components
    assert two.allocated.bytes > one.allocated.bytes
    assert any("second copy" in note for note in two.notes)


@pytest.mark.parametrize(
    ("spreads_itself", "gpus", "global_batch"), [(False, 1, 16), (False, 2, 16), (True, 2, 128)]
)
def test_a_script_that_spreads_itself_has_its_batch_on_every_rank_of_every_host(
    monkeypatch, spreads_itself, gpus, global_batch
):
    asked = set()

    def trace(request):
        asked.add((request.ranks, request.hosts))
        stream = with_buckets(toy_stream(request.batch or 16))
        return replace(stream, spreads_itself=spreads_itself)

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("train.py", (), PlanOptions(gpu="h100", gpus=gpus, hosts=4))

    assert asked == {(4 * gpus, 4)}
    assert found.plan.advice.batch == global_batch
    assert "nccl" in found.plan.components
    assert any(a.operator == BUCKETS for a in found.stream.allocations)


@pytest.mark.parametrize(
    ("gpu", "gpus", "fits_one", "fits_spread"),
    [
        ("600MiB", 1, False, False),
        ("1GiB", 1, True, False),
        ("1GiB", 8, False, False),
        ("2480MiB", 8, False, True),
        ("80GiB", 8, True, True),
    ],
)
def test_techniques_are_traced_where_neither_one_gpu_nor_a_way_to_spread_it_is_enough(
    monkeypatch, gpu, gpus, fits_one, fits_spread
):
    traced = []

    def trace(request):
        traced.extend(request.recipe.names)
        return toy_stream(request.batch or 16)

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("train.py", (), PlanOptions(gpu=gpu, gpus=gpus)).plan

    assert (found.fits, any(way.fits for way in found.parallel)) == (fits_one, fits_spread)
    assert bool(traced) == (not fits_one and not fits_spread)


@pytest.mark.parametrize("how", ["a thread", "a fault", "no fork"])
def test_ways_are_the_same_where_no_copy_of_the_process_looks_for_them(monkeypatch, how):
    trace = lambda request: toy_stream(request.batch or 16)  # noqa: E731
    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))
    options = PlanOptions(gpu="2480MiB", gpus=8)
    expected = plan("train.py", (), options).plan

    with contextlib.ExitStack() as stack:
        if how == "a thread":
            done = threading.Event()
            other = threading.Thread(target=done.wait)
            other.start()
            stack.callback(other.join)
            stack.callback(done.set)
        elif how == "a fault":
            monkeypatch.setattr(verb, "begun_in_fork", lambda *_: nullcontext(refuse))
        else:
            monkeypatch.setattr(verb, "can_fork", lambda: False)
        found = plan("train.py", (), options).plan

    assert found == expected
    assert len(found.parallel) > 2


def refuse():
    raise verb.ForkedError("the process was killed")


def test_shards_are_not_taken_for_the_whole_model(monkeypatch):
    def trace(request):
        return replace(toy_stream(request.batch or 16), spreads_itself=True)

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("train.py", (), PlanOptions(gpu="513MiB", gpus=8)).plan

    assert (found.parallel, found.advice) == ((), None)
    assert any("other ways to spread it cannot be compared" in note for note in found.notes)
    assert not any("zero" in name for rung in found.ladder for name in rung.choices)
    # FSDP's shards are no buckets, and stay as they were traced.
    assert BUCKETS_ASSUMED not in map(code_of, found.notes)


def test_the_trace_of_a_technique_takes_no_minutes(monkeypatch):
    limits = {}

    def trace(request):
        limits.setdefault(bool(request.recipe.choices), set()).add(request.limit_s)
        if request.recipe.choices:
            raise UserError("the trace was not done within 30 s")
        return toy_stream(request.batch or 16)

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("train.py", (), PlanOptions(gpu="513MiB"))

    assert limits == {False: {verb.LIMIT_S}, True: {verb.TECHNIQUE_LIMIT_S}}
    assert any(note.endswith("the trace was not done within 30 s") for note in found.plan.notes)


def test_a_batch_in_parts_that_cannot_be_traced_in_time_is_not_begun(monkeypatch):
    asked = []

    def trace(request):
        asked.extend(request.recipe.names)
        return replace(toy_stream(request.batch or 16, steps=2), traced_s=4.0)

    monkeypatch.setattr(verb, "open_tracer", lambda *_: nullcontext(trace))

    found = plan("planned.py:task", (), PlanOptions(gpu="513MiB"))

    assert "microbatching" not in asked
    said = "it cuts a batch into 16 parts, which takes minutes to trace"
    assert any("microbatching" in note and note.endswith(said) for note in found.plan.notes)


@pytest.mark.slow
def test_a_recipe_is_part_of_what_is_planned():
    choice = Choice(technique="activation_checkpointing", settings={"mode": "full"})

    bare = plan(SUBJECT, (), PlanOptions(gpu="l4", batch=64)).plan
    changed = plan(
        SUBJECT, (), PlanOptions(gpu="l4", batch=64, recipe=Recipe(choices=(choice,)))
    ).plan

    assert changed.allocated.bytes < bare.allocated.bytes


def test_the_allocator_s_variables_count(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    assert ground_of(PlanOptions(gpu="l4")).settings.expandable_segments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": "h20"}, "did you mean 'h200'"),
        ({"gpu": "12"}, "12 bytes is none"),
    ],
)
def test_an_unknown_gpu_is_refused_before_anything_runs(options, says):
    with pytest.raises(UserError, match=says):
        plan(SUBJECT, (), PlanOptions(**options))


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": -3}, {"gpus": 0}])
def test_numbers_that_plan_nothing_are_refused(options):
    with pytest.raises(UserError, match="at least 1"):
        PlanOptions(gpu="l4", **options)


@pytest.mark.parametrize(
    ("kind", "name", "gpu", "is_refused"),
    [
        ("cuda", "NVIDIA L4", "h100", True),
        ("cpu", "AMD EPYC 7763", "24GiB", True),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100", False),
        ("cuda", "NVIDIA RTX A6000", "48GiB", False),
    ],
)
def test_a_profile_of_another_device_calibrates_nothing(monkeypatch, kind, name, gpu, is_refused):
    monkeypatch.setattr(
        verb, "open_tracer", lambda *_: nullcontext(lambda request: toy_stream(request.batch or 16))
    )
    seen = profile(kind=kind, device_name=name, samples_per_step=16.0)
    refusal = pytest.raises(UserError, match=f"{name} and the plan for") if is_refused else None

    with refusal or nullcontext():
        plan("train.py", (), PlanOptions(gpu=gpu, gpus=2, profile=seen))


@pytest.mark.parametrize(
    ("devices", "says"), [(1, "this machine has one"), (8, "give --gpus 2 or more")]
)
def test_links_that_cannot_be_measured_say_why(monkeypatch, tmp_path, devices, says):
    here = machine(devices=(gpu(),) * devices)
    monkeypatch.setattr(verb, "read_machine", lambda **_: here)

    with pytest.raises(UserError, match=says):
        verb.read_links(tmp_path / "links.json", 1, pytest.fail)


def test_an_option_behind_the_script_is_pointed_at():
    with pytest.raises(UserError, match="put it before"):
        plan(str(SCRIPTS / "no_step.py"), ("--gpu", "l4"), PlanOptions())


def test_without_a_gpu_here_the_names_are_listed(monkeypatch):
    machine = verb.read_machine(torch=False)
    if machine.device.kind in verb.GPU_KINDS:
        pytest.skip("this machine has a GPU")

    with pytest.raises(UserError) as refusal:
        plan(SUBJECT)

    assert all(name in str(refusal.value) for name in CATALOGUE)


def test_a_step_that_fails_is_refused_in_one_line_with_its_place():
    with pytest.raises(UserError) as refusal:
        plan(f"{SCRIPTS / 'planned.py'}:failing", (), PlanOptions(gpu="l4"))

    assert "\n" not in str(refusal.value)
    assert "no loss for 2 parts" in str(refusal.value)
    assert "planned.py" in str(refusal.value)
    assert "nothing could be predicted" in str(refusal.value)


def test_a_script_without_a_step_is_refused_in_one_line():
    with pytest.raises(UserError) as refusal:
        plan(str(SCRIPTS / "no_step.py"), (), PlanOptions(gpu="l4"))

    assert "\n" not in str(refusal.value)
    assert "step" in str(refusal.value)


def test_every_technique_that_is_traced_exists():
    assert traceable_choice("activation_checkpointing mode=selective").settings == {
        "mode": "selective"
    }
    assert traceable_choice("microbatching chunks=2").settings == {"chunks": 2}
    assert traceable_choice("expandable_segments") is None
    assert traceable_choice("batch=8 accumulate=2 (by hand)") is None
