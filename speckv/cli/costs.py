"""`speckv costs`: what can be done with cost models."""

import pathlib

import click

from speckv.cli.common import TRACES, make_console, must_be_new, print_table
from speckv.errors import SpecKVError


@click.group()
def costs() -> None:
    """Look at cost models, and fit one to timings."""


@costs.command("fit")
@click.argument("path", type=click.Path(path_type=pathlib.Path))
@click.option("--name", required=True, help="Short name for tables.")
@click.option("--source", required=True, help="Where the timings come from.")
@click.option(
    "--stand-in",
    "stand_ins",
    multiple=True,
    metavar="OTHER=TIMED",
    help="Use the timings of one compression for another that was not timed.",
)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path, dir_okay=False))
def costs_fit(path: pathlib.Path, name: str, source: str, stand_ins: tuple[str, ...], out: pathlib.Path) -> None:
    """Fit a cost model to a step log with seconds, or to a CSV of timed runs.

    The CSV has the columns compression, gamma, num_steps, elapsed_sec. Any other file is read as a step log, as
    `speckv decode --log`, `speckv traces import` and `speckv traces to-steps` write it. If the log has the signal
    batch_size, the model has a batch axis.
    """
    from speckv.compression import check_compression
    from speckv.costs import fit_costs, fit_costs_to_log
    from speckv.steplogs import StepLog

    alias = {}
    for text in stand_ins:
        other, _, timed = text.partition("=")
        if not (other and timed):
            raise SpecKVError(f"--stand-in {text!r} is not of the form OTHER=TIMED")
        alias[check_compression(other)] = check_compression(timed)
    if not name.strip():
        raise SpecKVError("--name is empty; give the model a short name for tables")
    must_be_new(out)
    if path.suffix.lower() == ".csv":
        model = fit_costs(path, name, source, alias)
    else:
        model = fit_costs_to_log(StepLog.load(path), name, source, alias, where=path)
    model.save(out)
    held_out = dict(model.provenance["held_out"])
    error, ratio = held_out.pop("median_relative_error"), held_out.pop("total_ratio")
    ((unit, count),) = held_out.items()
    click.echo(
        f"{out}: written; of {count} {unit}, held out in fifths, the median one was {error:.1%} off, and their sum "
        f"{ratio - 1:+.1%}"
    )
    for size, check in model.provenance.get("held_out_batches", {}).items():
        click.echo(
            f"batch {size}: of the {check[unit]} {unit} near it, the median one was "
            f"{check['median_relative_error']:.1%} off, and their sum {check['total_ratio'] - 1:+.1%}"
        )


@costs.command("time-policies")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@TRACES
def costs_time_policies(paths: tuple[pathlib.Path, ...], traces_path: pathlib.Path | None) -> None:
    """Measure on this machine how long each policy's decisions take, and keep it in the cost models at PATHS.

    With it, the same comparison gives the same result to the last digit.
    """
    import dataclasses

    from speckv.costs import CostModel
    from speckv.machine import machine
    from speckv.plugins import registry
    from speckv.policy import Clairvoyant
    from speckv.replaying import measure_controller
    from speckv.shipped import shipped_traces
    from speckv.traces import TraceDataset

    models = [CostModel.load(path) for path in paths]
    data = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    times = {}
    for name, entry in sorted(registry().policies.items()):
        if not issubclass(entry.value, Clairvoyant):
            before, inside = measure_controller(entry.value().fit(data, models[0]), data, models[0])
            times[name] = (round(before, 7), round(inside, 7))
    for path, model in zip(paths, models, strict=True):
        provenance = model.provenance | {"controller": {"source": "measured by speckv costs time-policies"} | machine()}
        dataclasses.replace(model, controller=times, provenance=provenance).save(path)
    for name, (before, inside) in times.items():
        click.echo(f"{name}: {1e6 * before:.1f} µs before the step, {1e6 * inside:.1f} µs a drafted token")


@costs.command("show")
@click.argument("names", metavar="[FILE|NAME]...", nargs=-1)
@click.option("--plot", "plot_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="PNG, SVG or PDF.")
def costs_show(names: tuple[str, ...], plot_path: pathlib.Path | None) -> None:
    """Show cost models (by default those that ship with speckv) as tables of milliseconds.

    There is a row for each context length that was measured, and a column for each number of tokens in the forward,
    and a table for each batch size. The tokens are those of one sequence, the milliseconds those of the whole batch.
    """
    from rich.table import Table

    from speckv.plugins import load_costs
    from speckv.report import plots
    from speckv.shipped import shipped_costs

    if plot_path is not None:
        must_be_new(plots.check_picture(plot_path))
    models = [load_costs(name) for name in names] or shipped_costs()
    batches = [[model.at_batch(size) for size in model.batch_sizes] for model in models]
    if plot_path is not None:
        plots.save_figure(plots.cost_staircases([sized for of_sizes in batches for sized in of_sizes]), plot_path)
    console = make_console()
    tokens = (1, 2, 3, 4, 5, 7, 9, 13, 17)
    for model, of_sizes in zip(models, batches, strict=True):
        for sized in of_sizes:
            table = Table("forward", title=f"{sized.name}: ms by tokens")
            for heading in ("context", *map(str, tokens)):
                table.add_column(heading, justify="right")
            for name, timings in {"draft": sized.draft, **{f"verify {c}": t for c, t in sized.verify.items()}}.items():
                for context in timings.contexts.tolist():
                    at = str(context) if len(timings.contexts) > 1 else "any"
                    table.add_row(name, at, *(f"{1000 * timings.at(n, context):.1f}" for n in tokens))
            print_table(console, table)
        for key, value in model.provenance.items():
            console.print(f"{key}: {value}", style="dim", highlight=False)
    if plot_path is not None:
        click.echo(f"{plot_path}: written")
