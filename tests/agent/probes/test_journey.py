"""Copies to pinned memory, which only a machine with a device makes."""

from flatout.agent.probes.journey import PIN, JourneyProbe
from flatout.agent.session import Session
from flatout.records.trial_result import Segment
from flatout.records.trial_spec import TrialSpec


def test_a_sampled_step_has_no_part_of_the_skipped_ones_before_it():
    session = Session(TrialSpec())
    probe = JourneyProbe(session)
    session.sampler.skips_left = 3
    for _ in range(3):
        probe.saw_pinning(0.5)
    session.sampler.skips_left = 0

    probe.saw_pinning(0.25)
    probe.saw_segments([Segment()])

    (_, _, parts), *_ = probe.rows
    assert {place // probe.width: seconds for place, seconds in parts.items()} == {PIN: 0.25}
