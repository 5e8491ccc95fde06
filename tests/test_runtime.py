"""A bundle decides as its policy does, for a host that has NumPy and tells it what it sees."""

import itertools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv import runtime
from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import FEATURES
from speckv.replaying import replay
from speckv.runtime import Bundle
from speckv.runtime.models import TRANSFORMS, Inputs, Network, Trees, logit, sigmoid
from speckv.runtime.programs import Additive, Draft, Gate, Program, Score, Table, Threshold, Worth
from speckv.testing.recordings import dense, make_sequences

from .portable import EXACT, FORMS, decode, fitted, recording


def bundle_of(spec: str) -> Bundle:
    return Bundle(spec, fitted(spec).program())


SEQUENCES = make_sequences(prompts=3, gamma_max=8, budget=40, seed=6)


@pytest.mark.parametrize("spec", EXACT)
def test_a_host_that_tells_what_it_sees_decodes_as_the_replay(spec):
    """Features from the tracker of the replay against those that a sequence keeps for itself."""
    policy, (_, costs) = fitted(spec), recording()
    bundle = bundle_of(spec)
    for rollout in SEQUENCES:
        run = replay(policy, dense(rollout, gamma_max=8, budget=40), costs)
        ratio = costs.cost_ratio(rollout.compression)
        sequence = bundle.start(len(rollout.prompt_tokens), rollout.compression, ratio)
        steps = decode(rollout, 8, 40, sequence.choose_gamma, sequence.draw_token, sequence.keep_drafting,
                       sequence.observe)  # fmt: skip
        assert steps == list(zip(run.position, run.gamma, run.accepted, run.forwards, strict=True))


def test_every_portable_policy_of_the_zoo_is_among_them():
    from speckv.plugins import registry

    portable = {name for name, entry in registry().policies.items() if entry.value().unportable is None}
    assert portable == {spec.partition(":")[0] for spec in EXACT}


PROGRAM = """
import sys
from speckv import runtime
sequence = runtime.load({path!r}).start(20, "nf4")
gamma = sequence.choose_gamma()
sequence.draw_token(draft_entropy=.4, draft_top1=.8, draft_top2=.1, draft_top10=.99)
sequence.keep_drafting()
sequence.observe(1, 1, .5, 2.0)
print(gamma, [name for name in ("torch", "sklearn", "scipy", "pyarrow", "pluggy", "onnx") if name in sys.modules])
"""


@pytest.mark.parametrize("spec", ["mlp", "hazard", "boosted-hazard"])
def test_it_needs_numpy_and_safetensors_alone(spec, tmp_path):
    bundle_of(spec).save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(path=str(tmp_path))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    gamma = bundle_of(spec).start(20, "nf4").choose_gamma()
    assert done.stdout == f"{gamma} []\n"


@pytest.mark.parametrize("spec", ["mlp", "neural-hazard"])
def test_threads_share_one_bundle(spec):
    bundle = bundle_of(spec)

    def text(rollout):
        sequence = bundle.start(len(rollout.prompt_tokens), rollout.compression)
        return decode(rollout, 8, 40, sequence.choose_gamma, sequence.draw_token, sequence.keep_drafting,
                      sequence.observe)  # fmt: skip

    alone = [text(rollout) for rollout in SEQUENCES]
    found: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: text(SEQUENCES[n % len(SEQUENCES)])})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(8)] == [alone[n % len(alone)] for n in range(8)]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("spec", ["none", "heuristic", "svip", "p-min", "specdec-pp", "hazard", "mlp", "ppo-stop"])
