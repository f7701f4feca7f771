import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout import cli
from flatout.cli import call
from flatout.cli.commands import SUMMARIES, flatout
from flatout.records.errors import UserError
from tests.support.programs import python, ran

SOURCE = Path(cli.__file__).parent


def run(*arguments, **options):
    return python(arguments, **options)


WORDS_OF = {
    "run": ["run", "--on-oom", "adapt", "train.py"],
    "pack": ["pack", "photographs", "store"],
    "demo": ["demo"],
    "container": ["container"],
}


def fails_with(monkeypatch, error, verb="doctor"):
    """Let a verb end with an error."""

    def broken(*_arguments, **_options):
        raise error

    monkeypatch.setattr(flatout.get_command(None, verb), "callback", broken)


def test_help_imports_no_torch_and_no_verb():
    code = (
        "import sys; from flatout.cli import call; call(['--help'])\n"
        "heavy = {'torch', 'numpy', 'rich', 'jinja2', 'libcst', 'asyncio'} & set(sys.modules)\n"
        "verbs = [m for m in sys.modules if m.startswith(('flatout.workflow', 'flatout.reporting',"
        " 'flatout.cli.tune', 'flatout.hardware'))]\n"
        "print('imported', sorted(heavy), verbs)"
    )

    done = run("-c", code)

    assert done.stdout.splitlines()[-1] == "imported [] []"


def test_with_closed_streams_nothing_is_said_and_no_file_takes_their_place(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    check = f"{sys.executable} -m flatout check {script} --output json"

    for closed in ("<&- >&- 2>&-", "<&-", ">&-"):
        done = ran(["sh", "-c", f"{check} {closed}"])

        assert (done.returncode, done.stderr) == (0, "")
        assert (done.stdout == "") is (">&-" in closed)


@pytest.mark.parametrize("verb", SUMMARIES)
def test_a_verb_s_own_help_imports_no_torch(verb):
    code = f"import sys; from flatout.cli import call; call(['{verb}', '--help'])\n"

    done = run("-c", code + "print('torch' in sys.modules, 'numpy' in sys.modules)")

    assert done.stdout.splitlines()[-1] == "False False"
    assert f"Usage: flatout {verb}" in done.stdout


def test_each_verb_has_one_file_and_the_summary_of_its_help():
    for verb, summary in SUMMARIES.items():
        assert flatout.get_command(None, verb).help.splitlines()[0] == summary


def test_a_file_with_a_command_is_a_verb():
    files = {
        path.stem
        for path in SOURCE.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "command"
    }

    assert files == set(SUMMARIES)


def test_help_lists_every_verb(capsys):
    assert call([]) == 0

    text = capsys.readouterr().out
    assert [verb for verb in SUMMARIES if f"\n  {verb} " not in text] == []


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_told(capsys, flag):
    assert call([flag]) == 0

    assert capsys.readouterr().out.startswith("flatout ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tnue"], "unknown command 'tnue'; did you mean 'tune'? 'flatout --help' shows"),
        (["train"], "unknown command 'train'"),
        (["tune", "--bugdet", "1m", "train.py"], "'--bugdet'"),
        (["tune", "--budget", "soon", "train.py"], "'soon' is not a time; write it as 90s"),
        (["tune", "--budget", "0s", "train.py"], "'0s' is not a time"),
        (["tune", "--numerics", "none", "train.py"], "'none' is not one of"),
        (["measure"], "Missing argument 'SCRIPT'"),
        (["measure", "nosuch.py"], "there is no script nosuch.py"),
        (["run", "train.py"], "run needs a recipe, as in: flatout run --with recipe.toml"),
        (["run", "--zero", "3", "--offload", "train.py"], "--zero and --offload need --gpus or"),
        (["run", "--with", "no.toml", "nosuch.py"], "there is no script nosuch.py"),
        (["compare", "a.json", "b.json"], "there is no file a.json"),
        (["tune", "--only", "loader_wrkers", "x.py"], "did you mean 'loader_workers'?"),
    ],
)
def test_a_mistake_is_one_clear_line_and_code_2(capsys, monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)

    code = call(words)

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("flatout: ")
    assert expected in captured.err


@pytest.mark.parametrize("words", [["measure", "nosuch.py"], ["tune", "nosuch.py"]])
def test_a_mistake_leaves_no_file_behind(monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)

    call(words)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.chaos
def test_an_interrupt_is_code_130(monkeypatch, capsys):
    fails_with(monkeypatch, KeyboardInterrupt())

    assert call(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "flatout: interrupted; your files are unchanged"


def test_a_user_error_of_several_lines_becomes_one(monkeypatch, capsys):
    fails_with(monkeypatch, UserError("first\n  second"))

    assert call(["doctor"]) == 2
    assert capsys.readouterr().err == "flatout: first second\n"


def test_a_defect_of_flatout_is_code_70_with_its_traceback(monkeypatch, capsys):
    fails_with(monkeypatch, RuntimeError("boom"))

    assert call(["doctor"]) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("flatout: internal error: RuntimeError: boom; your files are")


@pytest.mark.parametrize("verb", ["run", "pack", "demo", "container"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_verb_that_writes_does_not_say_that_nothing_was_written(monkeypatch, capsys, verb, error):
    fails_with(monkeypatch, error, verb)

    assert call(WORDS_OF[verb]) in {70, 130}
    assert "unchanged" not in capsys.readouterr().err.splitlines()[-1]


def test_a_reader_that_went_away_is_no_defect():
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from flatout.cli import call; sys.exit(call(['techniques']))"

    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)

    assert done.returncode == 1
    assert done.stderr == b""
