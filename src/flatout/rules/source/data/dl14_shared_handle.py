"""Forked workers share one open file."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, is_self_attribute
from flatout.analysis.source.training import dataset_classes

HANDLES = {
    "h5py.File": "HDF5 file",
    "lmdb.open": "LMDB environment",
    "lmdb.Environment": "LMDB environment",
    "sqlite3.connect": "SQLite connection",
    "zipfile.ZipFile": "zip file",
    "tarfile.open": "tar file",
}


def check(script: Script) -> Iterator[Issue]:
    """Report handles that a data set opens in `__init__` and keeps."""
    for owner in dataset_classes(script):
        setup = script.method(owner, "__init__")
        if setup is None or script.method(owner, "__getstate__") is not None:
            continue
        for node in script.within(setup, ast.Assign):
            kind = HANDLES.get(script.called(node.value))
            if kind is None or not is_self_attribute(node.targets[0]):
                continue
            name = node.targets[0].attr  # type: ignore[attr-defined]
            if f"self.{name}.close()" in script.source(setup):
                continue
            yield Issue(
                node=node,
                because=(
                    f"forked workers share this {kind} and its position: samples are mixed up or "
                    "the worker crashes; spawned ones cannot be started at all"
                ),
                instead=f"self.{name} = None here, and open it in the first __getitem__",
            )
