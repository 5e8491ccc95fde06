"""The paper's check in a real browser: readable in both themes and at every width, reachable by keyboard."""

import pytest

from speckv.paper import webpage

from .pages import CONTRAST
from .paper_files import make_result, write_paper

pytestmark = pytest.mark.browser
TEXTS = ["h1", "nav a", "section p", "section li", "code", "pre", "figcaption", "thead th", "tbody th", "tbody td",
         "footer p", "#theme"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    out = folder / "page.html"
    webpage.write_page(make_result(write_paper(folder / "paper", prompts=2)), out)
    return out


SHOWN = "all => all.every((one) => one.complete && one.naturalWidth > 0 && one.clientWidth > 200)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(scheme, page):
    page.emulate_media(color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    assert (sum(int(part) for part in before.strip("rgb()").split(",")) > 600) == (scheme == "light")
    for times in (1, 2):
        contrast = page.evaluate(CONTRAST, TEXTS)
        assert {selector: ratio for selector, ratio in contrast.items() if ratio < 4.5} == {}
        card = page.locator("img").evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
        assert set(card) == {"rgb(255, 255, 255)"}  # the pictures are drawn for white
        page.click("#theme")
        assert (page.evaluate(paper) == before) == (times == 2)
        assert page.get_attribute("#theme", "aria-pressed") == str((scheme == "dark") == (times == 2)).lower()


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_no_width_makes_the_page_scroll_sideways(width, page):
    page.set_viewport_size({"width": width, "height": 800})
    images = page.locator("img")
    images.evaluate_all("all => Promise.all(all.map((one) => one.decode()))")
    assert images.count() == 4 and images.evaluate_all(SHOWN)
    narrow = images.evaluate_all("all => all.every((one) => one.currentSrc !== one.src)")
    assert narrow == (width == 400)
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]")
    assert sizes[0] <= width and sizes[1] <= width and sizes[2] == width
    # What is published, reproduced and honest stands side by side without scrolling.
    table = page.locator("[aria-labelledby=table-table1]")
    assert table.evaluate("one => one.scrollWidth <= one.clientWidth")


def test_the_keyboard_reaches_sections_theme_and_tables(page):
    reached = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """() => { const node = document.activeElement, style = getComputedStyle(node);
            return [node.getAttribute("href") || node.id || node.getAttribute("aria-labelledby") || node.tagName,
                    style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2]; }"""
        )
        if where[0] == "BODY":
            break
        assert where[1], where[0]
        reached.append(where[0])
    assert reached[:3] == ["#main", "theme", "#in-short"]
    assert [name for name in reached if name.startswith("table-")] == page.locator("figcaption").evaluate_all(
        "all => all.map((one) => one.id)"
    )
