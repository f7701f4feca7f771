"""Help in the reader's language: click writes it, its texts are looked up by their English."""

from collections.abc import Iterable

import click

from flatout.records.messages import Messages
from flatout.reporting.tables import wrapped

EXTRA = "  ["
"""What click puts between the help of an option and its default or range."""


class TranslatedFormatter(click.HelpFormatter):
    """Looks every text up, and wraps lines by the columns that wide letters take."""

    def __init__(self, say: Messages, width: int | None = None, max_width: int | None = None):
        super().__init__(width=width, max_width=max_width)
        self.say = say

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the usage line."""
        super().write_usage(prog, args, prefix or f"{self.say.text('Usage:')} ")

    def write_heading(self, heading: str) -> None:
        """Write the heading of a list."""
        super().write_heading(self.say.text(heading))

    def write_text(self, text: str) -> None:
        """Write paragraphs, each known by its words."""
        indent = " " * self.current_indent
        said = (self.say.text(" ".join(each.split())) for each in text.split("\n\n"))
        self.write("\n\n".join("\n".join(wrapped(x, self.width, indent=indent)) for x in said))
        self.write("\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write a list of options or commands."""
        rows = list(rows)
        first = min(max(len(name) for name, _ in rows), col_max) + col_spacing
        hanging = " " * (self.current_indent + first)
        for name, text in rows:
            start = " " * self.current_indent + name
            if len(start) + col_spacing > len(hanging):
                self.write(f"{start}\n")
                start = ""
            start = start.ljust(len(hanging))
            help_text, extra, more = text.partition(EXTRA)
            more = more.replace("default:", self.say.text("default:"))
            said = f"{self.say.text(help_text)}{extra}{more}"
            lines = wrapped(said, self.width, indent=start, hanging=hanging) or [start.rstrip()]
            self.write("\n".join([*lines, ""]))
