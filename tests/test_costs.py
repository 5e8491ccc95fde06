"""Cost models: tables, files, and files that are none."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.costs import CostModel, StepCosts, Timings
from speckv.errors import SpecKVError

from .synthetic import make_costs, seconds_of, step_seconds

STAIRS = Timings(
    np.array([1, 2, 4, 5, 8]), np.array([16, 64]), np.array([[10.0, 12], [10, 12], [10, 12], [20, 24], [20, 30]])
)


def test_between_measured_points_is_a_straight_line():
    assert STAIRS.at(3, 16) == 10.0
    assert STAIRS.at(1, 40) == 11.0
    assert STAIRS.at(7, 64) == pytest.approx(28.0)
    assert STAIRS.at(7, 40) == pytest.approx((20 + 28) / 2)


def test_beyond_measured_points():
    assert STAIRS.at(11, 64) == pytest.approx(36.0)  # the slope of the last two
    assert STAIRS.at(11, 16) == 20.0
    assert STAIRS.at(1, 0) == 10.0 and STAIRS.at(1, 1000) == 12.0  # the nearest context
    assert Timings(np.array([1]), np.array([8]), np.array([[3.0]])).at(9, 100) == 3.0
    assert STAIRS.at(0, 30) == 0.0


def test_the_staircase_stays():
    assert [STAIRS.at(tokens, 16) for tokens in range(1, 9)] == [10, 10, 10, 10, 20, 20, 20, 20]


@given(
    gaps=st.lists(st.integers(1, 4), max_size=4),
    contexts=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_tables_interpolate(gaps, contexts, data):
    tokens = np.cumsum([1, *gaps])
    flat = data.draw(
        st.lists(st.floats(0.1, 1), min_size=len(tokens) * len(contexts), max_size=len(tokens) * len(contexts))
    )
    # Increasing in tokens, as measured forwards are.
    seconds = np.cumsum(np.reshape(flat, (len(tokens), len(contexts))), axis=0)
    timings = Timings(tokens, np.array(contexts), seconds)
    table = timings.table(20, 50)
    assert table.shape == (21, 51) and not table[0].any()
    expected = [[seconds_of(timings, count, context) for context in range(51)] for count in range(1, 21)]
    np.testing.assert_allclose(table[1:], expected, rtol=1e-9)
    np.testing.assert_allclose(table[np.ix_(tokens, contexts)], seconds)  # measured points are kept


def test_noise_never_extrapolates_to_negative_seconds():
    noisy = Timings(np.array([1, 2]), np.array([64]), np.array([[0.050], [0.049]]))
    assert noisy.at(80, 64) > 0


@given(lag=st.integers(1, 30), forwards=st.integers(0, 8), gamma=st.integers(0, 8), context=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_seconds_of_a_step(lag, forwards, gamma, context):
    costs = make_costs()
    step = StepCosts(costs, np.array(["nf4", "bf16"]), 40, 300)
    got = step.seconds(np.array([0, 1]), np.array([context] * 2), np.array([lag] * 2), forwards, gamma)
    expected = [step_seconds(costs, name, context, lag, forwards, gamma) for name in ("nf4", "bf16")]
    np.testing.assert_allclose(got, expected)


def test_cost_ratio():
    assert make_costs(draft=0.01, verify=0.05).cost_ratio("bf16") == pytest.approx(0.2)
    assert make_costs(draft=0.01, verify=0.05).cost_ratio("nf4") == pytest.approx(0.2 / 1.5)


def test_save_and_load_is_exact(tmp_path):
    spread = Timings(STAIRS.tokens, STAIRS.contexts, STAIRS.seconds, STAIRS.seconds / 7)
    costs = CostModel("toy", spread, {"int8": STAIRS}, 0.1, {"mlp": (1e-5, 2e-6)}, {"source": "made up"})
    costs.save(tmp_path / "costs.json")
    read = CostModel.load(tmp_path / "costs.json")
    assert (read.name, read.overhead, read.controller, read.provenance) == (
        costs.name,
        costs.overhead,
        costs.controller,
        costs.provenance,
    )
    for one, other in ((read.draft, costs.draft), (read.verify["int8"], STAIRS)):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.contexts, other.contexts)
        np.testing.assert_array_equal(one.seconds, other.seconds)
    np.testing.assert_array_equal(read.draft.spread, spread.spread)
    assert read.verify["int8"].spread is None


def change(*path, to=None, drop=False):
    """A function that changes or drops one place of a JSON value."""

    def apply(value):
        for key in path[:-1]:
            value = value[key]
        if drop:
            del value[path[-1]]
        else:
            value[path[-1]] = to

    return apply


BAD = {
    "no draft": change("draft", drop=True),
    "no verify": change("verify", drop=True),
    "no name": change("name", drop=True),
    "no overhead": change("overhead", drop=True),
    "no seconds": change("draft", "seconds", drop=True),
    "no tokens": change("verify", "bf16", "tokens", drop=True),
    "negative seconds": change("draft", "seconds", 0, 0, to=-0.1),
    "zero seconds": change("draft", "seconds", 0, 0, to=0),
    "NaN seconds": change("verify", "bf16", "seconds", 1, 0, to=float("nan")),
    "infinite seconds": change("verify", "bf16", "seconds", 1, 0, to=float("inf")),
    "seconds in words": change("draft", "seconds", 0, 0, to="fast"),
    "a row too short": change("draft", "seconds", 0, to=[0.1]),
    "tokens fall": change("draft", "tokens", 1, to=1),
    "tokens from 2": change("draft", "tokens", 0, to=0),
    "contexts fall": change("draft", "contexts", 1, to=0),
    "verify is a list": change("verify", to=[1]),
    "draft is null": change("draft", to=None),
    "newer": change("schema_version", to=3),
    "no version": change("schema_version", drop=True),
    "foreign": change("format", to="another"),
    "overhead in words": change("overhead", to="little"),
    "controller of one number": change("controller", to={"mlp": [0.1]}),
    "negative overhead": change("overhead", to=-1),
    "NaN overhead": change("overhead", to=float("nan")),
    "negative controller": change("controller", to={"mlp": [-1, 0]}),
    "no batch size": change("batch_size", to=0),
    "a batch of a word": change("batches", to={"many": {}}),
    "a batch without times": change("batches", "2", to={}),
    "a smaller batch": change("batch_size", to=2),
    "batches of other compressions": change("batches", "2", "verify", "nf4", drop=True),
    "a batch size of a half": change("batch_size", to=1.5),
    "another unit": change("unit", to="milliseconds"),
    "no unit": change("unit", drop=True),
    "an unknown compression": lambda value: value.update(verify={"int3": value["draft"]}, batches={}),
    "nothing in verify": lambda value: value.update(verify={}, batches={}),
    "a spread of another shape": change("draft", "spread", to=[0.1]),
    "a spread below 0": change("draft", "spread", to=[[-0.1] * 2] * 17),
    "a negative context": change("draft", "contexts", 0, to=-1),
    "contexts in halves": change("draft", "contexts", 1, to=100.5),
    "tokens in halves": change("draft", "tokens", 1, to=2.5),
    "tokens of truth": change("draft", to={"tokens": [True], "contexts": [0], "seconds": [[0.1]]}),
    "overhead of truth": change("overhead", to=True),
    "overhead as a text": change("overhead", to="0.1"),
    "seconds as texts": change("draft", "seconds", to=[["0.1"] * 2] * 17),
    "controller of three numbers": change("controller", to={"mlp": [0.1, 0.1, 0.1]}),
    "controller of truth": change("controller", to={"mlp": [True, True]}),
    "negative seconds in a batch": change("batches", "2", "draft", "seconds", 0, 0, to=-0.1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(name, tmp_path):
    path = tmp_path / "costs.json"
    dataclasses.replace(make_costs(), batches={2: make_costs()}).save(path)
    value = json.loads(path.read_text())
    BAD[name](value)
    path.write_text(json.dumps(value))
    with pytest.raises(SpecKVError) as caught:
        CostModel.load(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    if name == "newer":
        assert "schema version 3 is newer than 2" in message and "upgrade" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\x80\x04\x95", b"PAR1"])
def test_not_json_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(SpecKVError) as caught:
        CostModel.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(SpecKVError, match="no such file"):
        CostModel.load(tmp_path / "none.json")
    with pytest.raises(SpecKVError, match="not readable as a cost model"):
        CostModel.load(tmp_path)
