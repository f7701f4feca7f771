"""The pages tell the truth: what they name exists, what exists has a page, what they show runs.

A fenced block whose first word after the language is `run` is executed: ```python run or ```sh run.
In every other `sh` block, and in code within a sentence, the commands of flatout and make must
exist, with the options shown.
"""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest

import flatout.rules
import flatout.rules.source
from flatout.cli.commands import flatout as command_line
from flatout.records import catalogue
from flatout.records.catalogue import module_names
from flatout.records.input_files import read_toml
from flatout.workflow.demo import JOB
from flatout.workflow.recipe_files import read_recipe
from tests.copies import Copies
from tests.paths import ROOT
from tests.support.programs import ran

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"])
NAMES = catalogue.names()
CODES = sorted(
    {
        *(set(module_names(flatout.rules)) - set(module_names(flatout.rules.source)))
        - {path.name for path in (ROOT / "src/flatout/rules/source").iterdir()},
        *module_names(flatout.rules.source),
    }
)
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:flatout|make) [^`<]+)`")
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
RECORD = re.compile(r"\]\(([^)\s]*benchmarks/records/[^)\s]+)\)")
NOWHERE = re.compile(r"(^|: )not measured[.;]", re.IGNORECASE | re.MULTILINE)
MOST_LINES = 180
"""A longer page is read by no one: split it by question, or cut it."""
STARTS = ("-m", "torchrun", "accelerate", "uv", "python")
OPTIONS_AFTER_SCRIPT = re.compile(r"\.py\b|:\w+\b")


def relative(path):
    return str(path.relative_to(ROOT))


def commands():
    context = click.Context(command_line)
    names = command_line.list_commands(context)
    return {name: command_line.get_command(context, name) for name in names}


def options(command):
    return [p for p in command.params if isinstance(p, click.Option)]


def blocks(path, *languages):
    """Return info string and text of the fenced blocks in the given languages."""
    found = BLOCK.findall(path.read_text())
    return [(info.split(), text) for language, info, text in found if language in languages]


def runnable(language):
    return [
        pytest.param(text, id=f"{relative(path)}-{number}")
        for path in PAGES
        for number, (info, text) in enumerate(blocks(path, language))
        if "run" in info
    ]


def command_lines(path):
    """Return the shown shell commands, continued lines joined, comments dropped."""
    lines = []
    shown = [text for _info, text in blocks(path, "sh", "bash", "console")]
    inline = INLINE.findall(BLOCK.sub("", path.read_text()))
    for text in [*shown, *(" ".join(command.split()) for command in inline)]:
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            lines.extend([words] if words else [])
    return lines


def headings(path):
    """Return the anchors that a forge makes of a page's headings."""
    found = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found]
    return {heading.replace(" ", "-") for heading in plain}


COMMANDS = commands()


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path):
    lost = []
    for link in LINK.findall(path.read_text()):
        place, _hash, anchor = link.partition("#")
        if place.startswith(("http://", "https://", "mailto:")):
            continue
        target = (path.parent / place).resolve() if place else path
        if not target.exists() or (anchor and anchor not in headings(target)):
            lost.append(link)

    assert lost == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=relative)
def test_a_page_is_short_enough_to_be_read(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_commands_that_are_shown_exist(path):
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))

    unknown = [
        shlex.join(words)
        for words in command_lines(path)
        if (words[0] == "make" and not set(words[1:2]) <= targets)
        or (words[0] == "flatout" and not is_a_command(words[1:]))
    ]
    assert unknown == []


def is_a_command(words):
    """Return whether the verb exists and has the options that stand before the script."""
    if not words or words[0].startswith("-"):
        return set(words) <= {"--help", "--version"}
    if words[0] not in COMMANDS:
        return False
    known = {name for option in options(COMMANDS[words[0]]) for name in all_names(option)}
    own = []
    for word in words[1:]:
        if word in STARTS or OPTIONS_AFTER_SCRIPT.search(word):
            break
        own.append(word.partition("=")[0])
    return {word for word in own if word.startswith("-")} <= known | {"--help"}


