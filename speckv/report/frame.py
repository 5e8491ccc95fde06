"""What every page of ours is set in: one file that loads nothing, in light and dark."""

import base64
import hashlib
import html
import string
from importlib import resources


def render_frame(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page as HTML. Its own policy allows exactly the script and the style in it, and no address at all.

    Args:
        title: text, of the window.
        body: HTML, with an element `main` of that id; style attributes in it are refused by browsers.
        style, script: of this page, behind what all pages have.
    """
    style, script = read_asset("frame.css") + style, read_asset("frame.js") + script
    return string.Template(read_asset("frame.html")).substitute(
        title=html.escape(title),
        policy=f"default-src 'none'; img-src data:; script-src {_digest(script)}; style-src {_digest(style)}",
        style=style,
        script=script,
        body=body,
    )


def read_asset(name: str, package: str = "speckv.report") -> str:
    """The text of a file that ships in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
