"""The rules for what kernels take, and whole predictions, against numbers of an H200."""

import os

import pytest

from benchmarks.gpu_memory import CASES, all_cases
from flatout.hardware.catalogue import find_gpu
from flatout.planner.allocator_settings import AllocatorSettings
from flatout.planner.kernel_workspaces import Convolution, Recurrent, taken_by
from flatout.planner.largest_batch import steady_replay
from flatout.planner.memory_trace import open_tracer
from flatout.planner.tracing.script import TraceRequest
from flatout.planner.workspaces import find_calibration, with_workspaces
from flatout.records.input_files import read_json
from flatout.records.memory_stream import Allocation, Component, Phase
from flatout.records.units import MIB
from tests.paths import ROOT

MEASURED = read_json(ROOT / "tests/planner/h200.json")
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def convolution(row):
    pictures, inner, outer, before, after, width, stride, groups, dtype, is_last, *_ = row
    return Convolution(
        pictures=pictures,
        inner=inner,
        outer=outer,
        pixels_in=before**2,
        pixels_out=after**2,
        taps=width**2,
        stride=stride,
        groups=groups,
        dtype=dtype,
        is_channels_last=bool(is_last),
    )


def recurrent(row):
    kind, steps, batch, inner, hidden, layers, directions, dtype, *_ = row
    return Recurrent(
        kind=kind,
        steps=steps,
        batch=batch,
        inner=inner,
        hidden=hidden,
        layers=layers,
        directions=directions,
        element_bytes=ELEMENT_BYTES[dtype],
    )


def gradients(operator, shape, dtype):
    first = Allocation(
        size=1,
        component=Component.TEMPORARIES,
        phase=Phase.BACKWARD,
        step=0,
        operator=f"aten._scaled_dot_product_{operator}_attention_backward.default",
        shape=shape,
        dtype=dtype,
        arguments=((), shape),
    )
    return [first] * 3


@pytest.mark.parametrize(("direction", "share"), [(0, 0.9), (1, 0.9), (2, 0.8)])
def test_most_convolutions_take_what_the_rule_says(direction, share):
    rows = MEASURED["convolutions"]
    ways = (Convolution.along, Convolution.against, Convolution.of_weight)

    near = [
        abs(ways[direction](convolution(row)) - row[10 + direction])
        <= max(2.1 * MIB, 0.02 * row[10 + direction])
        for row in rows
    ]

    assert sum(near) / len(rows) >= share


@pytest.mark.parametrize("row", MEASURED["recurrent"])
def test_recurrent_layers_keep_and_take_what_was_measured(row):
    *_, workspace, reserve = row

    assert recurrent(row).reserve_bytes() == reserve
    assert recurrent(row).workspace_bytes() == pytest.approx(workspace, rel=0.07)


@pytest.mark.parametrize("row", MEASURED["attention"])
def test_attention_s_backward_takes_what_was_measured(row):
    batch, heads, length, head, dtype, operator, taken = row

    *_, last = taken_by(gradients(operator, (batch, heads, length, head), dtype))

    sums = batch * heads * length * 4 if operator == "efficient" else -256
    assert last.bytes - sums == taken


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in all_cases()}))
def test_predictions_are_near_what_the_gpu_counted(name):
    calibration = find_calibration(find_gpu("h200"), "2.11.0")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    with open_tracer(f"{CASES}:{name}", environment=environment) as trace:
        for case, batch in all_cases():
            if case == name:
                stream = trace(TraceRequest(batch=batch, capability=(9, 0)))
                full = with_workspaces(stream, calibration)
                played = steady_replay(full, AllocatorSettings(), None)
                allocated, reserved = MEASURED["trainings"][f"{name}-{batch}"]

                assert played.peak_allocated == pytest.approx(allocated, rel=0.01)
                assert played.peak_reserved == pytest.approx(reserved, rel=0.07)
