"""`speckv tune`: a preset of a policy's parameters, found on training prompts."""

import itertools
import os
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

import click

from speckv.cli.common import COSTS, TRACES, make_console, must_be_new, must_serve, print_table
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.policy import Policy


@click.command()
@click.argument("policy_spec", metavar="POLICY")
@click.option(
    "--grid",
    "grid",
    multiple=True,
    required=True,
    metavar="PARAMETER=VALUE;VALUE…",
    help="Values to try, may be repeated: all combinations are tried.",
)
@TRACES
@COSTS
@click.option(
    "--folds",
    default=5,
    show_default=True,
    type=click.IntRange(2),
    help="One in so many prompts is held out, to be played at the end; the search splits the others again.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--out", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write the preset, as JSON.")
def tune(
    policy_spec: str,
    grid: tuple[str, ...],
    traces_path: pathlib.Path | None,
    costs_name: str | None,
    folds: int,
    seed: int,
    out: pathlib.Path | None,
) -> None:
    """Try parameters of POLICY (NAME or NAME:PARAMETER=VALUE,…) and print the fastest, as other commands take it.

    Every combination is cross-validated on the training prompts. The held-out ones are played once, by the fastest, by
    POLICY as it was given, and by the best fixed gamma. Every command that takes a policy takes what was written, as
    NAME@FILE, or as NAME@FILE:PARAMETER=VALUE with a parameter changed.
    """
    from rich.table import Table

    from speckv.comparison import folds_of, naming
    from speckv.plugins import load_costs, make_policy
    from speckv.presets import write_preset
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset
    from speckv.tuning import play, search

    must_be_new(out)
    if ":" in str(out):  # it starts the parameters in NAME@FILE:PARAMETER=VALUE
        raise SpecKVError(f"{out}: has a colon, which no command could read behind NAME@; choose another place")
    given = make_policy(policy_spec)
    must_serve(given)
    candidates = _combinations(policy_spec, grid)
    if (reason := given.untrainable) is not None:
        raise SpecKVError(f"policy {policy_spec!r} {reason}")
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
    fold_of = folds_of(traces, folds, seed)
    learned, held_out = traces.take(fold_of > 0), traces.take(fold_of == 0)
    speeds = search([*candidates.values()], learned, costs, folds, seed, os.cpu_count() or 1)
    tried = dict(zip(candidates, speeds.tolist(), strict=True))
    ranked = sorted(tried, key=lambda spec: -tried[spec])
    best, reached = candidates[ranked[0]], {}
    for spec, policy in {ranked[0]: best, policy_spec: given, "best-fixed": make_policy("best-fixed")}.items():
        with naming(policy):
            reached[spec] = play(policy.fit(learned, costs, seed), held_out, costs).throughput
    if out is not None:
        about = {
            "command": shlex.join(["speckv", *sys.argv[1:]]),
            "seed": seed,
            "folds": folds,
            "costs": costs.name,
            "tried": tried,
            "held_out": reached,
            "prompts": sorted(set(learned.ids.tolist())),
        }
        write_preset(out, best, about)
    table = Table("policy")
    table.add_column("tokens/s on\ntraining prompts", justify="right")
    for spec in ranked:
        table.add_row(spec, f"{tried[spec]:.4g}")
    print_table(make_console(), table)
    mine, *others = reached
    gains = [f"{reached[mine] / reached[other] - 1:+.1%} against {other}" for other in others]
    click.echo(f"{mine}: {', '.join(gains)} on held-out prompts")
    if out is not None:
        click.echo(f"{out}: written; play it as {best.name}@{out}")


def _combinations(policy_spec: str, grid: tuple[str, ...]) -> "dict[str, Policy]":
    """The policy with each combination of values, by its spec; what the policy's spec itself sets stays."""
    from speckv.plugins import make_policy

    choices = []
    for part in grid:
        name, equals, values = part.partition("=")
        if not (name and equals and values):
            raise SpecKVError(f"--grid {part!r} is not of the form PARAMETER=VALUE;VALUE…")
        choices.append([f"{name}={value}" for value in values.split(";")])
    start = policy_spec + ("," if ":" in policy_spec else ":")
    specs = [start + ",".join(combination) for combination in itertools.product(*choices)]
    return {spec: make_policy(spec) for spec in specs}
