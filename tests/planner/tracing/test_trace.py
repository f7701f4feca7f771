import json
from collections import Counter

import pytest

from flatout.analysis.stream_changes import accumulated
from flatout.planner.tracing import cuda_shim
from flatout.planner.tracing import trace as tracing
from flatout.planner.tracing.cuda_shim import ShimRefused, slots_of, virtual_functions
from flatout.planner.tracing.trace import trace
from flatout.planner.tracing.training_step import TrainingStep
from flatout.records.errors import UserError
from flatout.records.memory_stream import (
    Component,
    MemoryStream,
    Phase,
    repeated,
    stream_from_json,
    stream_to_json,
)
from tests.paths import ROOT
from tests.planner.some_at_once import SOME_AT_ONCE
from tests.support.host_kernels import trace_host
from tests.support.programs import python
from tests.support.truth_models import MODELS, Gpt

SCRIPT = ROOT / "tests/scripts/memory/trace_steps.py"
NAMES = (
    *("gpt", "bf16", "fused", "checkpointed", "reentrant", "accumulated", "scaled", "cnn"),
    *("lstm", "gru", "masked", "masked_half", "shapeless", "summed", "compiled", "sharded"),
    "values",
)
FP32 = 4


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> dict[str, MemoryStream | str]:
    """Every step of the script, traced in one process that believes in a GPU."""
    path = tmp_path_factory.mktemp("traced") / "streams.json"
    done = python(
        [str(SCRIPT), str(path), *NAMES],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    return {k: v["error"] if "error" in v else stream_from_json(v) for k, v in found.items()}


def peak(stream: MemoryStream) -> int:
    return max(stream.alive())


def bytes_of(stream: MemoryStream, component: Component, phase: Phase | None = None) -> int:
    rows = (a for a in stream.allocations if a.component is component)
    return sum(a.size for a in rows if phase is None or a.phase is phase)


def operators(stream: MemoryStream) -> set[str]:
    return {a.operator for a in stream.allocations}


def parameter_bytes() -> int:
    return FP32 * sum(p.numel() for p in Gpt().parameters())


@pytest.mark.slow
def test_needs_no_gpu_to_trace_one(traced):
    assert {traced["gpt"].device} == {"cuda"}
    assert traced["gpt"].method in ("virtual_cuda", "cuda_fake")


@pytest.mark.slow
def test_finds_every_parameter_once_and_its_states_twice(traced):
    stream = traced["gpt"]

    assert bytes_of(stream, Component.PARAMETERS) == parameter_bytes()
    assert bytes_of(stream, Component.OPTIMIZER) == pytest.approx(2 * parameter_bytes(), rel=1e-3)


@pytest.mark.slow
def test_finds_one_gradient_a_parameter_and_step(traced):
    stream = traced["gpt"]

    assert bytes_of(stream, Component.GRADIENTS) == pytest.approx(2 * parameter_bytes(), rel=0.2)


@pytest.mark.slow
def test_attention_is_the_kernel_that_a_gpu_would_take(traced):
    assert any("cudnn_attention" in name for name in operators(traced["bf16"]))
    assert any("efficient_attention" in name for name in operators(traced["gpt"]))
    assert not any("for_cpu" in name for name in operators(traced["bf16"]))


@pytest.mark.slow
def test_gradients_of_a_shortcut_are_added_up_in_place(traced):
    added = [a.shape for a in traced["gpt"].allocations if a.operator == "aten.add.Tensor"]
    backward = [
        a.shape
        for a in traced["gpt"].allocations
        if a.operator == "aten.add.Tensor" and a.phase is Phase.BACKWARD
    ]

    assert any(len(shape) == 3 for shape in added)
    assert not any(len(shape) == 3 for shape in backward)


@pytest.mark.slow
def test_a_kernel_s_first_result_says_what_it_was_called_with(traced):
    called = {a.operator: a.arguments for a in traced["cnn"].allocations if a.arguments}

    assert len(called["aten.convolution.default"][0]) == 4
    assert len(called["aten.convolution_backward.default"][10]) == 3


@pytest.mark.slow
def test_batch_norm_is_the_kernel_that_a_gpu_would_take(traced):
    assert "aten.cudnn_batch_norm.default" in operators(traced["cnn"])


@pytest.mark.slow
def test_an_optimizer_over_many_tensors_makes_temporaries_and_a_fused_one_none(traced):
    many = bytes_of(traced["bf16"], Component.TEMPORARIES, Phase.OPTIMIZER)
    fused = bytes_of(traced["fused"], Component.TEMPORARIES, Phase.OPTIMIZER)

    assert many > parameter_bytes()
    assert fused < parameter_bytes() / 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "reentrant"])