def test_saved_and_loaded_it_is_the_same(spec, tmp_path):
    bundle = bundle_of(spec)
    bundle.save(tmp_path / "one")
    again = runtime.load(tmp_path / "one")
    again.save(tmp_path / "two")
    for name in ("bundle.json", "bundle.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (again.gammas, again.signals, again.asks) == (bundle.gammas, bundle.signals, bundle.asks)


def test_what_the_json_says(tmp_path):
    bundle_of("mlp").save(tmp_path)
    value = json.loads((tmp_path / "bundle.json").read_text())
    assert (value["format"], value["schema_version"], value["policy"]) == ("speckv-bundle", 1, "mlp")
    assert value["gammas"] == [2, 4, 6, 8] and value["form"] == "choice"
    assert value["features"]["last_mean_entropy"] == {"unit": "nats", "exists": "before"}
    assert set(value["features"]) == set(fitted("mlp").features)
    assert bundle_of("mlp").signals == ("draft_entropy", "draft_top1") and bundle_of("mlp").asks is None
    assert bundle_of("hazard").asks == "both" and bundle_of("confidence").asks == "keep_drafting"
    assert bundle_of("p-min").asks == "draw_token" and bundle_of("p-min").gammas == (0, 1, 2, 3)


DAMAGE = {
    "another format": (lambda value: value | {"format": "x"}, "is not a policy bundle"),
    "a newer one": (lambda value: value | {"schema_version": 2}, "schema version 2 is newer than 1"),
    "no program": (lambda value: value | {"program": None}, "is not a whole policy bundle"),
    "an unknown form": (lambda value: value | {"program": {"form": "eval"}}, "is not a whole policy bundle"),
    "an unknown feature": (
        lambda value: _with(value, "features", "mood"),
        "'mood', which is no feature",
    ),
    "a transform that is none": (
        lambda value: _with(value, "transforms", "exp"),
        "'exp'",
    ),
    "other compressions": (lambda value: value | {"compressions": ["bf16"]}, "it counts compressions as bf16"),
    "a number that is none": (
        lambda value: json.loads(json.dumps(value).replace('"activation": "relu"', '"activation": 7')),
        "activation is 7",
    ),
    "an array that is not there": (
        lambda value: json.loads(json.dumps(value).replace('"gamma.choices"', '"choices"')),
        "'choices'",
    ),
}


def _with(value, part, changed):
    """Of the first input."""
    value["program"]["gamma"]["model"]["inputs"][part][0] = changed
    return value


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_refused_in_one_line(damage, tmp_path):
    change, message = DAMAGE[damage]
    bundle_of("mlp").save(tmp_path)
    path = tmp_path / "bundle.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(SpecKVError) as caught:
        runtime.load(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_arrays_that_do_not_fit_are_found_when_it_is_loaded(tmp_path):
    from safetensors.numpy import load_file, save_file

    bundle_of("mlp").save(tmp_path)
    arrays = load_file(tmp_path / "bundle.safetensors")
    save_file(arrays | {"gamma.model.weights.0": arrays["gamma.model.weights.0"][:-1]}, tmp_path / "bundle.safetensors")
    with pytest.raises(SpecKVError, match="is not a whole policy bundle"):
        runtime.load(tmp_path)


@pytest.mark.parametrize("spec", FORMS)
def test_an_array_that_lost_a_part_or_its_numbers_is_found_when_it_is_loaded(spec, tmp_path):
    """Whichever array it is, along any of its axes: `zip` and `map` would stop at the shorter one."""
    from safetensors.numpy import load_file, save_file

    bundle_of(spec).save(tmp_path)
    arrays = load_file(tmp_path / "bundle.safetensors")
    for name, array in arrays.items():
        damaged = [np.take(array, range(array.shape[axis] - 1), axis) for axis in range(array.ndim)]
        if array.dtype.kind == "f":
            damaged.append(np.where(np.arange(array.size).reshape(array.shape) == array.size - 1, np.nan, array))
        for values in damaged:
            save_file(arrays | {name: np.ascontiguousarray(values)}, tmp_path / "bundle.safetensors")
            with pytest.raises(SpecKVError, match="is not a whole policy bundle"):
                runtime.load(tmp_path)
    save_file(arrays, tmp_path / "bundle.safetensors")
    runtime.load(tmp_path)


def test_a_tree_that_has_no_end_is_refused():
    """A damaged file must not hang a server."""
    one = np.array([1, 0])
    with pytest.raises(ValueError, match="not below its parent"):
        Trees(Inputs(("position",), ("none",)), np.zeros(1, int), np.zeros(2, int), np.zeros(2), one, one,
              np.zeros((2, 1)), np.zeros(1))  # fmt: skip


def test_a_bundle_is_not_overwritten(tmp_path):
    bundle_of("mlp").save(tmp_path)
    with pytest.raises(SpecKVError, match="holds a bundle already"):
        bundle_of("hazard").save(tmp_path)


@pytest.mark.parametrize(("drafted", "gamma"), [(2, 0), (3, 4)])
def test_what_was_not_drawn_is_not_among_the_signals_of_the_last_draft(drafted, gamma):
    highest = Network(Inputs(("last_max_entropy",), ("none",)), (np.ones((1, 1)),), (np.zeros(1),))
    sequence = Bundle("by-hand", Program(Gate(highest, np.full(5, 1.0), cap=4))).start()
    sequence.choose_gamma()
    for entropy in (0.2, 0.3, 5.0):
        sequence.draw_token(draft_entropy=entropy)
    sequence.observe(drafted, 1)
    assert sequence.choose_gamma() == gamma


def test_what_a_host_forgets_to_tell_is_named():
    sequence = bundle_of("hazard").start()
    sequence.choose_gamma()
    with pytest.raises(SpecKVError, match="draft_entropy is missing; draw_token has to be told draft_top1, "):
        sequence.draw_token(draft_top1=0.5, draft_top2=0.2)
    with pytest.raises(SpecKVError, match="target_margin is missing; observe has to be told target_entropy, target_"):
        sequence.observe(0, 0, target_entropy=0.5)
    fixed = bundle_of("fixed").start()
    fixed.choose_gamma()
    assert fixed.draw_token() and fixed.keep_drafting(0.3)
    fixed.observe(1, 1)


@pytest.mark.parametrize(("drafted", "accepted"), [(3, 5), (2, -1), (-1, -1)])
def test_an_outcome_that_cannot_be_is_refused(drafted, accepted):
    sequence = bundle_of("fixed").start()
    before = dict(sequence.values)
    with pytest.raises(SpecKVError, match=f"{accepted} of {drafted} drafted tokens can't have been accepted"):
        sequence.observe(drafted, accepted)
    assert sequence.values == before, "what was refused left no trace"


def test_a_draft_that_was_not_told_whole_is_named():
    """Signals of the last draft are made of all its tokens."""
    sequence = bundle_of("mlp").start()
    gamma = sequence.choose_gamma()
    for told in (0, 1):
        with pytest.raises(SpecKVError, match=f"{gamma} tokens were drafted and draw_token was told of {told}"):
            sequence.observe(gamma, 1)
        sequence.draw_token(draft_entropy=0.2, draft_top1=0.8)
    sequence.observe(2, 1)
    fresh = bundle_of("mlp").start()
    fresh.choose_gamma()
    for _ in range(2):
        fresh.draw_token(draft_entropy=0.2, draft_top1=0.8)
    fresh.observe(2, 1)
    assert sequence._values == fresh._values, "what was refused left no trace"


@pytest.mark.parametrize("probability", [None, 0.9])
def test_a_draft_that_nothing_was_told_of_is_named(probability):
    sequence = bundle_of("confidence").start()
    for _ in range(2):  # what was told of the draft before does not count
        sequence.choose_gamma()
        with pytest.raises(SpecKVError, match="keep_drafting was called before draw_token"):
            sequence.keep_drafting(probability)
        sequence.draw_token(draft_top1=0.9)
        assert sequence.keep_drafting(probability)
        sequence.observe(1, 1)


def test_a_cost_ratio_that_the_policy_reads_is_not_made_up():
    with pytest.raises(SpecKVError, match="cost_ratio is missing; policy 'dqn' reads it"):
        bundle_of("dqn").start(20, "nf4")
    assert bundle_of("dqn").start(20, "nf4", 0.0).choose_gamma() >= 0
    bundle_of("mlp").start(20, "nf4")


@pytest.mark.parametrize(
    ("gamma", "message"),
    [([4] * (len(COMPRESSIONS) - 1), "index out of range"), ([4, -3] + [4] * 9, "drafts -3 tokens")],
)
def test_what_only_one_compression_would_show_is_found_when_it_is_loaded(gamma, message, tmp_path):
    Bundle("by-hand", Program(Table(np.array(gamma)))).save(tmp_path)
    with pytest.raises(SpecKVError, match=message):
        runtime.load(tmp_path)


def test_tables_that_only_a_long_draft_would_leave_are_refused():
    half = Network(Inputs(("draft_top1",), ("none",)), (np.zeros((1, 1)),), (np.full(1, 0.5),))
    size = len(COMPRESSIONS)
    with pytest.raises(ValueError, match="tables of a worth do not fit together"):
        Worth(half, half, np.ones(3), np.zeros((size, 3, 3)), np.zeros((size, 4)))


def test_a_sequence_of_an_unknown_compression_is_refused():
    with pytest.raises(SpecKVError, match="compression 'int3' is unknown"):
        bundle_of("mlp").start(3, "int3")


numbers = st.floats(-3, 3, width=32)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_network_is_what_numpy_says(data):
    width, hidden, out = (data.draw(st.integers(1, 4)) for _ in range(3))
    layers = data.draw(st.integers(1, 3))
    sizes = [width, *[hidden] * (layers - 1), out]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    weights = tuple(random.normal(size=pair) for pair in itertools.pairwise(sizes))
    biases = tuple(random.normal(size=size) for size in sizes[1:])
    activation = data.draw(st.sampled_from(["relu", "tanh"]))
    output = data.draw(st.sampled_from(["linear", "logistic", "unit"]))
    x = np.array(data.draw(st.lists(numbers, min_size=width, max_size=width)))
    names = tuple(FEATURES)[:width]
    network = Network(Inputs(names, ("none",) * width), weights, biases, activation, output)
    expected = x
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        expected = expected @ weight + bias
        if number < layers - 1:
            expected = np.maximum(expected, 0) if activation == "relu" else np.tanh(expected)
    expected = {"linear": expected, "logistic": 1 / (1 + np.exp(-expected)), "unit": np.clip(expected, 0, 1)}[output]
    assert np.allclose(network.of(dict(zip(names, x.tolist(), strict=True))), expected)
    assert network.outputs == out


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(numbers, min_size=2, max_size=2))
def test_trees_are_what_scikit_learn_says(seed, x):
    from sklearn.tree import DecisionTreeRegressor

    random = np.random.default_rng(seed)
    inputs = random.normal(size=(60, 2)).astype(np.float32)
    grown = [DecisionTreeRegressor(max_depth=3, random_state=seed).fit(inputs, random.normal(size=(60, 2)))
             for _ in range(2)]  # fmt: skip
    parts = [tree.tree_ for tree in grown]
    starts = np.cumsum([0, parts[0].node_count])
    nodes = np.arange(sum(part.node_count for part in parts))
    leaf = np.concatenate([part.children_left < 0 for part in parts])

    def children(side):
        moved = np.concatenate([getattr(part, side) + start for part, start in zip(parts, starts, strict=True)])
        return np.where(leaf, nodes, moved)

    trees = Trees(
        Inputs(("position", "target_margin"), ("none", "none")),
        root=starts,
        feature=np.where(leaf, 0, np.concatenate([part.feature for part in parts])),
        threshold=np.concatenate([part.threshold for part in parts]),
        left=children("children_left"),
        right=children("children_right"),
        value=np.concatenate([part.value[:, :, 0] for part in parts]),
        start=np.array([0.5, -0.5]),
    )
    one, two = (tree.predict(np.array([x], dtype=np.float32))[0] for tree in grown)
    assert np.allclose(trees.of({"position": x[0], "target_margin": x[1]}), one + two + (0.5, -0.5))


def test_transforms_by_hand():
    inputs = Inputs(
        ("draft_top1", "draft_entropy", "target_margin", "draft_index", "compression", "compression"),
        ("logit", "sqrt", "log1p", "log", "=1", "=2"),
    )
    values = {"draft_top1": 0.8, "draft_entropy": 0.25, "target_margin": np.e - 1, "draft_index": 1, "compression": 2}
    assert inputs.of(values) == pytest.approx([np.log(4), 0.5, 1.0, 0.0, 0.0, 1.0])
    assert logit(0) == pytest.approx(np.log(1e-4 / (1 - 1e-4))) and logit(1) == pytest.approx(-logit(0))
    assert sigmoid(0) == 0.5 and sigmoid(-1e9) < 1e-200 and sigmoid(1e9) == 1.0


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rounding_below_the_range_of_a_signal_stops_no_host(transform):
    inputs = Inputs(("draft_entropy",), (transform,))
    assert np.isfinite(inputs.of({"draft_entropy": -1e-8})).all() and np.isfinite(inputs.of({"draft_entropy": 0})).all()


def test_rules_by_hand():
    additive = Additive(start=5, up=2, down=1, smallest=1, largest=6)
    seen = [{"is_first": 1.0, "last_gamma": 0, "last_accepted": 0}, *(
        {"is_first": 0.0, "last_gamma": gamma, "last_accepted": accepted}
        for gamma, accepted in [(5, 5), (4, 4), (4, 3), (1, 0), (0, 0)]
    )]  # fmt: skip
    assert [additive.choose(values) for values in seen] == [5, 6, 6, 3, 1, 2]
    assert additive.gammas == (1, 2, 3, 4, 5, 6)

    kept = Threshold("draft_top1", np.array([0.5]), least=2)
    drawn = Threshold("draft_entropy", np.array([1.0]), above=False, drawn=False, least=1)
    at = {"compression": 0.0, "draft_entropy": 1.5, "draft_top1": 0.4}
    assert [kept.keeps(at | {"draft_index": index}, Draft()) for index in (1, 2)] == [True, False]
    assert [drawn.draws(at | {"draft_index": index}, Draft()) for index in (1, 2)] == [True, False]
    assert kept.draws(at, Draft()) and drawn.keeps(at, Draft())
    assert kept.keeps(at | {"draft_top1": 0.5, "draft_index": 9}, Draft())

    half = Network(Inputs(("draft_top1",), ("none",)), (np.ones((1, 1)),), (np.zeros(1),))
    product, draft = Score(half, np.array([0.5]), cumulative=True), Draft()
    assert [product.keeps(at | {"draft_top1": p, "draft_index": 3}, draft) for p in (0.8, 0.7, 1.0)] == [
        True, True, True,
    ]  # fmt: skip
    assert draft.survival == pytest.approx(0.56)
    assert not product.keeps(at | {"draft_top1": 0.8, "draft_index": 4}, draft)
    assert not Score(half, np.array([0.5]), strict=True).keeps(at | {"draft_top1": 0.5, "draft_index": 1}, Draft())


def test_worth_by_hand():
    """Survival .8, the next one .5: two more bring .8 * .5 * 1.6 = .64 for .6, one more .4 for .5."""
    chance = Network(Inputs(("draft_top1",), ("none",)), (np.ones((1, 1)),), (np.zeros(1),))
    half = Network(Inputs(("draft_top1",), ("none",)), (np.zeros((1, 1)),), (np.full(1, 0.5),))
    price = np.full((1, 3, 2), np.inf)
    price[0, 1] = [0.5, np.inf]
    price[0, 0] = price[0, 1] = [0.5, 0.6]
    rule = Worth(chance, half, np.array([1.0, 1.6]), price, np.array([[0.0, 0.3, 0.85]]))
    draft = Draft()
    assert rule.draws({"compression": 0.0, "draft_index": 1, "draft_top1": 0.8}, draft)
    assert rule.keeps({}, draft) and draft.survival == 0.8
    # Behind the second there is no room; its survival of .8 is less than its place costs.
    assert not rule.draws({"compression": 0.0, "draft_index": 2, "draft_top1": 1.0}, draft)
    assert not rule.keeps({}, draft)
    assert Program(Table(np.array([2])), rule).gammas == (0, 1, 2)
