"""The page of a result in a real browser: it draws itself, and mouse and keyboard reach everything on it."""

import json
import pathlib

import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.report.page import render

from .pages import CONTRAST
from .reports import HOSTILE, make_report_folder, page_json, report_command

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> pathlib.Path:
    folder = make_report_folder(tmp_path_factory.mktemp("made"))
    out = folder / "page.html"
    done = CliRunner().invoke(main, report_command(folder, "report", folder / "result.json", "--out", out))
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def data(report) -> dict:
    return page_json(report.read_text(encoding="utf-8"))


def names(page) -> list[str]:
    return page.locator("#leaderboard-table tbody th").all_inner_texts()


def cells(data: dict, costs: str, compression: str) -> list[dict]:
    rows = [dict(zip(data["cells"], row, strict=True)) for row in zip(*data["cells"].values(), strict=True)]
    return [row for row in rows if (row["costs"], row["compression"]) == (costs, compression)]


def sequence(data: dict, identifier: str, compression: str = "bf16") -> tuple[int, dict]:
    shown = data["explorer"]["sequences"]
    return next((n, s) for n, s in enumerate(shown) if (s["id"], s["compression"]) == (identifier, compression))


def gammas(data: dict, costs: str, policy: str, at: int) -> list[int]:
    runs = data["explorer"]["runs"]
    return next(run["steps"][at][0] for run in runs if (run["costs"], run["policy"]) == (costs, policy))


def shown_gammas(page, side: str) -> list[int]:
    return [int(text) for text in page.locator(f"#panel-{side} .gamma").all_inner_texts()]


def shown_text(page, side: str) -> str:
    tokens = page.locator(f"#panel-{side} .token").all_text_contents()
    return "".join(tokens).replace("↵", "")


def test_everything_is_drawn(page, data):
    assert page.title().startswith("SpecKV report: small drafting for synthetic")
    for section in ("gap", "leaderboard", "tasks", "gammas", "machines", "costs", "calibration", "explorer"):
        assert page.locator(f"#{section} svg").count() > 0, section
    assert page.locator("#gap figure").count() == 4  # two machines, two compressions
    assert page.locator("#gammas figure").count() == len(data["policies"])
    assert page.locator("svg [d*=NaN], svg [x*=NaN], svg [cx*=NaN], svg [width^='-']").count() == 0


def test_the_leaderboard_sorts(page, data):
    rows = cells(data, "one", "bf16")
    assert names(page) == [row["policy"] for row in sorted(rows, key=lambda row: -row["throughput"])]

    def order(key: str) -> str:
        return page.get_attribute(f"th:has(button[data-key={key}])", "aria-sort")

    assert (order("throughput"), order("policy")) == ("descending", "none")
    page.click("button[data-key=policy]")
    assert names(page) == sorted(row["policy"] for row in rows)
    assert (order("throughput"), order("policy")) == ("none", "ascending")
    assert page.evaluate("document.activeElement.dataset.key") == "policy"  # the keyboard goes on where it was
    page.keyboard.press("Enter")
    assert names(page) == sorted((row["policy"] for row in rows), reverse=True)
    page.click("button[data-key=p]")
    assert set(names(page)[-3:]) == {row["policy"] for row in rows if row["p"] is None}  # what has none comes last


def test_machine_and_compression_change_what_is_shown(page, data):
    page.select_option("#machine", "dear")
    page.select_option("#compression", "nf4")
    rows = sorted(cells(data, "dear", "nf4"), key=lambda row: -row["throughput"])
    assert names(page) == [row["policy"] for row in rows]
    at, _ = sequence(data, page.input_value("#prompt"), "nf4")
    assert shown_gammas(page, "left") == gammas(data, "dear", "best-fixed", at)
    page.select_option("#compression", "all")
    assert names(page) == [r["policy"] for r in sorted(cells(data, "dear", "all"), key=lambda row: -row["throughput"])]


