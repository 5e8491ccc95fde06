"""The paper's check as one HTML page: the same text as in the documentation, every table, every picture."""

import base64
import html
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from speckv.paper import page, webpage
from speckv.paper.plots import draw_all
from speckv.paper.tables import UNKNOWN, make_tables
from speckv.report.plots import render_figure

from .pages import Elements, check_self_contained
from .paper_files import make_result, write_paper


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_paper(tmp_path_factory.mktemp("made") / "paper", prompts=2)


@pytest.fixture(scope="module")
def result(folder):
    return make_result(folder)


@pytest.fixture(scope="module")
def text(result):
    return webpage.render(result)


def squeeze(text: str) -> str:
    """Words with single spaces, without the marks of Markdown."""
    return re.sub(r"\s+", " ", re.sub("[*`]", "", text)).strip()


def read(page: str) -> str:
    """What one reads of HTML."""
    return squeeze(html.unescape(re.sub("<[^>]*>", "", page)))


def test_the_page_is_one_file_that_asks_for_nothing(text):
    check_self_contained(text)


def test_the_page_names_its_parts(text):
    found = Elements(text)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"][1:] for tag, attributes in found.tags if tag == "a"]
    assert set(links) <= set(ids) and {"main", "in-short", "tokens-per-second", "the-study-repeated"} <= set(links)
    assert {attributes["aria-labelledby"] for _, attributes in found.tags if "aria-labelledby" in attributes} <= set(
        ids
    )


def test_the_text_is_that_of_the_documentation(text, result):
    blocks = re.split(r"\n\n|\n(?=- )", page.render(result))
    lines = [squeeze(block.removeprefix("- ")) for block in blocks if not block.startswith(("|", "!", "#"))]
    assert len(lines) > 30 and [line for line in lines if line not in read(text)] == []


def test_every_table_is_on_the_page_whole(text, result):
    for name, table in make_tables(result).items():
        part = text.split(f'aria-labelledby="table-{name}"')[1].split("</table>")[0]
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", part)]
        cells = [[" ".join(html.unescape(re.sub("<[^>]*>", "", cell)).split()) for cell in row] for row in rows]
        assert cells == [list(table.columns), *table.rows]


def test_what_a_recording_says_stays_text(text):
    assert "&lt;b&gt;target" in text and "<b>target" not in text


def test_the_pictures_have_a_wide_and_a_narrow_form_and_a_text(text):
    found = Elements(text)
    images = [attributes for tag, attributes in found.tags if tag == "img"]
    sources = [attributes for tag, attributes in found.tags if tag == "source"]
    assert len(images) == len(sources) == 4 and all(len(image["alt"]) > 20 for image in images)
    for image, source in zip(images, sources, strict=True):
        wide, narrow = (
            ElementTree.fromstring(base64.b64decode(address.removeprefix("data:image/svg+xml;base64,")))
            for address in (image["src"], source["srcset"])
        )
        assert float(narrow.get("width").removesuffix("pt")) < 300 < float(wide.get("width").removesuffix("pt"))


def test_the_same_report_gives_the_same_picture(result):
    first, second = (render_figure(draw_all(result)["paper-predictors"], "svg") for _ in range(2))
    assert first == second


def test_a_policy_that_never_chose_what_was_logged(folder):
    """Nothing is known of it then, which is said: no NaN, no traceback."""
    result = make_result(folder, matching=False)
    json.dumps(result, allow_nan=False)
    honest = result["honest"]
    assert honest["table1"]["overall"]["SpecKV-fast"] is None and honest["improvement_pct"] is None
    assert honest["table1"]["overall"]["Fixed-4"] > 1
    rows = {row["policy"]: row for row in honest["throughput"]}
    assert rows["Cost-aware"]["matched_steps"] == 0 and rows["Cost-aware"]["tokens_per_second"]["int8"] is None
    assert rows["Cost-aware"]["over_best_fixed"]["int8"] == {"gain_pct": None, "low": None, "high": None}
    assert rows["Cost-aware"]["over_best_fixed_on_complete_steps"]["int8"]["gain_pct"] is not None
    tables = make_tables(result)
    assert tables["table1"].rows[-1][-1] == tables["table1"].rows[-2][-1] == UNKNOWN
    assert tables["gains"].rows[-1] == ["Cost-aware", *[f"{UNKNOWN} ({UNKNOWN})"] * 3]
    assert f"{UNKNOWN} over gamma 4" in page.render(result)
    text = webpage.render(result)
    assert text.count(UNKNOWN) > 50 and "nan" not in read(text.split("<main")[1]).split()
