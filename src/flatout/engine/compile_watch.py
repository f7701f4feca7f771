"""What the compiler did behind the scenes: silent falls back to eager, and compiling for ever.

Torch compiles a function anew for each input that its last version does not fit. After a few times
it gives up, says so in a log that a trial hides, and runs the function eagerly from then on.
"""

import logging
from collections import Counter
from typing import Any

from flatout.core.errors import NotApplicable

LOGGER = "torch._dynamo.convert_frame"
LIMIT_WORDS = ("recompile_limit", "cache_size_limit")
"""What torch's message names when it gives up; older releases used the second."""
STORM = 5
"""Versions of one function beyond its first from which on compiling is the training: one each
for evaluation, the last batch of an epoch and a dynamic shape are ordinary."""


class CompileWatch(logging.Handler):
    """Listens to the compiler from when it is begun; ask it at the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.storm = STORM
        """Versions beyond its first that one function may not have."""
        self.gave_up = ""
        """The compiler's own words, empty where it did not give up."""
        self._known = 0

    def begin(self) -> "CompileWatch":
        """Start listening; what was compiled before does not count."""
        logging.getLogger(LOGGER).addHandler(self)
        self._known = len(_compilations())
        return self

    def expect(self, versions: int) -> None:
        """Take so many versions of one function for ordinary, if that is more than was."""
        self.storm = max(self.storm, versions)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message with which the compiler gives up."""
        text = record.getMessage()
        if not self.gave_up and any(words in text for words in LIMIT_WORDS):
            reason = next((line for line in text.splitlines() if "last reason" in line), "")
            self.gave_up = reason.partition("last reason:")[2].strip() or text.splitlines()[0]

    def report(self) -> str:
        """Return what was compiled.

        Raises:
            NotApplicable: if the compiler gave up, went on compiling, or compiled nothing.
        """
        if self.gave_up:
            raise NotApplicable(
                f"torch gave up compiling and went on eagerly, silently: {self.gave_up[:200]}"
            )
        made = _compilations()[self._known :]
        if not made:
            raise NotApplicable("torch compiled nothing: no call reached the compiler")
        versions = Counter(_place(one) for one in made)
        (place, most), *_ = versions.most_common(1)
        if most - 1 >= self.storm:
            reasons = [getattr(m, "recompile_reason", "") for m in made if _place(m) == place]
            raise NotApplicable(
                f"recompile storm: {place[0]} was compiled {most} times, last since {reasons[-1]}"
            )
        again = sum(count - 1 for count in versions.values())
        return f"{len(versions)} regions compiled, {again} of them again"


def _compilations() -> list[Any]:
    """Return the compiler's own record of forward compilations; backward ones name no code."""
    from torch._dynamo.utils import get_compilation_metrics

    return [one for one in get_compilation_metrics() if one.co_name]


def _place(one: Any) -> tuple[str, str, int]:
    return one.co_name, one.co_filename or "", one.co_firstlineno or 0
