"""Every parser under damaged input: an answer or a user error, never anything else.

Inputs are made from a seed, so a failure names the input that caused it. Each parser gets 500 of
them in an ordinary run and 10,000 in the long one, in processes that may take 1 GB of memory more
than they have and ten minutes for 500.
"""

import contextlib
import copy
import dataclasses
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import flatout.data
from flatout.agent.guard.record import GuardRecord, find_record, write_record
from flatout.agent.journal_file import BESIDE
from flatout.cli import call
from flatout.data import pictures, writer
from flatout.data.format import ENTRY, BadSample, Encoding
from flatout.data.sources import columns
from flatout.data.sources.arrays import open_arrays
from flatout.data.staging import part_path, read_part
from flatout.hardware import peaks
from flatout.hardware.peaks import Peaks, PeaksOf
from flatout.launch.rollback import restore
from flatout.launch.trial_folders import announce, find_job, has_ended
from flatout.launch.trial_process import _results
from flatout.launch.workloads import parse_workload
from flatout.planner.tracing import hugging_face
from flatout.records.errors import UserError
from flatout.records.input_files import parse_json
from flatout.records.json_records import from_plain
from flatout.records.parallel import spec_from_toml
from flatout.records.profile import profile_from_json
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Trial
from flatout.records.trial_result import CurvePoint, PrintedValue, RunRecord
from flatout.tuning.history import errors_on, read_history
from flatout.tuning.policy import TuningTask, budget_of, tuning
from flatout.tuning.script_files import digests_of
from flatout.tuning.trial_runner import JOURNAL, journal_line, open_journal
from flatout.workflow import check as checking
from flatout.workflow.recipe_files import read_recipe
from flatout.workflow.run import read_plan
from flatout.workflow.watch import read_job
from tests.data.packs import file_bytes, image_folder, packed
from tests.paths import ROOT
from tests.tuning.test_policy import JOURNALS

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
[parallel]
tp = 2
microbatches = 4
tp_plan = { "layers.*.q" = "colwise", "layers.*.o" = "rowwise" }
[about]
script = "train.py"
ratio = 1.5
""" % flatout.__version__.encode()
PLAN = {
    "target": "train.py",
    "device": "h100",
    "capacity_bytes": 7,
    "batch": 1,
    "allocated": {"bytes": 5, "source": "traced"},
    "reserved": {"bytes": 6, "source": "traced"},
    "used": {"bytes": 6, "source": "traced"},
    "peak_phase": "backward",
    "components": {"workspace": {"bytes": 1, "source": "traced"}},
    "ladder": [
        {
            "fits": True,
            "choices": ["microbatching chunks=8"],
            "peak_bytes": 4,
            "saved_bytes": 3,
            "time_ratio": 1.0,
        }
    ],
}
HEADER = {
    "records": 1,
    "workload": "train.py",
    "files": {"train.py": "a1"},
    "torch": "2",
    "device": "cpu",
    "cpu": "x86",
    "cores": 2,
}
TRIAL = json.loads(
    json.dumps(
        Trial(
            recipe=Recipe(),
            outcome=Outcome.OK,
            profile=profile_from_json(json.loads((DATA / "profile_busy.json").read_text())),
        ).to_json()
    )
)
SCREENED = [
    json.loads(line)
    for line in gzip.decompress((JOURNALS / "screen.jsonl.gz").read_bytes()).splitlines()[:-1]
]
SCREENED_LINES = [journal_line(row) for row in SCREENED]
ODD = (
    None,
    True,
    -1,
    0,
    10**400,
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 5_000,
    "\0",
    "../a",
)
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


EARLIER = {"at": "", "script": "a", "device": "CPU", "technique": "x", "predicted": 1.0, "n": 3}
EARLIER |= {"ratio": 1.25, "interval": [1.2, 1.3], "verdict": "kept", "settings": {"workers": 2}}
FINDING = {"code": "SYN10", "rule": "r", "line": 3, "column": 1, "end_line": 3, "because": "b"}
FINDING |= {"instead": "i", "fix": {"is_safe": True, "edits": []}}
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2}
CONFIG |= {"n_embd": 8, "vocab_size": 64, "dtype": "float32", "id2label": {"0": "a"}}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 3, "content": "[UNK]", "single_word": False, "lstrip": False}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"},
}
TOKENIZER["added_tokens"][0] |= {"rstrip": False, "normalized": False, "special": True}
GUARD = GuardRecord(torch="2", device="cpu", threads=1, start={"w": np.arange(64.0)})


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


def fuzz_parallel(dice, folder):
    """The table as other versions and people write it: of other types, or combined otherwise."""
    plain = {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "1f1b", "microbatches": 8}
    plain |= {"tp_plan": {"layers.*.q": "colwise"}, "stages": [["a"], ["b"]]}
    with contextlib.suppress(ValueError):  # half a document
        spec_from_toml(parse_json(json_input(plain, dice)))


def fuzz_history(dice, folder):
    lines = [json.dumps(EARLIER).encode() for _ in range(3)]
    lines[1] = json_input(EARLIER, dice)
    (folder / "history.jsonl").write_bytes(b"\n".join(lines))
    ordered = errors_on("CPU", read_history(folder / "history.jsonl"))
    assert all(np.isfinite(ordered.get("x", [])))


def fuzz_check_cache(dice, folder):
    answer = {"findings": [FINDING], "notes": ["a"], "not_analysable": ""}
    (folder / "check.json").write_bytes(json_input({"key": answer}, dice))
    known = checking._remembered(folder / "check.json")
    sound = {key: found for key, one in known.items() if (found := checking._recalled(one))}
    for key in sound:
        checking._checked(checking._File(Path("a.py"), key=key), sound, ["SYN10"])


def fuzz_pyproject(dice, folder):
    text = b"[tool.flatout.check]\nselect = ['DL', 'SYN10']\nignore = []\n[project]\nname = 'a'\n"
    (folder / "pyproject.toml").write_bytes(damaged(text, dice))
    checking._settings([folder])


def fuzz_tokenizer(dice, folder):
    (folder / "tokenizer.json").write_bytes(json_input(TOKENIZER, dice))
    writer._tokenizer.cache_clear()
    encoding = Encoding(kind="tokens", tokenizer=str(folder / "tokenizer.json"))
    writer._tokens(b"a b c", encoding)


def fuzz_hugging_face(dice, folder):
    (folder / "config.json").write_bytes(json_input(CONFIG, dice))
    hugging_face._config(folder / "config.json")


def fuzz_peaks(dice, folder):
    """Of flatout's own cache: what is damaged is measured again."""
    wanted = PeaksOf(
        device_kind="cpu", device_name="a", dtype="float32", threads=1, torch_version="2"
    )
    rates = dict.fromkeys(("gemm_flops_per_s", "memory_bytes_per_s", "copy_bytes_per_s"), 1e9)
    measured = Peaks(dtype="float32", threads=1, own_share=0.0, **rates)
    (folder / wanted.file_name).write_bytes(json_input(dataclasses.asdict(measured), dice))
    with mock.patch.object(peaks, "measure_in_child", return_value=measured):
        peaks.read_peaks(wanted, folder, "python")


