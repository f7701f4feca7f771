"""Find the one-file-each levers and rules of a folder by their file names."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TypeVar

Base = TypeVar("Base")


def module_names(package: ModuleType) -> dict[str, str]:
    """Map each file in the package's sub-folders to its module path, importing none of them.

    Files beside the sub-folders are not in the catalog: shared code may live there.
    """
    names: dict[str, str] = {}
    for root in package.__path__:
        for family in _packages(root):
            for info in pkgutil.iter_modules([str(Path(root) / family)]):
                if info.ispkg:
                    continue
                module = f"{package.__name__}.{family}.{info.name}"
                if info.name in names:
                    raise ValueError(
                        f"two files are called {info.name}: {names[info.name]}, {module}"
                    )
                names[info.name] = module
    return dict(sorted(names.items()))


def load_class(module_name: str, base: type[Base]) -> type[Base]:
    """Import one module and return the single subclass of `base` that it defines."""
    module = importlib.import_module(module_name)
    found = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind.__module__ == module_name
    ]
    if len(found) != 1:
        raise TypeError(
            f"{module_name} must define exactly one {base.__name__}, found {len(found)}"
        )
    return found[0]


def _packages(root: str) -> list[str]:
    return [info.name for info in pkgutil.iter_modules([root]) if info.ispkg]
