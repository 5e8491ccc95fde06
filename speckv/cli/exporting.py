"""`speckv export`: a policy for the decoder that people run."""

import os
import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import COSTS, FOLDER, TRACES, make_console, must_be_new
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.policy import Policy
    from speckv.traces import Rollouts


@click.command()
@click.argument("policy_spec", metavar="POLICY", required=False)
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
    policy_spec: str | None,
    exporter_spec: str | None,
    out: pathlib.Path | None,
    traces_path: pathlib.Path | None,
    costs_name: str | None,
    approximate: bool,
    listing: bool,
    as_json: bool,
) -> None:
    """Write POLICY for a decoder, and replay what was written beside the original.

    POLICY is the folder of a saved policy, or NAME or NAME:PARAMETER=VALUE,… of one that needs no training. The prompts
    that it was trained on by `speckv train`, from a recording or a step log, are left out of the traces, unless nothing
    else is there.
    """
    if listing:
        _list(as_json)
        return
    if policy_spec is None or exporter_spec is None or out is None:
        raise click.UsageError("give a saved policy's folder, --to and --out; or --list")
    must_be_new(out)
    import warnings

    from speckv.errors import SpecKVWarning
    from speckv.exporting import export as write
    from speckv.files import read_json
    from speckv.plugins import load_costs, make_exporter
    from speckv.saving import FIDELITY
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    exporter = make_exporter(exporter_spec)
    policy = _policy(policy_spec)
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = shipped_costs()[0] if costs_name is None else load_costs(costs_name)
    traces, held_out = _held_out(traces, policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecKVWarning)
        result = write(exporter, policy, out, traces, costs, approximate)
    for warning in caught:
        click.echo(f"speckv: {warning.message}", err=True)
    stored = (out / FIDELITY).read_text(encoding="utf-8")
    if as_json:
        click.echo(stored, nl=False)
        return
    interval = ""
    if result.interval is not None:
        interval = f" (95 %: {result.interval[0]:.3g} to {result.interval[1]:.3g})"
    of_batch = ""
    if result.batch_size > 1 or ("batch_size" in exporter.observes and exporter.by_itself):
        of_batch = f", in batches of {result.batch_size}"
    how = "written"
    if read_json(out / FIDELITY, "the fidelity of an export")["approximated"]:
        how = "fitted to half of the prompts, and written"
    click.echo(
        f"{out}: {how} for {exporter.decoder}; {result.equal_decisions:.2%} of {result.steps} decisions are those of "
        f"{policy.label}, {result.throughput:.3g} tokens/s{interval} against {result.original_throughput:.3g} "
        f"({result.throughput / result.original_throughput - 1:+.2%}; {result.sequences} sequences{held_out}"
        f"{of_batch}, costs of {result.costs})"
    )


def _policy(spec: str) -> "Policy":
    """A saved policy, or where no such file is, one by name that needs no training."""
    from speckv.plugins import make_policy, registry
    from speckv.policy import Policy
    from speckv.saving import load_policy

    name = spec.partition(":")[0]
    if os.path.exists(spec) or name not in registry().policies:
        return load_policy(spec)
    policy = make_policy(spec)
    if type(policy).fit is not Policy.fit and not policy.fitted:
        raise SpecKVError(
            f"policy {policy.label!r} has to be trained: `speckv train {spec} --out FOLDER`, and export that folder"
        )
    return policy


def _held_out(traces: "Rollouts", policy: "Policy") -> "tuple[Rollouts, str]":
    """The sequences whose prompts a policy was not trained on, all if it was on each, and which these are in words."""
    import numpy as np

    from speckv.provenance import seen_in

    known = np.isin(traces.ids, list(seen_in(policy, traces)))
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
