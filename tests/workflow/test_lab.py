"""What a lab asks of its trials."""

from flatout.core.recipe import Recipe
from flatout.core.trial import Outcome, Trial
from flatout.core.workload import Workload
from flatout.workflow.lab import Lab
from tests.techniques.facts import machine


def test_the_copies_are_looked_at_where_steps_are_timed_and_nowhere_else(tmp_path):
    traced = []

    def runner(_workload, recipe, _machine, options):
        traced.append(options.traces_kernels)
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    lab = Lab(
        workload=Workload(target="train.py", folder=tmp_path),
        machine=machine(),
        out=tmp_path,
        limit_s=60.0,
        runner=runner,
    )

    lab.time(Recipe())
    lab.guard(Recipe(), "baseline", {}, 2)
    lab.look("samples", Recipe(), {"pipeline": {}}, 12)

    assert traced == [True, False, False]
