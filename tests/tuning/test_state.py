from dataclasses import replace

from flatout.records.profile import ModelFacts
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.tuning.experiments import Budget, TrialHistory
from flatout.tuning.ranking import Search
from flatout.tuning.state import TuningState, with_attention_of
from flatout.tuning.worker_scan import WorkerScans
from tests.techniques.facts import machine, profile


def net(**facts):
    known = {"name": "GPT", "parameters": 1, "parameter_bytes": 4, "dtypes": ("float32",)}
    return ModelFacts(**known | facts)


def seen(*models):
    return replace(profile(), models=models)


def backends(before, now):
    return [model.attention_backend for model in with_attention_of(before, now).models]


def test_what_attention_ran_on_is_known_of_a_model_that_was_compiled_since():
    before = seen(net(attention_backend="flash"), net(name="Head"))

    now = seen(net(is_compiled=True), net(name="Head", is_compiled=True))

    assert backends(before, now) == ["flash", ""]


def test_what_was_seen_since_counts_and_a_model_that_is_not_compiled_tells_itself():
    before = seen(net(attention_backend="flash"))

    assert backends(before, seen(net(is_compiled=True, attention_backend="cudnn"))) == ["cudnn"]
    assert backends(before, seen(net())) == [""]
    assert backends(before, seen(net(name="Other", is_compiled=True))) == [""]


def state(*, takes_turns):
    history = TrialHistory(machine=machine(), takes_turns=takes_turns)
    search = Search(machine=machine(), ceiling=Numerics.PRECISION)
    return TuningState(
        history=history,
        budget=Budget(total_s=100.0),
        tell=lambda _: None,
        search=search,
        confirm_pairs=3,
        recipe=Recipe(),
        profile=profile(),
        scans=WorkerScans(history=history, search=search),
    )


def test_a_candidate_takes_fewer_pairs_where_its_processes_take_turns():
    one, other = state(takes_turns=True), state(takes_turns=False)

    assert one.cost_s == 4 * one.trial_s
    assert other.cost_s == 6 * other.trial_s
    assert one.experience.cost_s("data", 5.0) == one.cost_s + 2 * 5.0
    assert other.experience.cost_s("data", 5.0) == other.cost_s + 3 * 5.0
