"""Size is a feature: what may grow no further without a decision.

A budget is lowered when a folder shrinks. All that exists today should fit into 52,000 lines.
Commands, rules and techniques are not in it: a new one needs no edit here, it is only to be small.
"""

import pytest

from benchmarks.structure import (
    ROOT,
    SMALL_LINES,
    SOURCE,
    folder_files,
    folder_lines,
    frames_to_trial,
    importers,
    modules_of,
    repeated_classes,
)

MODULES = modules_of(SOURCE)
LINES = {
    "": 482,
    "agent": 14_525,
    "analysis": 6_423,
    "cli": 717,
    "data": 11_671,
    "guard": 1_114,
    "hardware": 1_922,
    "kernels": 2_247,
    "launch": 2_116,
    "parallel": 5_367,
    "planner": 6_218,
    "records": 5_307,
    "reporting": 4_434,
    "rules": 287,
    "techniques": 2_315,
    "tuning": 6_228,
    "workflow": 5_086,
}
FLAT_FILES = 26
SINGLE_IMPORTER = 90
FRAMES = 8
PLUG_INS = ("cli", "rules", "techniques", "agent.probes", "tuning.passes", "data.sources")
"""Packages whose modules are found by name, one idea each."""
LINES_OF_ONE = {"cli": 300, "rules": 120, "techniques": 400}
"""What a command, a rule or a technique may have: it has a page of its own, and adds nothing to
what its folder's shared code may have."""
PAGES = {"cli": "commands", "rules": "rules", "techniques": "techniques"}
SMALL_ON_PURPOSE = {
    "flatout.__main__": "what `python -m flatout` needs",
    "flatout.agent.boot.sitecustomize": "Python finds it by its name",
    "flatout.data.seeding": "imports torch, which the sampler must not",
}


def own_page(module):
    """Return the page of a command, a rule or a technique; None of any other module."""
    folder, _, name = module.name.partition(".")[2].rpartition(".")
    kind = PAGES.get(folder.partition(".")[0])
    return kind and next((ROOT / "docs" / kind).rglob(f"{name}.md"), None)


SHARED = {name: module for name, module in MODULES.items() if own_page(module) is None}


@pytest.mark.parametrize("folder", sorted(folder_lines(SHARED, SOURCE)))
def test_no_folder_outgrows_its_budget(folder):
    assert folder_lines(SHARED, SOURCE)[folder] <= LINES[folder]


@pytest.mark.parametrize("folder", sorted(LINES_OF_ONE))
def test_a_plug_in_is_one_idea(folder):
    own = [module for name, module in MODULES.items() if name not in SHARED]
    large = {
        module.name: module.lines
        for module in own
        if module.name.startswith(f"flatout.{folder}.") and module.lines > LINES_OF_ONE[folder]
    }

    assert own
    assert large == {}


def test_no_folder_is_a_heap_of_files():
    crowded = {
        folder: count
        for folder, count in folder_files(SHARED, SOURCE).items()
        if count > FLAT_FILES
    }

    assert crowded == {}


def test_small_modules_are_plug_ins_or_have_a_reason():
    small = {
        module.name
        for module in MODULES.values()
        if module.lines < SMALL_LINES
        and not module.is_face
        and not module.name.startswith(tuple(f"flatout.{name}." for name in PLUG_INS))
    }

    assert small == set(SMALL_ON_PURPOSE)


def test_few_modules_serve_a_single_other():
    users = importers(MODULES)

    assert sum(len(users[name]) == 1 for name in MODULES) <= SINGLE_IMPORTER


def test_no_class_name_has_two_meanings():
    assert repeated_classes(MODULES) == {}


@pytest.mark.parametrize("command", ["measure", "tune"])
def test_a_command_is_few_functions_away_from_its_trial(command):
    assert frames_to_trial(command, SOURCE) <= FRAMES
