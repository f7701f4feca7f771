"""The command `rules`."""

import click


@click.command("rules")
@click.argument("name", required=False, metavar="[CODE]")
def command(name: str | None) -> int:
    """List the rules, or print the page of one.

    CODE is what a finding shows: DL02, dl02_no_workers, data_wait.
    """
    from flatout import rules
    from flatout.cli.options import page
    from flatout.records.errors import UserError, unknown
    from flatout.rules import source

    by_code = {source.code_of(rule): rule for rule in source.modules()}
    known = [*sorted(source.modules()), *rules.codes()]
    if name is None:
        for each in known:
            title = page("rules", each).splitlines()[2].partition(": ")
            click.echo(f"{each:34}{title[2] or title[0]}")
        return 0
    wanted = by_code.get(name.upper(), name.lower())
    if wanted not in known:
        raise UserError(unknown("rule", name, [*by_code, *known]))
    click.echo(page("rules", wanted), nl=False)
    return 0
