"""What a command says in Korean: help, errors, the lists, and what `check` finds."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys

import click
import pytest

from flatout.cli import call, reader_language
from flatout.cli.commands import SUMMARIES, Context, flatout
from flatout.records.messages import messages
from tests.paths import ROOT

SOURCE = ROOT / "src/flatout"
ENGLISH = re.compile(
    r"(?<![-/\w.])(the|of|is|are|that|not|an|it|no|was|to|and|in|with)\b(?![-.(=])"
)
"""Words of every English sentence, and of none that is Korean."""
REFUSING = (
    *("agent", "cli", "launch", "planner", "records", "reporting", "tuning", "workflow"),
    *("data/file_order.py", "data/format.py", "data/packed_store.py", "data/sources"),
    *("data/staging.py", "data/verify.py", "data/worker_pool.py", "data/writer.py"),
)
"""Where the errors are that a user of the commands may meet."""
ENDINGS = re.compile(r"(scriptx|pythonx|\[parallel\] x|[\w.]+[.:] ?x: x|\w+: x|xx a size .*)$")
"""Errors whose end is another text that is known by itself."""
FOUND = "import torch\nx = torch.zeros(3000).cuda()\ny = torch.rand(3000).cuda()\n"


def prose(text):
    """Return a text without what is quoted, code or a link."""
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\S+\.\w+\(\S*", "", text)


def explained(command):
    context = Context(command)
    yield from inspect.cleandoc(command.help).split("\n\n")
    yield from (x.help for x in command.get_params(context) if isinstance(x, click.Option))


@pytest.mark.parametrize("name", ["", *SUMMARIES])
def test_all_of_a_command_s_help_has_its_korean(name):
    command = flatout.get_command(None, name) if name else flatout

    said = [" ".join(text.split()) for text in explained(command)]

    assert [text for text in said if messages("ko").text(text) == text] == []


def test_help_is_korean_and_no_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")

    assert call(["tune", "--lang", "ko", "--help"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("사용법: flatout tune")
    assert [line for line in lines if ENGLISH.search(prose(line))] == []
    wide = [sum(1 + (c > "\u1100") for c in line) for line in lines[1:]]
    assert max(wide) <= 60


@pytest.mark.parametrize(
    ("place", "language"), [("ko_KR.UTF-8", "ko"), ("de_DE.UTF-8", "en"), ("C", "en"), ("", "en")]
)
def test_the_locale_s_language_is_used_unless_another_is_asked_for(monkeypatch, place, language):
    monkeypatch.setenv("LC_ALL", place)
    for name in ("LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)

    assert reader_language(["measure", "train.py", "--lang", "ko"]) == language
    assert reader_language(["measure", "-m", "translate", "--lang", "ko"]) == language
    assert reader_language(["measure", "--lang", "ko", "train.py"]) == "ko"
    assert reader_language(["measure", "--lang=en", "train.py"]) == "en"


def test_a_korean_machine_gets_korean(tmp_path):
    known = {**os.environ, "LC_ALL": "ko_KR.UTF-8", "PYTHONIOENCODING": "utf-8"}

    done = subprocess.run(
        [sys.executable, "-m", "flatout", "rules"],
        cwd=tmp_path, env=known, capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip

    lines = done.stdout.splitlines()
    assert [line for line in lines if not re.search("[\uac00-\ud7a3]", line)] == []


@pytest.mark.parametrize(
    "words",
    [
        ["tnue"],
        ["tune", "--bugdet", "1m", "train.py"],
        ["tune", "--budget", "soon", "train.py"],
        ["tune", "--numerics", "none", "train.py"],
        ["measure"],
        ["measure", "nosuch.py"],
        ["run", "train.py"],
        ["compare", "a.json", "b.json"],
        ["tune", "--only", "loader_wrkers", "x.py"],
        ["rules", "DL99"],
        ["check", "nosuch"],
        ["plan", "--gpu", "h1000", "train.py"],
        ["patch", "no.toml", "train.py"],
    ],
)
def test_a_mistake_is_one_korean_line(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")

    assert call(words) == 2

    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search("[\uac00-\ud7a3]", said)
    assert ENGLISH.search(prose(said)) is None


def refusals():
    """Yield the errors of the commands, with x for what is filled in."""
    for place in map(SOURCE.joinpath, REFUSING):
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = getattr(getattr(node, "func", None), "attr", "")
                name = name or getattr(getattr(node, "func", None), "id", "")
                if name in {"BadParameter", "UsageError", "UserError"} and node.args:
                    yield from texts_of(node.args[0])


def texts_of(node):
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(x.value if isinstance(x, ast.Constant) else "x" for x in node.values)


def test_every_error_of_the_commands_has_its_korean():
    said = [text for text in refusals() if re.search("[a-wyz]", text)]

    assert said
    korean = messages("ko")
    unknown = [text for text in said if korean.text(text) == text]
    assert [text for text in unknown if not ENDINGS.search(text)] == []


def test_what_check_finds_is_korean_and_json_is_not(folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "train.py").write_text(FOUND)

    assert call(["check", "--lang", "ko", "--json", "found.json", "train.py"]) == 1

    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if ENGLISH.search(prose(line))] == []
    assert shown.splitlines()[-1].startswith("파일 1개에서 2건 발견")
    assert "fills memory of the host" in json.loads((folder / "found.json").read_text())[
        "findings"][0]["message"]  # fmt: skip


def test_restore_says_in_korean_what_it_did(tmp_path, capsys):
    assert call(["restore", "--lang", "ko", str(tmp_path)]) == 0

    assert capsys.readouterr().out == f"{tmp_path}에서 변경 0건을 되돌렸습니다\n"
