import re
from dataclasses import replace

from markdown_it import MarkdownIt

from flatout.records.recipe import Choice
from flatout.reporting.tuning.text import ablation_markdown

CHANGES = {"loader_workers num_workers=2": ("- a", "+ b ```"), "bf16_autocast": ()}
HOSTILE = "<img src=x onerror=alert(1)> | [a](http://b) `c`\n# d"


def rendered(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def test_the_report_of_a_tuning(tuned, snapshot):
    assert ablation_markdown(tuned, CHANGES) == snapshot


def test_every_row_has_all_columns(tuned):
    html = rendered(ablation_markdown(tuned))

    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    assert {row.count("<td") + row.count("<th") for row in rows} == {12}
    assert len(rows) == 1 + 1 + 8 + 1


def test_hostile_names_stay_text(tuned):
    row = replace(tuned.rows[0], choice=Choice(technique=HOSTILE, settings={HOSTILE: HOSTILE}))
    hostile = replace(tuned, workload=HOSTILE, rows=(row,), notes=(HOSTILE,))

    html = rendered(ablation_markdown(hostile))

    assert "<img" not in html
    assert "<a " not in html
    assert html.count("<h1>") == 1


def test_a_recipe_without_any_instructions_has_no_section_for_them(tuned):
    assert "by hand" not in ablation_markdown(tuned, {"bf16_autocast": ()})


def test_code_that_holds_a_fence_stays_in_its_block(tuned):
    html = rendered(ablation_markdown(tuned, CHANGES))

    assert "+ b ```\n</code>" in html
