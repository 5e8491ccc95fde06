"""The page and the pictures of a result: what they hold, and what they refuse."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from speckv.cli import main
from speckv.cli.reporting import PLOTS
from speckv.comparison import Comparison, folds_of
from speckv.costs import CostModel
from speckv.plugins import SWITCH, make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.report import plots
from speckv.report.heldout import Reliability, play
from speckv.report.page import PROMPTS
from speckv.traces import TraceDataset

from .pages import Elements, check_self_contained
from .reports import HOSTILE, SPECS, make_report_folder, page_json, report_command
from .synthetic import make_costs, make_rollouts


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    return make_report_folder(tmp_path_factory.mktemp("made"))


@pytest.fixture
def place(made, tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv(SWITCH, "")
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(*command: object):
    return CliRunner().invoke(main, [str(part) for part in command])


@pytest.fixture(scope="module")
def page(made, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "page.html"
    done = run(*report_command(made, "report", made / "result.json", "--out", out))
    assert done.exit_code == 0, done.output
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_file_that_asks_for_nothing(page):
    check_self_contained(page)


def test_the_page_has_every_section_and_names_its_parts(page):
    found = Elements(page)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"][1:] for tag, attributes in found.tags if tag == "a"]
    assert (
        set(links)
        == {"main", "gap", "leaderboard", "tasks", "gammas", "machines", "costs", "calibration", "explorer"}
        <= set(ids)
    )
    for _, attributes in found.tags:
        assert set(attributes.get("aria-labelledby", "").split()) <= {*ids, "panel-left-title", "panel-right-title"}


def test_text_of_the_recording_stays_text(page):
    data = page_json(page)
    assert page.count("</script>") == 2  # that of the data and that of the program
    assert HOSTILE not in page
    assert any(HOSTILE in sequence["tokens"] for sequence in data["explorer"]["sequences"])


def test_the_page_holds_the_result(page, made):
    data, result = page_json(page), Comparison.load(made / "result.json")
    columns = data["cells"]
    assert columns["policy"] == [cell.policy for cell in result.cells]
    assert columns["gain"] == pytest.approx([cell.gain for cell in result.cells], abs=1e-5)
    assert np.array(columns["gamma_share"]) == pytest.approx(np.array([c.gamma_share for c in result.cells]), abs=1e-3)
    for cell in result.by_task:
        throughput, gain, *interval = data["tasks"][cell.costs][cell.compression][cell.task][cell.policy]
        assert throughput == pytest.approx(cell.throughput, abs=1e-4) and gain == pytest.approx(cell.gain, abs=1e-4)
        assert interval == pytest.approx(list(cell.gain_ci or ()), abs=1e-4)
    assert data["bounds"] == ["oracle", "perfect-judge"] and data["against"] == "best-fixed"
    shares = {change.policy: change.share for change in result.changes}
    assert data["changes"]["one"]["dear"] == data["changes"]["dear"]["one"] == pytest.approx(shares, abs=1e-4)
    assert shares["none"] == shares["fixed-4"] == 0 < shares["best-fixed"]
    draft = CostModel.load(made / "dear.json").draft
    assert data["costs"][1]["draft"] == pytest.approx([1000 * draft.at(n, 256) for n in range(1, 18)], abs=1e-3)


def test_the_explorer_holds_the_held_out_steps_of_each_policy(page, made):
    explorer = page_json(page)["explorer"]
    dataset = TraceDataset(made / "traces")
    rollouts, sequences = dataset.load(), {(s.id, s.compression): s for s in dataset}
    fold_of = folds_of(rollouts, 3, 0)
    for costs in ("one", "dear"):
        model = CostModel.load(made / f"{costs}.json")
        for spec in (*SPECS, "fixed:gamma=4", "best-fixed", "perfect-judge", "oracle"):
            policy = make_policy(spec).fit(rollouts.take(fold_of != 0), model)
            held_out = rollouts.take(fold_of == 0)
            log = replay(policy, held_out, model)
            steps = next(r["steps"] for r in explorer["runs"] if (r["costs"], r["policy"]) == (costs, policy.label))
            for shown, (gamma, accepted, ms, looked) in zip(explorer["sequences"], steps, strict=True):
                row = np.flatnonzero((held_out.ids == shown["id"]) & (held_out.compressions == shown["compression"]))
                mine = log.sequence == row[0]
                assert gamma == log.gamma[mine].tolist() and accepted == log.accepted[mine].tolist()
                assert ms == pytest.approx(1000 * log.seconds[mine], abs=0.051)
                assert looked == np.flatnonzero(log.forwards[mine] > log.gamma[mine]).tolist()
                # What the page shows of a wrong draft reaches as far as any of the policies drafted.
                original, start = sequences[shown["id"], shown["compression"]], 0
                for g, a in zip(gamma, accepted, strict=True):
                    if a < g:
                        assert len(shown["wrong"][str(start + a)][0]) >= g - a
                        assert original.tokens[start + a] != original.draft_tokens[start + a]
                    start += a + 1
                assert start >= len(shown["tokens"]) == len(original.tokens)


def test_as_many_held_out_prompts_of_each_task_are_shown_at_every_compression(page, made):
    explorer = page_json(page)["explorer"]
    rollouts = TraceDataset(made / "traces").load()
    held_out = rollouts.take(folds_of(rollouts, 3, 0) == 0)
    shown = [(sequence["task"], sequence["id"], sequence["compression"]) for sequence in explorer["sequences"]]
    assert len(shown) == len(set(shown))
    for task in set(rollouts.tasks):
        expected = sorted(set(held_out.ids[held_out.tasks == task]))[: PROMPTS // 3]
        for compression in ("bf16", "nf4"):
            assert [i for t, i, c in shown if (t, c) == (task, compression)] == expected


def test_the_same_result_gives_the_same_bytes(place):
    for name in ("a", "b"):
        assert (
            run(*report_command(place, "report", place / "result.json", "--out", place / f"{name}.html")).exit_code == 0
        )
    assert (place / "a.html").read_bytes() == (place / "b.html").read_bytes()


def test_without_a_vocabulary_the_page_shows_numbers_and_says_so(place):
    (place / "traces" / "vocabulary.json").unlink()
    done = run(*report_command(place, "report", place / "result.json", "--out", place / "page.html"))
    assert done.exit_code == 0, done.output
    explorer = page_json((place / "page.html").read_text(encoding="utf-8"))["explorer"]
    assert explorer["texts"] is False and re.fullmatch(r"⟨\d+⟩", explorer["sequences"][0]["tokens"][0])


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_pictures_come_in_three_kinds_and_the_same_twice(kind, place):
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    for name in ("a", "b"):
        assert run("plot", "gap", place / "result.json", "--out", place / f"{name}.{kind}").exit_code == 0
    content = (place / f"a.{kind}").read_bytes()
    assert content.startswith(magic) and content == (place / f"b.{kind}").read_bytes()


@pytest.mark.parametrize("name", PLOTS)
def test_every_picture_is_drawn(name, place):
    done = run(*report_command(place, "plot", name, place / "result.json", "--out", place / "picture.svg"))
    assert done.exit_code == 0, done.output
    assert (place / "picture.svg").stat().st_size > 5000


def test_the_command_line_offers_every_picture_there_is():
    assert set(PLOTS) == {*plots.OF_RESULT, *plots.OF_EVIDENCE}


def test_pictures_show_the_numbers(made):
    result = Comparison.load(made / "result.json")
    panels = plots.leaderboard(result).axes
    assert len(panels) == 2 * 2
    cells = {c.policy: c.gain for c in result.cells if (c.costs, c.compression) == ("one", "bf16")}
    drawn = [float(line.get_xdata()[0]) for line in panels[0].get_lines() if line.get_marker() in {"o", "D", "<"}]
    assert sorted(drawn) == pytest.approx(sorted(100 * max(gain, -0.3) for gain in cells.values()))
    shares = [bar.get_height() for bar in plots.gammas(result).axes[0].patches]
    assert sum(shares) == pytest.approx(100)


def change(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BAD = {
    "no such file": lambda place: (place / "result.json").unlink(),
    "is not the result of a comparison": lambda place: change(place / "result.json", format="speckv-costs"),
    "schema version 2 is newer": lambda place: change(place / "result.json", schema_version=2),
    "not readable as the result": lambda place: (place / "result.json").write_text('{"format": '),
    "KeyError('by_task')": lambda place: drop(place / "result.json", "by_task"),
    "gain is 'much'": lambda place: spoil(place / "result.json", gain="much"),
    "gain is None": lambda place: spoil(place / "result.json", gain=None),
    "throughput is nan": lambda place: spoil(place / "result.json", throughput=float("nan")),
    "made under costs 'one'": lambda place: rename_costs(place / "one.json"),
    "made from another recording": lambda place: change(place / "traces" / "manifest.json", settings={"target": "x"}),
    "the result was made from 30 of": lambda place: sorted((place / "traces").glob("*.parquet"))[0].unlink(),
    "not a whole vocabulary": lambda place: drop(place / "traces" / "vocabulary.json", "tokens"),
}


def drop(path: pathlib.Path, key: str) -> None:
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))


def spoil(path: pathlib.Path, **changes) -> None:
    value = json.loads(path.read_text())
    value["cells"][3] |= changes
    path.write_text(json.dumps(value))


def rename_costs(path: pathlib.Path) -> None:
    make_costs(name="other").save(path)


def refused(place: pathlib.Path, *command: object) -> str:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    done = run(*command)
    assert done.exit_code == 2, f"{done.output}\n{done.exception!r}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("speckv: error: "), done.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    return lines[0]


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message, place):
    BAD[message](place)
    assert message in refused(place, *report_command(place, "report", place / "result.json", "--out", place / "x.html"))


def test_a_policy_that_the_result_lacks(place):
    command = report_command(place, "report", place / "result.json", "--out", place / "x.html", "--policy", "svip")
    assert "the result has no policy 'svip'" in refused(place, *command)


def test_what_is_there_is_not_overwritten(place):
    (place / "x.html").write_text("precious")
    (place / "x.png").write_text("precious")
    assert "exists already" in refused(
        place, *report_command(place, "report", place / "result.json", "--out", place / "x.html")
    )
    assert "exists already" in refused(place, "plot", "gap", place / "result.json", "--out", place / "x.png")
    assert "choose one of these endings" in refused(
        place, "plot", "gap", place / "result.json", "--out", place / "x.gif"
    )


def test_a_result_comes_back_as_it_was_written(made, tmp_path):
    result = Comparison.load(made / "result.json")
    (tmp_path / "again.json").write_text(json.dumps(result.to_json()))
    assert Comparison.load(tmp_path / "again.json") == result


def test_tasks_add_up_to_the_whole(made):
    result, rollouts = Comparison.load(made / "result.json"), TraceDataset(made / "traces").load()
    for cell in result.cells:
        mask = np.isin(rollouts.compressions, [cell.compression]) | (cell.compression == "all")
        tokens = {task: rollouts.lengths[mask & (rollouts.tasks == task)].sum() for task in set(rollouts.tasks)}
        parts = [
            c
            for c in result.by_task
            if (c.costs, c.compression, c.policy) == (cell.costs, cell.compression, cell.policy)
        ]
        assert {part.task for part in parts} == set(tokens)
        seconds = sum(tokens[part.task] / part.throughput for part in parts)
        assert seconds == pytest.approx(sum(tokens.values()) / cell.throughput)


def test_a_result_that_compares_with_another_policy(place):
    """And holds out whole tasks: the page says so, and shows the prompts of the one that was held out first."""
    command = report_command(place, "compare", "--hold-out", "task", "--against", "fixed-4", "--json", place / "r.json")
    assert run(*command, "--policy", "confidence:threshold=0.6").exit_code == 0
    done = run(*report_command(place, "report", place / "r.json", "--out", place / "page.html"))
    assert done.exit_code == 0, done.output
    data = page_json((place / "page.html").read_text(encoding="utf-8"))
    assert data["against"] == "fixed-4" and data["settings"]["hold_out"] == "task"
    assert {sequence["task"] for sequence in data["explorer"]["sequences"]} == {"chat"}
    axes = plots.leaderboard(Comparison.load(place / "r.json")).axes
    assert "fixed-4: " in axes[0].get_title()


def test_reliability_known_values():
    found = Reliability.of(np.array([0.05, 0.05, 0.95, 1.0]), np.array([False, True, True, True]))
    assert found.predicted == pytest.approx([0.05, 0.975]) and found.observed == pytest.approx([0.5, 1.0])
    assert found.tokens.tolist() == [2, 2]
    assert found.ece == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)
    assert found.brier == pytest.approx((0.05**2 + 0.95**2 + 0.05**2) / 4)


@given(arrays.arrays(float, st.integers(1, 50), elements=st.floats(0, 1)), st.randoms(use_true_random=False))
def test_reliability_counts_every_token_once(chances, random):
    accepted = np.array([random.random() < 0.5 for _ in chances])
    found = Reliability.of(chances, accepted)
    assert found.tokens.sum() == len(chances)
    assert found.observed @ found.tokens == pytest.approx(accepted.sum())
    assert found.predicted @ found.tokens == pytest.approx(chances.sum())
    assert 0 <= found.ece <= 1 and found.ece**2 <= found.brier + 1e-12


class Coin(Policy):
    """Drafts three tokens and gives each the same chance; online or not."""

    name = "coin"
    features = ("draft_index",)

    def choose_gamma(self, features, state):
        return 3

    def acceptance(self, features):
        return 0.25 * features["draft_index"]  # 0.25, 0.5, 0.75


class CountingCoin(Coin):
    """Keeps a state, under a name that any policy might take."""

    name = "counting-coin"

    def new_state(self, rows):
        return {"row": np.zeros(rows, dtype=np.int64)}

    def observe(self, outcome, state):
        state["row"] += 1
        assert list(state) == ["row"]


class RememberingCoin(Coin):
    name = "remembering-coin"

    def new_memory(self):
        return {"steps": np.zeros(1)}


@pytest.mark.parametrize("policy", [Coin(), CountingCoin(), RememberingCoin()])
def test_chances_meet_what_became_of_their_tokens(policy):
    traces, costs = make_rollouts(prompts=9, budget=20), make_costs()
    found = play([policy], traces, [costs], 3, 0)
    log = replay(make_policy("fixed:gamma=3"), traces.take(found.rows), costs)
    assert found.replays["toy", policy.name].gamma.tolist() == log.gamma.tolist()
    right = traces.run[found.rows][log.sequence, log.position]
    tried = [int(((log.gamma >= n) & (right >= n - 1)).sum()) for n in (1, 2, 3)]
    share = [float((right >= n)[(log.gamma >= n) & (right >= n - 1)].mean()) for n in (1, 2, 3)]
    reliability = found.reliability["toy", policy.name]
    assert reliability.predicted == pytest.approx([0.25, 0.5, 0.75])
    assert reliability.tokens.tolist() == tried and reliability.observed == pytest.approx(share)


def test_a_policy_that_never_drafts_has_no_reliability():
    class Never(Coin):
        name = "never"

        def choose_gamma(self, features, state):
            return 0

    assert play([Never()], make_rollouts(prompts=6, budget=10), [make_costs()], 3, 0).reliability == {}
