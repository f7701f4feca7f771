import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import EVALUATION, READ

SAME_LOSSES = (READ, READ + EVALUATION)
EVALUATE = """
import torch
{decorator}
def evaluate(model, loader):
    model.eval()
    text = '''
      as it is'''
    {before}
    for x, y in loader:  # batches
        out = model(x)
        note = '''two
lines'''
        {line}
    return out
"""


def script(decorator="", before="pass", line="pass"):
    return EVALUATE.format(decorator=decorator, before=before, line=line)


def test_an_evaluation_with_graphs_is_found():
    assert codes_in(script()) == {"MEM02": [9]}


@pytest.mark.parametrize(
    "changes",
    [
        {"decorator": "@torch.no_grad()"},
        {"decorator": "@torch.inference_mode()"},
        {"before": "torch.set_grad_enabled(False)"},
        {"before": "model.train()"},
        {"line": "torch.autograd.grad(out, x)"},
        {"line": "out.backward()"},
        {"before": "x.requires_grad_()"},
    ],
)
def test_it_is_silent_where_gradients_are_off_or_wanted(changes):
    assert "MEM02" not in codes_in(script(**changes))


@pytest.mark.parametrize(
    "frozen",
    [
        "model.requires_grad_(False)",
        "for p in model.parameters():\n    p.requires_grad = False",
    ],
)
def test_it_is_silent_where_the_model_has_nothing_that_asks_for_a_gradient(frozen):
    loop = "model.eval()\nfor x in loader:\n    out = model(x)\n"

    assert codes_in(f"import torch\n{loop}") == {"MEM02": [3]}
    assert codes_in(f"import torch\n{frozen}\n{loop}") == {}


def test_it_is_silent_where_an_attack_that_the_loop_calls_takes_gradients():
    attack = "def attack(model, x):\n    model(x).sum().backward()\n    return x.grad\n"
    text = script(line="out = attack(model, x)")

    assert codes_in(text) == {"MEM02": [9]}
    assert "MEM02" not in codes_in(text + attack)


def test_it_is_silent_where_the_callers_turn_gradients_off():
    text = script() + "with torch.no_grad():\n    evaluate(m, l)\n"

    assert codes_in(text) == {}


def test_the_fix_indents_code_and_comments_but_not_the_inside_of_texts():
    assert fixed(script(), "MEM02").splitlines()[8:] == [
        "    with torch.no_grad():",
        "        for x, y in loader:  # batches",
        "            out = model(x)",
        "            note = '''two",
        "lines'''",
        "            pass",
        "    return out",
    ]


def test_it_is_silent_where_gradients_are_off_within_the_loop():
    text = script().replace(
        "        out = model(x)\n", "        with torch.no_grad():\n            out = model(x)\n"
    )

    assert codes_in(text) == {}
