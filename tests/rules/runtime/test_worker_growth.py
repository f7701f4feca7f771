from dataclasses import replace

import pytest

from flatout.hardware.machine import read_machine
from flatout.records.trial import Outcome
from flatout.records.units import GIB, MIB
from flatout.rules.runtime.worker_growth import check
from flatout.workflow.measure import measure
from tests.paths import ROOT
from tests.rules.journey_facts import journey
from tests.rules.rank_facts import rank
from tests.support.programs import workload_of
from tests.techniques.facts import machine, profile

TURNS = {"next": {}}
SCRIPTS = ROOT / "tests/scripts/whole"


def findings_of(*arguments):
    """Return what is found in a real run, on a machine of a known size."""
    workload = workload_of(SCRIPTS, "growing_workers.py", *arguments)
    trial = measure(workload, machine=replace(read_machine(torch=False), memory_bytes=16 * GIB))
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    return {finding.code: finding for finding in trial.profile.findings}


@pytest.mark.slow
def test_a_data_set_whose_list_grows_in_its_workers_is_found():
    finding = findings_of("keeps")["worker_growth"]

    # Four samples of 1 MiB are a step's.
    assert finding.evidence["growth_bytes_per_step"] == pytest.approx(4 * MIB, rel=0.5)
    assert finding.evidence["workers"] == 2


@pytest.mark.slow
def test_a_data_set_that_replaces_what_it_keeps_is_not():
    assert "worker_growth" not in findings_of("replaces")


def test_growth_is_reported_with_the_steps_that_are_left():
    finding = check(profile(journey=journey(growth=1 * MIB)), machine(memory_bytes=16 * GIB))

    assert finding.of == "memory"
    assert finding.share == 2_000 * MIB / (16 * GIB)
    assert finding.because == (
        "the 2 loader workers hold 200.0 MiB and grow by 2.00 MiB a step, 1.95 GiB in 1,000 steps; "
        "the 16 GiB of this machine last for 8,092 more"
    )
    assert "numpy" in finding.next


def test_it_is_silent_on_slow_growth_and_without_a_journey():
    assert check(profile(journey=journey(growth=20_000.0)), machine()) is None
    assert check(profile(), machine()) is None


def test_the_workers_of_all_ranks_share_the_memory_of_the_machine():
    ranks = tuple(rank(number) for number in range(4))
    facts = profile(journey=journey(growth=1 * MIB), ranks=ranks)

    finding = check(facts, machine(memory_bytes=16 * GIB))

    assert finding.share == 8_000 * MIB / (16 * GIB)
    assert finding.because.startswith("the 8 loader workers hold 800.0 MiB and grow by 8.00 MiB")
