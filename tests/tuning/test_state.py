from dataclasses import replace

from flatout.records.profile import ModelFacts
from flatout.tuning.state import with_attention_of
from tests.techniques.facts import profile


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
