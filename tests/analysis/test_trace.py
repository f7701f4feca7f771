import random

import pytest

from flatout.analysis.trace import (
    idle_split,
    length,
    merged,
    summarise_operators,
    summarise_trace,
    without,
)
from flatout.records.readings import IdleSplit


def event(kind, name, ts, dur, **args):
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def step(number, ts, dur):
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def launch(ts, correlation):
    return event("cuda_runtime", "cudaLaunchKernel", ts, 1.0, correlation=correlation)


def kernel(name, ts, dur, correlation=0):
    return event("kernel", name, ts, dur, correlation=correlation)


def shares(entries):
    return {entry.name: entry.share for entry in entries}


def test_self_time_leaves_out_what_an_operator_calls():
    events = [
        step(1, 0.0, 100.0),
        event("cpu_op", "aten::linear", 10.0, 50.0),
        event("cpu_op", "aten::t", 12.0, 8.0),
        event("cpu_op", "aten::addmm", 20.0, 40.0),
        event("cpu_op", "aten::add", 70.0, 20.0),
    ]

    summary = summarise_trace(events)

    assert shares(summary.operators) == pytest.approx(
        {"aten::addmm": 0.4, "aten::add": 0.2, "aten::t": 0.08, "aten::linear": 0.02}
    )
    assert summary.steps == 1


def test_operators_of_another_thread_are_not_nested():
    other = event("cpu_op", "aten::mul", 10.0, 30.0) | {"tid": 2}

    summary = summarise_trace([step(1, 0.0, 100.0), event("cpu_op", "aten::mm", 0.0, 50.0), other])

    assert shares(summary.operators) == pytest.approx({"aten::mm": 0.5, "aten::mul": 0.3})


def test_calls_and_times_are_those_of_a_step():
    events = [step(1, 0.0, 100.0), step(2, 100.0, 100.0)]
    events += [event("cpu_op", "aten::mm", ts, 10.0) for ts in (0.0, 20.0, 100.0, 120.0)]

    entry = summarise_trace(events).operators[0]

    assert (entry.calls_per_step, entry.ms_per_step) == (2, 0.02)
    assert entry.share == pytest.approx(0.2)


def test_without_a_step_there_is_no_summary():
    assert summarise_trace([event("cpu_op", "aten::mm", 0.0, 1.0)]) is None


def test_without_a_device_the_reason_is_given():
    summary = summarise_trace([step(1, 0.0, 100.0)])

    assert summary.idle is None
    assert summary.tensor_core_share is None
    assert summary.missing["idle"] == "no device kernels in the trace"


def test_idle_time_is_split_by_what_the_next_kernel_waited_for():
    events = [
        step(1, 0.0, 100.0),
        launch(10.0, 1),
        launch(11.0, 2),
        launch(12.0, 3),
        launch(60.0, 4),
    ]
    device = [
        kernel("a", 20.0, 10.0, 1),  # launched at 10, the device was idle from 0: the host
        kernel("b", 30.02, 9.98, 2),  # 20 ns after the one before
        kernel("c", 45.0, 5.0, 3),  # queued since 12 and 5 us late: something else
        kernel("d", 65.0, 35.0, 4),  # launched at 60, idle since 50: the host
    ]

    idle = idle_split([*events, *device], device, (0.0, 100.0))

    assert idle.host_wait_share == pytest.approx(0.35)
    assert idle.kernel_wait_share == pytest.approx(0.0002)
    assert idle.other_share == pytest.approx(0.05)


def test_idle_and_busy_make_the_whole():
    events = [step(1, 0.0, 100.0), launch(0.0, 1), kernel("a", 10.0, 60.0, 1)]

    assert summarise_trace(events).idle.idle_share == pytest.approx(0.4)


def test_products_are_a_share_of_the_kernels_and_without_them_of_the_operators():
    operators = [
        event("cpu_op", "aten::addmm", 0.0, 30.0),
        event("cpu_op", "aten::add", 40.0, 10.0),
    ]

    on_host = summarise_trace([step(1, 0.0, 100.0), *operators])
    on_device = summarise_trace(
        [step(1, 0.0, 100.0), *operators, kernel("gemm", 0.0, 20.0), kernel("add", 20.0, 60.0)]
    )

    assert on_host.product_share == pytest.approx(0.75)
    assert on_device.product_share == pytest.approx(0.25)


