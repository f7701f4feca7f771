import re
from dataclasses import replace
from pathlib import Path

import pytest

import flatout
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.machine import Device, Machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.units import GIB
from flatout.workflow.container import stack_of, with_flatout

MACHINE = Machine(
    device=Device(kind="cuda", name="NVIDIA H200", memory_bytes=1),
    logical_cores=16,
    usable_cores=16,
    physical_cores=8,
    memory_bytes=1,
    shm_free_bytes=1,
    torch_version="2.11.0+cu130",
    facts={"torch_cuda": "13.0", "torch_hip": None, "python": "3.12.4", "shm_bytes": 16 * GIB},
)


def test_a_cuda_build_gets_its_index():
    stack = stack_of(MACHINE)

    assert stack.kind == "cuda"
    assert (stack.torch, stack.index[-5:]) == ("2.11.0", "cu130")
    assert stack.python == "3.12"
    assert stack.shm_gib == 16


def test_a_cpu_build_gets_its_python():
    facts = {**MACHINE.facts, "torch_cuda": None, "python": "3.11.2", "shm_bytes": 0}

    stack = stack_of(replace(MACHINE, torch_version="2.13.0+cpu", facts=facts))

    assert stack.kind == "cpu"
    assert stack.python == "3.11"
    assert stack.index.endswith("/whl/cpu")
    assert stack.shm_gib == 2


def test_a_rocm_build_gets_its_version():
    facts = {**MACHINE.facts, "torch_cuda": None, "torch_hip": "6.4.43482-0f2d60242"}

    stack = stack_of(replace(MACHINE, facts=facts))

    assert stack.kind == "rocm"
    assert stack.index.endswith("/whl/rocm6.4")


@pytest.mark.parametrize(
    ("change", "given", "words"),
    [
        ({"torch_version": ""}, {}, "torch is not installed"),
        ({}, {"recipe": Path("nowhere.toml")}, "there is no file nowhere.toml"),
    ],
)
def test_what_cannot_be_written_says_why(change, given, words):
    with pytest.raises(UserError, match=words):
        stack_of(replace(MACHINE, **change), **given)


def test_files_have_to_lie_in_the_folder(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/a.toml").touch()
    monkeypatch.chdir(tmp_path)

    assert stack_of(MACHINE, recipe=Path("recipes/a.toml")).recipe == "recipes/a.toml"
    with pytest.raises(UserError, match="docker copies only from the folder"):
        stack_of(MACHINE, recipe=tmp_path / "recipes/a.toml")


def test_flatout_may_be_a_wheel_a_clone_or_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flatout").mkdir()
    (tmp_path / "flatout/pyproject.toml").touch()
    (tmp_path / "flatout-0.1.0-py3-none-any.whl").touch()
    names = ("bf16_autocast", "fast_decode", "lora", "eight_bit_optimizer", "fp8_training")
    recipe = Recipe(choices=tuple(Choice(technique=name) for name in names))

    for source in ("flatout", "flatout-0.1.0-py3-none-any.whl", "https://example.org/f.whl"):
        stack = with_flatout(stack_of(MACHINE), source, recipe)

        assert (stack.source, stack.extras) == (source, ("jpeg", "lora", "lowbit"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "in no package index"),
        ("flatout==0.1.0", "there is no such wheel"),
        ("nowhere/flatout-0.1.0-py3-none-any.whl", "there is no such wheel"),
        ("a b.whl", "without blanks or quotes"),
        ('x.whl"\nRUN rm', "without blanks or quotes"),
        (str(Path(flatout.__file__).parents[2]), "docker copies only from the folder"),
    ],
)
def test_a_name_that_an_index_would_answer_to_is_refused(tmp_path, monkeypatch, source, words):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=words):
        with_flatout(stack_of(MACHINE), source, Recipe())


@pytest.mark.parametrize("name", catalogue.names())
def test_a_technique_gets_the_extra_that_its_page_names(name):
    family = catalogue.technique_class(name).family
    root = Path(flatout.__file__).parents[2]
    page = (root / f"docs/techniques/{family}/{name}.md").read_text()

    named = set(re.findall(r"flatout\[(\w+)\]", page))
    assert named == {catalogue.technique_class(name).extra} - {""}


@pytest.mark.parametrize("name", ["a.txt\nRUN evil", "a b.txt", "--chown=0", "$(id).txt", "a\\b"])
def test_the_name_of_a_file_adds_nothing_to_a_dockerfile(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")

    with pytest.raises(UserError, match="cannot stand in a Dockerfile"):
        stack_of(MACHINE, requirements=Path(name))
