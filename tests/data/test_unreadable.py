import gzip
import os
import pickle
import struct
import subprocess
import sys
import zlib

import pytest
from PIL import Image

from flatout.data.unreadable import Log, file_of, is_unreadable, left_out, words_of
from tests.data.broken import CUT, GONE, TEXT, FromBytes, FromFiles, Opened, broken_photographs


def error_of(work):
    try:
        work()
    except Exception as error:  # noqa: BLE001  of any kind: that is what is asked
        return error
    raise AssertionError("it raised nothing")


def cut_png(folder):
    path = folder / "a.png"
    Image.effect_noise((64, 64), 50).save(path)
    broken = bytearray(path.read_bytes())
    broken[37:41] = b"????"
    path.write_bytes(broken)
    with Image.open(path) as picture:
        picture.load()


def cut_gzip(folder):
    path = folder / "a.gz"
    path.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with gzip.open(path) as file:
        file.read()


BROKEN = {
    "a file that went away": lambda folder: (folder / "gone.jpg").read_bytes(),
    "a broken PNG": cut_png,
    "a cut gzip": cut_gzip,
    "a cut pickle": lambda _: pickle.loads(pickle.dumps([1.5] * 100)[:50]),
    "deflated data": lambda _: zlib.decompress(b"nothing deflated"),
    "a cut record": lambda _: struct.unpack("<Q", b"1234"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_broken_file_is_read_with_is_told(name, tmp_path):
    assert is_unreadable(error_of(lambda: BROKEN[name](tmp_path)))


@pytest.mark.parametrize("number", [CUT, TEXT, GONE])
@pytest.mark.parametrize("kind", [Opened, FromFiles])
def test_a_broken_photograph_is_told_and_its_file_named(kind, number, tmp_path):
    paths = broken_photographs(tmp_path)

    error = error_of(lambda: kind(paths)[number])

    assert is_unreadable(error)
    assert file_of(error) == paths[number]


def test_a_photograph_from_bytes_is_named_by_the_file_that_they_came_from(tmp_path):
    paths = broken_photographs(tmp_path)

    assert file_of(error_of(lambda: FromBytes(paths)[TEXT])) == paths[TEXT]


def own_mistake(_):
    raise ValueError("a mistake of the script's own")


def own_program(_):
    subprocess.run(["/no/such/program"], check=True)


def pillows_argument(folder):
    Image.new("RGB", (8, 8)).convert("no mode")


OTHERS = {
    "a ValueError": own_mistake,
    "a SyntaxError": lambda _: compile("a b", "script", "exec"),
    "a program that is missing": own_program,
    "a wrong argument": pillows_argument,
    "a key": lambda _: {}["label"],
    "a type": lambda _: len(3),
    "no rights or no file": lambda folder: folder.read_bytes(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_broken_file_is_not_taken_for_one(name, tmp_path):
    assert not is_unreadable(error_of(lambda: OTHERS[name](tmp_path)))


@pytest.mark.parametrize("number", [1, 5, 12, 13, 24, 28, 104, 110, 116])
def test_failures_of_the_system_are_not_taken_for_a_broken_file(number):
    assert not is_unreadable(OSError(number, os.strerror(number)))


def test_memory_that_runs_out_and_an_error_below_oserror_are_not_taken_for_a_broken_file():
    class NetworkError(OSError):
        pass

    assert not is_unreadable(MemoryError())
    assert not is_unreadable(NetworkError("no route"))


def test_an_error_is_told_in_one_short_line():
    assert words_of(OSError("first\nsecond")) == "OSError: first second"
    assert len(words_of(OSError("x" * 999))) == 160


WRITER = """
import pickle, sys
log = pickle.loads(bytes.fromhex(sys.argv[1]))
log.write({"name": "b", "who": "worker 1", "error": "e"})
"""


def test_a_process_that_was_started_anew_adds_to_the_log():
    log = Log()
    log.write({"epoch": True})
    log.write({"name": "a", "who": "worker 0", "error": "e"})
    _, seen = log.read()

    subprocess.run([sys.executable, "-c", WRITER, pickle.dumps(log).hex()], check=True)

    assert log.read(seen)[0] == [{"name": "b", "who": "worker 1", "error": "e"}]
    assert log.read(log.read()[1]) == ([], log.read()[1])
    assert left_out(log.read()[0]).sentence() == (
        "2 samples left out in 1 epochs of loaders (1 by worker 0, 1 by worker 1), "
        "2 different ones: a (e); b (e)"
    )


def test_more_names_than_are_shown_are_counted():
    lines = [{"name": f"{number}", "who": "worker 0", "error": "e"} for number in range(7)]

    said = left_out(lines + lines[:1]).sentence()

    assert said.startswith("8 samples left out")
    assert said.endswith("7 different ones: 0 (e); 1 (e); 2 (e); 3 (e); 4 (e); and 2 more")
