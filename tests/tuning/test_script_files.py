"""Which files a workload is made of."""

import sys

import pytest

from flatout.records.trial import Workload
from flatout.tuning import script_files
from flatout.tuning.script_files import MAX_BYTES, digests_of, find_script, script_folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "work"


def written(folder, **texts):
    """Write files; two underscores in a name stand for a slash."""
    for name, text in texts.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files_of(folder, target, *arguments, is_task=False):
    workload = Workload(target=target, arguments=arguments, folder=folder, is_task=is_task)
    return set(digests_of(workload))


def test_modules_are_followed_from_one_to_the_next(folder):
    written(folder, train="import model", model="import blocks", blocks="import model", other="")

    assert files_of(folder, "train.py") == {"train.py", "model.py", "blocks.py"}


def test_a_changed_module_has_another_digest_and_the_others_have_not(folder):
    written(folder, train="import model", model="width = 8")
    before = digests_of(Workload(target="train.py", folder=folder))
    written(folder, model="width = 9")

    after = digests_of(Workload(target="train.py", folder=folder))

    assert before["train.py"] == after["train.py"]
    assert before["model.py"] != after["model.py"]


def test_imports_within_functions_and_packages_are_followed(folder):
    written(
        folder,
        train="def main():\n    from nets import large, small",
        nets__large="from .parts.blocks import Block\nfrom . import rates",
        nets__small="from ..elsewhere import nothing",
        nets__rates="",
        nets__parts__blocks="from .. import rates",
    )
    (folder / "nets" / "__init__.py").write_text("")

    assert files_of(folder, "train.py") == {
        *("train.py", "nets/__init__.py", "nets/large.py", "nets/small.py", "nets/rates.py"),
        "nets/parts/blocks.py",
    }


def test_a_script_in_a_folder_finds_what_lies_beside_it(folder):
    written(folder, scripts__train="import model", scripts__model="", model="")

    assert "scripts/model.py" in files_of(folder, "scripts/train.py")


def test_a_module_is_found_as_python_finds_it(folder):
    written(folder, package__train="from package import model", package__model="")

    assert files_of(folder, "-m package.train") == {"package/train.py", "package/model.py"}


def test_a_package_that_is_started_runs_its_main_module(folder):
    written(folder, package__model="")
    (folder / "package" / "__main__.py").write_text("from package import model")

    assert files_of(folder, "-m package") == {"package/__main__.py", "package/model.py"}


def test_of_a_launcher_it_is_the_script_that_counts(folder):
    written(folder, train="import model", model="")
    arguments = ("--nproc-per-node", "2", "train.py", "--lr", "0.1")

    assert files_of(folder, "-m torch.distributed.run", *arguments) == {"train.py", "model.py"}


@pytest.mark.parametrize(
    ("target", "arguments", "place"),
    [
        ("scripts/train.py", (), "scripts"),
        ("-m torch.distributed.run", ("scripts/train.py",), "scripts"),
        ("-m scripts.train", (), "scripts"),
        ("gone.py", (), "."),
    ],
)
def test_lines_are_named_from_the_folder_of_the_script(folder, target, arguments, place):
    written(folder, scripts__train="import torch")
    workload = Workload(target=target, arguments=arguments, folder=folder)

    assert script_folder(workload) == folder / place


def test_of_two_modules_of_one_name_the_first_on_python_s_path_runs(folder, tmp_path, monkeypatch):
    written(folder, train="import torch")
    written(tmp_path / "src", train="import torch")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "src")])

    assert find_script(Workload(target="-m train", folder=folder)) == folder / "train.py"


def test_a_task_is_made_of_its_file(folder):
    written(folder, job="import model", model="")

    assert files_of(folder, "job.py:task", is_task=True) == {"job.py", "model.py"}


def test_what_is_installed_is_left_out(folder):
    written(folder, train="import os, torch, click.core\nfrom flatout import techniques")

    assert files_of(folder, "train.py") == {"train.py"}


def test_a_module_on_python_s_path_counts_wherever_it_lies(folder, tmp_path, monkeypatch):
    written(folder, train="import model")
    written(tmp_path / "src", model="")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "src")])

    assert files_of(folder, "train.py") == {"train.py", str(tmp_path / "src" / "model.py")}


def test_named_files_count_and_data_do_not(folder):
    written(folder, train="")
    (folder / "small.yaml").write_text("width: 8")
    (folder / "lists").write_text("a\nb\n")
    (folder / "data.npy").write_bytes(bytes(MAX_BYTES + 1))
    words = ("--config=small.yaml", "lists", "data.npy", "--text", "x" * 5000, "a\0b", "", ".")

    assert files_of(folder, "train.py", *words) == {"train.py", "small.yaml", "lists"}


@pytest.mark.parametrize("text", ["def broken(:", "x = '\\d'", "from ........ import x", "\0"])
def test_a_script_that_cannot_be_read_is_still_told_from_another(folder, text):
    written(folder, train=text)

    assert files_of(folder, "train.py") == {"train.py"}


def test_the_files_of_a_large_library_do_not_all_count(folder, monkeypatch):
    monkeypatch.setattr(script_files, "MOST", 3)
    written(folder, train="import a, b, c, d", **dict.fromkeys("abcd", ""))

    assert files_of(folder, "train.py") == {"train.py", "a.py", "b.py"}
