"""The process that traces: `flatout.planner.tracing.child SPEC`, one request a line.

Tracing tells torch of a device that is not there, for the rest of the process; so it has one of
its own. Requests come as JSON lines on standard input, each answered by a line on the descriptor
that the specification names: the path of a stream's file, or what went wrong.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.agent import patching, undo_journal
from flatout.agent.processes import die_with_parent
from flatout.planner.tracing.script import TraceRequest, explained
from flatout.records.errors import UserError
from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_json

NOT_NEEDED = ("accelerate", "scipy", "sklearn", "torchao")
"""Packages that transformers imports where they are installed, a fifth of its time, and that no
model here is made of. A technique may need one of them later."""


def main(arguments: list[str]) -> int:
    """Serve the requests until standard input ends."""
    die_with_parent()
    spec = read_json(arguments[0], MAX_OWN_BYTES)
    folder = Path(spec["folder"])
    undo_journal.install(folder, tuple(spec["not_journaled"]))
    server = _Server(spec, folder)
    requests = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    with requests, os.fdopen(spec["replies"], "w", encoding="utf-8") as replies:
        for number, line in enumerate(requests):
            begin_input(spec["input"])
            reply = server.answer(parse_json(line), folder / f"stream-{number}.json")
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    return 0


def begin_input(path: str | None) -> None:
    """Let the script read what `flatout plan` was given as its input, from its beginning."""
    descriptor = os.open(path if path and os.access(path, os.R_OK) else os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    patching.swapped(sys, "stdin", os.fdopen(0, encoding="utf-8", closefd=False))


class _Server:
    """The subject, loaded at the first request, and its traces."""

    def __init__(self, spec: Mapping[str, Any], folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.subject: Any = None

    def answer(self, request: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the reply to one request: every failure is one."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self.trace(request, path)
        except UserError as error:
            return {"error": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's code raises
            traceback.print_exc()
            return {"error": explained(error)}
        return {"stream": str(path)}

    def trace(self, request: Mapping[str, Any], path: Path) -> None:
        """Trace as asked and write the stream."""
        from flatout.planner.tracing.trace import trace
        from flatout.records import catalogue
        from flatout.records.json_records import from_plain
        from flatout.records.memory_stream import stream_to_json

        asked = from_plain(TraceRequest, request)
        changes = catalogue.build(asked.recipe)
        for change in changes:
            # What a recipe changes around the process is said before anything is traced.
            os.environ.update(change.environment(dict(os.environ)))
        stream = trace(
            self.load(),
            batch=asked.batch,
            changes=changes,
            device=asked.device,
            steps=asked.steps,
            capability=asked.capability,
        )
        path.write_text(json.dumps(stream_to_json(stream)), encoding="utf-8")

    def load(self) -> Any:
        """Return the subject that the target names, loaded once."""
        if self.subject is None:
            target = self.spec["target"]
            if target.startswith("hf:"):
                from flatout.planner.tracing.hugging_face import hf_subject

                with _without(NOT_NEEDED):
                    self.subject = hf_subject(target.removeprefix("hf:"), self.spec["arguments"])
            else:
                from flatout.planner.tracing.target import load_subject

                sys.path.insert(0, "")  # the user's own code imports as by `python -m`
                self.subject = load_subject(target)
        return self.subject


@contextlib.contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Make as if these packages were not installed, but for those that are imported already."""
    hidden: Any = {name: None for name in packages if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # to take a traced model apart would take a second, and serve no one
