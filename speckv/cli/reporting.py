"""`speckv report` and `speckv plot`: results that one can look at."""

import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import TRACES, must_be_new

if TYPE_CHECKING:
    from speckv.comparison import Comparison
    from speckv.report.evidence import Evidence

PLOTS = ("leaderboard", "tasks", "gammas", "gap", "costs", "calibration")


def _evidence_options(command: Any) -> Any:
    for option in (
        click.option(
            "--policy",
            "policy_specs",
            multiple=True,
            help="NAME or NAME:PARAMETER=VALUE,… to replay step by step, may be repeated.  "
            "[default: the four fastest and gamma 4]  The best fixed gamma and the bounds always join.",
        ),
        click.option(
            "--costs",
            "cost_names",
            multiple=True,
            help="Cost model of the result, a file or a name, may be repeated.  [default: those that ship with speckv]",
        ),
        TRACES,
    ):
        command = option(command)
    return command


_RESULT = click.argument("result_path", metavar="RESULT.json", type=click.Path(path_type=pathlib.Path))
_OUT = click.Path(path_type=pathlib.Path, dir_okay=False)


@click.command()
@_RESULT
@_evidence_options
@click.option("--out", required=True, type=_OUT, help="HTML.")
def report(
    result_path: pathlib.Path,
    traces_path: pathlib.Path | None,
    cost_names: tuple[str, ...],
    policy_specs: tuple[str, ...],
    out: pathlib.Path,
) -> None:
    """Make one self-contained page of what `speckv compare --json` wrote, with the policies' steps to look at."""
    from speckv.comparison import Comparison
    from speckv.report.page import write_page

    must_be_new(out)
    comparison = Comparison.load(result_path)
    write_page(_evidence(comparison, traces_path, cost_names, policy_specs), out)
    click.echo(f"{out}: written")


@click.command()
@click.argument("name", type=click.Choice(PLOTS))
@_RESULT
@_evidence_options
@click.option("--out", required=True, type=_OUT, help="PNG, SVG or PDF.")
def plot(
    name: str,
    result_path: pathlib.Path,
    traces_path: pathlib.Path | None,
    cost_names: tuple[str, ...],
    policy_specs: tuple[str, ...],
    out: pathlib.Path,
) -> None:
    """Draw one of the pictures of a report: PNG, SVG or PDF by the file's ending."""
    from speckv.comparison import Comparison
    from speckv.report import plots

    plots.check_picture(out)
    must_be_new(out)
    comparison = Comparison.load(result_path)
    if name in plots.OF_RESULT:
        figure = plots.OF_RESULT[name](comparison)
    else:
        figure = plots.OF_EVIDENCE[name](_evidence(comparison, traces_path, cost_names, policy_specs))
    plots.save_figure(figure, out)
    click.echo(f"{out}: written")


def _evidence(
    comparison: "Comparison", traces_path: pathlib.Path | None, cost_names: tuple[str, ...], specs: tuple[str, ...]
) -> "Evidence":
    from speckv.plugins import load_costs
    from speckv.report.evidence import Evidence
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    dataset = shipped_traces() if traces_path is None else TraceDataset(traces_path)
    return Evidence.of(comparison, dataset, [load_costs(name) for name in cost_names] or shipped_costs(), specs)