def all_names(option):
    return [*option.opts, *option.secondary_opts]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_page_that_names_all_its_options(name):
    text = (ROOT / f"docs/commands/{name}.md").read_text()

    flags = [flag for option in options(COMMANDS[name]) for flag in option.opts]
    assert [flag for flag in flags if f"`{flag}" not in text] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_and_option_explains_itself(name):
    command = COMMANDS[name]

    assert command.help
    assert [option.name for option in options(command) if not option.help] == []


def test_no_command_page_outlives_its_command():
    pages = {path.stem for path in (ROOT / "docs/commands").glob("*.md")} - {"README"}

    assert pages == set(COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_s_page_names_its_promise_and_its_settings(name):
    kind = catalogue.technique_class(name)
    text = (ROOT / f"docs/techniques/{kind.family}/{name}.md").read_text()

    assert text.startswith("# ")
    words = [f"`{kind.numerics.value}`", *(f"`{setting}" for setting in kind().settings())]
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_s_page_has_a_measured_row_or_says_that_there_is_none(name):
    page = ROOT / f"docs/techniques/{catalogue.technique_class(name).family}/{name}.md"
    text = page.read_text()

    rows = [line for line in text.splitlines() if line.startswith("| ") and RECORD.search(line)]
    assert all((page.parent / link).is_file() for row in rows for link in RECORD.findall(row))
    # "CPU only" links to the status page and may be next to a number; "Not measured." is not.
    said = "not measured" in text.lower() or "[CPU only](../../status.md)" in text
    assert not rows if NOWHERE.search(text) else rows or said


def test_the_index_of_the_techniques_names_every_family():
    text = (ROOT / "docs/techniques/README.md").read_text()

    families = {catalogue.technique_class(name).family for name in NAMES}
    assert set(re.findall(r"^\| \[(\w+)/\]\(\1\) ", text, re.M)) == families


@pytest.mark.parametrize("code", CODES)
def test_a_rule_s_page_says_when_it_speaks_and_what_to_do(code):
    text = (ROOT / f"docs/rules/{code}.md").read_text()

    assert text.startswith("# ")
    assert code in text


def test_the_design_shows_the_layers_that_are_checked():
    tools = read_toml(ROOT / "pyproject.toml")["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    text = (ROOT / "docs/design.md").read_text()

    assert "\n".join(layer.replace("flatout.", "") for layer in layers) in text
    packages = {path.parent.name for path in (ROOT / "src/flatout").glob("*/__init__.py")}
    assert {name for name in packages if f"| `{name}` |" not in text} == set()


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_recipes_that_are_shown_are_recipes(path, tmp_path):
    shown = [text for _info, text in blocks(path, "toml") if "[flatout]" in text]
    for number, text in enumerate(shown):
        recipe = tmp_path / f"{number}.toml"
        recipe.write_text(text)

        found = read_recipe(recipe, may_spread=True)
        assert found.choices or found.parallel


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_python_that_is_shown_is_python(path):
    for _info, text in blocks(path, "python"):
        compile(text, relative(path), "exec")


@pytest.fixture(scope="module")
def copies():
    """A process with torch, of which every block gets a copy."""
    made = Copies()
    yield made
    made.close()


@pytest.mark.parametrize("text", runnable("python"))
def test_python_marked_run_runs(text, tmp_path, copies):
    exit_code, said = copies.run(text, tmp_path)

    assert exit_code == 0, said


@pytest.mark.parametrize("text", runnable("sh"))
def test_shell_marked_run_runs(text, tmp_path):
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = ran(["bash", "-euc", text], cwd=tmp_path, env={"PATH": path, "HOME": str(tmp_path)})

    assert done.returncode == 0, done.stderr


def test_the_first_screen_shows_the_two_commands():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])

    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_the_tutorial_goes_to_where_the_demo_puts_its_script():
    assert f"\ncd flatout-demo/{JOB}\n" in (ROOT / "docs/tutorial.md").read_text()


def test_every_default_folder_is_named_with_the_files():
    said = (ROOT / "docs/files.md").read_text()

    defaults = {
        str(option.default)
        for command in commands().values()
        for option in options(command)
        if option.name == "out" and isinstance(option.default, Path)
    }

    assert [name for name in sorted(defaults) if f"`{name}/`" not in said] == []


def test_changes_are_told_for_this_version():
    assert f"## {flatout.__version__}" in (ROOT / "CHANGELOG.md").read_text()
