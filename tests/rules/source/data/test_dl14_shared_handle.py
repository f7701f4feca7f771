import pytest

from tests.rules.source.scenario import codes_in

CLASS = """
import h5py, lmdb, sqlite3, torch
from torch.utils.data import Dataset
class Scans({base}):
    def __init__(self, path):
        {first}
        self.path = path
    def __getitem__(self, i):
        return self.f[i]
    {more}
"""


def found(first, base="Dataset", more=""):
    return codes_in(CLASS.format(first=first, base=base, more=more))


@pytest.mark.parametrize(
    "first",
    ["self.f = h5py.File(path, 'r')", "self.f = lmdb.open(path)", "self.f = sqlite3.connect(path)"],
)
def test_a_handle_of_the_constructor_is_found(first):
    assert found(first) == {"DL14": [6]}


def test_what_is_closed_local_dropped_or_no_data_set_s_is_left_alone():
    assert found("with h5py.File(path) as f: self.n = len(f)") == {}
    assert found("self.f = h5py.File(path); self.f.close()") == {}
    assert found("self.f = h5py.File(path)", more="def __getstate__(self): return {}") == {}
    assert found("self.f = h5py.File(path)", base="object") == {}
