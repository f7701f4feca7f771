"""First code of a child process: a real `python train.py args` with flatout armed.

Put first on PYTHONPATH, so that the interpreter imports it as its site customisation. Only the
standard library is touched here; torch is reached when, and if, the script imports it.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib costs 4 ms
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]  # noqa: PTH100
_ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the environment's own one, hidden by ours
except ImportError:
    # The import machinery looks the name up after we return: leave some module under it.
    sys.modules["sitecustomize"] = _ours
if "FLATOUT_SPEC" in os.environ:
    try:
        from flatout.seams.arming import arm
    except ImportError:
        pass  # another interpreter, started by the script, without flatout: it runs unobserved
    else:
        arm()
