"""A process that checks one file after another: a path a line in, what was found a line out.

It never imports what it reads. A file that ends it, or keeps it busy, ends nothing else.
"""

import gc
import io
import json
import os
import resource
import signal
import stat
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.analysis.source.script import NotAnalysableError
from flatout.records.json_records import to_plain
from flatout.rules import source

MAX_BYTES = 2 << 20
"""The largest source of transformers has a tenth of it; what is larger is data."""
MAX_MEMORY_BYTES = 1 << 30
MAX_S = 10.0
"""Of CPU time: on a busy machine a large file is not given up for it."""
ABOUT_TRAINING = (b"torch", b"accelerat", b"lightning", b"transformers")
"""A file without any of these words has nothing to check."""
NOTHING: Mapping[str, Any] = {"findings": [], "notes": [], "not_analysable": ""}
"""The answer on a file in which nothing is found."""


def read_bytes(path: Path) -> bytes:
    """Return a file's content."""
    try:
        # A pipe would block; what is opened is what is looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise NotAnalysableError("not a regular file")
            if found.st_size > MAX_BYTES:
                raise NotAnalysableError(
                    f"{found.st_size / 2**20:.1f} MiB; at most {MAX_BYTES >> 20} MiB are read"
                )
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotAnalysableError(error.strerror or str(error)) from None


def decode(data: bytes) -> tuple[str, str]:
    """Return a source's text, line ends kept, and its encoding."""
    try:
        encoding, _lines = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, LookupError) as error:
        raise NotAnalysableError(f"not text: {getattr(error, 'msg', error)}") from None
    except UnicodeDecodeError as error:
        raise NotAnalysableError(f"not {error.encoding}: byte {error.start}") from None


class TooLongError(BaseException):
    """A file took too long. No rule's `except Exception` holds it."""


def _give_up(_number: int, _frame: object) -> None:
    raise TooLongError


def not_analysable(why: str) -> dict[str, Any]:
    """Return the answer on a file that cannot be read as Python."""
    return {**NOTHING, "not_analysable": " ".join(why.split())}


def check_file(path: Path) -> dict[str, Any]:
    """Return what is found in a file, as plain values."""
    try:
        findings, notes = source.check_text(decode(read_bytes(path))[0])
    except NotAnalysableError as error:
        return not_analysable(str(error))
    except TooLongError:
        return not_analysable(f"takes more than {MAX_S:.0f} s")
    except MemoryError:
        return not_analysable("needs more than 1 GiB")
    return {**NOTHING, "findings": [to_plain(finding) for finding in findings], "notes": notes}


def main() -> None:
    """Answer until there are no more paths."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _give_up)
    gc.disable()  # a tree has no cycles: the collector would visit a million nodes and free none
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_S)
        answer = check_file(Path(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
