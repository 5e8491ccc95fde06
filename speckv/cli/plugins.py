"""`speckv plugins`: what came from where."""

import warnings

import click

from speckv.cli.common import make_console, print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plugins(as_json: bool) -> None:
    """List what each plugin registered, the built-in ones too, and the plugins that were skipped."""
    from speckv.errors import SpecKVWarning
    from speckv.plugins import KINDS, registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)  # what was skipped is listed below
        found = registry()
    registered = [
        {"plugin": entry.plugin.name, "version": entry.plugin.version, "kind": noun, "name": name,
         "origin": entry.origin}
        for kind, (noun, _) in KINDS.items()
        for name, entry in sorted(found.of_kind(kind).items())
    ]  # fmt: skip
    skipped = [
        {"plugin": plugin.name, "version": plugin.version, "origin": str(plugin), "reason": reason}
        for plugin, reason in found.skipped
    ]
    if as_json:
        import json

        click.echo(json.dumps({"registered": registered, "skipped": skipped}, indent=2))
        return
    from rich.table import Table

    names: dict[tuple[str, str], list[str]] = {}
    for row in registered:
        names.setdefault((row["origin"], row["kind"]), []).append(row["name"])
    table = Table("plugin", "kind", "names")
    for (origin, kind), of_kind in sorted(names.items(), key=lambda item: item[0][0]):
        table.add_row(origin, kind, ", ".join(of_kind))
    print_table(make_console(), table)
    for row in skipped:
        click.echo(f"skipped: {row['origin']}: {row['reason']}")
