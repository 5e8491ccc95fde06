"""The story of the check as one HTML page: the text of `page.md` with the report's tables and pictures in it."""

import base64
import html
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import speckv
from speckv.files import write_atomically
from speckv.paper.page import fill_in
from speckv.paper.plots import draw_all
from speckv.paper.tables import UNKNOWN, Table, make_tables
from speckv.report.frame import read_asset, render_frame
from speckv.report.plots import render_figure

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from matplotlib.figure import Figure


def write_page(result: dict[str, Any], path: pathlib.Path) -> None:
    """Write the page. The same report gives the same bytes.

    Raises:
        SpecKVError: the file can't be written.
    """
    text = render(result)
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def render(result: dict[str, Any]) -> str:
    """The page as HTML, with nothing to be loaded from anywhere."""
    tables = make_tables(result)
    text = fill_in(result, {name: f"```table\n{name}\n```" for name in tables}).replace(" %", "\N{NO-BREAK SPACE}%")
    start, *chapters = text.split("\n## ")
    title, introduction = start.removeprefix("# ").split("\n", 1)
    markdown = _make_markdown(tables, _draw_pictures(result))
    links, sections = [], [f'<section aria-label="About this page">\n{markdown.render(introduction)}</section>']
    for chapter in chapters:
        heading, body = chapter.split("\n", 1)
        name, words = re.sub(r"\W+", "-", heading.lower()).strip("-"), html.escape(heading)
        links.append(f'<a href="#{name}">{words}</a>')
        sections.append(
            f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{words}</h2>\n'
            f"{markdown.render(body)}</section>"
        )
    lines = [
        f"<header>\n<h1>{html.escape(title)}</h1>",
        '<nav aria-label="Sections">',
        *links,
        "</nav>\n</header>",
        '<main id="main" tabindex="-1">',
        *sections,
        f"</main>\n<footer>\n<p>{html.escape(_describe_making(result))}</p>\n</footer>",
    ]
    return render_frame(title, "\n".join(lines), read_asset("webpage.css", "speckv.paper"))


def _describe_making(result: dict[str, Any]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in result["software"].items())
    processor = result["machine"]["processor"]
    return (
        f"Made by speckv {speckv.__version__} with {software}. Decisions were timed on {processor}. "
        f"Where a table says {UNKNOWN}, no step of the data had the gamma that the policy chose."
    )


def _make_markdown(tables: dict[str, Table], pictures: dict[str, str]) -> "MarkdownIt":
    """A renderer to which a fenced `table` and an image are names of what to put there."""
    from markdown_it import MarkdownIt

    def render_fence(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        name = tokens[index].content.strip()
        return _render_table(name, tables[name])

    def render_image(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        return pictures[pathlib.PurePath(token.attrs["src"]).stem].format(alt=html.escape(token.content))

    markdown = MarkdownIt("commonmark", {"html": False})
    markdown.add_render_rule("fence", render_fence)
    markdown.add_render_rule("image", render_image)
    return markdown


def _render_table(name: str, table: Table) -> str:
    def cells(texts: Sequence[str], head: bool) -> str:
        parts = []
        for column, text in enumerate(texts):
            kind = ' class="label"' if column < table.labels else ""
            tag, scope = ("th", ' scope="col"') if head else ("td", "") if column else ("th", ' scope="row"')
            parts.append(f"<{tag}{scope}{kind}>{_render_cell(text)}</{tag}>")
        return "".join(parts)

    body, before = [], None
    for row in table.rows:
        starts = ' class="start"' if table.labels > 1 and row[0] != before else ""
        body.append(f"<tr{starts}>{cells(row, head=False)}</tr>")
        before = row[0]
    return (
        f'<figure>\n<figcaption id="table-{name}">{html.escape(table.title)}</figcaption>\n'
        f'<div class="scroller" role="region" aria-labelledby="table-{name}" tabindex="0"><table>\n'
        f"<thead><tr>{cells(table.columns, head=True)}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody></table></div>\n</figure>\n"
    )


def _render_cell(text: str) -> str:
    """The text of a cell; where there is no room, arrows and brackets start a line."""
    parts = re.split(" (?=[(→])", html.escape(text).replace(" %", "\N{NO-BREAK SPACE}%"))
    return " ".join(f"<span>{part}</span>" for part in parts) if len(parts) > 1 else parts[0]


def _draw_pictures(result: dict[str, Any]) -> dict[str, str]:
    """Name -> the picture as an element that lacks its text: one form for wide screens, one for small ones."""
    wide, narrow = draw_all(result), draw_all(result, narrow=True)
    return {
        name: f'<picture><source media="(max-width: 45rem)" srcset="{_to_address(narrow[name])}">'
        f'<img src="{_to_address(figure)}" alt="{{alt}}"></picture>'
        for name, figure in wide.items()
    }


def _to_address(figure: "Figure") -> str:
    """The picture itself as an address. Inlined as an element, the page's own policy would refuse its styles."""
    return f"data:image/svg+xml;base64,{base64.b64encode(render_figure(figure, 'svg')).decode()}"
