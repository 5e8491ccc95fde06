"""Tables on the terminal and in files: no number is ever cut, folded or left out."""

import io
import pathlib
import re

import pytest
from rich.console import Console
from rich.table import Table

from speckv.cli.common import print_table

CLI = pathlib.Path(__file__).parents[1] / "speckv" / "cli"
NUMBERS = ("+135.0 %", "+133.5 … +136.6", "12345.6")
NAME = "explore:policy=off-switch,epsilon=0.1,largest=8"
WIDTHS = (40, 80, 120, None)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(width: int | None, name: str = NAME) -> list[str]:
    """The lines of a table on a terminal of this width, or in a pipe."""
    table = Table(title="a title")
    table.add_column("policy")
    for heading in ("gain", "95 % interval", "tok/s"):
        table.add_column(heading, justify="right")
    table.add_column("estimator")
    table.add_row(name, *NUMBERS, "plug-in")
    file = io.StringIO() if width is None else Screen()
    print_table(Console(file=file, width=width or 120, color_system=None), table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_and_texts_are_whole(width):
    lines = shown(width)
    assert any(all(f" {number} " in line for number in NUMBERS) for line in lines)
    folded = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert folded == NAME


def test_texts_fold_where_the_terminal_is_narrow_and_nowhere_else():
    long, full = "x" * 200, len(shown(None)[-1])
    assert {len(shown(width)[-1]) for width in (full, full + 40)} == {full}
    assert len(shown(full - 10)[-1]) == full - 10
    assert len(shown(120, long)[-1]) == 120 and len(shown(None, long)[-1]) == full - len(NAME) + 200
    assert len(shown(40)[-1]) == len(shown(1)[-1]) < 80  # longer than a line, but no longer than numbers need


def test_every_table_is_printed_like_this():
    """What else prints one has a grid of texts."""
    for path in CLI.glob("*.py"):
        printed = re.findall(r"\.print\((?:_?tables?\b(?!\.[A-Z])|.*to_rich).*", path.read_text(encoding="utf-8"))
        assert not printed or path.name in ("common.py", "exporting.py"), path