def test_from_one_machine_to_another(page, data):
    """Places, and what changes, as seen from the machine that is chosen."""
    for here, there in (("one", "dear"), ("dear", "one")):
        page.select_option("#machine", here)
        page.select_option("#compression", "nf4")
        ranks = {
            name: [r["policy"] for r in sorted(cells(data, name, "nf4"), key=lambda row: -row["throughput"])
                   if r["policy"] not in data["bounds"]]
            for name in (here, there)
        }  # fmt: skip
        rows = page.locator("#machines-table tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ranks[here]
        for at, row in enumerate(rows):
            policy, place, _, _, elsewhere, _, _, share = row.split("\t")
            to = ranks[there].index(policy)
            moved = f"{'▲' if at > to else '▼'} {abs(at - to)}" if at != to else ""
            assert (place, elsewhere) == (str(at + 1), f"{to + 1}{moved}")
            changed = data["changes"][here][there][policy]
            assert share.strip() == (f"{100 * changed:.1f} %" if changed else "same")
        said = page.inner_text("#machines-changes li")
        same = sum(data["changes"][here][there][policy] == 0 for policy in ranks[here])
        assert (
            said.startswith(f"{there}: {ranks[there][0]} is fastest")
            and f"{same} of {len(rows)} policies draft the same" in said
        )


def test_one_machine_has_no_other(page, data, report):
    whole = report.read_text(encoding="utf-8")
    try:
        report.write_text(render(data | {"changes": {}}), encoding="utf-8")
        page.reload()
        assert page.locator("#machines").is_hidden() and page.locator("#machines-link").is_hidden()
    finally:
        report.write_text(whole, encoding="utf-8")


def test_a_compression_of_a_single_prompt(page, data, report):
    """It has no intervals and no p values, and is drawn without."""
    alone = [compression == "nf4" for compression in data["cells"]["compression"]]
    cells = data["cells"] | {
        name: [None if n else value for n, value in zip(alone, data["cells"][name], strict=True)]
        for name in ("gain_ci", "p")
    }
    whole = report.read_text(encoding="utf-8")
    try:
        report.write_text(render(data | {"cells": cells}), encoding="utf-8")
        page.reload()
        charts = page.locator("#gap-chart figure")
        assert [charts.nth(n).locator("line.interval").count() for n in range(4)] == [1, 0, 1, 0]
        assert "…" not in charts.nth(1).inner_text() and "…" in charts.nth(0).inner_text()
        page.select_option("#compression", "nf4")
        assert page.locator("#leaderboard-table line.interval").count() == 0 < len(names(page))
    finally:
        report.write_text(whole, encoding="utf-8")


def test_the_explorer_shows_the_sequence_and_the_policies_that_were_chosen(page, data):
    for identifier in page.locator("#prompt option").evaluate_all("options => options.map(option => option.value)")[:3]:
        page.select_option("#prompt", identifier)
        at, chosen = sequence(data, identifier)
        for policy in ("oracle", "disco"):
            page.select_option("#right", policy)
            assert page.locator("#panel-right h3").inner_text() == policy
            assert shown_gammas(page, "right") == gammas(data, "one", policy, at)
            assert shown_text(page, "right") == shown_text(page, "left") == "".join(chosen["tokens"])
    assert HOSTILE in shown_text(page, "right") and page.title() != "broken"


def test_a_compression_at_which_nothing_was_held_out(page, data, report):
    explorer = data["explorer"]
    kept = [n for n, shown in enumerate(explorer["sequences"]) if shown["compression"] == "bf16"]
    runs = [run | {"steps": [run["steps"][n] for n in kept]} for run in explorer["runs"]]
    changed = explorer | {"sequences": [explorer["sequences"][n] for n in kept], "runs": runs}
    whole = report.read_text(encoding="utf-8")
    try:
        report.write_text(render(data | {"explorer": changed}), encoding="utf-8")
        page.reload()
        page.select_option("#compression", "nf4")
        assert "None of the prompts" in page.inner_text("#explorer-note") and page.locator(".panels").is_hidden()
        page.select_option("#compression", "bf16")
        assert page.locator("#panel-left .step").count() > 0
    finally:
        report.write_text(whole, encoding="utf-8")


def test_tokens_are_marked_by_how_they_came_to_be(page, data):
    page.select_option("#left", "fixed-4")
    at, chosen = sequence(data, page.input_value("#prompt"))
    run = next(r for r in data["explorer"]["runs"] if (r["costs"], r["policy"]) == ("one", "fixed-4"))
    expected = []
    for gamma, accepted in zip(*run["steps"][at][:2], strict=True):
        last = "alone" if gamma == 0 else "correction" if accepted < gamma else "bonus"
        expected += ["accepted"] * accepted + [last]
    classes = page.locator("#panel-left .token").evaluate_all("all => all.map(one => one.classList[1])")
    assert classes == expected[: len(chosen["tokens"])]
    styles = {kind: page.locator(f"#explorer-legend .{kind}").evaluate("one => getComputedStyle(one).borderBottomStyle")
              for kind in ("accepted", "correction", "bonus", "alone")}  # fmt: skip
    assert len(set(styles.values())) == 4  # told apart without their colours


def test_a_step_tells_on_hover_and_on_focus(page, data):
    page.select_option("#right", "fixed-4")
    steps, tip = page.locator("#panel-right .step"), page.locator("#tip")
    at, chosen = sequence(data, page.input_value("#prompt"))
    run = next(r for r in data["explorer"]["runs"] if (r["costs"], r["policy"]) == ("one", "fixed-4"))
    gamma, accepted = run["steps"][at][:2]
    assert tip.is_hidden()
    steps.nth(1).hover()
    assert f"Step 2: gamma {gamma[1]}, {accepted[1]} accepted" in tip.inner_text()
    page.locator("#explorer-title").hover()
    assert tip.is_hidden()
    steps.nth(0).focus()
    assert "Step 1: gamma" in tip.inner_text()
    assert steps.nth(0).get_attribute("aria-describedby") == "tip"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert steps.nth(2).evaluate("node => node === document.activeElement")
    text = tip.inner_text()
    assert f"Step 3: gamma {gamma[2]}" in text and "nats" in text
    drafted = tip.locator("tbody tr")
    assert drafted.count() == gamma[2]
    start = accepted[0] + accepted[1] + 2
    if accepted[2]:
        assert f"{chosen['signals']['draft_top1'][start]:.2f}" in drafted.nth(0).inner_text()
    page.keyboard.press("End")
    assert f"Step {len(gamma)}:" in tip.inner_text()
    assert page.locator("#panel-left .step.peer").count() >= 1  # the other policy at the same place
    box, window = tip.bounding_box(), page.viewport_size
    assert box["x"] >= 0 and box["x"] + box["width"] <= window["width"]
    page.keyboard.press("Escape")
    assert tip.is_hidden() and page.locator(".step.peer").count() == 0
    page.keyboard.press("Enter")
    assert tip.is_visible()


def test_the_keyboard_reaches_every_control(page):
    reached, outlines = [], []
    page.evaluate("document.activeElement.blur()")
    for _ in range(80):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """() => { const node = document.activeElement, style = getComputedStyle(node);
            return [node.id || node.dataset.key || (node.closest("article") ?? node).id || node.getAttribute("href")
                    || node.tagName, style.outlineStyle, parseFloat(style.outlineWidth)]; }"""
        )
        if where[0] == "BODY":
            break
        reached.append(where[0])
        outlines.append(where[1] != "none" and where[2] >= 2)
    wanted = ["#main", "theme", "#gap", "#explorer", "machine", "compression", "policy", "throughput", "decision_us",
              "prompt", "left", "right", "panel-left", "panel-right"]  # fmt: skip
    assert [name for name in wanted if name not in reached] == []
    assert [reached.index(name) for name in wanted] == sorted(reached.index(name) for name in wanted)
    assert reached.count("panel-left") == 1  # one stop, then the arrow keys
    assert all(outlines), [name for name, seen in zip(reached, outlines, strict=True) if not seen]