def test_checkpointing_keeps_fewer_activations_and_computes_more(traced, kind):
    plain, saved = traced["bf16"], traced[kind]

    assert peak(saved) < peak(plain)
    assert saved.model_flops > plain.model_flops


@pytest.mark.slow
def test_autocast_takes_less_than_full_precision(traced):
    assert peak(traced["bf16"]) < peak(traced["gpt"])


@pytest.mark.slow
def test_only_convolutions_in_full_precision_may_use_tf32_by_default(traced):
    assert traced["cnn"].tf32_share > 0.95
    assert traced["gpt"].tf32_share == traced["bf16"].tf32_share == 0


def test_a_scaled_step_is_taken(traced):
    assert bytes_of(traced["scaled"], Component.OPTIMIZER) > parameter_bytes()


@pytest.mark.slow
def test_accumulation_holds_gradients_through_the_second_forward(traced):
    stream = traced["accumulated"]
    forwards = [m.at for m in stream.marks if m.phase is Phase.FORWARD]
    alive = set()
    for event in stream.events[: forwards[1]]:
        (alive.add if event.born else alive.discard)(event.index)
    held = [stream.allocations[i] for i in alive]

    assert sum(a.size for a in held if a.component is Component.GRADIENTS) >= parameter_bytes()


@pytest.mark.slow
def test_a_step_that_is_stated_to_be_in_micro_batches_takes_what_one_takes_that_is(traced):
    stated, plain = accumulated(traced["bf16"]), traced["bf16"]

    assert (plain.micro_batches, traced["accumulated"].micro_batches) == (1, 2)
    assert peak(stated) == pytest.approx(peak(traced["accumulated"]), rel=0.01)
    assert peak(plain) < 0.97 * peak(traced["accumulated"])
    assert repeated(stated, 1).steps == stated.steps + 1


