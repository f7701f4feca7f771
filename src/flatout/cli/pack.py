"""The command `pack`."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from flatout.cli import INTERRUPTED
from flatout.cli import options as cli
from flatout.records.live import Progress, Tell
from flatout.records.messages import Messages, messages, words
from flatout.records.units import format_duration
from flatout.reporting.blocks import safe

ENCODINGS = ("original", "raw", "jpeg", "qoi", "zstd", "tokens")
LINE_S = 5.0
"""Between two lines of progress where the output is no terminal."""
DIFFERENT = 1


@click.command("pack")
@click.argument("source", metavar="SRC", required=False)
@click.argument("destination", metavar="DST", type=cli.PATH, required=False)
@click.option(
    "--encode",
    type=click.Choice(ENCODINGS),
    default="original",
    show_default=True,
    help="How images (or texts) are stored; jpeg is lossy.",
)
@click.option(
    "--short-side",
    type=click.IntRange(min=1),
    help="Make images smaller until their short side has this many pixels (lossy).",
)
@click.option(
    "--quality",
    type=click.IntRange(1, 100),
    default=90,
    show_default=True,
    help="Of a re-encoded JPEG.",
)
@click.option("--tokenizer", default="", help="For tokens: bytes, or a tokenizer.json.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the permutation.")
@click.option("--keep-order", is_flag=True, help="Store samples in the order of the source.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Processes; by default all usable cores."
)
@click.option(
    "--on-bad",
    type=click.Choice(("raise", "skip")),
    default="raise",
    show_default=True,
    help="Stop at a sample that cannot be packed, or leave it out and list it.",
)
@click.option("--verify", is_flag=True, help="Compare every stored sample with the source.")
@click.option(
    "--check",
    "store",
    metavar="STORE",
    type=cli.PATH,
    help="Compare a packed store with its own checksums; needs no source, packs nothing.",
)
@click.option(
    "--formats",
    is_flag=True,
    help="Compare what SRC's images cost in each format; packs nothing.",
)
@click.option(
    "--images-per-s",
    type=click.FloatRange(min=0, min_open=True),
    help="With --formats: what the training takes; shows the cores that each format needs.",
)
@click.option(
    "--files",
    is_flag=True,
    help="Copy SRC's files as they are into DST, in shuffled order: a folder like SRC, no store.",
)
@cli.json_option
@cli.language_option
def command(  # noqa: PLR0913, PLR0917  one parameter per option
    source: str | None,
    destination: Path | None,
    encode: str,
    short_side: int | None,
    quality: int,
    tokenizer: str,
    seed: int,
    keep_order: bool,
    workers: int | None,
    on_bad: str,
    verify: bool,
    store: Path | None,
    formats: bool,
    images_per_s: float | None,
    files: bool,
    json_path: Path | None,
    language: str,
) -> int:
    """Put a data set into a fast, shuffled, resumable format.

    SRC is a folder of images, a WebDataset, Parquet or Arrow, CSV, JSON lines, text, NumPy arrays,
    or a data set as module:name. DST is a folder that does not exist yet, or an unfinished pack: a
    pack that was stopped or killed goes on with the same command.
    """
    from flatout.data.format import Encoding
    from flatout.data.writer import PackOptions
    from flatout.hardware.limits import usable_cores
    from flatout.reporting import pack as reports
    from flatout.workflow import pack as packing
    from flatout.workflow.image_formats import compare_formats

    num_workers = workers or usable_cores()
    follow = partial(_followed, json_path=json_path, language=language)
    if store:
        if source:
            raise click.UsageError(
                f"--check looks at a store and packs nothing; leave {source} away"
            )
        return follow(
            lambda tell: packing.check(store, workers=num_workers, tell=tell),
            reports.render_check,
            stopped="pack.check_stopped",
        )
    if formats:
        if not source or destination:
            raise click.UsageError("--formats takes SRC alone: the images to look at")
        found = compare_formats(source, images_per_s).to_json()
        text = reports.render_formats(found, width=cli.terminal_width(), language=language)
        cli.show_result(text, found, json_path)
        return 0
    if images_per_s:
        raise click.UsageError("--images-per-s goes with --formats")
    if not source or not destination:
        raise click.UsageError("SRC and DST are needed: what to pack, and where to")
    if files:
        if encode != "original" or short_side or tokenizer or keep_order or verify:
            raise click.UsageError("--files copies files as they are; --seed alone goes with it")
        return follow(
            lambda tell: packing.shuffle_files(source, destination, seed=seed, tell=tell),
            reports.render_files,
        )
    if short_side and encode in ("original", "tokens"):
        raise click.UsageError(f"--short-side needs --encode raw, jpeg, qoi or zstd, not {encode}")
    options = PackOptions(
        encoding=Encoding(
            kind=encode, short_side=short_side or 0, quality=quality, tokenizer=tokenizer
        ),
        seed=seed,
        is_shuffled=not keep_order,
        workers=num_workers,
        on_bad=on_bad,
    )
    return follow(
        lambda tell: packing.pack(source, destination, options, tell, verify=verify),
        reports.render_pack,
    )


def _followed(
    work: Callable[[Tell], Any],
    render: Callable[..., str],
    json_path: Path | None,
    language: str,
    stopped: str = "pack.stopped",
) -> int:
    """Do some work with its progress shown, show what came of it, and return the exit code."""
    try:
        with progress(language) as tell, heeding_ctrl_c(tell) as heeding:
            found = work(heeding).to_json()
    except KeyboardInterrupt:
        cli.show(messages(language)(stopped) + "\n", is_error=True)
        return INTERRUPTED
    cli.show_result(render(found, width=cli.terminal_width(), language=language), found, json_path)
    compared = found.get("verification") or found
    return DIFFERENT if compared.get("num_problems") else 0


@contextmanager
def heeding_ctrl_c(tell: Tell) -> Iterator[Tell]:
    """Give a function that tells, and stops where Ctrl-C was pressed and got lost.

    An interrupt inside a callback of the interpreter's (a fork's, a weak reference's) is printed
    and forgotten; the next progress raises it again.
    """
    heard: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if previous is not signal.default_int_handler or not is_main:
        yield tell  # ignored, or someone else's
        return

    def hear(number: int, _frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def heeding(now: Progress) -> None:
        if heard:
            raise KeyboardInterrupt
        tell(now)

    signal.signal(signal.SIGINT, hear)
    try:
        yield heeding
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def progress(language: str) -> Iterator[Tell]:
    """Give the function that is told: a live bar on a terminal, a line now and then elsewhere."""
    say = messages(language)
    if not sys.stderr.isatty():
        yield _lines(say)
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        task = bar.add_task(say("packing.looking"), total=1.0)

        def tell(now: Progress) -> None:
            if now.event:
                bar.console.print(safe(say.text(now.event), say), markup=False)
                return
            bar.update(task, completed=now.done_share, description=_with_time_left(now, say))

        yield tell


def _with_time_left(now: Progress, say: Messages) -> str:
    left = words("trying.left", time=format_duration(now.left_s))
    return safe(say.text((now.trying, left)), say)


def _lines(say: Messages) -> Tell:
    """Return what writes every event, and other progress not more often than a log can bear."""
    said_at = time.monotonic()

    def tell(now: Progress) -> None:
        nonlocal said_at
        if not now.event:
            if time.monotonic() - said_at < LINE_S:
                return
            said_at = time.monotonic()
        text = safe(say.text(now.event), say) if now.event else _with_time_left(now, say)
        cli.show(f"[{format_duration(now.elapsed_s)}] {text}\n", is_error=True)

    return tell
