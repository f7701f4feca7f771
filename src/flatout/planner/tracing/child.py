"""The process that traces: `flatout.planner.tracing.child SPEC`, one request a line.

Tracing tells torch of a device that is not there, for the rest of the process; so it has one of
its own. Requests come as JSON lines on standard input, each answered by a line on the descriptor
that the specification names: the stream, or what went wrong.
"""

import contextlib
import functools
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.agent import undo_journal
from flatout.agent.processes import die_with_parent
from flatout.agent.worker_start import can_fork
from flatout.data.proof.forked import in_forks
from flatout.planner.tracing.script import TraceRequest, explained
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_json
from flatout.records.json_records import from_plain
from flatout.records.memory_stream import MemoryStream, stream_to_json


def main(arguments: list[str]) -> int:
    """Serve the requests until standard input ends."""
    die_with_parent()
    spec = read_json(arguments[0], MAX_OWN_BYTES)
    undo_journal.install(Path(spec["folder"]), tuple(spec["not_journaled"]))
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    # What the user's code reads as its input ends at once, and holds no requests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with requests, os.fdopen(spec["replies"], "w", encoding="utf-8") as replies:
        for line in requests:
            asked = from_plain(TraceRequest, parse_json(line))
            replies.write(json.dumps(answer(spec, asked)) + "\n")
            replies.flush()
    return 0


def answer(spec: Mapping[str, Any], asked: TraceRequest) -> dict[str, Any]:
    """Return the reply to one request: every failure is one."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            with _uncollected():
                subject = _subject(spec["target"], tuple(spec["arguments"]))
            return _two(spec, asked, subject) or {"stream": stream_to_json(_traced(asked, subject))}
    except UserError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's code raises
        traceback.print_exc()
        return {"error": explained(error)}


def _two(spec: Mapping[str, Any], asked: TraceRequest, subject: Any) -> dict[str, Any]:
    """Return the reply with a second trace in it; empty where one alone is asked for or possible.

    Each is made in a copy of this process, which has torch and the user's code loaded. What fails
    there is tried again here: user's code that asked for CUDA, say, has it in no copy.
    """
    import torch

    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not (asked.more and can_fork()) or has_gpu or threading.active_count() > 1:
        return {}
    batch = subject.batch_size if asked.batch is None else asked.batch
    both = [replace(asked, batch=size, more=0) for size in (batch, batch + asked.more)]
    with contextlib.suppress(OSError), _shared_memory():
        found = in_forks([functools.partial(answer, spec, each) for each in both], asked.limit_s)
        first, second = ((one or {}).get("value", {}) for one in found)
        if "stream" in first:
            return {**first, **({"next": second["stream"]} if "stream" in second else {})}
    return {}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Import without looking for garbage: with torch and transformers that is a fifth of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _shared_memory() -> Iterator[None]:
    """Let copies of this process not look through what it holds: that would copy all its pages."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _traced(asked: TraceRequest, subject: Any) -> MemoryStream:
    from flatout.planner.tracing.trace import trace

    changes = catalogue.build(asked.recipe)
    for change in changes:
        # What a recipe changes around the process is said before anything is traced.
        os.environ.update(change.environment(dict(os.environ)))
    return trace(
        subject,
        batch=asked.batch,
        changes=changes,
        device=asked.device,
        capability=asked.capability,
    )


@functools.cache
def _subject(target: str, arguments: tuple[str, ...]) -> Any:
    """Return the subject that the target names, loaded at the first request."""
    if target.startswith("hf:"):
        from flatout.planner.tracing.hugging_face import hf_subject

        return hf_subject(target.removeprefix("hf:"), arguments)
    from flatout.planner.tracing.target import load_subject

    sys.path.insert(0, "")  # the user's own code imports as by `python -m`
    return load_subject(target)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # to take a traced model apart would take a second, and serve no one
