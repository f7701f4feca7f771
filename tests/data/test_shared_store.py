import json
import os
import subprocess
import sys
import time

import pytest

from flatout.data import caching as module
from flatout.data.caching import ByteStore, shared_store

RANK = """
import sys
from flatout.data.caching import shared_store
from flatout.data.caching import ByteStore

def make(others):
    print("made", others, flush=True)
    return ByteStore(slots=64, budget_bytes=1 << 16)

store = shared_store("decoded", make)
for word in iter(sys.stdin.readline, ""):
    kind, key, *value = word.split()
    if kind == "add":
        print(store.add(int(key), [value[0].encode()]), flush=True)
    else:
        found = store.find(int(key))
        print(bytes(found).decode() if found is not None else "nothing", flush=True)
"""


class Rank:
    """A process of a training, driven by lines."""

    def __init__(self, folder, ranks=2):
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "LOCAL_WORLD_SIZE": str(ranks)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def hear(self):
        return self.process.stdout.readline().strip()

    def ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def begin(tmp_path):
    begun = []

    def start(**options):
        begun.append(Rank(tmp_path, **options))
        return begun[-1]

    yield start
    for rank in begun:
        rank.end()


def test_ranks_find_what_the_other_one_kept(begin):
    first = begin()
    assert first.hear() == "made 1"
    second = begin()

    assert first.ask("add 7 seven") == "True"
    assert second.ask("find 7") == "seven"
    assert second.ask("add 8 eight") == "True"
    assert first.ask("find 8") == "eight"


def test_what_was_kept_outlives_its_maker(begin):
    first = begin()
    assert first.hear() == "made 1"
    second = begin()
    assert first.ask("add 7 seven") == "True"
    assert second.ask("find 7") == "seven"

    first.end()

    assert second.ask("find 7") == "seven"


def test_ranks_that_start_together_make_one_store(begin):
    ranks = [begin() for _ in range(4)]

    answers = [rank.ask("add 1 one") for rank in ranks]

    assert sorted(answers) == ["True", "True", "True", "made 1"]


def test_a_process_by_itself_shares_with_nobody(begin):
    assert begin(ranks=1).hear() == "made 1"
    assert begin(ranks=1).hear() == "made 1"


def test_what_an_ended_training_left_is_not_found_and_removed(begin, tmp_path):
    first = begin()
    assert first.hear() == "made 1"
    # It is told after it was made.
    deadline = time.monotonic() + 10
    while not (found := list((tmp_path / "flatout" / "stores").glob("*.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = found[0]
    first.end()
    stale = told.with_name("1-2-decoded.json")
    stale.write_text(told.read_text())

    assert begin().hear() == "made 1"
    deadline = time.monotonic() + 10
    while stale.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stale.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", json.dumps({"pid": os.getpid(), "descriptor": 0})],
    ids=["empty", "torn", "no fields", "another kind of file"],
)
def test_a_file_that_tells_nothing_is_not_believed(tmp_path, text):
    path = tmp_path / "told.json"
    path.write_text(text)

    assert module._read(path) is None


def test_where_nothing_can_be_told_each_rank_has_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def fail():
        raise PermissionError("no folder")

    monkeypatch.setattr(module, "scratch_root", fail)
    asked = []

    def make(others):
        asked.append(others)
        return ByteStore(slots=4, budget_bytes=64)

    assert shared_store("decoded", make).count == 0
    assert asked == [3]
