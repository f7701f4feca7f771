"""The example notebook runs from top to bottom, and its results show as pages and as text.

Its cells are executed in one namespace, as a kernel does it; what the last line of a cell gives is
rendered as Jupyter renders it.
"""

import ast
import json
import os

import pytest

from tests.paths import ROOT
from tests.support.programs import python

NOTEBOOK = ROOT / "examples/notebook.ipynb"
EXECUTOR = """
import ast, json, sys

shown, names = {}, {"__name__": "__main__"}
for cell, source in json.loads(sys.argv[1]):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), cell, "eval"), names)
        html = getattr(value, "_repr_html_", str)()
        shown[cell] = {"text": repr(value), "html": html, "type": type(value).__name__}
open("shown.json", "w").write(json.dumps(shown))
"""


def cells():
    """Return identifier and text of each cell of code."""
    notebook = json.loads(NOTEBOOK.read_text())
    return [
        (cell["id"], "".join(cell["source"]))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    done = python(
        ["-c", EXECUTOR, json.dumps(cells())],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "shown.json").read_text())


def test_the_notebook_is_python_and_holds_no_results():
    notebook = json.loads(NOTEBOOK.read_text())

    assert all(ast.parse(text) for _cell, text in cells())
    assert [cell["id"] for cell in notebook["cells"] if cell.get("outputs")] == []


@pytest.mark.smoke
@pytest.mark.slow
def test_every_result_shows_as_a_page_and_as_text(shown):
    for cell in ("measure", "tune", "plan"):
        assert shown[cell]["html"].startswith("<iframe srcdoc=")
        assert "&lt;!doctype html&gt;" in shown[cell]["html"].lower()
    for cell in ("compare", "check"):
        assert shown[cell]["html"].startswith("<pre>")
    for cell in ("measure", "tune", "plan", "compare", "check"):
        assert not shown[cell]["text"].startswith(f"{shown[cell]['type']}(")
    for cell in ("measure", "tune"):
        assert len(shown[cell]["text"].splitlines()) <= 25
    assert "train.py" in shown["measure"]["text"]
    assert shown["run"]["text"] == "0"
