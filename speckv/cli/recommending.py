"""`speckv recommend`: what to set in a decoder that runs no policy."""

import os
import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import COSTS, TRACES, make_console, must_serve, print_table, showing_progress
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from rich.console import Console

    from speckv.exporters.settings import SettingsExporter
    from speckv.exporting import Exporter
    from speckv.policy import Policy
    from speckv.recommending import Gain, Recommendation


class _Command(click.Command):
    """Its help ends with the decoders, those of plugins too, which are looked at only then."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Decoders"):
            formatter.write_dl([(name, exporter.decoder) for name, exporter in _decoders().items()])


@click.command(cls=_Command)
@TRACES
@COSTS
@click.option("--decoder", "decoder_name", required=True, metavar="DECODER", help="What is to be set; see below.")
@click.option("--compression", "compressions", multiple=True, help="Of the target, may be repeated.  [default: all]")
@click.option(
    "--policy",
    "policy_specs",
    multiple=True,
    help="For the decoder's host, if one plays policies: NAME or NAME:PARAMETER=VALUE,…, may be repeated.  [default: "
    "all portable ones that it can hold and that train without torch]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Sequences that share every step; the cost model must have been profiled for it.  "
    "[default: what its tables start with, mostly 1]",
)
@click.option("--folds", default=5, show_default=True, type=click.IntRange(2))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def recommend(
    traces_path: pathlib.Path | None,
    costs_name: str | None,
    decoder_name: str,
    compressions: tuple[str, ...],
    policy_specs: tuple[str, ...],
    batch_size: int | None,
    folds: int,
    seed: int,
    as_json: bool,
) -> None:
    """Find the best setting of a decoder that runs no policy, and what a policy would gain on top."""
    import json

    import numpy as np

    from speckv import specs
    from speckv.plugins import load_costs
    from speckv.recommending import host_of
    from speckv.recommending import recommend as find
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    decoders = _decoders()
    # Their exporters' own names do, too.
    named = {exporter.name: exporter for exporter in decoders.values()} | decoders
    exporter = specs.find("decoder", decoder_name, named)()
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    known = np.unique(traces.compressions).tolist()
    if missing := [name for name in compressions if name not in known]:
        raise SpecKVError(f"the traces hold no sequences at {missing[0]!r}; they hold {', '.join(known)}")
    if compressions:
        traces = traces.take(np.isin(traces.compressions, compressions))
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
    policies = _policies(policy_specs, host_of(exporter), traces.gamma_max)
    with showing_progress("playing policies") as progress:
        result = find(
            exporter, traces, costs, policies, batch_size or costs.batch_sizes[0], folds, seed, os.cpu_count() or 1,
            progress=progress,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
        return
    _show(make_console(), result)


def _decoders() -> "dict[str, type[SettingsExporter]]":
    """The decoders that can be asked about, by the names that users call them by."""
    from speckv.exporters.settings import SettingsExporter
    from speckv.plugins import registry

    exporters = (entry.value for _, entry in sorted(registry().exporters.items()))
    return {exporter.family: exporter for exporter in exporters if issubclass(exporter, SettingsExporter)}


def _policies(specs: tuple[str, ...], host: "Exporter | None", gamma_max: int) -> "list[Policy]":
    """The policies that a user asked for; by default all portable ones that the host, if there is one, can hold and
    that train without torch."""
    from speckv.plugins import make_policy, registry

    policies = [make_policy(spec) for spec in specs]
    for policy in policies:
        must_serve(policy)
        if reason := policy.untrainable:
            raise SpecKVError(f"policy {policy.label!r} {reason}")
    if specs or host is None:
        return policies
    known: list[Policy] = [entry.value() for _, entry in sorted(registry().policies.items())]
    return [
        policy
        for policy in known
        if host.verdict(policy)[0] == "exactly"
        and policy.unportable is None
        and not (policy.requires or policy.explores or policy.required_gamma > gamma_max)
    ]


def _show(console: "Console", result: "Recommendation") -> None:
    from rich.table import Table

    about = result.about
    of_batch = f" · batches of {about['batch_size']}" if about["batch_size"] > 1 else ""
    table = Table(
        title=f"{result.decoder} · costs of {about['costs']}{of_batch}", title_justify="left", title_style="bold"
    )
    table.add_column("target")
    for name in ("tok/s", "95 %", "over plain", "over default"):
        table.add_column(name, justify="right")
    if about["policies"]:
        table.add_column("policy on top")
    for name in ("gain", "95 %", "p") if about["policies"] else ():
        table.add_column(name, justify="right")
    table.add_column("judge", justify="right")
    for row in result.rows:
        low, high = row.throughput_ci
        on_top = [row.policy or "", _percent(row.on_top), _interval(row.on_top), _p(row.on_top)]
        table.add_row(
            row.compression, _speed(row.throughput), f"{_speed(low)} … {_speed(high)}", _percent(row.over_plain),
            _percent(row.over_default), *(on_top if about["policies"] else []), _speed(row.judge),
        )  # fmt: skip
    print_table(console, table)
    for row in result.rows:
        if row.paste is not None:
            console.print(f"{row.compression}: {row.paste}", highlight=False, soft_wrap=True, markup=False)
    for line in _legend(about):
        console.print(line, style="dim", highlight=False, markup=False)


def _legend(about: dict[str, Any]) -> "list[str]":
    policies = len(about["policies"])
    several = f" and {policies} {'policy' if policies == 1 else 'policies'}" if policies else ""
    lines = [
        f"Chosen among {about['settings']} settings{several}; each of {about['prompts']} prompts is judged with the "
        "choice made on the other folds. Those printed are the fastest on all prompts.",
        "Intervals and p are of prompts, in pairs. judge: tok/s of one who knows which drafted tokens are right.",
        f"to write a setting: speckv export POLICY --to {about['exporter']} --approximate --out FOLDER",
    ]
    if policies:
        lines.append(f"to write a policy for its host: speckv export POLICY --to {about['host']} --out FOLDER")
    elif about["host"] is None:
        lines.append("no policy is on top: nothing plays policies inside this decoder")
    if about["cut"]:
        lines.append(f"no draft was longer than {about['gamma_max']} tokens, the most of the recording")
    if about["note"]:
        lines.append(about["note"])
    if about["batch_size"] > 1:
        lines.append("tok/s are those of the whole batch while it is full; all of it is taken to draft alike")
    return lines


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:#.3g}".rstrip(".")


def _percent(gain: "Gain | None") -> str:
    return "" if gain is None else f"{100 * gain.gain:+.1f} %"


def _p(gain: "Gain | None") -> str:
    return "" if gain is None else f"{gain.p:.2g}"


def _interval(gain: "Gain | None") -> str:
    return "" if gain is None else f"{100 * gain.ci[0]:+.1f} … {100 * gain.ci[1]:+.1f}"
