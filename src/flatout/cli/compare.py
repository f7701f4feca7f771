"""The command `compare`."""

from pathlib import Path

import click

from flatout.cli import options as cli
from flatout.records.messages import messages


@click.command("compare")
@click.option(
    "--fail-below",
    type=click.FloatRange(min=0.0),
    metavar="RATIO",
    help="Exit with code 1 when the ratio is below this; 0.95 lets 5 % pass.",
)
@cli.json_option
@cli.language_option
@click.argument("baseline", type=cli.PATH)
@click.argument("candidate", type=cli.PATH)
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
    from flatout.reporting.documents import read_json
    from flatout.reporting.tuning.text import render_contrast
    from flatout.workflow.compare import compare

    contrast = compare(read_json(baseline), read_json(candidate))
    text = render_contrast(
        contrast,
        baseline=str(baseline),
        candidate=str(candidate),
        width=cli.terminal_width(),
        language=language,
    )
    cli.show_result(text, contrast.to_json(), json_path)
    if fail_below is None or contrast.ratio >= fail_below:
        return 0
    limits = {"ratio": f"{contrast.ratio:.3f}", "limit": f"{fail_below:g}"}
    cli.show(messages(language)("compare.below", **limits) + "\n", is_error=True)
    return 1
