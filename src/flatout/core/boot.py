"""How another Python comes by this flatout: through a folder that is first on its PYTHONPATH."""

import os
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent
"""Where flatout lies: often site-packages, so it is never put in front of the standard library."""
BOOT = SOURCE / "flatout" / "seams" / "boot"


def with_boot(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python that finds flatout, and all else as it would without.

    >>> with_boot({"PYTHONPATH": "mine"})["PYTHONPATH"] == f"{BOOT}{os.pathsep}mine"
    True
    """
    search = [str(BOOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}
