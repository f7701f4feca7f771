"""What the site adds to `docs/`: pages made from the code, links out of it, a check of ways in.

mkdocs calls the functions `on_*` (see `hooks` in mkdocs.yml). The tables of commands, techniques
and rules exist nowhere else, so they cannot differ from the code.
"""

import ast
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

import flatout.rules
from flatout.cli.commands import SUMMARIES
from flatout.cli.commands import flatout as command_line
from flatout.records import catalogue

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCHEMAS = ROOT / "src/flatout/reporting/schemas"
REPOSITORY = os.environ.get("FLATOUT_REPOSITORY", "")
"""Address below which the source is browsed, such as https://host/owner/flatout/blob/main; links
to files outside `docs/` become plain words where it is empty."""
BORROWED = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "STYLE.md": "style.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "README.ko.md": "ko.md",
}
"""Pages of the repository's root and where the site has them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TITLES = {"data": "Loading data", "model": "The model", "batch": "The batch"}


def generated() -> dict[str, str]:
    """Return the pages that are not in `docs/`, by their path on the site."""
    pages = {
        "reference/commands.md": commands_page(),
        "reference/techniques.md": techniques_page(),
        "reference/rules.md": rules_page(),
    }
    for name, place in BORROWED.items():
        if place != "index.md":
            text = (ROOT / name).read_text().replace('src="docs/', 'src="')
            pages[place] = _links(text, lambda link: f"../{link}")
    return pages


def commands_page() -> str:
    """Return every command with its options, as `--help` has them."""
    lines = ["# Commands", ""]
    lines += ["flatout's own options come before the script; the rest belongs to the script.", ""]
    context = click.Context(command_line, info_name="flatout")
    for name, summary in SUMMARIES.items():
        command = command_line.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        usage = " ".join(["flatout", name, *command.collect_usage_pieces(own)])
        lines += [f"## flatout {name}", "", f"{summary} [More](../commands/{name}.md).", ""]
        lines += ["```text", usage, "```", "", "| option | what it does |", "|---|---|"]
        for option in command.params:
            record = option.get_help_record(own)
            if record is not None:
                flags, text = record
                lines.append(f"| `{flags}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines)


def techniques_page() -> str:
    """Return every technique by family, with its promise and what it does."""
    classes = {name: catalogue.technique_class(name) for name in catalogue.names()}
    lines = ["# Techniques", ""]
    lines += [
        "`flatout tune` tries those that can help the script at hand, no further than "
        "`--numerics` allows. The [promises](../techniques/README.md) say what a technique may do "
        "to the numbers.",
        "",
    ]
    for family in sorted({kind.family for kind in classes.values()}):
        lines += [f"## {TITLES.get(family, family.capitalize())}", ""]
        lines += ["| technique | what it does | promise | acts on |", "|---|---|---|---|"]
        for name, kind in classes.items():
            if kind.family == family:
                module = ROOT / f"src/flatout/techniques/{family}/{name}.py"
                page = f"[{name}](../techniques/{family}/{name}.md)"
                acts_on = ", ".join(sorted(kind.addresses))
                cells = (page, _cell(_summary(module)), kind.numerics.value, _cell(acts_on))
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def rules_page() -> str:
    """Return every rule: those on profiles first, then those on source by what they are about."""
    root = Path(flatout.rules.__file__).parent
    lines = ["# Rules", ""]
    lines += [
        "Rules on a profile speak in `flatout measure`, with the numbers that prove them; rules on "
        "source speak in [`flatout check`](../commands/check.md), with line and fix. "
        "[What became of each known fault](../rules/README.md).",
        "",
    ]
    measured = [folder for folder in sorted(root.iterdir()) if folder.name != "source"]
    for folder in (*measured, *sorted((root / "source").iterdir())):
        modules = sorted(folder.glob("[!_]*.py")) if folder.is_dir() else []
        if not modules:
            continue
        title = f"Measured: {folder.name}" if folder in measured else f"Source: {folder.name}"
        lines += [f"## {title}", "", "| rule | it speaks where |", "|---|---|"]
        for module in modules:
            page = f"[{module.stem}](../rules/{module.stem}.md)"
            lines.append(f"| {page} | {_cell(_summary(module))} |")
        lines.append("")
    return "\n".join(lines)


def _summary(module: Path) -> str:
    """Return the first sentence of a module's docstring; of a folder, of its face."""
    file = module if module.exists() else module.with_suffix("") / "__init__.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _links(text: str, change: Any) -> str:
    """Return a page with the targets of its links changed, those in fenced blocks left alone."""

    def changed(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        target = change(link)
        return f"{mark}[{label}]({target})" if target else label

    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(changed, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(changed, text[last:])])


def site_link(link: str, page: str) -> str:
    """Return where a link of a page of `docs/` leads on the site; empty for nowhere.

    >>> site_link("../CHANGELOG.md#010", "faq.md"), site_link("techniques/data", "faq.md")
    ('changes.md#010', 'reference/techniques.md')
    """
    path, mark, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    here = posixpath.dirname(page) or "."
    if target in BORROWED:
        return posixpath.relpath(BORROWED[target], here) + mark + anchor
    if not target.startswith("docs/"):
        return f"{REPOSITORY}/{target}{mark}{anchor}" if REPOSITORY else ""
    inside = target.removeprefix("docs/")
    if (DOCS / inside).is_dir():
        name = inside.partition("/")[0]
        inside = f"reference/{name}.md"
    return posixpath.relpath(inside, here) + mark + anchor


def without_way_in(pages: Mapping[str, str], start: Iterable[str]) -> list[str]:
    """Return the pages that no chain of links reaches from those in the navigation.

    >>> without_way_in({"a.md": "[b](b.md)", "b.md": "", "c.md": "[a](a.md)"}, ["a.md"])
    ['c.md']
    """
    seen: set[str] = set()
    waiting = [page for page in start if page in pages]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for _mark, _label, link in LINK.findall(pages[page]):
            path = link.partition("#")[0]
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            if target in pages:
                waiting.append(target)
    return sorted(set(pages) - seen)


def pages_of_site() -> dict[str, str]:
    """Return every page of the site by its path, with the links as the site has them."""
    pages = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    pages |= generated()
    return {
        page: _links(text, lambda link, page=page: site_link(link, page))
        for page, text in pages.items()
    }


def on_files(files: Any, config: Any) -> Any:
    """Add the pages made from the code and the JSON Schema files."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for schema in sorted(SCHEMAS.glob("*.json")):
        files.append(File.generated(config, f"schemas/{schema.name}", content=schema.read_text()))
    lost = without_way_in(pages_of_site(), _in_navigation(config.nav))
    if lost:
        from mkdocs.exceptions import PluginError

        raise PluginError(f"no link leads to: {', '.join(lost)}")
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Return a page with links that lead somewhere on the site."""
    return _links(markdown, lambda link: site_link(link, page.file.src_uri))


def _in_navigation(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    found = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in found for page in _in_navigation(entry)]
