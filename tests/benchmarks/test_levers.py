from dataclasses import replace

import pytest

from benchmarks.bench import Arm
from benchmarks.suites import levers, levers_storage, levers_text
from benchmarks.suites.levers import Subject, record_of, run_once
from flatout.records import catalogue
from flatout.records.profile import PeakBytes
from flatout.records.recipe import Recipe
from flatout.records.trial import Applied, Outcome, Trial, Workload
from tests.techniques.facts import profile


class FakeLab:
    """Answers with trials made beforehand."""

    def __init__(self, *trials):
        self.trials = list(trials)

    def time(self, recipe):
        return self.trials.pop(0)


def trial(median=100.0, outcome=Outcome.OK, applied=(), peak=100):
    seen = profile(phases_ms={"forward": median, "backward": 0.0})
    seen = replace(seen, peak_bytes=PeakBytes(device=peak))
    return Trial(
        recipe=Recipe(),
        outcome=outcome,
        profile=seen if outcome is Outcome.OK else None,
        message="it broke",
        applied=applied,
    )


GROUPS = {
    f"{suite.THEME} {name}": group
    for suite in (levers, levers_text, levers_storage)
    for name, group in vars(suite).items()
    if name.startswith("ON_")
}


@pytest.mark.parametrize("name", GROUPS)
def test_every_technique_of_the_suites_exists_and_takes_its_settings(name):
    for lever, settings in GROUPS[name].items():
        assert catalogue.technique_class(lever)(**settings)


def test_a_technique_that_cannot_act_is_named_with_its_reason():
    refused = {}
    why = Applied(technique="lora", status="not_applicable", why="no matrices")
    arm = Arm(name="lora", lab=FakeLab(trial(applied=(why,))))

    run_once(arm, refused)

    assert (arm.profiles, refused) == ([], {"lora": "not_applicable: no matrices"})


def subject(refused):
    workload = Workload(target="train.py", arguments=(), folder=".", python="python")
    made = Subject(name="GPT", workload=workload, levers={}, refused=refused)
    for name, medians in (("baseline", (100.0, 102.0)), ("fused_optimizer", (50.0, 51.0))):
        arm = Arm(name=name, lab=FakeLab(*(trial(median, peak=len(name)) for median in medians)))
        for _ in medians:
            run_once(arm, {})
        made.arms.append(arm)
    return made


def test_the_record_shows_ratio_and_memory():
    record = record_of("levers", [subject({"lora": "not_applicable: no matrices"})], [])

    assert record.holds
    assert record.table[2][4] == "2.00x"
    assert record.table[2][-1] == f"{len('fused_optimizer') / len('baseline'):.2f}x"
    assert "lora: not_applicable: no matrices" in record.notes


def test_a_technique_that_broke_makes_the_claim_false():
    assert not record_of("levers", [subject({"lora": "failed: it broke"})], []).holds


def test_the_scripts_of_the_suite_are_there():
    assert levers.GPT.exists()
    assert levers.IMAGES.exists()
    assert levers_text.TEXTS.exists()
    assert levers_text.LANGUAGE.exists()
    assert levers_storage.PHOTOGRAPHS.exists()
    assert levers_storage.SAMPLES.exists()
