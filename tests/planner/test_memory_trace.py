import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flatout.analysis.stream_changes import second_copies, with_buckets
from flatout.launch.trial_process import clean_up_stale_trials
from flatout.planner.largest_batch import affine
from flatout.planner.memory_trace import _Process, open_tracer
from flatout.planner.tracing import script
from flatout.planner.tracing.script import TraceRequest
from flatout.records.errors import UserError
from flatout.records.memory_stream import Component, Phase
from flatout.records.recipe import Choice, Recipe
from tests.paths import ROOT
from tests.support.programs import python
from tests.support.traced import trace_memory

SCRIPTS = ROOT / "tests/scripts/whole"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with a script and a Task in it."""
    for path in (*SCRIPTS.glob("planned_*.py"), SCRIPTS / "no_step.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_kept(path):
    """A checkpoint of a real training, as a script resumes from."""
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.zeros(2, 64)).sum().backward()
    optimizer.step()
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, path)


def size_of(stream, component):
    return sum(a.size for a in stream.allocations if a.component is component)


def listing(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


def test_traces_a_script_as_it_is(folder):
    before = listing(folder)

    stream = trace_memory("planned_steps.py")

    weights = 4 * (768 * 512 + 512 + 512 * 10 + 10)
    assert (stream.device, stream.batch, stream.steps) == ("cuda", 16, 2)
    assert size_of(stream, Component.PARAMETERS) == weights
    assert size_of(stream, Component.OPTIMIZER) == pytest.approx(2 * weights, rel=1e-3)
    assert any(a.line.startswith("planned_steps.py:") for a in stream.allocations)
    assert any(a.dtype == "float16" for a in stream.allocations if a.phase is Phase.FORWARD)
    assert stream.model_flops > 0
    assert listing(folder) == before


def test_gives_a_script_another_batch(folder):
    stream = trace_memory("planned_steps.py", request=TraceRequest(batch=64, ranks=4))

    assert stream.batch == 64
    assert not stream.spreads_itself  # torchrun's variables alone spread nothing
    assert any(a.shape == (64, 3, 16, 16) for a in stream.allocations)


WITH_INPUT = """
import json, sys
from flatout.planner.memory_trace import open_tracer
from flatout.planner.tracing.script import TraceRequest
with open_tracer("reads.py") as trace:
    print([trace(TraceRequest(batch=batch)).batch for batch in (None, 32)])
