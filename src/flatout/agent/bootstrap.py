"""Arm a child process: it ends with flatout, and the hook points install when torch is imported.

Standard library only. Importing torch here would change the script: one that sets
OMP_NUM_THREADS before its own `import torch` must still get its way.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.agent.processes import cleans_up, die_with_lasting_parent, die_with_parent
from flatout.records.input_files import MAX_OWN_BYTES, read_json

SPEC_VARIABLE = "FLATOUT_SPEC"
"""Environment variable with the path of the trial's specification."""
PARENT_VARIABLE = "FLATOUT_PARENT"
"""Environment variable with the number of the flatout that trains; only its own child sees it."""


NEEDED = ("numpy",)
"""What the modules in the script's own processes import alongside torch."""


def arm() -> None:
    """Prepare this process; called by the boot before any code of the script."""
    path = os.environ[SPEC_VARIABLE]
    if PARENT_VARIABLE in os.environ:
        # Taken away: what a real training starts lives as long as it would without flatout.
        die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    try:
        spec = read_json(path, MAX_OWN_BYTES)
    except OSError:
        return  # the trial is over and its folder gone: a late child of the script
    except ValueError as error:
        raise SystemExit(f"flatout: {path}: {error}") from None  # without it nothing is undone
    if cleans_up(sys.orig_argv):
        if spec["descendants_end"]:
            warnings.simplefilter("ignore")  # what others left: flatout itself has ended them
        return
    if spec["descendants_end"]:
        die_with_lasting_parent()
        os.register_at_fork(after_in_child=die_with_lasting_parent)
    if spec.get("seed") is not None:
        random.seed(spec["seed"])
    if spec.get("undo"):
        from flatout.agent import undo_journal

        undo_journal.install(Path(spec["undo"]), tuple(spec["not_journaled"]))
    sys.meta_path.insert(0, AfterImport("torch", lambda: _enter(spec)))


def _enter(spec: Mapping[str, Any]) -> None:
    """Hand over to the module that composes hook points, recipe and recorders.

    It lives above us.
    """
    lacking = [name for name in NEEDED if sys.prefix != spec["prefix"] and not find_module(name)]
    if lacking:  # a Python of another environment, started by the script
        what = f"{' and '.join(lacking)} not installed there"
        sys.stderr.write(f"flatout: {sys.executable} runs without flatout: {what}\n")
        return
    # Not before torch: dataclasses take 10 ms, in every process that the script starts.
    from flatout.records.json_records import from_plain
    from flatout.records.trial_spec import TrialSpec

    importlib.import_module(spec["entry"]).install(from_plain(TrialSpec, spec))


def find_module(
    name: str,
    path: Sequence[str] | None = None,
    target: ModuleType | None = None,
    *,
    but: object = None,
) -> importlib.machinery.ModuleSpec | None:
    """Ask the finders for a module: those of paths, then others, as editable installs bring.

    Most others only watch, and some ask all finders themselves: `but` is not asked. Nothing is
    imported for the name of a top-level one.
    """
    found = importlib.machinery.PathFinder.find_spec(name, path, target)
    others = [one for one in sys.meta_path if one is not but and hasattr(one, "find_spec")]
    asked = (one.find_spec(name, path, target) for one in others)
    return found or next(filter(None, asked), None)


class AfterImport(importlib.abc.MetaPathFinder):
    """Run a function right after the first import of one module has finished."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual and extend its loader.

        A mere question must not use the hook up: transformers asks `find_spec("torch")`
        without importing, so the finder removes itself only when the module is executed.
        """
        if fullname != self.name:
            return None
        spec = find_module(fullname, path, target, but=self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # A finder that asks all others, as hooks of other tools do, extends one loader twice.
            is_first = self in sys.meta_path
            if is_first:
                sys.meta_path.remove(self)
            execute(module)
            if is_first:
                self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
