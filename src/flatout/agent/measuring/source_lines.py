"""Which line of the user's code is running: the innermost frame outside torch and frameworks."""

import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType

import flatout

OWN, FOREIGN, USER = range(3)
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Folders of installed packages: a framework's line is not where its user can act."""
PLUMBING = ("torch", "flatout")
"""Packages whose lines never count, not even where nothing else is to be named."""


class SourceLines:
    """Name lines as `file.py:line`, relative to the script's folder."""

    def __init__(self, folder: Path | None = None) -> None:
        import torch

        self.folder = (folder or script_folder()).resolve()
        self.started_in = Path.cwd()
        library = Path(sysconfig.get_paths()["stdlib"])
        homes = (Path(flatout.__file__).parent, Path(torch.__file__).parent, library)
        self.own = tuple(home.resolve() for home in homes)
        self.thread = threading.get_ident()
        self._known: dict[CodeType, tuple[int, str]] = {}
        self._files: dict[str, tuple[int, str]] = {}

    def here(self) -> str:
        """Return the line that is running; empty when there is none of the user's.

        Autograd runs backward on CUDA in a thread of its own: there it is the line of the training
        thread, which waits in backward.
        """
        if threading.get_ident() == self.thread:
            return self.of(sys._getframe(1))
        found = self.of(sys._getframe(1))
        return found or self.of(sys._current_frames().get(self.thread))

    def of(self, frame: FrameType | None) -> str:
        """Return the innermost line of the user's from this frame outwards.

        Where a package itself is the script (`python -m package.train`) its own lines count.
        """
        in_package = ""
        known = self._known
        while frame is not None:
            code = frame.f_code
            kind, name = known.get(code) or self._look_up(code)
            if kind == USER:
                return f"{name}:{frame.f_lineno}"
            if kind == FOREIGN and not in_package and name:
                in_package = f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return in_package

    def is_torch(self, frame: FrameType) -> bool:
        """Return whether a frame belongs to torch, to the standard library or to us."""
        return (self._known.get(frame.f_code) or self._look_up(frame.f_code))[0] == OWN

    def _look_up(self, code: CodeType) -> tuple[int, str]:
        file = code.co_filename
        if file not in self._files:
            self._files[file] = self._place(file)
        found = self._known[code] = self._files[file]
        return found

    def _place(self, file: str) -> tuple[int, str]:
        path = (self.started_in / file).resolve()
        package = next((part for part in PACKAGE_FOLDERS if part in path.parts), None)
        if package is not None:
            inner = path.parts[path.parts.index(package) + 1 :]
            return (OWN, "") if inner[0] in PLUMBING else (FOREIGN, "/".join(inner))
        if file.startswith("<") or any(path.is_relative_to(each) for each in self.own):
            return OWN, ""
        is_near = path.is_relative_to(self.folder)
        return USER, path.relative_to(self.folder).as_posix() if is_near else str(path)


def script_folder() -> Path:
    """Return the folder of the script that this process runs, else the working folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).parent if main else Path.cwd()
