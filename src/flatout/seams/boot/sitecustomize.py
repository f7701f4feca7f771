"""First code of a child process: a real `python train.py args` with flatout armed.

Put first on PYTHONPATH, so that the interpreter imports it as its site customisation. Only the
standard library is touched here; torch is reached when, and if, the script imports it.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401  the environment's own one, hidden by ours
except ImportError:
    # The import machinery looks the name up after we return: leave some module under it.
    sys.modules["sitecustomize"] = _ours
if "FLATOUT_SPEC" in os.environ:
    try:
        from flatout.seams import arming
    except ImportError:
        # Another interpreter started by the script, without flatout: it runs unobserved.
        arming = None
    if arming is not None:
        arming.arm()
