import pytest

from tests.rules.source.scenario import codes_in

READ = """
from torch.utils.data import Dataset
class Notes(Dataset):
    def __init__(self):
        self.file = open('index')
    def __getitem__(self, i):
        {line}
"""


@pytest.mark.parametrize("line", ["return open(p).read()", "f = open(p); return f.read()"])
def test_a_file_that_stays_open_is_found(line):
    assert codes_in(READ.format(line=line)) == {"DL08": [7]}


@pytest.mark.parametrize(
    "line",
    [
        "with open(p) as f: return f.read()",
        "f = open(p); x = f.read(); f.close(); return x",
        "with closing(open(p)) as f: return f.read()",
        "return self.zip.open(p)",
        "return Image.open(p)",
    ],
)
def test_files_that_are_closed_are_left_alone(line):
    assert codes_in(READ.format(line=line)) == {}
