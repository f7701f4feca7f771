"""How another Python comes by this flatout: through a folder that is first on its PYTHONPATH."""

import os
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent
"""Where flatout lies: often site-packages, so it is never put in front of the standard library."""
BOOT = SOURCE / "flatout" / "seams" / "boot"
RUN_MODULE = (
    "import sys, os; sys.path[:] = [p for p in sys.path if p not in ('', os.getcwd())]; "
    "import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What `python -m` does, but for the current folder in front of everything on `sys.path`: a
`json.py` there would run. Python 3.10 has no `-P`; `sys` and `os` are loaded before the path is
extended."""


def module_command(python: str, module: str, *words: str) -> list[str]:
    """Return the argv that runs a module of ours, and nothing out of the current folder.

    Args:
        python: the interpreter.
        module: dotted name.
        words: its arguments.
    """
    return [python, "-c", RUN_MODULE, module, *words]


def with_boot(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python that finds flatout, and all else as it would without.

    >>> with_boot({"PYTHONPATH": "mine"})["PYTHONPATH"] == f"{BOOT}{os.pathsep}mine"
    True
    """
    search = [str(BOOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}