def fuzz_arrow_state(dice, folder):
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (folder / "state.json").write_bytes(json_input(state, dice))
    columns._listed(folder / "state.json")


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


def fuzz_tuning_journal(dice, folder):
    lines = [
        {"header": HEADER},
        *({"key": "k", "elapsed_s": 1.0, "trial": TRIAL} for _ in range(2)),
    ]
    lines.append({"key": "c", "elapsed_s": 2.0, "judgement": {"check": {"status": "within"}}})
    at = dice.randrange(len(lines))
    texts = [journal_line(line) for line in lines]
    texts[at] = damaged(texts[at], dice) if dice.random() < 0.5 else json_input(lines[at], dice)
    (folder / JOURNAL).write_bytes(b"".join(texts))
    open_journal(folder, HEADER, resume=True)


def fuzz_screen(dice, folder):
    """A whole recorded tuning, of which a byte or a value is damaged: `--resume` replays it."""
    lines = list(SCREENED_LINES)
    at = dice.randrange(len(lines))
    lines[at] = damaged(lines[at], dice) if dice.random() < 0.8 else twisted(SCREENED[at], dice)
    (folder / JOURNAL).write_bytes(b"".join(lines))
    header = SCREENED[0]
    begun, recorded = open_journal(folder, header["header"], resume=True)
    task = from_plain(TuningTask, begun["task"])
    asking = tuning(task, budget_of(task), lambda _: None)
    with contextlib.suppress(StopIteration):
        asked = next(asking)
        while recorded.get(asked.key):
            asked = asking.send(recorded[asked.key].pop(0))


