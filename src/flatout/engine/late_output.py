"""Standard output in which a text may wait for its numbers; everything behind it waits with it."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

MARK = "\x1a"
"""Around the number of a text that is not there yet: a control character nobody prints."""
PLACES = re.compile(f"{MARK}(\\d+){MARK}")
AT_EASE = ("encoding", "errors", "isatty", "line_buffering", "mode", "name", "newlines", "writable")
"""What may be asked of the output without its waiting texts being written first."""


class Number(Protocol):
    """What a text waits for."""

    def is_there(self) -> bool:
        """Tell whether it is known by now."""

    def value(self) -> Any:
        """Return it, after a wait if need be."""


class LateOutput:
    """Stands in for `sys.stdout`: the same lines in the same order, some of them later."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.waiting: deque[str] = deque()
        self.texts: dict[int, tuple[Number, Callable[[Any], str]]] = {}
        self.count = 0
        self.wants_flush = False

    def place(self, number: Number, render: Callable[[Any], str]) -> str:
        """Return a stand-in for the text of a number."""
        self.count += 1
        self.texts[self.count] = number, render
        return f"{MARK}{self.count}{MARK}"

    def write(self, text: str) -> int:
        """Write a text, or keep it until what stands before it is written."""
        if not self.waiting and MARK not in text:
            return int(self.stream.write(text))
        self.waiting.append(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what is written; what waits is flushed when it is."""
        self.wants_flush = bool(self.waiting)
        self.stream.flush()

    def let_out(self, *, waits: bool = False) -> None:
        """Write the texts whose numbers are there; all of them where that may wait."""
        wrote = False
        while self.waiting and (waits or self._is_ready(self.waiting[0])):
            self.stream.write(PLACES.sub(self._text, self.waiting.popleft()))
            wrote = True
        if wrote and self.wants_flush:
            self.wants_flush = bool(self.waiting)
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        if name not in AT_EASE:
            self.let_out(waits=True)  # the buffer or the file itself: what waits comes first
        return getattr(self.stream, name)

    def _is_ready(self, text: str) -> bool:
        numbers = (self.texts.get(int(place[1])) for place in PLACES.finditer(text))
        return all(found is None or found[0].is_there() for found in numbers)

    def _text(self, place: re.Match[str]) -> str:
        found = self.texts.pop(int(place[1]), None)
        return place[0] if found is None else found[1](found[0].value())
