"""The cost model of spread steps: its parts by hand."""

import pytest

from flatout.parallel.cost import DeviceCosts, Link, StepWork, Work, step_cost
from flatout.records.plan import NumberSource

LINK = Link(latency_s=1e-3, bytes_per_s=1000.0, source=NumberSource.ASSUMED)
UNIT = DeviceCosts(s_per_flop=1.0)


def test_a_reduction_is_a_scatter_and_a_gather():
    assert LINK.all_gather_s(100, 4) == pytest.approx(3 * 1e-3 + 0.75 * 0.1)
    assert LINK.all_reduce_s(100, 4) == pytest.approx(2 * LINK.all_gather_s(100, 4))
    assert LINK.all_reduce_s(100, 1) == LINK.all_reduce_s(0, 4) == 0.0


def test_measured_reductions_are_interpolated_and_extended_by_bandwidth():
    curve = ((100.0, 1.0), (200.0, 3.0))
    link = Link(latency_s=0, bytes_per_s=1, source=NumberSource.CALIBRATED, measured={2: curve})

    assert link.all_reduce_s(150, 2) == pytest.approx(2.0)
    assert link.all_reduce_s(10, 2) == pytest.approx(1.0)
    assert link.all_reduce_s(400, 2) == pytest.approx(6.0)
    assert link.all_reduce_s(400, 4) == pytest.approx(2 * link.all_gather_s(400, 4))


def test_a_pipeline_waits_for_its_slowest_stage_and_fills_with_all():
    stages = (Work(flops=1.0), Work(flops=2.0), Work(flops=1.0))

    cost = step_cost(StepWork(stages=stages, microbatches=4), UNIT)

    assert cost.compute_s == 8.0
    assert cost.bubble_s == 2.0
    assert cost.total_s == 10.0


def test_backward_of_the_last_microbatch_hides_gradients():
    work = (Work(flops=3.0),)

    exposed = step_cost(StepWork(stages=work, gradients_s=4.0), UNIT)
    hidden = step_cost(StepWork(stages=work, gradients_s=4.0, overlap=1.0), UNIT)

    assert exposed.exposed_s == 4.0
    assert hidden.exposed_s == pytest.approx(2.0)


def test_a_starved_step_lasts_as_long_as_its_loader():
    cost = step_cost(StepWork(stages=(Work(flops=1.0),), data_s=4.0), UNIT)

    assert cost.total_s == 4.0
    assert cost.shares["data"] == 0.75


def test_the_share_of_starts_is_one_of_the_step():
    work = (Work(flops=3.0, starts=4.0),)
    costs = DeviceCosts(s_per_flop=1.0, s_per_start=1.0, step_s=10.0)

    cost = step_cost(StepWork(stages=work, microbatches=2), costs)

    assert cost.total_s == 2 * 5.0 + 10.0
    assert cost.shares["starts"] == 2 * 4.0 / 20.0