"""


@pytest.mark.slow
def test_a_script_reads_the_file_that_flatout_was_given_as_its_input_at_each_request(folder):
    script = (folder / "planned_steps.py").read_text()
    (folder / "reads.py").write_text(f"import sys\nassert sys.stdin.read() == 'yes'\n{script}")
    (folder / "given").write_text("yes")

    with (folder / "given").open() as file:
        done = python(["-c", WITH_INPUT], stdin=file, cwd=folder)

    assert done.stdout.strip() == "[16, 32]", done.stderr


@pytest.mark.slow
def test_a_script_finds_the_end_of_its_input_and_not_what_is_asked(folder):
    script = (folder / "planned_steps.py").read_text()
    (folder / "reads.py").write_text(f"import sys\nassert sys.stdin.read() == ''\n{script}")

    assert trace_memory("reads.py").batch == 16


@pytest.mark.slow
def test_passes_a_script_its_own_arguments(folder):
    assert trace_memory("planned_steps.py", ["--batch", "32"]).batch == 32


@pytest.mark.slow
def test_says_when_a_script_makes_its_batches_itself(folder):
    with open_tracer("planned_steps.py", ["--own-batches"]) as trace:
        with pytest.raises(UserError, match="batches of 8 samples itself"):
            trace(TraceRequest(batch=64))

        assert trace(TraceRequest()).batch == 8


def test_names_the_line_at_which_a_script_fails(folder):
    with pytest.raises(UserError, match=r"planned_steps\.py:\d+: ValueError: the images"):
        trace_memory("planned_steps.py", ["--fails"])


HABITS = ("writes", "saves", "evaluates", "draws", "resumes", "scatters")


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS)
def test_what_scripts_do_between_their_steps_does_not_end_the_trace(folder, habit):
    save_kept("kept.pt")

    stream = trace_memory("planned_habits.py", [habit])

    second = [a for a in stream.allocations if a.step == 1 and a.phase is Phase.BACKWARD]
    assert (stream.steps, stream.notes) == (2, ())
    assert second
    assert "state.pt" not in listing(folder)


@pytest.mark.slow
def test_weights_that_a_script_draws_itself_take_the_place_of_the_module_s(folder):
    stream = trace_memory("planned_own_weights.py")

    weight_bytes = 4 * 64 * 1024
    parameters = [a for a in stream.allocations if a.component is Component.PARAMETERS]
    assert stream.steps == 2
    assert sum(a.size == weight_bytes for a in parameters) == 1


@pytest.mark.slow
def test_a_failure_before_the_second_step_is_no_plan_of_the_first(folder):
    with pytest.raises(UserError, match=r"follows step 1 failed.*planned_habits\.py:\d+: ValueErr"):
        trace_memory("planned_habits.py", ["breaks"])


@pytest.mark.slow
def test_a_failure_before_any_step_is_not_said_to_be_one_of_a_step(folder):
    with pytest.raises(UserError, match=r"before its first step, failed.*kept\.pt"):
        trace_memory("planned_early.py")


@pytest.mark.slow
def test_a_script_that_ends_early_is_refused_with_its_last_words(folder):
    with pytest.raises(UserError, match="exit code 1 and took no training step: give me data"):
        trace_memory("planned_early.py", ["--ends"])


@pytest.mark.slow
def test_says_that_several_gpus_are_planned_as_one(folder):
    stream = trace_memory("planned_pair.py", ["cuda:1"])

    assert any("several GPUs" in note for note in stream.notes)


@pytest.mark.slow
def test_says_that_a_script_takes_one_step_only(folder):
    stream = trace_memory("planned_habits.py", ["nothing", "--epochs", "1"])

    assert stream.steps == 1
    assert any("took one step" in note for note in stream.notes)


@pytest.mark.slow
def test_every_one_of_several_optimizers_steps_twice(folder):
    stream = trace_memory("planned_pair.py")

    state = 2 * 4 * 65 * 4096
    last = stream.steps - 1
    start = min(mark.at for mark in stream.marks if mark.step == last)
    alive = stream.alive()
    backward = [m.at for m in stream.marks if m.step == last and m.phase is Phase.BACKWARD]
    assert len(backward) == 2
    assert min(alive[start:]) > state


@pytest.mark.slow
def test_a_script_without_a_loader_is_not_run_again_for_another_batch(folder, monkeypatch):
    runs = []
    run = script.run_process
    monkeypatch.setattr(script, "run_process", lambda *a, **k: runs.append(a) or run(*a, **k))

    with open_tracer("planned_pair.py") as trace:
        assert trace(TraceRequest()).batch == 16
        with pytest.raises(UserError, match="batches of 16 samples itself, and not of 17"):
            trace(TraceRequest(batch=17))

    assert len(runs) == 1


TWO_LOADERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rows = TensorDataset(torch.zeros(640, 32))
marked, plain = DataLoader(rows, 4), DataLoader(rows, 28)
model = nn.Linear(32, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (few,), (many,) in zip(marked, plain):
    optimizer.zero_grad()
    (model(few.to("cuda")).sum() + model(many.to("cuda")).mean()).backward()
    optimizer.step()
    model.eval()
    for _ in DataLoader(rows, 64):
        break
    model.train()
"""


@pytest.mark.slow
def test_batches_of_several_sizes_are_not_taken_to_grow_alike(folder):
    (folder / "two.py").write_text(TWO_LOADERS)

    with open_tracer("two.py") as trace:
        stream = trace(TraceRequest())
        with pytest.raises(UserError, match="draws batches of 4 and 28 samples"):
            trace(TraceRequest(batch=29))

    assert stream.micro_batches == 1


ENDS_SHORT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.zeros(100, 32)), 64, shuffle=True)
model = nn.Linear(32, 8).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for number, (rows,) in enumerate(loader):
        model(rows.to("cuda")).sum().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_last_batch_of_a_small_data_set_is_planned_as_a_full_one(folder):
    (folder / "short.py").write_text(ENDS_SHORT)

    with open_tracer("short.py") as trace:
        model = affine(trace(TraceRequest()), trace(TraceRequest(batch=65)))

    inputs = [a.shape for a in model.at(80).allocations if a.component is Component.INPUTS]
    assert {shape for shape in inputs if shape[1:] == (32,)} == {(80, 32)}
    assert (model.stream.batch, model.stream.micro_batches) == (64, 2)


@pytest.mark.slow
def test_says_when_a_script_takes_no_step(folder):
    with pytest.raises(UserError, match="took no training step"):
        trace_memory("no_step.py")


