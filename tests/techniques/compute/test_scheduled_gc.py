"""Garbage is collected when it was said, and numbers stay what they are."""

import gc
import os
import weakref

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.compute.scheduled_gc import CollectionSchedule, ScheduledGc
from tests.support.programs import python
from tests.techniques.facts import machine, profile
from tests.techniques.guarded import played

PROMISE = ("naive_gpt.py", {"every": 5})


@pytest.fixture(autouse=True)
def collector_as_it_was():
    yield
    gc.unfreeze()
    gc.enable()


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self):
        self.me = self


def test_cycles_live_until_the_step_that_collects():
    tick = CollectionSchedule(3).tick
    tick()
    ghost = weakref.ref(Knot())

    tick()
    at_two = ghost() is not None
    tick()

    assert at_two
    assert ghost() is None
    assert not gc.isenabled()


def test_at_the_end_of_the_technique_python_collects_by_itself_again():
    technique = ScheduledGc(every=2)
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = technique.optimizer(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones(())
    optimizer.step()

    technique.end()

    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_at_the_end_of_the_process_nothing_stays_frozen():
    script = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count()))
from flatout.techniques.compute.scheduled_gc import CollectionSchedule
CollectionSchedule(3).tick()
print("frozen", gc.get_freeze_count() > 0)
"""

    done = python(["-c", script], check=True)

    assert done.stdout.split("\n")[:2] == ["frozen True", "frozen 0"]


def test_an_optimizers_steps_are_counted():
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = ScheduledGc(every=2).optimizer(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones(())

    optimizer.step()
    ghost = weakref.ref(Knot())
    optimizer.step()

    assert ghost() is None


def stepping(technique):
    """Return an optimizer whose steps the technique counts."""
    parameter = nn.Parameter(torch.zeros(()))
    parameter.grad = torch.ones(())
    return technique.optimizer(torch.optim.SGD([parameter], lr=0.1))


def test_the_next_optimizers_steps_are_counted_once_the_first_retires():
    technique = ScheduledGc(every=2)
    stepping(technique).step()
    ghost = weakref.ref(Knot())

    stepping(technique).step()

    assert ghost() is None
    assert not gc.isenabled()


def test_an_optimizer_that_goes_on_after_the_end_changes_nothing():
    technique = ScheduledGc(every=2)
    optimizer = stepping(technique)
    optimizer.step()
    technique.end()

    optimizer.step()

    assert gc.isenabled()
    assert not gc.get_freeze_count()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked processes here")
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_forked_child_collects_by_itself_unless_the_script_says_otherwise(is_ended):
    script = f"""
import gc, os
from flatout.techniques.compute.scheduled_gc import CollectionSchedule
schedule = CollectionSchedule(3)
schedule.tick()
if {is_ended}:
    schedule.end()
    gc.disable()
child = os.fork()
if child == 0:
    os._exit(int(gc.isenabled()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled())
"""

    done = python(["-c", script], check=True)

    assert done.stdout.split() == [str(int(not is_ended)), "False"]


def test_a_script_that_switched_it_off_is_left_alone():
    gc.disable()

    with pytest.raises(NotApplicable, match="switched the automatic collection off"):
        ScheduledGc().optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1))


def test_it_is_offered_where_the_collector_takes_its_share():
    busy = profile(collection_ms_per_step=4.0)

    (found,) = ScheduledGc.candidates(busy, machine())

    assert found.predict(busy, machine()).step_ms == pytest.approx(-3.96)
    assert ScheduledGc.candidates(profile(collection_ms_per_step=0.1), machine()) == ()


@pytest.mark.slow
def test_the_collectors_time_is_measured_and_goes_away():
    script = "heavy_objects.py"

    before, after = played(script), played(script, "scheduled_gc", every=1000)

    assert before.profile.collection_ms_per_step > 0
    assert after.profile.collection_ms_per_step < before.profile.collection_ms_per_step
    assert [item.status for item in after.applied] == ["applied"]
