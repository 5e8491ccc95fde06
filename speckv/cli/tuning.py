"""`speckv tune`: a preset of a learner's parameters, found on training prompts."""

import itertools
import os
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

import click

from speckv.cli.common import COSTS, TRACES, make_console, must_be_new, must_learn
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
    """Try parameters of POLICY (NAME or NAME:PARAMETER=VALUE,…) and print the fastest.

    Every combination is cross-validated on the training prompts. The held-out ones are played once, by the fastest
    alone. What it prints is a policy that every other command takes.
    """
    from rich.table import Table

    from speckv.comparison import folds_of, naming, with_decision_times
    from speckv.files import write_json
    from speckv.plugins import load_costs, make_policy
    from speckv.replaying import replay
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset
    from speckv.tuning import search

    must_be_new(out)
    candidates = _combinations(policy_spec, grid)
    must_learn(candidates[0])
    if (reason := candidates[0].untrainable) is not None:
        raise SpecKVError(f"policy {policy_spec!r} {reason}")
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
    fold_of = folds_of(traces, folds, seed)
    learned, held_out = traces.take(fold_of > 0), traces.take(fold_of == 0)
    speeds = search(candidates, learned, costs, folds, seed, os.cpu_count() or 1)
    best = candidates[int(speeds.argmax())]
    table = Table("policy", "tokens/s on training prompts")
    for candidate, speed in sorted(zip(candidates, speeds.tolist(), strict=True), key=lambda pair: -pair[1]):
        table.add_row(candidate.label, f"{speed:.4g}")
    make_console().print(table)
    fixed = make_policy("best-fixed").fit(learned, costs, seed)
    base = replay(fixed, held_out, costs).throughput
    (costs,) = with_decision_times(best, learned, [costs])
    with naming(best):
        mine = replay(best.fit(learned, costs, seed), held_out, costs).throughput
    click.echo(f"{best.label}: {mine / base - 1:+.1%} against the best fixed gamma on held-out prompts")
    if out is not None:
        command = shlex.join(["speckv", *sys.argv[1:]])
        tried = {candidate.label: speed for candidate, speed in zip(candidates, speeds.tolist(), strict=True)}
        prompts = sorted(set(learned.ids.tolist()))
        facts = {"policy": best.label, "command": command, "costs": costs.name, "tried": tried, "prompts": prompts}
        write_json(out, {"format": "speckv-preset", "schema_version": 1, "seed": seed} | facts)


def _combinations(policy_spec: str, grid: tuple[str, ...]) -> "list[Policy]":
    """The policy with each combination of values; what the spec itself sets stays."""
    from speckv.plugins import make_policy

    choices = []
    for part in grid:
        name, equals, values = part.partition("=")
        if not (name and equals and values):
            raise SpecKVError(f"--grid {part!r} is not of the form PARAMETER=VALUE;VALUE…")
        choices.append([f"{name}={value}" for value in values.split(";")])
    start = policy_spec + ("," if ":" in policy_spec else ":")
    return [make_policy(start + ",".join(combination)) for combination in itertools.product(*choices)]
