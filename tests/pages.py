"""Pages to look at: what is in their text, and how they are in a real browser."""

import base64
import contextlib
import hashlib
import pathlib
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = [f"--{flag}" for flag in ("no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync",
                                  "disable-component-update", "no-first-run")]  # fmt: skip
MINUTES = 60_000.0  # of patience, in milliseconds: the machines that run this are slow and busy
#: Given selectors, a program that returns the ratio of contrast of each one's first text.
CONTRAST = """selectors => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (color) => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const luminance = (color) => channels(color).map((c) => c / 255)
    .map((c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((total, c, n) => total + c * [.2126, .7152, .0722][n], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)" && color !== "transparent") return color; } return "white"; };
  return Object.fromEntries(selectors.map((selector) => {
    const node = document.querySelector(selector), style = getComputedStyle(node);
    const ink = luminance(node instanceof SVGElement ? style.fill : style.color), paper = luminance(behind(node));
    return [selector, (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05)]; }));
}"""


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of script and style elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, text):
        if self._inside in self.texts:
            self.texts[self._inside].append(text)


def check_self_contained(page: str) -> None:
    """Nothing is loaded, and the page's own policy allows its script and style and nothing else."""
    found = Elements(page)
    loaded = {"src", "srcset", "href"}
    addresses = [value for _, attributes in found.tags for name, value in attributes.items() if name in loaded]
    assert "data:," in addresses and all(address.startswith(("#", "data:")) for address in addresses)
    assert not any("style" in attributes for _, attributes in found.tags)  # which the policy would refuse
    assert not re.search(r"url\(|@import|https?:", "".join(found.texts["style"]))
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    for text in ("".join(found.texts["style"]), found.texts["script"][-1]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Debian's Chromium or another that is here; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)}")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET, timeout=4 * MINUTES)
        yield browser
        browser.close()


@contextlib.contextmanager
def open_page(browser: Any, path: pathlib.Path) -> Iterator[Any]:
    """The page, opened; in the end nothing may have gone wrong and nothing may have been asked for."""
    page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme="light")
    page.set_default_timeout(4 * MINUTES)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert messages == []
    assert {url for url in requests if not url.startswith("data:")} == {path.as_uri()}
