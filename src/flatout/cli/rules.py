"""The command `rules`."""

import click

from flatout.cli import options as cli


@click.command("rules")
@cli.language_option
@click.argument("name", required=False, metavar="[CODE]")
def command(language: str, name: str | None) -> int:
    """List the rules, or print the page of one.

    CODE is what a finding shows: DL02, dl02_no_workers, data_wait.
    """
    from flatout import rules
    from flatout.records.errors import UserError, unknown
    from flatout.records.messages import messages
    from flatout.rules import source

    by_code = {source.code_of(rule): rule for rule in source.modules()}
    known = [*sorted(source.modules()), *rules.codes()]
    if name is None:
        for each in known:
            title = cli.page("rules", each).splitlines()[2].partition(": ")
            cli.show(f"{each:34}{messages(language).text(title[2] or title[0])}\n")
        return 0
    wanted = by_code.get(name.upper(), name.lower())
    if wanted not in known:
        raise UserError(unknown("rule", name, [*by_code, *known]))
    click.echo(cli.page("rules", wanted), nl=False)
    return 0
