"""What `tune` and `demo` share: tune with a display, show the table, write the reports."""

import os
from pathlib import Path

import click

from flatout import techniques
from flatout.cli.display import display
from flatout.cli.options import terminal_width
from flatout.core.ablation import Ablation
from flatout.core.workload import Workload
from flatout.reporting.documents import (
    ensure_file_writable,
    ensure_writable,
    write_json,
    write_text,
)
from flatout.reporting.html import ablation_html
from flatout.reporting.ladder import ladder_svg
from flatout.reporting.markdown import ablation_markdown
from flatout.reporting.patch import hand_changes
from flatout.reporting.text import render_ablation, render_failure
from flatout.reporting.verdict import Place
from flatout.workflow.recipes import write_recipe
from flatout.workflow.tune import BaselineFailedError, TuneOptions, tune

RECIPE = "recipe.toml"
INTERRUPTED = 130


def tune_and_report(workload: Workload, options: TuneOptions, json_path: Path | None) -> int:
    """Tune, print the table, write the reports; return the exit code."""
    ensure_writable(options.out)
    if json_path:
        ensure_file_writable(json_path)
    try:
        with display(options.budget_s) as tell:
            ablation = tune(workload, options, tell)
    except BaselineFailedError as error:
        text = render_failure(error.trial, workload=workload.command_line, width=terminal_width())
        click.echo(text, nl=False, err=True)
        return 2
    # The table first: should the disk be full, nothing is lost.
    place = place_of(workload, options.out)
    click.echo(render_ablation(ablation, place=place, width=terminal_width()), nl=False)
    write_reports(ablation, options.out, place)
    if json_path:
        write_json(ablation.to_json(), json_path)
    click.echo(f"files {options.out}/: ladder.html, ladder.svg, report.md, ablation.json, {RECIPE}")
    return INTERRUPTED if ablation.stopped == "interrupted" else 0


def place_of(workload: Workload, out: Path) -> Place:
    """Return how the user types the way to the results."""
    if workload.folder == Path.cwd():
        return Place(out=str(out))
    return Place(
        out=os.path.relpath(out, workload.folder), start_in=os.path.relpath(workload.folder)
    )


def write_reports(ablation: Ablation, out: Path, place: Place) -> None:
    """Write everything that a tuning leaves behind.

    The recipe is written when it is empty too, so that none of an earlier tuning stays there.
    """
    changes = hand_changes(ablation.recipe, techniques.technique_class)
    write_recipe(ablation.recipe, out / RECIPE)
    write_json(ablation.to_json(), out / "ablation.json")
    write_text(ablation_markdown(ablation, changes, place=place), out / "report.md")
    write_text(ladder_svg(ablation), out / "ladder.svg")
    write_text(ablation_html(ablation, changes, place=place), out / "ladder.html")
