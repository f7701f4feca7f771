"""The verb `measure`."""

from flatout.core.recipe import Recipe
from flatout.core.trial import Outcome, Trial
from flatout.core.workload import Workload
from flatout.workflow import measure as measuring
from flatout.workflow import passes


def test_preparing_data_for_long_is_no_hang_within_the_limit(monkeypatch):
    asked = []

    def trial(workload, recipe, machine, options):
        asked.append(options)
        return Trial(recipe=Recipe(), outcome=Outcome.NO_STEPS)

    monkeypatch.setattr(passes, "run_trial", trial)

    measuring.measure(Workload(target="train.py"), limit_s=900.0, machine=object())

    assert asked[0].limit_s > 890.0
    assert asked[0].hang_s > 890.0
