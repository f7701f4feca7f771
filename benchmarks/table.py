"""The table in `benchmarks/README.md`, made of the records: `python -m benchmarks.table`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, SCHEMA
from flatout.reporting.documents import write_text

PAGE = Path(__file__).parent / "README.md"
START, END = "<!-- TABLE -->", "<!-- END OF TABLE -->"
NONE_YET = "No record yet: run `make bench`."


def main() -> None:
    """Put the table of all records between the page's two marks."""
    text = PAGE.read_text(encoding="utf-8")
    write_text(with_table(text, table(read_records(RECORDS))), PAGE)


def read_records(root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return folder name and result of every record, the latest first."""
    found = []
    for path in sorted(root.glob("*/result.json"), reverse=True):
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.get("schema") == SCHEMA:
            found.append((path.parent.name, plain))
    return found


def table(records: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the Markdown table."""
    rows = [
        f"| {plain['date']} | [{plain['theme']}](records/{folder}/README.md) | {plain['device']} "
        f"| {plain['claim']} | {plain['finding']} | {'yes' if plain['holds'] else '**no**'} |"
        for folder, plain in records
    ]
    if not rows:
        return NONE_YET
    head = "| date | record | measured on | claim | found | holds |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def with_table(page: str, table: str) -> str:
    """Return the page with the text between its two marks replaced."""
    before, mark, rest = page.partition(START)
    _old, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page has no marks {START} and {END}")
    return f"{before}{START}\n{table}\n{END}{after}"


if __name__ == "__main__":
    main()
