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
if sys.version_info >= (3, 10):  # noqa: UP036  an older one that the script starts runs unobserved
    import importlib.util

    # By its place: through sys.path, all that is installed alongside flatout would be found, too.
    _package = os.path.dirname(os.path.dirname(_here))  # noqa: PTH120
    _init = os.path.join(_package, "__init__.py")  # noqa: PTH118
    _spec = importlib.util.spec_from_file_location("flatout", _init)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["flatout"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["flatout"])
    if "FLATOUT_SPEC" in os.environ:
        from flatout.agent.bootstrap import arm

        arm()
