"""`speckv traces`: what can be done with recordings."""

import pathlib

import click

from speckv.cli.common import COSTS, FOLDER, TRACES, make_console, must_be_new, print_table


@click.group()
def traces() -> None:
    """Look at recordings, merge them, and import step logs."""


@traces.command("show")
@click.argument("path", type=FOLDER, required=False)
def traces_show(path: pathlib.Path | None) -> None:
    """Summarise a trace folder (by default the recording that ships with speckv) and read it to its end."""
    import numpy as np
    from rich.table import Table

    from speckv.shipped import shipped_traces
    from speckv.traces import TraceDataset

    dataset = shipped_traces() if path is None else TraceDataset(path)
    data = dataset.load()
    title = f"{dataset.path}: gamma up to {data.gamma_max}, {dataset.manifest.settings}"
    table = Table("compression", "task", title=title)
    for heading in ("sequences", "tokens", "draft right", "mean run of\nright tokens"):
        table.add_column(heading, justify="right")
    inside = np.arange(data.tokens.shape[1]) < data.lengths[:, None]
    right = (data.tokens == data.draft_tokens) & inside
    for compression in np.unique(data.compressions):
        for task in np.unique(data.tasks):
            mask = (data.compressions == compression) & (data.tasks == task)
            if mask.any():
                table.add_row(str(compression), str(task), str(mask.sum()), str(data.lengths[mask].sum()),
                              f"{100 * right[mask].sum() / inside[mask].sum():.1f} %",
                              f"{data.run[mask][:, :-1][inside[mask]].mean():.2f}")  # fmt: skip
    print_table(make_console(), table)


@traces.command("texts")
@click.argument("path", type=FOLDER)
@click.option("--tokenizer", required=True, help="Of the recorded models: a folder or a name on the hub.")
def traces_texts(path: pathlib.Path, tokenizer: str) -> None:
    """Keep in a trace folder what its token ids mean, so that reports can show texts; `speckv record` does so."""
    from speckv import vocabulary
    from speckv.errors import SpecKVError
    from speckv.traces import TraceDataset

    dataset = TraceDataset(path)
    if (known := path / vocabulary.FILE).exists():
        raise SpecKVError(f"{known}: exists already; move it away if it is of another tokenizer")

    from speckv.live.models import load_tokenizer
    from speckv.live.vocabulary import keep_texts

    click.echo(f"{path}: the texts of {keep_texts(dataset, load_tokenizer(tokenizer))} tokens")


@traces.command("merge")
@click.argument("sources", nargs=-1, required=True, type=FOLDER)
@click.option("--out", required=True, type=FOLDER)
def traces_merge(sources: tuple[pathlib.Path, ...], out: pathlib.Path) -> None:
    """Write the sequences of one or several trace folders to a new one, with one file a compression."""
    from speckv.traces import TraceDataset

    must_be_new(out)
    TraceDataset.merge([TraceDataset(source) for source in sources], out)
    click.echo(f"{out}: written")


@traces.command("import")
@click.argument("source", type=click.Path(path_type=pathlib.Path))
@click.option("--importer", "importer_spec", required=True, help="NAME or NAME:PARAMETER=VALUE,…; see speckv plugins.")
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Parquet file.")
def traces_import(source: pathlib.Path, importer_spec: str, out: pathlib.Path) -> None:
    """Read a step log of another program, and say of every row that can't be used what is wrong with it."""
    import numpy as np

    from speckv.errors import SpecKVError
    from speckv.plugins import make_importer

    must_be_new(out)
    if not source.exists():
        raise SpecKVError(f"{source}: no such file or folder; expected a step log")
    imported = make_importer(importer_spec).read(source)
    for fault in imported.faults:
        click.echo(f"{source}: row {fault.row}: {fault.reason} ({'kept' if fault.kept else 'left out'})", err=True)
    if not len(imported.log):
        raise SpecKVError(f"{source}: none of its {imported.steps} steps can be used; nothing was written")
    imported.log.save(out)
    click.echo(
        f"{out}: {len(imported.log)} of {imported.steps} steps, of {len(np.unique(imported.log.sequence))} sequences; "
        f"{len(imported.faults)} faults"
    )


@traces.command("to-steps")
@TRACES
@COSTS
@click.option(
    "--policy",
    "policy_specs",
    multiple=True,
    required=True,
    help="NAME or NAME:PARAMETER=VALUE,… to replay, may be repeated. Prompts are played by one that was fitted to "
    "the others, if it learns.",
)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Parquet file.")
def traces_to_steps(
    traces_path: pathlib.Path | None, costs_name: str | None, policy_specs: tuple[str, ...], out: pathlib.Path
) -> None:
    """Replay policies on a recording and write their steps as a log, as a decoder that played them would have.

    With `--policy fixed:gamma=2 --policy fixed:gamma=4 …` it is a profiling grid; with `explore` it has propensities.
    """
    from speckv.evaluation.recording import join, to_held_out_steps
    from speckv.plugins import load_costs, make_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    must_be_new(out)
    data = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
    policies = [make_policy(spec) for spec in policy_specs]
    log = join({policy.label: to_held_out_steps(policy, data, costs) for policy in policies})
    log.save(out)
    click.echo(f"{out}: {len(log)} steps of {len(set(log.sequence.tolist()))} sequences")