@pytest.mark.slow
def test_sharding_over_eight_leaves_an_eighth(traced):
    stream = traced["sharded"]

    assert bytes_of(stream, Component.PARAMETERS) == pytest.approx(parameter_bytes() / 8, rel=0.05)
    assert bytes_of(stream, Component.OPTIMIZER) == pytest.approx(parameter_bytes() / 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers_say_what_they_assume(traced, kind):
    stream = traced[kind]

    assert any("cuDNN's workspace" in note for note in stream.notes)
    assert any(a.dtype == "uint8" and a.size > 1000 for a in stream.allocations)


@pytest.mark.slow
def test_a_mask_takes_its_upper_bound_or_the_stated_share(traced):
    whole, half = traced["masked"], traced["masked_half"]

    assert any("all of the elements" in n and "trace_steps.py:" in n for n in whole.notes)
    assert any("a share of 0.5" in note for note in half.notes)
    assert peak(half) < peak(whole)


@pytest.mark.slow
def test_an_operator_without_a_shape_function_is_run_and_named(traced):
    assert any("shapeless" in note for note in traced["shapeless"].notes)
    assert "flatout_tests.shapeless.default" in operators(traced["shapeless"])


@pytest.mark.slow
def test_sparse_gradients_are_seen(traced):
    if "no NVIDIA driver" in str(traced["summed"])[:500]:
        pytest.skip("in a build for CUDA, operators on sparse tensors ask the driver, fake or not")
    rows = [a for a in traced["summed"].allocations if a.component is Component.GRADIENTS]

    assert not any(a.module == "sparse" and a.shape == (5000, 32) for a in rows)
    assert bytes_of(traced["summed"], Component.PARAMETERS) > 2 * 5000 * 32 * FP32


@pytest.mark.slow
def test_compiled_code_is_said_to_be_traced_as_eager_code(traced):
    stream = traced["compiled"]
    eager = bytes_of(traced["gpt"], Component.ACTIVATIONS) / 2

    assert any("torch.compile" in note for note in stream.notes)
    assert any("the compiled step keeps" in note for note in stream.notes)
    assert peak(stream) == peak(traced["gpt"])
    assert eager / 2 < stream.compiled_kept_bytes < 1.2 * eager
    assert traced["gpt"].compiled_kept_bytes is None


@pytest.mark.slow
def test_a_step_that_takes_shapes_from_values_is_refused_in_one_line(traced):
    assert "failed while it was traced at trace_steps.py:" in traced["values"]
    assert "nothing could be predicted" in traced["values"]


@pytest.mark.slow
def test_names_modules_and_lines(traced):
    stream = traced["gpt"]
    activations = [a for a in stream.allocations if a.component is Component.ACTIVATIONS]

    assert all("truth_models.py:" in a.line or "trace_steps.py:" in a.line for a in activations)
    assert {"blocks.0.mlp.0", "blocks.3.qkv"} <= {a.module for a in activations}


@pytest.mark.slow
def test_two_steps_show_the_state_of_the_optimizer(traced):
    steps = Counter(a.step for a in traced["gpt"].allocations)

    assert set(steps) == {0, 1}
    assert peak(traced["gpt"]) > 3 * parameter_bytes()


@pytest.mark.slow
def test_a_stream_survives_its_file(traced):
    stream = traced["bf16"]

    assert stream_from_json(json.loads(json.dumps(stream_to_json(stream)))) == stream


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_any_batch_follows_from_two(name):
    pytest.importorskip("peft" if name == "lora" else "torch")
    pytest.importorskip("transformers" if name in ("bert", "gpt2", "vit", "lora") else "torch")
    two, three, seven = (trace_host(MODELS[name], batch=n) for n in (2, 3, 7))

    expected = [
        a.size + 5 * (b.size - a.size)
        for a, b in zip(two.allocations, three.allocations, strict=True)
    ]

    assert [e.index for e in two.events] == [e.index for e in seven.events]
    assert [a.size for a in seven.allocations] == expected


def test_refuses_a_subject_that_makes_no_sense():
    parts = {"model": Gpt, "batch": None, "loss": None, "optimizer": None}

    with pytest.raises(UserError, match="autocast='fp8'"):
        TrainingStep(**parts, autocast="fp8")
    with pytest.raises(UserError, match="accumulate=0"):
        TrainingStep(**parts, accumulate=0)
    with pytest.raises(UserError, match="mask_share"):
        TrainingStep(**parts, mask_share=0)


def test_traces_on_the_host_where_no_device_can_be_pretended(monkeypatch):
    def refuse():
        raise ShimRefused("the headers are others")

    monkeypatch.setattr(cuda_shim, "install", refuse)
    monkeypatch.setattr(tracing.torch.cuda, "is_available", lambda: False)

    stream = trace(MODELS["small_cnn"])

    assert (stream.device, stream.method) == ("cpu", "cpu_fake")
    assert any("the headers are others" in note for note in stream.notes)
    # A GPU's convolutions make no copies in oneDNN's blocks of channels.
    assert not bytes_of(stream, Component.WORKSPACE)


def test_buffers_of_the_hosts_kernels_count_only_against_real_runs_of_the_host():
    plain, compared = trace(MODELS["small_cnn"], device="cpu"), trace_host(MODELS["small_cnn"])

    assert not bytes_of(plain, Component.WORKSPACE)
    assert bytes_of(compared, Component.WORKSPACE)


def test_counts_virtual_functions_in_headers(tmp_path):
    base, derived = tmp_path / "Base.h", tmp_path / "Derived.h"
    base.write_text("struct API Base { virtual ~Base(); virtual int a() { return 1; } };")
    derived.write_text(
        "struct API Derived : Base { virtual bool b(int x) const; // virtual void no();\n"
        "#ifdef USE_ROCM\n virtual int rocm();\n#endif\n"
        " virtual int a(); virtual void c() = 0; };"
    )

    assert slots_of(base) == {"a": 2, "": 3}
    assert slots_of(base, derived) == {"a": 2, "b": 3, "c": 4, "": 5}


def test_refuses_a_header_without_its_class():
    with pytest.raises(ValueError, match="no class Other"):
        virtual_functions("struct One { };", "Other")


def test_refuses_hooks_that_are_more_or_fewer_than_declared(monkeypatch):
    code = cuda_shim._Code()
    monkeypatch.setattr(cuda_shim._Code, "length", lambda *_: 7)
    slots = dict.fromkeys(cuda_shim.NEEDED, 0) | {"": 48}
    table = (cuda_shim.Pointer * 64)()
    holder = (cuda_shim.Pointer * 1)(cuda_shim.ctypes.addressof(table))

    with pytest.raises(ShimRefused):
        cuda_shim._hook_table(code, holder, slots, 0)
