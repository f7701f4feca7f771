"""Every parser under damaged input: an answer or a user error, never anything else.

Inputs are made from a seed, so a failure names the input that caused it.
"""

import contextlib
import copy
import io
import json
import random
import shutil

import numpy as np
import pytest

import flatout.data
from flatout.cli import call
from flatout.data import pictures
from flatout.data.format import BadSample, Encoding
from flatout.records.errors import UserError
from flatout.workflow.recipe_files import read_recipe
from flatout.workflow.run import read_plan
from tests.data.packs import file_bytes, image_folder, packed
from tests.paths import ROOT

DATA = ROOT / "tests/reporting/data"
RECIPE = b"""[flatout]
version = "%s"
[workload]
training_loaders = ["train.py:12"]
[[technique]]
name = "loader_workers"
workers = 2
[[technique]]
name = "torch_compile"
cache = "mine"
[about]
script = "train.py"
ratio = 1.5
""" % flatout.__version__.encode()
PLAN = {
    "device": "h100",
    "allocated": {"bytes": 5},
    "reserved": {"bytes": 6},
    "components": {"workspace": {"bytes": 1}},
    "fits": True,
    "ladder": [
        {
            "fits": True,
            "choices": ["microbatching chunks=8"],
            "saved_bytes": 3,
            "time_ratio": 1.0,
        }
    ],
}
ODD = (None, True, -1, 0, 10**400, 2**63, 1e308, float("nan"), "", "x" * 5_000, "\0", "../a")
ODD_PARTS = ([], {}, [[]] * 3, {"a": 1}, [None], {"": {"": {}}})
TOKENS = (
    b"[" * 2_000,
    b"9" * 5_000,
    b"2026-11-23",
    b"\0",
    b"\xff\xfe",
    b"a." * 3_000,
    b'"""',
    b"=",
)


def damaged(data, dice):
    """Return bytes with some of them flipped, left out, doubled or replaced."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(made) or 1)
        kind = dice.randrange(5)
        if kind == 0 and made:
            made[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del made[at : at + dice.randint(1, 20)]
        elif kind == 2:
            made[at:at] = dice.choice(TOKENS)
        elif kind == 3:
            made[at:at] = made[at : at + dice.randint(1, 60)]
        else:
            del made[dice.randrange(len(made) or 1) :]
    return bytes(made)


def twisted(plain, dice):
    """Return a JSON document with one of its values replaced by one of another kind."""
    made = copy.deepcopy(plain)
    part = made
    while True:
        keys = list(part) if isinstance(part, dict) else range(len(part))
        key = dice.choice(keys)
        below = part[key]
        if not isinstance(below, dict | list) or not below or dice.random() < 0.2:
            break
        part = below
    if isinstance(part, dict) and dice.random() < 0.2:
        del part[key]
    else:
        part[key] = dice.choice(ODD + ODD_PARTS)
    return json.dumps(made).encode()


def json_input(plain, dice):
    return (
        twisted(plain, dice) if dice.random() < 0.6 else damaged(json.dumps(plain).encode(), dice)
    )


@pytest.fixture(scope="session")
def whole_store(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    encoding = Encoding(kind="raw")
    packed(image_folder(root / "photos", 4, size=(8, 8)), root / "store", encoding=encoding)
    return root / "store"


@pytest.fixture
def store(whole_store, tmp_path):
    return shutil.copytree(whole_store, tmp_path / "store")


def fuzz_recipe(dice, folder):
    (folder / "recipe.toml").write_bytes(damaged(RECIPE, dice))
    read_recipe(folder / "recipe.toml")


def fuzz_plan(dice, folder):
    (folder / "plan.json").write_bytes(json_input(PLAN, dice))
    read_plan(folder / "plan.json")


def fuzz_header(dice, folder):
    path = folder / "store/header.json"
    kept = path.read_bytes()
    plain = json.loads(kept) | {"schema": "flatout.packed/1"}  # read without a checksum
    path.write_bytes(json_input(plain, dice))
    try:
        data = flatout.data.open(folder / "store", order="source")
        if len(data):
            data[0]
    finally:
        path.write_bytes(kept)


def fuzz_index(dice, folder):
    path = folder / "store/index.npy"
    kept = path.read_bytes()
    if dice.random() < 0.5:
        path.write_bytes(damaged(kept, dice))
    else:
        index = np.load(path)
        name = dice.choice(["shard", "offset", "length"])
        index[name][dice.randrange(len(index))] = dice.choice([2**31, 1, 7, 2**32 - 1])
        np.save(path, index)
    try:
        flatout.data.open(folder / "store", order="source")[0]
    finally:
        path.write_bytes(kept)


def fuzz_image(dice, folder):
    stream = io.BytesIO(damaged(file_bytes(1, dice.choice(["jpeg", "png", "gif", "bmp"])), dice))
    pictures.encode(pictures.from_source(stream.getvalue()), Encoding(kind="raw"))


PARSERS = {
    fuzz_recipe: 150,
    fuzz_plan: 100,
    fuzz_header: 100,
    fuzz_index: 40,
    fuzz_image: 70,
}
"""How many inputs each gets in an ordinary run, with the documents below 500; 20 times as many in
the long one."""
NUM_DOCUMENTS = 40
LONG = 20


def try_parser(parser, count, folder, first=0):
    for seed in range(first, first + count):
        try:
            with contextlib.suppress(UserError, BadSample):
                parser(random.Random(seed), folder)
        except Exception as error:  # noqa: PERF203  the seed is told
            raise AssertionError(f"{parser.__name__}, seed {seed}: {error!r}") from error


def try_documents(count, folder, first=0):
    names = ["profile_busy.json", "ablation_tuned.json"]
    plain = {name: json.loads((DATA / name).read_text()) for name in names}
    for seed in range(first, first + count):
        dice = random.Random(seed)
        name = dice.choice(names)
        (folder / "a.json").write_bytes(json_input(plain[name], dice))
        code = call(["compare", str(folder / "a.json"), str(DATA / name)])
        assert code in (0, 1, 2), f"documents, seed {seed}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
def test_damaged_input_is_a_user_error(parser, store):
    try_parser(parser, PARSERS[parser], store.parent)


@pytest.mark.filterwarnings("ignore")
def test_damaged_documents_are_user_errors(tmp_path):
    try_documents(NUM_DOCUMENTS, tmp_path)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
def test_much_damaged_input_is_a_user_error(parser, store):
    try_parser(parser, PARSERS[parser] * LONG, store.parent, first=1_000)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore")
def test_many_damaged_documents_are_user_errors(tmp_path):
    try_documents(NUM_DOCUMENTS * LONG, tmp_path, first=1_000)
