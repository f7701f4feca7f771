"""`python -m flatout`: the same as `flatout`, for whoever has several Pythons."""

import os
import sys

if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  no module of that folder, pathlib.py neither
    del sys.path[0]

from flatout.cli import main

if __name__ == "__main__":
    main()
