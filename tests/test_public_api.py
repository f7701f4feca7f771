"""What others may build on, as a frozen list: a change of it is a decision, not an accident.

After a decision: `.venv/bin/python -m pytest tests/test_public_api.py --snapshot-update`, and a
line in CHANGELOG.md. Techniques and rules are not in the list: adding one edits nothing else.
"""

import importlib
import inspect
import pkgutil
from dataclasses import fields, is_dataclass
from enum import Enum

import click
import pytest

import flatout
from flatout.cli.commands import flatout as command_line
from flatout.records.ablation import Ablation
from flatout.records.technique import Technique
from tests.techniques.facts import profile

PACKAGES = ("flatout.records", "flatout.hardware")
"""Packages of which every public name may be used."""
COMMANDS = ("compare", "doctor", "measure", "pack", "recipe_files", "run", "tune")
"""Modules of `flatout.workflow` that may be used; the others are its own affair."""


def public_names(module):
    """Return the functions and classes that a module itself defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    )


def shape(value):
    """Return what a caller has to know: a record's fields, an enum's values, or a signature."""
    if inspect.isclass(value) and issubclass(value, Enum):
        return [str(member.value) for member in value]
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    return list(inspect.signature(value).parameters)


def modules_of(package):
    path = importlib.import_module(package).__path__
    return [f"{package}.{info.name}" for info in pkgutil.iter_modules(path) if not info.ispkg]


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_a_package(package, snapshot):
    found = {name: public_names(importlib.import_module(name)) for name in modules_of(package)}

    assert found == snapshot


def test_names_at_the_top(snapshot):
    assert sorted(flatout.__all__) == snapshot


@pytest.mark.parametrize("command", COMMANDS)
def test_functions_behind_a_command(command, snapshot):
    module = importlib.import_module(f"flatout.workflow.{command}")

    assert {name: shape(getattr(module, name)) for name in public_names(module)} == snapshot


@pytest.mark.parametrize("module", ["machine", "profile", "recipe", "technique", "trial"])
def test_fields_of_the_nouns(module, snapshot):
    nouns = importlib.import_module(f"flatout.records.{module}")

    found = {
        name: shape(value)
        for name in public_names(nouns)
        if inspect.isclass(value := getattr(nouns, name)) and value is not Technique
    }
    assert found == snapshot


def test_methods_of_a_technique(snapshot):
    methods = {
        name: list(inspect.signature(getattr(Technique, name)).parameters)
        for name in vars(Technique)
        if not name.startswith("_") and callable(getattr(Technique, name, None))
    }

    assert methods == snapshot


def test_commands_and_their_options(snapshot):
    context = click.Context(command_line)
    found = {}
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        found[name] = [" ".join([*p.opts, *p.secondary_opts]) for p in command.params]

    assert found == snapshot


def test_keys_of_the_json_results(snapshot):
    ablation = Ablation(workload="train.py", baseline=profile())

    found = {"profile": sorted(profile().to_json()), "ablation": sorted(ablation.to_json())}
    assert found == snapshot