def fuzz_undo_journal(dice, folder):
    """By `restore`, which touches nothing outside the folder, whatever is asked."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    (folder / "outside").write_text("mine")
    for name in ("model.pt", ".m.flatout-1-0", "deep"):
        (work / name).write_text(name)
    known = [["moved", "model.pt", ".m.flatout-1-0", 0], ["new", "deep", None, 0]]
    known += [["gone", "deep", "17", 5], ["made", "model.pt", None, 5], ["folder", "n", None, 1.0]]
    known += [
        ["renamed", "a", "b", 5],
        ["tree", "t", ".u.flatout-1-1", 1.0],
        ["link", "l", "../outside", 7],
    ]
    lines = [
        [kind, str(work / path), other and str(work / other), number, 10 + at]
        for at, (kind, path, other, number) in enumerate(dice.sample(known, 5))
    ]
    at = dice.randrange(len(lines))
    texts = [json.dumps(line).encode() for line in lines]
    texts[at] = json_input(lines[at], dice)
    (work / f"{BESIDE}trial-x").write_bytes(b"\n".join(texts) + b"\n")
    restore(work)
    assert (folder / "outside").read_text() == "mine"


def fuzz_guard_record(dice, folder):
    write_record(GUARD, folder / "guard.json")
    path = folder / "guard.json"
    path.write_bytes(damaged(path.read_bytes(), dice))
    find_record(path)


def fuzz_part(dice, folder):
    path = part_path(folder, 0)
    path.parent.mkdir(exist_ok=True)
    about = {"names": ["a"], "skipped": [], "bytes": 3, "shapes": [None, [2]]}
    raw = np.frombuffer(json_input(about, dice), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, entries=np.zeros(2, ENTRY), about=raw)
    path.write_bytes(damaged(stream.getvalue(), dice) if dice.random() < 0.5 else stream.getvalue())
    read_part(folder, 0)


def fuzz_npz_source(dice, folder):
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.zeros((4, 100)), y=np.arange(4))
    (folder / "a.npz").write_bytes(damaged(stream.getvalue(), dice))
    open_arrays(folder / "a.npz").read(0)


def fuzz_trial_folder(dice, folder):
    """What tells a job's owner, and what a trial left."""
    made = folder / "job"
    made.mkdir(exist_ok=True)
    announce(made, "run", "train.py")
    facts = json.loads((made / "job.json").read_text())
    result = {"why": "done", "segments": [1, 2], "wall_s": 1.0}
    (made / "job.json").write_bytes(json_input(facts, dice))
    (made / "result-1.json").write_bytes(json_input(result, dice))
    (made / "ending.json").write_bytes(json_input({"why": "ended", "wall_s": 1.0}, dice))
    facts = find_job(made)
    if facts is not None:
        has_ended(facts)
        read_job(made)
    _results(made)


def fuzz_profile(dice, folder):
    compare_with(DATA / "profile_busy.json", dice, folder)