@pytest.mark.slow
def test_samples_that_are_made_in_the_training_process_leave_other_batches_known(folder):
    few, more = (
        trace_memory("planned_samples.py", request=TraceRequest(batch=size)) for size in (8, 9)
    )

    assert affine(few, more).at(10).batch == 10
    assert size_of(few, Component.INPUTS) >= 8 * 256 * 4


@pytest.mark.slow
def test_runs_a_script_for_real_that_stays_on_the_host(folder):
    stream = trace_memory("planned_steps.py", ["--on-host"])

    assert (stream.device, stream.method) == ("cpu", "real")
    assert any("trains on the CPU" in note for note in stream.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "copies"), [((), 2), (("views",), 1)])
def test_traces_the_first_rank_of_several_with_its_buckets(folder, words, copies):
    stream = trace_memory("planned_ranks.py", words, TraceRequest(ranks=4))

    assert stream.spreads_itself
    last = stream.steps - 1
    gradients = sum(
        a.size
        for a in stream.allocations
        if a.component is Component.GRADIENTS and (a.step == last or a.operator == "buckets")
    )
    buckets = [a for a in stream.allocations if a.operator == "buckets"]
    assert sum(a.size for a in buckets if a.step == 1) == size_of(stream, Component.PARAMETERS)
    first = sum(a.size for a in buckets if a.step == 0)
    assert gradients == copies * size_of(stream, Component.PARAMETERS) + first
    # Gradients that are views of the buckets have no second copy that FSDP would save.
    assert bool(second_copies(stream)) is (copies == 2)


@pytest.mark.slow
def test_a_script_under_fsdp_spreads_itself_without_buckets(folder):
    stream = trace_memory("planned_ranks.py", ["sharded"], TraceRequest(ranks=8, hosts=2))

    assert stream.spreads_itself
    assert not any(a.operator == "buckets" for a in stream.allocations)
    assert with_buckets(stream) == stream


@pytest.mark.slow
def test_says_that_a_script_wants_torchrun(folder):
    with pytest.raises(UserError, match=r"LOCAL_RANK.*--gpus N"):
        trace_memory("planned_ranks.py")


@pytest.mark.slow
def test_a_recipe_changes_a_scripts_memory(folder):
    recipe = Recipe(choices=(Choice(technique="fused_optimizer"),))

    plain = trace_memory("planned_steps.py")
    fused = trace_memory("planned_steps.py", request=TraceRequest(recipe=recipe))

    def foreach(stream):
        return [a for a in stream.allocations if "_foreach" in a.operator]

    assert len(foreach(fused)) < len(foreach(plain))


@pytest.mark.slow
def test_traces_a_task_in_one_process_as_often_as_asked(folder):
    before = listing(folder)

    with open_tracer("planned_task.py:task") as trace:
        own, other = trace(TraceRequest()), trace(TraceRequest(batch=5))

    assert (own.batch, other.batch) == (20, 5)
    assert any(a.shape == (20, 3, 8, 8) for a in own.allocations)
    assert any(a.shape == (5, 3, 8, 8) for a in other.allocations)
    assert listing(folder) == before


@pytest.mark.parametrize(("name", "batch"), [("made", 20), ("subject", 3)])
def test_traces_what_a_function_returns_and_a_subject(folder, name, batch):
    stream = trace_memory(f"planned_task.py:{name}")

    assert stream.batch == batch
    assert size_of(stream, Component.PARAMETERS) == 4 * (192 * 256 + 256 + 256 * 10 + 10)


@pytest.mark.slow
def test_a_recipe_changes_a_subjects_memory(folder):
    recipe = Recipe(choices=(Choice(technique="bf16_autocast"),))

    with open_tracer("planned_task.py:task") as trace:
        changed = trace(TraceRequest(recipe=recipe))

    assert any(a.dtype == "bfloat16" for a in changed.allocations if a.phase is Phase.FORWARD)


def test_says_what_is_no_subject(folder):
    with pytest.raises(UserError, match="number is a int"):
        trace_memory("planned_task.py:number")
    with pytest.raises(UserError, match="did you mean"):
        trace_memory("planned_task.py:tusk")


def test_two_traces_at_once_are_those_that_come_one_after_the_other(folder, monkeypatch):
    asked, really = [], _Process.ask
    monkeypatch.setattr(
        _Process, "ask", lambda self, what: (asked.append(what.batch), really(self, what))[1]
    )
    requests = TraceRequest(), TraceRequest(batch=21)

    with open_tracer("planned_task.py:task") as trace:
        together = [trace(replace(requests[0], more=1)), trace(requests[1])]
    with open_tracer("planned_task.py:task") as trace:
        apart = [*map(trace, requests)]

    assert together == apart
    assert [stream.batch for stream in together] == [20, 21]
    assert all(stream.traced_s > 0 for stream in together)
    assert asked == [None, None, 21]
    assert "data.txt" not in listing(folder)


