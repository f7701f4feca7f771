"""What rules and `doctor` find, as records.

`Finding`: one bottleneck, with the numbers that prove it, and its `SourcePlace`: a line of a
script, and what to write there. `SourceFinding`: what a source rule says of one place, and the edit
that fixes it. `Check`: what `doctor` says of one thing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
WARN = "warn"
"""Training works, slower or with a risk."""
BAD = "bad"
"""Training fails, or lands where it should not."""
SAFE = "safe"
SUGGESTED = "suggested"
NONE = "none"
SCHEMA = "flatout.check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlace:
    """A line of the user's project where a source rule sees what was measured."""

    path: str
    """From the folder in which the script was started."""
    line: int
    code: str
    """Of the source rule, such as `SYN01`."""
    message: str
    instead: str
    fix: str
    """`safe`, `suggested` or `none`."""
    page: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One bottleneck seen in a profile."""

    code: str
    """Stable name, equal to the rule's file name. Code compares this."""
    share: float
    """Fraction of step time lost to it, in [0, 1]; see `of` for the exceptions."""
    because: str
    """One sentence with the measured numbers."""
    next: str
    """What to do about it: one sentence, a command where there is one."""
    evidence: dict[str, float] = field(default_factory=dict)
    """The numbers behind `because`, keyed by metric name."""
    of: str = "step"
    """What `share` is a fraction of: `step`; `run`: all that was seen of it; `training`: the whole
    of it, compiling included; `memory`: what 1,000 steps add to it; `device`: the memory of the
    device."""
    is_bound: bool = False
    """Whether `share` is only known not to be exceeded: the cause is some part of it."""
    lines: tuple[str, ...] = ()
    """Lines that were measured, as the profile names them: `train.py:41`."""
    places: tuple[SourcePlace, ...] = ()
    """Where `flatout check` sees it in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found about one thing, why it matters and what to do."""

    status: str
    """`ok`, `warn` or `bad`."""
    what: str
    """The reading, in one line with its numbers."""
    why: str = ""
    """What it means for training; empty when all is well."""
    next: str = ""
    """What to do: one sentence, a command where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Characters `start` to `end` of a text, replaced."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Edits that belong together: all of them are made, or none."""

    edits: tuple[Edit, ...]
    is_safe: bool = False
    """Whether the script computes the same numbers with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFinding:
    """One place in a script that a rule speaks about."""

    code: str
    """Stable, such as `DL02`."""
    rule: str
    """Name of the rule's file and of its page."""
    line: int
    column: int
    """Both count from 1; columns in characters."""
    end_line: int
    because: str
    """One sentence: what is there and what it costs."""
    instead: str
    fix: Fix | None = None

    @property
    def fix_class(self) -> str:
        """Return `safe`, `suggested` or `none`."""
        if self.fix is None:
            return NONE
        return SAFE if self.fix.is_safe else SUGGESTED

    @property
    def page(self) -> str:
        """Return the rule's page, from the root of flatout's repository."""
        return f"docs/rules/{self.rule}.md"

    def to_json(self, path: str) -> dict[str, Any]:
        """Return the finding as `flatout.check/1` has it."""
        return {
            "code": self.code,
            "path": path,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "message": self.because,
            "instead": self.instead,
            "fix": self.fix_class,
            "page": self.page,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """One file: what was found in it, or why it could not be read as Python."""

    path: str
    findings: tuple[SourceFinding, ...] = ()
    not_analysable: str = ""
    """Why, in one line; empty where it was analysed."""
    notes: tuple[str, ...] = ()
    """Rules that failed on it: defects of flatout."""
    is_named: bool = False
    """Whether the user named this very file, not a folder above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheck:
    """All files, in the order of their paths."""

    files: tuple[CheckedFile, ...]
    fixed: int = 0

    def findings(self) -> Iterator[tuple[str, SourceFinding]]:
        """Yield each finding with the path of its file."""
        for each in self.files:
            for finding in each.findings:
                yield each.path, finding

    def count(self, fix_class: str = "") -> int:
        """Return how many findings there are, or how many have a fix of that class."""
        return sum(fix_class in {"", finding.fix_class} for _path, finding in self.findings())

    @property
    def exit_code(self) -> int:
        """Return 2 where a named file cannot be analysed, 1 where something was found, else 0."""
        if any(each.is_named and each.not_analysable for each in self.files):
            return 2
        return 1 if self.count() else 0

    def to_json(self) -> dict[str, Any]:
        """Return the document `flatout.check/1`."""
        return {
            "schema": SCHEMA,
            "files": len(self.files),
            "findings": [finding.to_json(path) for path, finding in self.findings()],
            "not_analysable": [
                {"path": each.path, "because": each.not_analysable}
                for each in self.files
                if each.not_analysable
            ],
            "fixes": {SAFE: self.count(SAFE), SUGGESTED: self.count(SUGGESTED), "made": self.fixed},
        }
