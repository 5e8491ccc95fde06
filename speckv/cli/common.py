"""What the commands share: options, the console, and errors of one line."""

import contextlib
import errno
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from speckv.policy import Policy

#: Of the tables of estimates from a step log.
AGREE = "agree: share of the policy's steps at which the log asked for the same gamma"


def _recording(context: click.Context, option: click.Parameter, path: pathlib.Path | None) -> pathlib.Path | None:
    """Refuse a step log, or another file, where a recording is wanted."""
    from speckv.steplogs import is_step_log

    if path is not None and is_step_log(path):
        raise SpecKVError(
            f"{path}: is no recording; if it is a step log, `speckv train --from`, `speckv compare --traces` and "
            "`speckv evaluate` take it"
        )
    return path


FOLDER = click.Path(path_type=pathlib.Path, file_okay=False)
TRACES = click.option(
    "--traces",
    "traces_path",
    type=click.Path(path_type=pathlib.Path),
    callback=_recording,
    help="Trace folder.  [default: the recording that ships with speckv]",
)
COSTS = click.option(
    "--costs", "costs_name", help="Cost model: a file or a name.  [default: the first that ships with speckv]"
)


def must_be_new(*outs: pathlib.Path | None) -> None:
    """Raise SpecKVError if there is such a file or folder, or can't be: what a command writes must not cost another,
    and must not be lost when all is done. None is an output that was not asked for."""
    for out in outs:
        if out is not None and os.path.exists(out):  # not Path.exists, which fails where nothing can be: see below
            raise SpecKVError(f"{out}: exists already; choose another place")
    must_be_writable(*outs)


def must_be_writable(*outs: pathlib.Path | None) -> None:
    """Raise SpecKVError if nothing can be written there, in folders that may be missing, or not without harm: two
    outputs at one place, or one inside a recording or a saved policy. It leaves nothing behind."""
    places = set[str]()
    for out in outs:
        if out is None:
            continue
        place = os.path.realpath(out)
        if place in places:
            raise SpecKVError(f"{out}: is to be written twice; choose another place for one of the two")
        places.add(place)
        for folder in (pathlib.Path(place), *pathlib.Path(place).parents):
            if (kept := _kept_in(folder)) is not None:
                raise SpecKVError(f"{folder}: holds {kept} already; choose another place for {out}")
        try:
            nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
            tempfile.TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise SpecKVError(f"{out}: cannot be written ({error.strerror}); choose another place") from None


def _kept_in(folder: pathlib.Path) -> str | None:
    """What a folder is that another file or folder has no place in."""
    from speckv import saving, traces
    from speckv.files import read_json

    for name, form, what in (
        ("manifest.json", traces.FORMAT, "a recording"),
        ("policy.json", saving.FORMAT, "a policy"),
    ):
        with contextlib.suppress(SpecKVError):  # there is no such file, or it is another program's
            if read_json(folder / name, what).get("format") == form:
                return what
    return None


def must_be_text(text: str, what: str) -> str:
    """A text that a user gave, or a SpecKVError if bytes of it are no UTF-8. `what` names it in the message."""
    try:
        text.encode()  # Python hides such bytes in lone surrogates
    except UnicodeEncodeError as error:
        raise SpecKVError(f"{what} is not text ({error}); give UTF-8") from None
    return text


def must_serve(policy: "Policy") -> None:
    """Raise SpecKVError if a policy is not there to be played as well as can be."""
    from speckv.policy import Clairvoyant

    if isinstance(policy, Clairvoyant):
        raise SpecKVError(f"policy {policy.label!r} is a bound that knows the future: no decoder could play it")
    if policy.explores:
        raise SpecKVError(f"policy {policy.label!r} draws lots for the sake of a log; name the policy inside it")


def must_learn(policy: "Policy") -> None:
    """Raise SpecKVError if there is nothing in a policy that training could better."""
    from speckv.policy import Policy

    must_serve(policy)
    if type(policy).fit is Policy.fit:
        raise SpecKVError(f"policy {policy.label!r} learns nothing; `speckv policies` says which do")


class CommandGroup(click.Group):
    """A group whose commands end with one line and exit code 2 on every error that a user can cause.

    Besides its own commands it has those of plugins, which are looked at for `--help` and for unknown names only.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or _outside_commands().get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_outside_commands()])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_errors(), _orderly_termination():
            return super().invoke(ctx)


def _outside_commands() -> dict[str, click.Command]:
    from speckv.plugins import outside_entry_points, registry

    if not outside_entry_points():  # the usual case, and a quick one
        return {}
    return {name: entry.value for name, entry in registry().commands.items() if not entry.plugin.built_in}


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise  # a group without a command: click shows its help
    except click.UsageError as error:
        click.echo(f"speckv: error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except SpecKVError as error:
        click.echo(f"speckv: error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # files that can't be written are a SpecKVError: this is of what is printed
            raise
        reason = f"what is printed cannot be written ({error.strerror}); print it elsewhere"
        click.echo(f"speckv: error: {reason}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries to write the rest once more, at its end
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            raise
        click.echo("speckv: error: the device has not enough memory; decode less at once, or compress more", err=True)
        sys.exit(2)


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that its worker processes end with it."""
    if threading.current_thread() is not threading.main_thread():  # where Python lets no signals be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def showing_progress(what: str) -> "Iterator[Callable[[int, int], None]]":
    """A bar that goes when the work is done, moved by the function that this yields: how much is done, and of how
    much. Where there is no terminal it shows nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def make_console() -> "Console":
    """Where tables are printed: as wide as the terminal, or 120 characters where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def print_table(console: "Console", table: "Table") -> None:
    """Print a table with all of its numbers whole, which are what is on the right of its columns.

    Texts fold where the terminal is narrow, down to ten characters; where that is not enough, rows are longer than
    its lines. In a pipe or a file the table is as wide as it needs.
    """
    from rich.measure import Measurement

    boundless = console.options.update(width=1_000_000)
    least = full = 1
    for column in table.columns:
        cells = [column.header, *column.cells]
        widest = max(Measurement.get(console, boundless, cell).maximum for cell in cells)
        column.no_wrap, column.overflow = column.no_wrap or column.justify == "right", "fold"
        column.min_width = widest if column.no_wrap else min(widest, 10)
        least, full = least + column.min_width + 3, full + widest + 3
    table.width = min(full, max(least, console.width)) if console.file.isatty() else full
    console.print(table, crop=False)
