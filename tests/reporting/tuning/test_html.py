from dataclasses import replace

import pytest

from flatout.records.recipe import Choice
from flatout.reporting.tuning.text import ablation_html
from flatout.reporting.tuning.verdict import ResultPlace
from tests.reporting.markup import Markup

CHANGES = {"loader_workers": ("words", "- out", "+ in"), "bf16_autocast": ()}
LOADING = {"src", "href", "action", "srcset", "data", "poster", "background"}


def test_tags_close_in_order(tuned):
    page = Markup(ablation_html(tuned, CHANGES))

    assert page.open == []
    assert page.tags.count("tr") == 1 + 10
    assert page.tags.count("svg") == 1


def test_nothing_is_loaded_and_nothing_runs(tuned):
    text = ablation_html(tuned, CHANGES)
    page = Markup(text)

    assert {name for name, _value in page.attributes} & LOADING == set()
    assert [name for name, _value in page.attributes if name.startswith("on")] == []
    assert set(page.tags) & {"script", "link", "img", "iframe", "object"} == set()
    assert "url(" not in text
    assert "@import" not in text


def test_a_policy_forbids_what_the_page_does_not_do(tuned):
    policies = [v for k, v in Markup(ablation_html(tuned)).attributes if v and "default-src" in v]

    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize(
    "hostile",
    ["</title><script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "{{ 7*7 }}"],
)
def test_hostile_names_stay_text(tuned, hostile):
    row = replace(tuned.rows[0], choice=Choice(technique=hostile, settings={"a": hostile}))
    changes = {hostile: (hostile, f"+ {hostile}")}
    page = Markup(
        ablation_html(
            replace(tuned, workload=hostile, rows=(row,), notes=(hostile,)),
            changes,
            place=ResultPlace(out=hostile, start_in=hostile),
        )
    )

    assert set(page.tags) & {"script", "img"} == set()
    assert hostile in "".join(page.texts)


def test_the_page_says_what_the_terminal_says(tuned):
    words = Markup(ablation_html(tuned)).words

    assert "2.10x faster (95% interval 2.01-2.20, n=5 pairs)" in words
    assert "flatout run --with flatout-out/recipe.toml train.py --epochs 3" in words
    assert "gradient of layer1.0.conv1.weight is 440 times its limit" in words


def test_both_colour_schemes_and_phones_are_served(tuned):
    text = ablation_html(tuned)

    assert "prefers-color-scheme: dark" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
