"""`speckv paper`: the SpecKV paper, checked against the data that its author published."""

import os
import pathlib
import sys

import click

from speckv.cli.common import FOLDER, TRACES, make_console, must_be_new, must_be_writable, print_table


@click.group()
def paper() -> None:
    """Check the SpecKV paper (arXiv 2605.02888) against the data that its author published."""


@paper.command()
@click.argument("folder", type=FOLDER, metavar="DIR")
@TRACES
@click.option("--json", "json_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write all numbers.")
@click.option(
    "--report", "report_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="HTML, all in one."
)
@click.option("--docs", "docs_path", type=FOLDER, help="Write the story with its pictures here: paper.md and PNG.")
def reproduce(
    folder: pathlib.Path,
    traces_path: pathlib.Path | None,
    json_path: pathlib.Path | None,
    report_path: pathlib.Path | None,
    docs_path: pathlib.Path | None,
) -> None:
    """Published, reproduced and honest numbers side by side, from the paper's CSV files in DIR.

    The study is repeated on a recording of ours, which has to go up to gamma 8.
    """
    from rich.console import Console

    from speckv.files import write_json
    from speckv.paper import page, report, webpage
    from speckv.paper.data import PaperData
    from speckv.paper.tables import make_tables
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    must_be_new(json_path, report_path)
    must_be_writable(docs_path)
    published = PaperData.read(folder)
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    errors = Console(stderr=True)
    with errors.status("reading") as status:
        result = report.reproduce(
            published,
            traces,
            shipped_costs(),
            jobs=os.cpu_count() or 1,
            progress=lambda stage: status.update(stage) if sys.stderr.isatty() else None,
        )
    if json_path is not None:
        write_json(json_path, result)
    if report_path is not None:
        webpage.write_page(result, report_path)
    if docs_path is not None:
        page.write(result, docs_path)
    console = make_console()
    for table in make_tables(result).values():
        print_table(console, table.to_rich())