TEXTS = ["h1", "#lead", "nav a", ".toolbar label", "select", "section p", ".fine", "tr.bound th", "tr.bound td", ".up",
         ".token.accepted", ".token.correction", "#explorer-legend .bonus", ".step .gamma", "footer p",
         "#machines-changes li", "td.same", "svg text.muted", "summary", ".figures"]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(scheme, page):
    page.select_option("#left", "fixed-4")
    page.emulate_media(color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    channels = [int(part) for part in before.strip("rgb()").split(",")]
    assert (sum(channels) > 600) == (scheme == "light")
    for times in (1, 2):
        contrast = page.evaluate(CONTRAST, TEXTS)
        assert {selector: ratio for selector, ratio in contrast.items() if ratio < 4.5} == {}
        page.click("#theme")
        assert (page.evaluate(paper) == before) == (times == 2)
        assert page.get_attribute("#theme", "aria-pressed") == str((scheme == "dark") == (times == 2)).lower()


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_no_width_makes_the_page_scroll_sideways(width, page):
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    page.wait_for_function("width => document.querySelector('#gap svg').clientWidth <= width", arg=width)
    for _ in range(2):
        sizes = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]")
        assert sizes[0] <= width and sizes[1] <= width and sizes[2] == width, json.dumps(sizes)
        page.select_option("#machine", "dear")
    panels = [page.locator(f"#panel-{side}").bounding_box() for side in ("left", "right")]
    assert (panels[0]["y"] == panels[1]["y"]) == (width >= 1000)  # side by side where there is room
