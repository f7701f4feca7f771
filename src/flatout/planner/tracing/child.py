"""The process that traces: `flatout.planner.tracing.child SPEC`, one request a line.

Tracing tells torch of a device that is not there, for the rest of the process; so it has one of
its own. Requests come as JSON lines on standard input, each answered by a line on the descriptor
that the specification names: the stream, or what went wrong.
"""

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.agent import undo_journal
from flatout.agent.processes import die_with_parent
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
            replies.write(json.dumps(answer(spec, parse_json(line))) + "\n")
            replies.flush()
    return 0


def answer(spec: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one request: every failure is one."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return {"stream": stream_to_json(_traced(spec, from_plain(TraceRequest, request)))}
    except UserError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's code raises
        traceback.print_exc()
        return {"error": explained(error)}


def _traced(spec: Mapping[str, Any], asked: TraceRequest) -> MemoryStream:
    from flatout.planner.tracing.trace import trace

    changes = catalogue.build(asked.recipe)
    for change in changes:
        # What a recipe changes around the process is said before anything is traced.
        os.environ.update(change.environment(dict(os.environ)))
    return trace(
        _subject(spec["target"], tuple(spec["arguments"])),
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
