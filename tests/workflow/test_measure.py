"""The verb `measure`."""

import pytest

from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Applied, Outcome, Trial, Workload
from flatout.tuning import passes
from flatout.workflow import measure as measuring
from tests.techniques.facts import machine, model, optimizer, profile


def test_preparing_data_for_long_is_no_hang_within_the_limit(monkeypatch):
    asked = []

    def trial(workload, recipe, machine, options):
        asked.append(options)
        return Trial(recipe=Recipe(), outcome=Outcome.NO_STEPS)

    monkeypatch.setattr(passes, "run_trial", trial)

    measuring.measure(Workload(target="train.py"), limit_s=900.0, machine=object())

    assert asked[0].limit_s > 890.0
    assert asked[0].hang_s > 890.0


@pytest.mark.parametrize(
    ("status", "codes"),
    [("applied", {"slow_optimizer"}), ("not_applicable", {"slow_optimizer", "fp32_on_fast_bf16"})],
)
def test_a_technique_that_was_measured_with_is_not_advised(monkeypatch, status, codes):
    facts = profile(phases_ms={"optimizer": 50.0}, models=(model(),), optimizers=(optimizer(),))
    recipe = Recipe(choices=(Choice(technique="bf16_autocast"),))

    def trial(workload, recipe, machine, options):
        applied = (Applied(technique="bf16_autocast", status=status),)
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=facts, applied=applied)

    monkeypatch.setattr(passes, "run_trial", trial)

    measured = measuring.measure(
        Workload(target="train.py"),
        recipe=recipe,
        machine=machine(cpu_features=frozenset({"amx_bf16"})),
    )

    assert {finding.code for finding in measured.profile.findings} == codes
