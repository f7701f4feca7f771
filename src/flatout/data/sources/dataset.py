"""Any importable data set with a length: `package.module:name` or `path/to/file.py:name`.

The name is a data set, or a function without arguments that returns one. Its items are stored as
they come: what it draws at random is frozen, so give it without random augmentation. Every worker
process imports it for itself.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.data import values
from flatout.data.format import BadSample
from flatout.data.sources.source import Contents, fingerprint_of, label_in, need_samples, stamp_of
from flatout.records.errors import UserError, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The items of a data set."""

    contents: Contents
    target: str
    length: int

    def __len__(self) -> int:
        return self.length

    def name(self, index: int) -> str:
        """Return the item's number."""
        return f"item {index}"

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the values of the item's fields."""
        try:
            item = _load(self.target)[index]
        except Exception as error:  # noqa: BLE001  the user's code: anything may come
            raise BadSample(f"the data set raised {type(error).__name__}: {error}") from None
        structure, names, found = values.structure_of(item)
        expected = tuple(field.name for field in self.contents.fields)
        if (structure, names) != (self.contents.structure, expected):
            raise BadSample(
                f"it is a {structure} of {', '.join(names)}, and the first item is a "
                f"{self.contents.structure} of {', '.join(expected)}"
            )
        return found

    def fingerprint(self) -> str:
        """Return a hash of the name, the length, and the files that define the data set.

        Items are not read for it, nor what they are read from.
        """
        return fingerprint_of([self.target, str(self.length), *map(stamp_of, _files(self.target))])


def open_dataset(target: str) -> Imported:
    """Return the items of an importable data set."""
    found = _load(target)
    try:
        length = len(found)
    except (TypeError, NotImplementedError):
        raise UserError(
            f"{target} has no length; only map-style data sets can be packed (write an iterable "
            "one to WebDataset or JSON lines first)"
        ) from None
    except Exception as error:  # noqa: BLE001  the user's code: anything may come
        raise UserError(f"{target}: its length raised {type(error).__name__}: {error}") from None
    need_samples(length, target)
    try:
        structure, names, first = values.structure_of(found[0])
        fields = tuple(values.field_of(n, value) for n, value in zip(names, first, strict=True))
    except BadSample as error:
        raise UserError(f"{target}, item 0: {error}") from None
    except Exception as error:  # noqa: BLE001  the user's code: anything may come
        raise UserError(f"{target}, item 0 raised {type(error).__name__}: {error}") from None
    label = label_in(fields) or (names[1] if len(names) == 2 and fields[1].kind == "int" else "")
    contents = Contents(kind="dataset", fields=fields, structure=structure, label=label)
    return Imported(contents=contents, target=target, length=length)


@cache
def _load(target: str) -> Any:
    """Return the data set behind a name; imported once per process."""
    where, _colon, name = target.rpartition(":")
    module = _module(where, target)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"{where}: {unknown('name', name, known)}")
    found = getattr(module, name)
    if isinstance(found, type) or not hasattr(found, "__getitem__"):
        try:
            found = found()
        except Exception as error:  # noqa: BLE001  the user's code: anything may come
            raise UserError(f"{target} raised {type(error).__name__}: {error}") from None
    if not hasattr(found, "__getitem__"):
        raise UserError(f"{target} is a {type(found).__name__}; a data set has items: data[0]")
    return found


def _files(target: str) -> list[str]:
    """Return the file that was named, and the one that has the data set's class."""
    named = _module(target.rpartition(":")[0], target)
    kind = sys.modules.get(type(_load(target)).__module__)
    files = (getattr(module, "__file__", None) for module in (named, kind))
    return [file for file in files if file]


@cache
def _module(where: str, target: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return _from_file(Path(where))
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    except Exception as error:  # noqa: BLE001  the user's code: anything may come
        raise UserError(f"{target} cannot be imported: {type(error).__name__}: {error}") from None


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flatout_packed_{path.stem}", path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))  # what is alongside a script is importable
    spec.loader.exec_module(module)
    return module