def fuzz_run_record(dice, folder):
    """What `flatout run --record` left, in `compare`."""
    points = tuple(CurvePoint(step=step, s=float(step), samples=8, loss=1.0) for step in range(3))
    printed = {"val_loss": (PrintedValue(step=2, s=2.0, value=0.5),)}
    whole = RunRecord(
        command="a", recipe="", exit_code=0, seconds=3.0, points=points, printed=printed
    )
    (folder / "whole.json").write_text(json.dumps(whole.to_json()))
    compare_with(folder / "whole.json", dice, folder)


def fuzz_ablation(dice, folder):
    compare_with(DATA / "ablation_tuned.json", dice, folder)


def compare_with(whole, dice, folder):
    """By the command itself, from the file to the exit code."""
    (folder / "a.json").write_bytes(json_input(json.loads(whole.read_text()), dice))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert call(["compare", str(folder / "a.json"), str(whole)]) in (0, 1, 2)


def fuzz_script(dice, folder):
    """A script in which a Task, and what it imports, is looked for without running it."""
    around = dice.choice(
        [
            ("-", ""),
            ("not ", ""),
            ("[", "]"),
            ("(lambda:", ")"),
            ("a.", "b"),
            ("f(", ")"),
            ("1+", ""),
        ]
    )
    deep = dice.choice([3, 50, 500, 5_000, 100_000])
    nested = f"x = {around[0] * deep}1{around[1] * deep}\n".encode()
    blocks = "".join(f"{' ' * level}if 1:\n" for level in range(dice.choice([3, 90, 120])))
    text = b"import json, torch\nfrom . import there\nclass task:\n    pass\n"
    text += dice.choice(
        [b"", nested, blocks.encode() + b"pass\n", "x = '\u2028'\n".encode("utf-16")]
    )
    ends = dice.choice([b"\n", b"\r", b"\r\n", b"\0\n"])
    text = dice.choice([b"", b"\xef\xbb\xbf", b"#!/usr/bin/python2\n"]) + text.replace(b"\n", ends)
    (folder / "train.py").write_bytes(damaged(text, dice) if dice.random() < 0.5 else text)
    digests_of(parse_workload(f"{folder / 'train.py'}:task", ()))


PARSERS = (
    *(fuzz_script, fuzz_recipe, fuzz_parallel, fuzz_tuning_journal, fuzz_undo_journal),
    *(fuzz_guard_record, fuzz_part, fuzz_npz_source, fuzz_trial_folder, fuzz_plan, fuzz_header),
    *(fuzz_index, fuzz_image, fuzz_history, fuzz_check_cache, fuzz_pyproject, fuzz_tokenizer),
    *(fuzz_hugging_face, fuzz_peaks, fuzz_arrow_state, fuzz_profile, fuzz_ablation),
    *(fuzz_screen, fuzz_run_record),
)
NUM_INPUTS = 500
LONG = 20
"""Blocks of so many inputs in the long run."""


MAX_BYTES = 1 << 30
MAX_SECONDS = 600


def limited(work, *arguments):
    """Do something in a child that may take so much memory and time, in a folder that stays."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            data = next(
                int(line.split()[1]) * 1024
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmData")
            )
            resource.setrlimit(resource.RLIMIT_DATA, (data + MAX_BYTES, data + MAX_BYTES))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(MAX_SECONDS)
            with tempfile.TemporaryDirectory() as here:
                os.chdir(here)
                Path("mine").touch()
                work(*arguments)
                assert Path("mine").exists()
            code = 0
        except BaseException:  # noqa: BLE001  whatever it was is shown by pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def try_parser(parser, count, folder, first=0):
    for seed in range(first, first + count):
        try:
            with contextlib.suppress(UserError, BadSample):
                parser(random.Random(seed), folder)
        except Exception as error:  # noqa: PERF203  the seed is told
            raise AssertionError(f"{parser.__name__}, seed {seed}: {error!r}") from error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
def test_damaged_input_is_a_user_error(parser, store):
    limited(try_parser, parser, NUM_INPUTS, store.parent)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
def test_much_damaged_input_is_a_user_error(parser, store):
    for block in range(1, LONG + 1):
        limited(try_parser, parser, NUM_INPUTS, store.parent, block * NUM_INPUTS)
