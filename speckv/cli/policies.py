"""`speckv policies` and `speckv new-policy`: what the zoo and the plugins hold, and how to add to it."""

import pathlib
from typing import Any

import click

from speckv.cli.common import FOLDER, make_console, print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def policies(as_json: bool) -> None:
    """List the policies of the zoo and of all installed plugins.

    NAME@tuned is a policy with the parameters of the preset that comes with it, where one does.
    """
    from speckv.plugins import registry
    from speckv.policy import Clairvoyant, Policy
    from speckv.presets import tuned_preset

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "family": entry.value.__module__.removeprefix(f"{entry.plugin.module}."),
            "kind": "bound" if issubclass(entry.value, Clairvoyant) else entry.value().kind,
            "trainable": entry.value.fit is not Policy.fit,
            "online": entry.value().online,
            "tuned": tuned_preset(entry.value) is not None,
            "summary": (entry.value.__doc__ or "").strip().partition("\n")[0],
            "source": entry.value.source,
            "origin": entry.origin,
        }
        for name, entry in sorted(registry().policies.items())
    ]
    if as_json:
        import json

        click.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    for origin in sorted({row["origin"] for row in rows}):
        table = Table(
            "policy", "family", "decides", "trainable", "online", "@tuned", "what it does, and its source", title=origin
        )
        for row in sorted((row for row in rows if row["origin"] == origin), key=lambda row: row["family"]):
            about = Text("\n").join([Text(row["summary"]), Text(row["source"], style="dim")])
            learns = ["yes" if row[key] else "" for key in ("trainable", "online", "tuned")]
            table.add_row(row["name"], row["family"], row["kind"], *learns, about)
        print_table(make_console(), table)


@click.command("new-policy")
@click.argument("name")
@click.option("--out", type=FOLDER, default=".", show_default=True, help="Folder to write the project's folder to.")
def new_policy(name: str, out: pathlib.Path) -> None:
    """Write a plugin project with a policy called NAME, and its test: a start for a policy of your own."""
    from speckv.scaffold import new_policy as write

    folder = write(name, out)
    click.echo(f"{folder}: written; change the rule in {folder.name.replace('-', '_')}.py, then: pip install {folder}")
