"""`speckv export`: a policy for the decoder that people run."""

import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import COSTS, FOLDER, TRACES, make_console, must_be_new

if TYPE_CHECKING:
    from speckv.traces import Rollouts


@click.command()
@click.argument("policy_folder", metavar="POLICY", type=FOLDER, required=False)
@click.option("--to", "exporter_spec", metavar="EXPORTER", help="NAME or NAME:PARAMETER=VALUE,…; see --list.")
@click.option("--out", type=FOLDER, help="Folder to write; it must not exist.")
@TRACES
@COSTS
@click.option(
    "--approximate", is_flag=True, help="Fit a policy that the decoder can't hold to the nearest that it can."
)
@click.option("--list", "listing", is_flag=True, help="List the exporters and what their decoders can show a policy.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def export(
    policy_folder: pathlib.Path | None,
    exporter_spec: str | None,
    out: pathlib.Path | None,
    traces_path: pathlib.Path | None,
    costs_name: str | None,
    approximate: bool,
    listing: bool,
    as_json: bool,
) -> None:
    """Write the saved policy in the folder POLICY for a decoder, and replay what was written beside the original.

    What it was trained on by `speckv train` is left out of the traces, unless nothing else is there.
    """
    if listing:
        _list(as_json)
        return
    if policy_folder is None or exporter_spec is None or out is None:
        raise click.UsageError("give a saved policy's folder, --to and --out; or --list")
    must_be_new(out)
    from speckv.exporting import FIDELITY
    from speckv.exporting import export as write
    from speckv.files import read_json
    from speckv.plugins import load_costs, make_exporter
    from speckv.saving import load_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    exporter = make_exporter(exporter_spec)
    policy = load_policy(policy_folder)
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = shipped_costs()[0] if costs_name is None else load_costs(costs_name)
    about = policy_folder / "training.json"
    training = read_json(about, "what a policy was trained on") if about.exists() else None
    traces, held_out = _held_out(traces, training)
    result = write(exporter, policy, out, traces, costs, approximate, training)
    stored = (out / FIDELITY).read_text(encoding="utf-8")
    if as_json:
        click.echo(stored, nl=False)
        return
    interval = ""
    if result.interval is not None:
        interval = f" (95 %: {result.interval[0]:.3g} to {result.interval[1]:.3g})"
    how = "written"
    if read_json(out / FIDELITY, "the fidelity of an export")["approximated"]:
        how = "fitted to half of the prompts, and written"
    click.echo(
        f"{out}: {how} for {exporter.decoder}; {result.equal_decisions:.2%} of {result.steps} decisions are those of "
        f"{policy.label}, {result.throughput:.3g} tokens/s{interval} against {result.original_throughput:.3g} "
        f"({result.throughput / result.original_throughput - 1:+.2%}; {result.sequences} sequences{held_out}, costs "
        f"of {result.costs})"
    )


def _held_out(traces: "Rollouts", training: dict[str, Any] | None) -> "tuple[Rollouts, str]":
    """The sequences whose prompts a policy was not trained on, all if it was on each, and which these are in words."""
    import numpy as np

    from speckv.training import fingerprints

    seen = np.isin(fingerprints(traces), (training or {}).get("sequences", []))
    known = np.isin(traces.ids, traces.ids[seen])
    if not known.any():
        return traces, ""
    if known.all():
        return traces, " that it was trained on"
    return traces.take(~known), " of prompts that it was not trained on"


_WHEN_ASKED = {"before": "before the step", "draft": "inside the draft"}


def _list(as_json: bool) -> None:
    from speckv.features import FEATURES
    from speckv.plugins import registry

    policies = {name: entry.value() for name, entry in sorted(registry().policies.items())}
    rows: list[dict[str, Any]] = []
    for name, entry in sorted(registry().exporters.items()):
        exporter = entry.value
        fits: dict[str, dict[str, str]] = {"exactly": {}, "approximately": {}, "not": {}}
        for policy_name, policy in policies.items():
            fit, reason = exporter().verdict(policy)
            fits[fit][policy_name] = reason
        rows.append(
            {
                "name": name,
                "decoder": exporter.decoder,
                "observes": [feature for feature in FEATURES if feature in exporter.observes],
                "outcomes": exporter.outcomes,
                "kinds": sorted(exporter.kinds),
                "origin": entry.origin,
                "policies": fits,
            }
        )
    if as_json:
        import json

        click.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    console = make_console()
    for row in rows:
        hidden = [feature for feature in FEATURES if feature not in row["observes"]]
        shown = ", ".join(row["observes"]) if len(hidden) > 5 else f"all but {', '.join(hidden)}" if hidden else "all"
        facts = {
            "decoder": row["decoder"],
            "asks policies": " and ".join(_WHEN_ASKED[kind] for kind in _WHEN_ASKED if kind in row["kinds"]),
            "shows them": (shown or "nothing") + ("; what came of each step" if row["outcomes"] else ""),
            "origin": row["origin"],
        } | {f"holds {fit}" if fit != "not" else "can't hold": ", ".join(of) for fit, of in row["policies"].items()}
        console.print(f"[bold]{row['name']}[/]", highlight=False)
        table = Table.grid(padding=(0, 2))
        for name, text in facts.items():
            if text:
                table.add_row(f"  {name}", text)
        console.print(table)
