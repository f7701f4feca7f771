"""Counts on the front pages of projects: `python -m benchmarks.front_pages REPOSITORY ...`.

Each is a git repository, a bare one too; its last commit is looked at. The table is Markdown.
"""

import re
import statistics
import subprocess
import sys
from pathlib import Path

PICTURE = re.compile(r"!\[[^\]]*\]\([^)\s]+|<img\b[^>]*")
BADGE = re.compile(
    r"badge|shields\.io|pepy\.tech|codspeed|/v/ruff|slack|license/ruff|pyversions|actions/workflows"
)
"""In the address of a picture that is no picture of the program."""
OUTPUT = re.compile(r"^```(text|console)\s*$")
LISTED = (
    *("Hugging Face", "Lightning", "Accelerate", "Ray", "torchrun", "SLURM", "TensorBoard"),
    *("W&B", "MLflow", "Jupyter", "VS Code", "pre-commit", "GitHub Actions", "Grafana", "SARIF"),
)
"""Programs that one may work with."""
COLUMNS = (
    *("commit", "date", "words of the README", "line of the first picture or output"),
    *("pictures", "pages", "words of the middle page", "named in the README and the pages"),
)


def git(repository: Path, *words: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def counts(repository: Path) -> tuple[str, ...]:
    """Return a row of the table."""
    text = git(repository, "show", "HEAD:README.md")
    lines = text.splitlines()
    shown = [n for n, line in enumerate(lines, 1) if OUTPUT.match(line) or pictures(line)]
    names = git(repository, "ls-tree", "-r", "--name-only", "HEAD", "docs").split("\n")
    names = [name for name in names if name.endswith(".md")]
    pages = [git(repository, "show", f"HEAD:{name}") for name in names]
    whole = "\n".join([text, *pages])
    known = [name for name in LISTED if re.search(rf"\b{re.escape(name)}\b", whole)]
    middle = statistics.median(len(page.split()) for page in pages) if pages else 0
    commit, date = git(repository, "log", "-1", "--format=%h %cs").split()
    sizes = (len(text.split()), shown[0] if shown else "none", len(pictures(text)), len(pages))
    return (commit, date, *map(str, sizes), f"{middle:.0f}", ", ".join(known))


def pictures(text: str) -> list[str]:
    """Return the pictures of a text that are no badges.

    >>> pictures("![a](a.png) ![b](https://img.shields.io/b.svg)")
    ['![a](a.png']
    """
    return [found for found in PICTURE.findall(text) if not BADGE.search(found)]


if __name__ == "__main__":
    rows = [(Path(path).resolve(), counts(Path(path))) for path in sys.argv[1:]]
    names = [path.parent.name if path.name == "repo" else path.name for path, _ in rows]
    print(f"| | {' | '.join(names)} |\n|---{'|---' * len(rows)}|")
    for number, column in enumerate(COLUMNS):
        print(f"| {column} | {' | '.join(row[number] for _, row in rows)} |")
