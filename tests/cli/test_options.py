import re

import click
import pytest

from flatout.cli.options import ScriptCommand, names, script, seconds
from flatout.records.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("45", 45.0), ("1.5M", 90)],
)
def test_a_time_is_read_in_seconds(text, expected):
    assert seconds(None, None, text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5m", "ten", "5d", "1m30s", "nan", "inf"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(click.BadParameter, match="write it as 90s, 10m or 1h"):
        seconds(None, None, text)


def test_names_have_commas_between_them():
    assert names(None, None, " tf32, bf16_autocast,,") == ("tf32", "bf16_autocast")


def parsed(*words):
    """Return what a command with one flag and one option makes of its words."""
    seen = {}

    @click.command("verb", cls=ScriptCommand)
    @click.option("--budget", default="10m")
    @click.option("--resume", is_flag=True)
    @script
    def command(**given):
        seen.update(given)
        return 0

    command.main(list(words), prog_name="verb", standalone_mode=False)
    return seen


@pytest.mark.parametrize(
    ("words", "target", "arguments"),
    [
        ("train.py", "train.py", ""),
        ("train.py --budget 3 -- --x", "train.py", "--budget 3 -- --x"),
        ("train.py --help", "train.py", "--help"),
        ("--budget 1m train.py --budget 3 -- --x", "train.py", "--budget 3 -- --x"),
        ("--budget=1m --resume train.py --resume", "train.py", "--resume"),
        ("-- train.py -m fast", "train.py", "-m fast"),
        ("train.py -m fast", "train.py", "-m fast"),
        ("-m package.train --lr 3", "-m", "package.train --lr 3"),
        ("--resume -m package.train -m x", "-m", "package.train -m x"),
        ("--budget 1m -- -m package.train", "-m", "package.train"),
    ],
)
def test_everything_after_the_script_belongs_to_the_script(words, target, arguments):
    seen = parsed(*words.split())

    assert seen["target"] == target
    assert seen["arguments"] == tuple(arguments.split())


def test_options_before_the_script_are_flatout_s():
    seen = parsed("--budget", "1m", "--resume", "train.py", "--budget", "3")

    assert seen["budget"] == "1m"
    assert seen["resume"]


PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\n"


@pytest.mark.parametrize(
    ("words", "better"),
    [
        ("train.py --budget 3m --epochs 2", "verb --budget 3m train.py --epochs 2"),
        ("--resume train.py --budget=3m", "verb --resume --budget=3m train.py"),
        ("python train.py --epochs 2 --resume", "verb --resume python train.py --epochs 2"),
    ],
)
def test_an_option_of_flatout_s_after_the_script_is_named(words, better, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PARSES)

    with pytest.raises(UserError, match=re.escape(f"write: {better} (if")):
        parsed(*words.split())


@pytest.mark.parametrize(
    "source",
    [
        f"{PARSES}parser.add_argument('--budget')\n",
        "import sys\nprint(sys.argv)\n",
        "from transformers import HfArgumentParser\n",
        "import settings\n",
    ],
)
def test_an_option_that_the_script_may_have_is_the_script_s(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "settings.py").write_text("class Settings:\n    budget: int = 3\n")

    assert parsed("train.py", "--budget", "3")["arguments"] == ("--budget", "3")


def test_two_dashes_say_that_the_option_is_the_script_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PARSES)

    assert parsed("--", "train.py", "--budget", "3")["arguments"] == ("--budget", "3")
