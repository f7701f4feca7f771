"""Trace the memory of a workload in a process of its own: nothing trained, nothing written.

    with open_tracer("task.py:task") as trace:
        stream = trace(TraceRequest(batch=8))

The process stays between the requests, so that torch is imported once. A script is another matter:
each request runs it again, to the end of its second step.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.agent.journal_file import open_claims
from flatout.launch import trial_folders
from flatout.launch.rollback import rollback
from flatout.launch.trial_process import (
    TRACE,
    byte_code,
    last_output,
    not_journaled,
    scratch_root,
)
from flatout.launch.workloads import parse_workload
from flatout.planner.tracing.script import ScriptTracer, TraceRequest
from flatout.records.errors import UserError
from flatout.records.files import module_command, with_boot
from flatout.records.input_files import parse_json
from flatout.records.json_records import to_plain
from flatout.records.memory_stream import MemoryStream, stream_from_json
from flatout.records.messages import words
from flatout.records.trial import Workload

CHILD = "flatout.planner.tracing.child"
HF = "hf:"
"""Before the path of a transformers configuration."""
END_S = 5.0
"""How long a tracing process may take to end."""


Trace = Callable[[TraceRequest], MemoryStream]


@contextlib.contextmanager
def open_tracer(
    target: str, arguments: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Iterator[Trace]:
    """Return the function that traces a target, as often as it is asked.

    Args:
        target: A script, `file.py:name` of a Task, a Subject or a function that returns one, or
            `hf:` and the path of a transformers configuration.
        arguments: Of a script its own; of a configuration `sequence=1024` and its like.
        environment: Of the tracing process. Without a visible device in it the GPU is simulated.

    Raises:
        UserError: if there is no such target.
    """
    if target.startswith(HF):
        workload = Workload(target=target, arguments=tuple(arguments), python=sys.executable)
    else:
        workload = parse_workload(target, arguments)
    if not (workload.is_task or target.startswith(HF)):
        yield ScriptTracer(workload, environment).trace
        return
    with _Process(workload, environment) as process:
        yield process.trace


class _Process:
    """A tracing process, started when it is first needed and again after it died."""

    def __init__(self, workload: Workload, environment: Mapping[str, str]) -> None:
        self.workload = workload
        self.environment = environment
        self.child: subprocess.Popen[str] | None = None
        self.replies = -1
        self.ahead: tuple[TraceRequest, MemoryStream] | None = None
        """The stream that came with another one, and the request that it answers."""

    def __enter__(self) -> "_Process":
        self.folder = Path(tempfile.mkdtemp(prefix=TRACE, dir=scratch_root()))
        self.claims = open_claims(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        undone = rollback(self.folder)
        os.close(self.claims)
        for line in undone.differences:
            sys.stderr.write(f"flatout: {line}\n")
        if not undone.failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def trace(self, request: TraceRequest) -> MemoryStream:
        """Return the stream of one request."""
        if self.ahead is not None and self.ahead[0] == request:
            return self.ahead[1]
        reply = self.ask(request)
        notes: tuple[str, ...] = ()
        if reply is None and request.device == "cuda":
            # A device that is not there is torch's inner business: fall back instead of giving up.
            reply = self.ask(replace(request, device="cpu"))
            notes = (words("traced.died"),)
        if reply is None:
            raise UserError(f"the tracing process died: {self.last_words()}; nothing is predicted")
        if "error" in reply:
            raise UserError(reply["error"])
        stream = stream_from_json(reply["stream"])
        if "next" in reply:
            following = stream_from_json(reply["next"])
            self.ahead = replace(request, batch=following.batch, more=0), following
        return replace(stream, notes=(*stream.notes, *notes))

    def ask(self, request: TraceRequest) -> dict[str, Any] | None:
        """Return the child's reply, None where it died."""
        child = self.child or self.start()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(to_plain(request)) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            self.end()
            return None
        line = self.next_line(request.limit_s)
        if not line:
            self.end()
            return None
        reply: dict[str, Any] = parse_json(line)
        return reply

    def next_line(self, limit_s: float) -> str:
        """Return the child's next line, empty where it ended before that."""
        readable, _, _ = select.select([self.replies], [], [], limit_s)
        if not readable:
            self.end()
            raise UserError(f"the trace was not done within {limit_s:.0f} s")
        parts = []
        while part := os.read(self.replies, 1 << 20):
            parts.append(part)
            if part.endswith(b"\n"):
                return b"".join(parts).decode()
        return ""

    def start(self) -> "subprocess.Popen[str]":
        """Start the child."""
        ours, theirs = os.pipe()
        spec = {
            **trial_folders.owner(),
            "target": self.workload.target,
            "arguments": list(self.workload.arguments),
            "folder": str(self.folder),
            "replies": theirs,
            "not_journaled": not_journaled(self.environment, self.workload.folder),
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        try:
            with (self.folder / "log").open("ab") as log:
                self.child = subprocess.Popen(
                    module_command(self.workload.python, CHILD, str(path)),
                    cwd=self.workload.folder,
                    env={**with_boot(self.environment), **byte_code(self.environment)},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs,),
                    text=True,
                )
        finally:
            os.close(theirs)
        self.replies = ours
        return self.child

    def end(self) -> None:
        """End the child, if there is one."""
        child, self.child = self.child, None
        if child is None:
            return
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(timeout=END_S if child.poll() is None else None)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        os.close(self.replies)

    def last_words(self) -> str:
        """Return the last line that the child said."""
        text = last_output(self.folder / "log")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"
