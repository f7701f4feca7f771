import sys
from types import ModuleType

import pytest

from flatout.records.catalogue import load_class, module_names
from flatout.records.technique import Technique


def package(folder, files):
    """Return a package object over a folder with the given files; nothing of it is imported."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = ModuleType("techniques")
    made.__path__ = [str(folder)]
    return made


def test_files_in_sub_folders_are_found_by_name_and_not_imported(tmp_path):
    explosive = "raise RuntimeError('imported')"
    techniques = package(
        tmp_path,
        {
            "b/__init__.py": explosive,
            "b/zoom.py": explosive,
            "a/__init__.py": "",
            "a/boost.py": explosive,
            "shared.py": explosive,
        },
    )

    assert module_names(techniques) == {"boost": "techniques.a.boost", "zoom": "techniques.b.zoom"}


def test_two_files_of_one_name_are_a_mistake(tmp_path):
    files = {f"{family}/{name}.py": "" for family in "ab" for name in ("__init__", "boost")}

    with pytest.raises(ValueError, match=r"two files are called boost: techniques\.a\.boost"):
        module_names(package(tmp_path, files))


def test_the_one_class_of_a_module_is_loaded():
    kind = load_class("flatout.techniques.precision.tf32", Technique)

    assert kind.__name__ == "Tf32"
    assert "flatout.techniques.precision.tf32" in sys.modules


def test_a_module_without_a_technique_is_a_mistake():
    with pytest.raises(TypeError, match="must define exactly one Technique, found 0"):
        load_class("flatout.records.units", Technique)
