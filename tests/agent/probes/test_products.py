"""Products of real steps against those known by hand."""

import functools
import json

import pytest
import torch

from flatout.agent.probes.products import Products
from flatout.agent.session import Session
from flatout.analysis.products import attention_flops, seen_products
from flatout.records import phase_clock as phases
from flatout.records.trial import Outcome
from flatout.records.trial_result import Segment
from flatout.records.trial_spec import TrialSpec
from tests.support.probed import SCRIPTS, probed

pytestmark = pytest.mark.slow

FORWARD = {(8, 24, 16): "forward", (8, 5, 24): "forward"}
BACKWARD = {(8, 24, 5): "dgrad", (5, 24, 8): "wgrad", (24, 16, 8): "wgrad"}


@functools.cache
def found(kind):
    trial = probed(SCRIPTS / "multiplied.py", kind, probes={"products": {}}, steps=4)
    assert trial.outcome is Outcome.OK, trial.traceback
    assert trial.details["errors"] == []
    return trial.details["probes"]["products"]


def products(kind):
    return [row.product for row in seen_products(found(kind))]


def sizes(kind, but=((3, 5, 24),)):
    return {(p.m, p.n, p.k): p.role for p in products(kind) if (p.m, p.n, p.k) not in but}


def test_products_of_a_step_have_their_sizes_and_roles():
    assert sizes("plain") == FORWARD | BACKWARD
    assert {p.count for p in products("plain")} == {1.0}
    assert {p.dtype for p in products("plain")} == {"float32"}


def test_accumulated_batches_are_counted_in_their_step():
    counts = {(p.m, p.n, p.k): p.count for p in products("accumulate")}

    assert [counts[size] for size in FORWARD | BACKWARD] == [2.0] * 5


def test_autocast_shows_in_the_arithmetic():
    assert "bfloat16" in {p.dtype for p in products("autocast")}


def test_what_checkpointing_computes_again_is_told_apart():
    again = [p for p in products("checkpoint") if p.role == "again"]

    assert [(p.m, p.n, p.k) for p in again] == [(8, 24, 16)]


def test_a_convolution_is_found_with_its_backward():
    roles = {p.operator: (p.m, p.n, p.k) for p in products("conv") if p.batch == 1}

    assert roles["convolution"] == (8 * 2 * 2, 2, 9)
    assert roles["convolution_backward"] == (8 * 2 * 2, 2, 9)


def test_fused_attention_is_counted():
    assert attention_flops(found("attention")["segments"]) > 0
    assert attention_flops(found("plain")["segments"]) == 0


def test_products_in_groups_and_in_fp8_are_written_down_and_counted():
    session = Session(TrialSpec())
    session.clock.push(phases.FORWARD)
    probe = Products(session)
    rows, weights = torch.ones(64, 32).bfloat16(), torch.ones(4, 32, 16).bfloat16()
    ends, scale = torch.tensor([16, 32, 48, 64], dtype=torch.int32), torch.tensor(1.0)
    fp8 = torch.float8_e4m3fn

    probe.begin()
    torch._grouped_mm(rows, weights, ends)
    torch._scaled_mm(
        rows.to(fp8), weights[0].t().contiguous().t().to(fp8), scale, scale, out_dtype=rows.dtype
    )
    flops = probe.counter.get_total_flops()
    probe.leave()
    probe.end_segment(Segment())

    assert session.errors == []
    seen = json.loads(json.dumps(probe.result()))
    operators = [call["operator"] for call in seen["calls"].values()]
    assert operators == ["aten::_grouped_mm", "aten::_scaled_mm"]
    assert flops == 2 * 64 * 32 * 16 * 2
    assert seen["calls"]["1"]["arguments"][6] == "torch.bfloat16"


@pytest.mark.parametrize("kind", ["plain", "conv"])
def test_what_was_seen_can_be_called_again(kind):
    from flatout.workflow.products_alone import time_group

    for row in seen_products(found(kind)):
        assert "ms" in time_group([row.call], "cpu")[0], row
