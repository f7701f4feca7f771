"""Addresses of loaders: names that stay the same from run to run and survive small edits."""

import sys
from pathlib import Path
from types import FrameType

DEPTH = 4
"""Calling functions that make an address; Trainer and Accelerate build training and evaluation
loaders in one place, their callers tell them apart."""


class AddressBook:
    """Name construction sites by the functions that called, innermost first.

    Two sites within the same functions get different ordinals, in order of first use; the same
    site used again (a loader rebuilt at every epoch) keeps its address.
    """

    def __init__(self) -> None:
        self._sites: dict[str, list[tuple[int, ...]]] = {}

    def name(self, frame: FrameType | None) -> str:
        """Return the address of the site that `frame` is executing."""
        functions: list[str] = []
        offsets: list[int] = []
        while frame is not None and len(functions) < DEPTH:
            if not _is_plumbing(frame):
                file = Path(frame.f_code.co_filename).name
                functions.append(f"{file}:{frame.f_code.co_name}")
                offsets.append(frame.f_lasti)
            if frame.f_code.co_name == "<module>":
                break
            frame = frame.f_back
        chain = "<".join(functions)
        sites = self._sites.setdefault(chain, [])
        site = tuple(offsets)
        if site not in sites:
            sites.append(site)
        return f"{chain}#{sites.index(site)}"


def _is_plumbing(frame: FrameType) -> bool:
    """Tell whether a frame belongs to torch's loader or to us."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(("torch.utils.data", "flatout.", "functools", "importlib"))


def builder(frame: FrameType | None) -> str:
    """Return the module of the innermost frame that is neither torch's nor ours."""
    while frame is not None and _is_plumbing(frame):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


def caller() -> FrameType | None:
    """Return the frame that called the function that asks."""
    return sys._getframe(2)
