"""The command `compare`."""

from pathlib import Path

import click

from flatout.cli.options import json_option, language_option, show, terminal_width
from flatout.records.messages import messages


@click.command("compare")
@click.option(
    "--fail-below",
    type=click.FloatRange(min=0.0),
    metavar="RATIO",
    help="Exit with code 1 when the ratio is below this; 0.95 lets 5 % pass.",
)
@json_option
@language_option
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
def command(
    baseline: Path,
    candidate: Path,
    fail_below: float | None,
    json_path: Path | None,
    language: str,
) -> int:
    """Compare two results that --json wrote.

    BASELINE and CANDIDATE are both profiles (of measure) or both ablations (of tune).
    """
    from flatout.reporting.documents import read_json, write_json
    from flatout.reporting.terminal import render_contrast
    from flatout.workflow.compare import compare

    contrast = compare(read_json(baseline), read_json(candidate))
    text = render_contrast(
        contrast,
        baseline=str(baseline),
        candidate=str(candidate),
        width=terminal_width(),
        language=language,
    )
    show(text)
    if json_path:
        write_json(contrast.to_json(), json_path)
    if fail_below is None or contrast.ratio >= fail_below:
        return 0
    limits = {"ratio": f"{contrast.ratio:.3f}", "limit": f"{fail_below:g}"}
    show(messages(language)("compare.below", **limits) + "\n", is_error=True)
    return 1
