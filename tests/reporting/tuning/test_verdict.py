from types import SimpleNamespace

import pytest

from flatout.records import catalogue
from flatout.records.ablation import Comparison
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.tuning.verdict import gain, hand_changes

BY_HAND = """
Where the loader is made:
- loader = DataLoader(data)
+ loader = DataLoader(data, num_workers=$num_workers, context="$context")  # costs $5
"""


def changes_of(text, **settings):
    recipe = Recipe(choices=(Choice(technique="made_up", settings=settings),))
    return hand_changes(recipe, lambda _name: SimpleNamespace(by_hand=text))


def test_settings_stand_in_the_lines():
    (change,) = changes_of(BY_HAND, num_workers=2, context="spawn")

    assert change.label == "made_up num_workers=2 context=spawn"
    assert change.lines == (
        "Where the loader is made:",
        "- loader = DataLoader(data)",
        '+ loader = DataLoader(data, num_workers=2, context="spawn")  # costs $5',
    )


def test_a_technique_without_instructions_gives_no_lines():
    (change,) = changes_of("")

    assert change.lines == ()


@pytest.mark.parametrize("name", catalogue.names())
def test_instructions_name_no_setting_that_does_not_exist(name):
    kind = catalogue.technique_class(name)
    recipe = Recipe(choices=(Choice(technique=name, settings=kind().settings()),))

    (change,) = hand_changes(recipe, catalogue.technique_class)

    assert [line for line in change.lines if "$" in line] == []


@pytest.mark.parametrize("ratio", [1.003, 0.998])
def test_what_is_shown_as_no_gain_is_not_called_faster_or_slower(ratio):
    pair = Comparison(ratio=ratio, interval=(ratio - 0.001, ratio + 0.001), n=10)

    assert gain(pair).code == "gain.no_difference"
