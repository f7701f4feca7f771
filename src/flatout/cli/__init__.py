"""The command line: one command, one file, imported only when it runs."""

import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence

import click

from flatout.cli.commands import flatout
from flatout.records.errors import UserError

USER_ERROR = 2
"""Something the user can fix; also when the script itself failed in a trial."""
INTERNAL_ERROR = 70
"""`EX_SOFTWARE` of sysexits.h."""
STDERR = 2
"""The last of the standard streams' numbers."""
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
LEAVES_FILES = frozenset(
    {"measure", "plan", "roofline", "survey", "tune"}  # undo what the script wrote
    | {"compare", "patch", "doctor", "techniques", "watch"}  # run no script and change nothing
)
"""The commands after which the user's files are as before. The others are there to write."""
ASKED = re.compile(r"--lang[ =](\w+)")
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""Where the locale's language is, the first that is set."""


def main() -> None:
    """Run flatout as a program: parse, do, exit.

    SIGTERM and SIGHUP end it as Ctrl-C does, so that the user's files are as before when it is
    gone. Where they are ignored (nohup) they stay so.
    """
    _open_closed_streams()
    heard: list[int] = []

    def stop(number: int, _frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)
    code = call(sys.argv[1:])
    sys.exit(128 + heard[0] if heard and code == INTERRUPTED else code)


def _open_closed_streams() -> None:
    """Open what is closed of the standard streams (`>&-`): a file would get their number next.

    Then begin again: this Python has none to write to.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execv(command[0], command)  # noqa: S606  no shell: the command is started as it is


def call(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error ends here.

    Only when no one reads the output any more (`flatout doctor | head -1`) click exits on its own,
    with code 1 and in silence.
    """
    language = reader_language(arguments)
    try:
        # Bare `flatout` asks what there is.
        result = flatout.main(
            list(arguments) or ["--help"],
            prog_name="flatout",
            standalone_mode=False,
            obj=language,
        )
    except (click.ClickException, UserError) as error:
        return _say(_refusal(error), USER_ERROR, language)
    except (KeyboardInterrupt, click.Abort):
        return _say(["interrupted", *_of_files(arguments)], INTERRUPTED, language)
    except Exception as error:  # noqa: BLE001  the boundary: nothing may pass it unexplained
        sys.excepthook(*sys.exc_info())
        what = f"internal error: {type(error).__name__}: {error}"
        said = [what, *_of_files(arguments), "please report this"]
        return _say(said, INTERNAL_ERROR, language)
    return result if isinstance(result, int) else 0


def reader_language(arguments: Sequence[str] = ()) -> str:
    """Return the language that a command line asks for, else the locale's; English for any other.

    What follows a script is the script's.

    >>> reader_language(["measure", "--lang", "ko"]), reader_language(["check", "--lang=en"])
    ('ko', 'en')
    """
    own = itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), arguments)
    asked = ASKED.search(" ".join(own))
    place = next((os.environ[name] for name in LOCALE if os.environ.get(name)), "")
    return "ko" if (asked[1] if asked else place).startswith("ko") else "en"


def _of_files(arguments: Sequence[str]) -> list[str]:
    """Return what became of the user's files, where that is known.

    >>> _of_files(["tune", "train.py"]), _of_files(["run", "train.py"])
    (['your files are unchanged'], [])
    """
    return ["your files are unchanged"] if set(arguments[:1]) & LEAVES_FILES else []


def _refusal(error: click.ClickException | UserError) -> list[str]:
    """Return what is wrong and what to do."""
    if isinstance(error, UserError):
        return [" ".join(str(error).split())]
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "flatout"
    message = " ".join(error.format_message().split()).rstrip(".")
    return [message, f"'{path} --help' shows what is allowed"]


def _say(texts: Sequence[str], code: int, language: str) -> int:
    """Write one line on stderr and return the exit code."""
    from flatout.records.messages import messages

    line, *others = map(messages(language).text, texts)
    for text in others:
        line += f"{'' if line.endswith('?') else ';'} {text}"
    print(f"flatout: {line}", file=sys.stderr)
    return code