def test_the_own_times_of_a_cpu_make_the_same_summary():
    seen = {
        "steps": 2,
        "traced_ms": 40.0,
        "operators": [["aten::add", 4, 6.0], ["aten::mm", 2, 18.0]],
    }

    found = summarise_operators(seen)

    assert shares(found.operators) == pytest.approx({"aten::mm": 0.45, "aten::add": 0.15})
    assert found.operators[0].ms_per_step == 9.0
    assert found.product_share == pytest.approx(0.75)
    assert found.missing["idle"] == "no device kernels in the trace"
    assert summarise_operators({"steps": 0, "traced_ms": 0.0, "operators": []}) is None


def test_idle_split_adds_up():
    split = IdleSplit(host_wait_share=0.2, kernel_wait_share=0.1, other_share=0.05)

    assert split.idle_share == pytest.approx(0.35)


def test_communication_is_exposed_where_nothing_else_runs():
    events = [
        step(1, 0.0, 100.0),
        kernel("gemm", 0.0, 40.0),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30.0, 30.0),
        event("gpu_memcpy", "Memcpy HtoD", 50.0, 5.0),
    ]

    assert summarise_trace(events).exposed_communication_ms == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("name", "is_tensor_core"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", True),
        (
            "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64",
            True,
        ),
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize256x64x32", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x64", False),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma", False),
        ("ampere_sgemm_128x64_nn", False),
        ("cutlass_80_simt_sgemm_128x64_8x5_nn_align1", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
    ],
)
def test_tensor_core_kernels_are_told_by_their_names(name, is_tensor_core):
    summary = summarise_trace([step(1, 0.0, 10.0), kernel(name, 0.0, 5.0)])

    assert summary.tensor_core_share == float(is_tensor_core)


def test_layout_conversions_are_a_share_of_the_kernels():
    events = [
        step(1, 0.0, 100.0),
        kernel("void cudnn::ops::nchwToNhwcKernel<float>", 0.0, 10.0),
        kernel("conv", 10.0, 30.0),
    ]

    assert summarise_trace(events).layout_conversion_share == pytest.approx(0.25)


def test_kernels_that_run_past_the_last_step_belong_to_it():
    events = [step(1, 0.0, 50.0), launch(40.0, 1), kernel("late", 40.0, 60.0, 1)]

    summary = summarise_trace(events)

    assert summary.step_ms == pytest.approx(0.1)
    assert shares(summary.kernels) == pytest.approx({"late": 0.6})


def test_cutting_spans_agrees_with_counting_points():
    draw = random.Random(0)
    spans = [(a, a + draw.randrange(1, 9)) for a in (draw.randrange(90) for _ in range(12))]
    taken = [(a, a + draw.randrange(1, 9)) for a in (draw.randrange(90) for _ in range(12))]

    left = without(spans, taken)

    covered = {p for a, b in spans for p in range(a, b)} - {
        p for a, b in taken for p in range(a, b)
    }
    assert {p for a, b in left for p in range(a, b)} == covered
    assert length(left) == len(covered)
    assert merged(left) == left


def test_an_operators_time_goes_to_the_places_that_called_it_by_their_work():
    seen = {
        "steps": 2,
        "traced_ms": 200.0,
        "operators": [
            ["aten::mm", 8, 100.0],
            ["aten::bernoulli_", 2, 40.0],
            ["aten::add_", 9, 6.0],
        ],
        "places": [
            ["aten::mm", "layers.* (Linear)", "model.py:3", 30.0],
            ["aten::mm", "head (Linear)", "model.py:9", 10.0],
            ["aten::bernoulli_", "head (Linear)", "model.py:9", 5.0],
            ["aten::add_", "", "", 1.0],  # of the optimizer: no line of the user's
        ],
    }

    found = summarise_operators(seen).consumers

    assert [(one.module, one.line) for one in found] == [
        ("layers.* (Linear)", "model.py:3"),
        ("head (Linear)", "model.py:9"),
    ]
    # Of 100 ms of products three quarters and one; the masks are all the head's.
    assert [one.share for one in found] == pytest.approx([75 / 200, (25 + 40) / 200])
    assert [x.name for x in found[1].operators] == ["aten::bernoulli_", "aten::mm"]
