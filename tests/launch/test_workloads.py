import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flatout.launch.trial_process import command_of
from flatout.launch.workloads import parse_workload
from flatout.records.errors import UserError
from tests.support.programs import ran


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with one script and one Task."""
    (tmp_path / "train.py").write_text("print('training')\n")
    (tmp_path / "job.py").write_text(
        "from made import *\ntask = other = 1\ndef make():\n    x = 1\n"
    )
    (tmp_path / "job.py").write_text("task = other = 1\ndef make():\n    inner = 1\n")
    (tmp_path / "stars.py").write_text("from somewhere import *\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_keeps_its_arguments_untouched(folder):
    workload = parse_workload("train.py", ["--budget", "3", "--", "--x"])

    assert workload.target == "train.py"
    assert workload.arguments == ("--budget", "3", "--", "--x")
    assert workload.folder == folder
    assert workload.python == sys.executable
    assert not workload.is_task


def test_a_task_is_a_name_in_a_file():
    workload = parse_workload("job.py:task", [])

    assert workload.is_task
    assert workload.target == "job.py:task"


def test_a_name_that_a_star_import_may_bring_is_let_through():
    assert parse_workload("stars.py:task", []).is_task


def test_a_file_with_a_colon_in_its_name_is_a_script(folder):
    (folder / "a:b").write_text("#!/usr/bin/env python3\n")

    assert not parse_workload("a:b", []).is_task


def test_a_module_is_found_without_importing_it(folder):
    (folder / "package").mkdir()
    (folder / "package/__init__.py").write_text("raise SystemExit('imported')\n")

    workload = parse_workload("-m", ["package.train", "--lr", "1"])

    assert workload.target == "-m package.train"
    assert workload.arguments == ("--lr", "1")


def test_a_module_of_an_editable_install_is_found(monkeypatch):
    class Editable:
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, None) if name == "installed" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])

    assert parse_workload("-m", ["installed.train"]).target == "-m installed.train"


def test_a_script_without_a_suffix_may_say_that_it_is_python(folder):
    (folder / "train").write_text("#!/usr/bin/env python3\n")

    assert parse_workload("train", []).target == "train"


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("trian.py", [], r"there is no script trian\.py; did you mean train\.py\?"),
        ("no/such/train.py", [], r"there is no script no/such/train\.py"),
        ("jbo.py:task", [], r"there is no script jbo\.py; did you mean job\.py\?"),
        ("job.py:taks", [], r"unknown Task 'taks'; did you mean 'task'\?"),
        ("job.py:inner", [], "unknown Task 'inner'"),
        ("job.py:task", ["--lr", "1"], "a Task takes no arguments"),
        ("-m", [], "-m needs the name of a module"),
        ("-m", ["nosuchpackage.train"], r"there is no module nosuchpackage\.train here"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_was_meant(target, arguments, words):
    with pytest.raises(UserError, match=words):
        parse_workload(target, arguments)


def test_a_folder_is_no_script(folder):
    (folder / "src").mkdir()
    (folder / "src/main.py").touch()

    with pytest.raises(UserError, match=r"src is a folder, not a script.* src/main\.py\?"):
        parse_workload("src", [])


def test_a_folder_without_scripts_says_so(folder):
    (folder / "empty").mkdir()

    with pytest.raises(UserError, match=r"there is no \.py file in empty"):
        parse_workload("empty/train.py", [])


@pytest.mark.parametrize("content", [b"epochs: 3\n", b"\x80\x02}q\x00", b"#!/bin/sh\n"])
def test_a_file_that_is_no_python_is_no_script(folder, content):
    (folder / "train.yaml").write_bytes(content)

    with pytest.raises(UserError, match=r"not a Python script.*did you mean train\.py"):
        parse_workload("train.yaml", [])


def test_a_task_in_a_broken_file_says_where(folder):
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")

    with pytest.raises(UserError, match=r"broken\.py, line 2: "):
        parse_workload("broken.py:task", [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_script_says_so():
    Path("train.py").chmod(0)

    with pytest.raises(UserError, match=r"cannot read train\.py: Permission denied"):
        parse_workload("train.py", [])


def test_a_link_that_leads_nowhere_is_a_missing_script():
    Path("lost.py").symlink_to("nowhere.py")

    with pytest.raises(UserError, match=r"there is no script lost\.py"):
        parse_workload("lost.py", [])


@pytest.mark.parametrize("name", ["-cimport os.py", "-m evil.py", "-.py"])
def test_a_script_whose_name_looks_like_an_option_is_run_as_a_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("print('the script')")

    workload = parse_workload(name, [])
    done = ran(command_of(workload))

    assert done.stdout == "the script\n"


@pytest.mark.parametrize(
    ("typed", "is_as_if"),
    [
        ("python train.py --lr 1", "train.py --lr 1"),
        ("python3 train.py -u", "train.py -u"),
        ("python3.12 -m this --lr 1", "-m this --lr 1"),
        (f"{sys.executable} train.py", "train.py"),
        ("uv run train.py -- --x", "train.py -- --x"),
        ("uv run -- python -m this", "-m this"),
        (
            "poetry run torchrun --standalone train.py",
            "-m torch.distributed.run --standalone train.py",
        ),
        (
            "torchrun --nproc-per-node 2 train.py --lr 1",
            "-m torch.distributed.run --nproc-per-node 2 train.py --lr 1",
        ),
        ("accelerate launch --cpu train.py", "-m accelerate.commands.launch --cpu train.py"),
    ],
)
def test_a_launcher_is_taken_as_it_is_typed(typed, is_as_if):
    first, *rest = typed.split()
    same, *others = is_as_if.split()

    assert parse_workload(first, rest) == parse_workload(same, others)


@pytest.mark.parametrize("start", ["python", "uv run python"])
def test_options_of_python_are_python_s(start):
    first, *rest = f"{start} -u -s train.py -u".split()

    command = command_of(parse_workload(first, rest))

    assert command == [sys.executable, "-u", "-s", "train.py", "-u"]


def test_a_script_may_be_called_like_a_launcher(folder):
    (folder / "python.py").write_text("print('training')\n")

    assert parse_workload("python.py", ["train.py"]).arguments == ("train.py",)


def test_the_name_of_an_installed_command_is_its_script(monkeypatch, folder):
    python = folder / "bin/python"
    python.parent.mkdir()
    (folder / "bin/tunelab").write_text(f"#!{python}\n")
    monkeypatch.setattr(sys, "executable", str(python))

    workload = parse_workload("tunelab", ["fit"])

    assert command_of(workload) == [str(python), str(folder / "bin/tunelab"), "fit"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("python", "python needs a script"),
        ("uv run", "uv run needs a script"),
        ("python -O train.py", "cannot pass -O on to python"),
        ("uv run --with x train.py", "cannot pass --with on to uv run"),
        ("/no/such/python train.py", "not with /no/such/python: install flatout there"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", "put it before flatout"),
    ],
)
def test_a_start_that_cannot_be_passed_on_says_what_to_do(typed, words, monkeypatch, folder):
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    first, *rest = typed.split()

    with pytest.raises(UserError, match=words):
        parse_workload(first, rest)


@pytest.mark.parametrize("length", [1, 300])
def test_a_whole_command_in_quotes_is_named(length):
    with pytest.raises(UserError, match="type its words without quotes around all"):
        parse_workload("train.py --name " + "a" * length, [])


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ("LR=0.1 python train.py ", "", "put it before flatout"),
        ("train.py --name ", ":task", "type its words without quotes around all"),
        ("train.py --name ", "/out", "there is no script"),
    ],
)
def test_a_command_in_quotes_that_no_file_could_be_called_is_refused(start, end, words):
    with pytest.raises(UserError, match=words):
        parse_workload(start + "a" * 300 + end, [])


def test_a_command_line_can_be_typed_again(folder):
    (folder / "my train.py").touch()

    assert parse_workload("my train.py", ["a b"]).command_line == "'my train.py' 'a b'"
