from types import SimpleNamespace

import pytest

from flatout.records import catalogue
from flatout.records.ablation import Comparison
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.tuning import verdict
from flatout.reporting.tuning.verdict import gain, hand_changes

BY_HAND = """
Where the loader is made:
- loader = DataLoader(data)
+ loader = DataLoader(data, num_workers=$num_workers, context="$context")  # costs $5
"""


@pytest.fixture
def changes_of(monkeypatch):
    def changes(text, **settings):
        made_up = SimpleNamespace(by_hand=text)
        monkeypatch.setattr(verdict, "technique_class", lambda _name: made_up)
        recipe = Recipe(choices=(Choice(technique="made_up", settings=settings),))
        return hand_changes(recipe)

    return changes


def test_settings_stand_in_the_lines(changes_of):
    changes = changes_of(BY_HAND, num_workers=2, context="spawn")

    assert changes == {
        "made_up num_workers=2 context=spawn": [
            "Where the loader is made:",
            "- loader = DataLoader(data)",
            '+ loader = DataLoader(data, num_workers=2, context="spawn")  # costs $5',
        ]
    }


def test_a_technique_without_instructions_gives_no_lines(changes_of):
    assert changes_of("") == {"made_up": []}


@pytest.mark.parametrize("name", catalogue.names())
def test_instructions_name_no_setting_that_does_not_exist(name):
    kind = catalogue.technique_class(name)
    recipe = Recipe(choices=(Choice(technique=name, settings=kind().settings()),))

    (lines,) = hand_changes(recipe).values()

    assert [line for line in lines if "$" in line] == []


@pytest.mark.parametrize("ratio", [1.003, 0.998])
def test_what_is_shown_as_no_gain_is_not_called_faster_or_slower(ratio):
    pair = Comparison(ratio=ratio, interval=(ratio - 0.001, ratio + 0.001), n=10)

    assert gain(pair).code == "gain.no_difference"