@pytest.mark.parametrize(
    ("name", "said"), [("full", "no room for 4"), ("deadly", "the tracing process died")]
)
def test_what_ends_one_of_two_traces_is_said_of_that_one(folder, name, said):
    def both():
        return [trace(TraceRequest(more=1)), trace(TraceRequest(batch=4))]

    with open_tracer(f"planned_task.py:{name}") as trace, pytest.raises(UserError, match=said):
        both()


@pytest.mark.slow
def test_goes_on_after_a_step_that_fails(folder):
    with open_tracer("planned_task.py:broken") as trace:
        for _ in range(2):
            with pytest.raises(UserError, match=r"planned_task\.py:\d+: ZeroDivisionError"):
                trace(TraceRequest())


@pytest.mark.slow
def test_says_when_the_process_dies(folder):
    with pytest.raises(UserError, match="the tracing process died"):
        trace_memory("planned_task.py:deadly")


def test_where_a_gpu_cannot_be_pretended_the_host_stands_in(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(_Process, "ask", lambda _, request: asked.append(request.device))

    with open_tracer("planned_task.py:task") as trace, pytest.raises(UserError, match="died"):
        trace(TraceRequest())

    assert asked == ["cuda", "cpu"]


@pytest.mark.parametrize("numbers", [{"batch": 0}, {"batch": -1}, {"batch": 1.5}])
def test_refuses_numbers_that_make_no_sense(numbers):
    with pytest.raises(UserError, match="whole number"):
        TraceRequest(**numbers)


def test_traces_the_model_that_a_configuration_describes(folder):
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 500,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))

    with open_tracer("hf:config.json", ["sequence=32"]) as trace:
        stream = trace(TraceRequest(batch=4))

    assert any(a.shape == (4, 32, 64) for a in stream.allocations)
    assert any(a.module.startswith("transformer.h.1") for a in stream.allocations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ('{"model_type": "gtp2"}', [], "gpt2"),
        ('{"n_layer": 2}', [], "model_type"),
        ("no json", [], "not JSON"),
        ('{"model_type": "gpt2"}', ["sequens=3"], "sequence"),
        ('{"model_type": "gpt2"}', ["sequence=4096"], "at most 1024"),
    ],
)
def test_explains_a_configuration_that_is_none(folder, text, arguments, said):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(text)

    with pytest.raises(UserError, match=said):
        trace_memory("hf:config.json", arguments)


def test_a_plan_of_a_configuration_runs_nothing_of_the_current_folder(folder):
    for name in ("json.py", "torch.py", "runpy.py", "contextlib.py"):
        (folder / name).write_text("open('ran', 'w')")
    (folder / "config.json").write_text('{"n_layer": 2}')

    with pytest.raises(UserError):
        trace_memory("hf:config.json", [])

    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_a_class_of_tensors_of_the_scripts_own_is_planned_as_plain_tensors_are(folder):
    own = trace_memory("planned_scans.py")
    plain = trace_memory("planned_scans.py", ["--plain"])

    assert own.steps == 2
    assert [(a.size, a.component) for a in own.allocations] == [
        (a.size, a.component) for a in plain.allocations
    ]


KILLED = """
import os, signal
from flatout.planner import memory_trace
from flatout.planner.tracing import script as memory_script

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

memory_script.run_process = memory_trace._Process.next_line = killed
with memory_trace.open_tracer("{}") as trace:
    trace(memory_script.TraceRequest())
"""
WAIT_S = 120.0


@pytest.mark.chaos
@pytest.mark.parametrize("target", ["planned_steps.py", "writes.py:make"])
def test_what_a_killed_trace_leaves_is_gone_at_the_next_start(folder, monkeypatch, target):
    cache, temporary = folder / "cache", folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TMPDIR", str(temporary))
    (folder / "writes.py").write_text("open('written', 'w').close()\ndef make(): ...\n")
    code = KILLED.format(target)

    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False)

    assert done.returncode == -signal.SIGKILL
    (left,) = (cache / "flatout").glob("memory-*")
    end = time.monotonic() + WAIT_S
    while left.exists() and time.monotonic() < end:  # what the killed one started ends on its own
        clean_up_stale_trials()
        time.sleep(0.2)
    assert not left.exists()
    assert list(temporary.iterdir()) == []
    assert not (folder / "written").exists()
