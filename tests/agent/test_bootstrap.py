"""How flatout learns of a module's import, however that module was installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

from flatout.agent.bootstrap import SPEC_VARIABLE, AfterImport
from flatout.records.files import with_boot

NAME = "installed_by_a_finder"


class Editable:
    """What setuptools installs for an editable install that no path finds."""

    def __init__(self, file):
        self.file = file

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.file) if name == NAME else None


class Curious:
    """A hook of another tool, which asks all finders, itself left out."""

    is_asking = False

    def find_spec(self, name, path=None, target=None):
        if name != NAME or self.is_asking:
            return None
        self.is_asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.is_asking = False


@pytest.fixture
def editable(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    file = tmp_path / "elsewhere.py"
    file.write_text("VALUE = 1")
    return Editable(file)


@pytest.mark.parametrize("others", [(), (Curious(),)])
def test_a_module_that_only_a_finder_knows_is_followed_once(monkeypatch, editable, others):
    seen = []
    ours = AfterImport(NAME, lambda: seen.append(sys.modules[NAME].VALUE))
    monkeypatch.setattr(sys, "meta_path", [ours, *others, *sys.meta_path, editable])

    importlib.util.find_spec(NAME)
    importlib.import_module(NAME)

    assert seen == [1]
    assert ours not in sys.meta_path


class Asking:
    """A hook of another tool that asks all finders but itself, whoever asks it."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        others = (one for one in sys.meta_path if one is not self)
        return next(filter(None, (one.find_spec(name, path) for one in others)), None)


def test_beside_a_hook_that_asks_all_others_a_module_on_a_path_is_found(
    monkeypatch, tmp_path, editable
):
    (tmp_path / f"{NAME}.py").write_text("VALUE = 2")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    ours = AfterImport(NAME, lambda: seen.append(sys.modules[NAME].VALUE))
    monkeypatch.setattr(sys, "meta_path", [ours, Asking(), *sys.meta_path])

    importlib.import_module(NAME)

    assert seen == [2]


@pytest.mark.parametrize("said", ["[", "[" * 5000, "1" * 5000])
def test_a_process_whose_specification_was_damaged_does_not_begin(tmp_path, said):
    (tmp_path / "child.json").write_text(said)
    environment = {**with_boot(os.environ), SPEC_VARIABLE: str(tmp_path / "child.json")}

    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert f"flatout: {tmp_path / 'child.json'}: " in done.stderr
