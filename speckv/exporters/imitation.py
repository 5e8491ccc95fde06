"""Decision trees that imitate a policy without a portable form."""

import copy
from collections.abc import Collection
from typing import Any

import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.features import FEATURES, TOKEN_SIGNALS, FloatArray, IntArray
from speckv.policy import Policy
from speckv.replaying import Replay, replay
from speckv.runtime.models import Inputs, Trees
from speckv.runtime.programs import Choice, GammaRule, Program, Score, Table
from speckv.traces import Rollouts

LEAVES, LEAST_SAMPLES = 32, 10


def imitate(
    policy: Policy, traces: Rollouts, costs: CostModel, observes: Collection[str], inside: bool = True
) -> Program:
    """A portable policy that decides like `policy`, as far as a small tree can tell from what a decoder shows.

    It learns from a replay alone: a step's gamma, and of each token of a draft whether another one followed.

    Args:
        policy: fitted, if it learns. It is left as it is.
        traces: what to imitate it on.
        observes: the features that may be looked at.
        inside: whether a draft may be stopped; if not, gamma has to tell where the policy would have.
    """
    before = tuple(name for name in FEATURES if name in observes and FEATURES[name].when == "before")
    run = replay(copy.deepcopy(policy), traces, costs, controller=(0.0, 0.0), features=before)
    room = traces.limit[run.sequence, run.position]
    known = np.column_stack([run.features[name] for name in before])
    if policy.kind == "before" or not inside:
        free = run.gamma < room  # where the text ends, the policy's own choice is not seen
        rows = free if free.any() else np.ones(len(room), dtype=bool)
        return Program(_choice(before, known[rows], run.gamma[rows]))
    if not run.gamma.any():
        return Program(Table(np.zeros(len(COMPRESSIONS))))
    codes = {name: code for code, name in enumerate(COMPRESSIONS)}
    compression = np.array([codes[name] for name in traces.compressions])[run.sequence]
    cap = np.zeros(len(COMPRESSIONS), dtype=np.int64)
    np.maximum.at(cap, compression, run.gamma)
    return Program(_start(before, known, run, room, cap), _stop(policy, before, known, run, room, traces, observes))


def _start(before: tuple[str, ...], known: FloatArray, run: Replay, room: IntArray, cap: IntArray) -> GammaRule:
    """Whether to draft at all; if so, what stops the draft is another rule."""
    started = run.forwards[room > 0] > 0
    return Table(cap) if started.all() else _choice(before, known[room > 0], np.where(started, cap.max(), 0))


def _choice(before: tuple[str, ...], known: FloatArray, gamma: IntArray) -> Choice:
    model, classes = _grow(before, known, gamma)
    return Choice(classes, model, np.ones(len(classes)), np.zeros((len(COMPRESSIONS), len(classes))))


def _stop(
    policy: Policy,
    before: tuple[str, ...],
    known: FloatArray,
    run: Replay,
    room: IntArray,
    traces: Rollouts,
    observes: Collection[str],
) -> Score:
    """What stops a draft, before or behind one of its tokens, wherever the policy does."""
    drawn = policy.overrides("keep_drafting")
    token = tuple(name for name in TOKEN_SIGNALS if name in observes and (drawn or FEATURES[name].when != "drawn"))
    rows, followed = [], []
    for index in range(1, int(run.forwards.max()) + 1):
        asked = (run.gamma >= index) & (room > index) if drawn else run.forwards >= index
        step = np.flatnonzero(asked)
        signals = [
            traces.drafted_signal(TOKEN_SIGNALS[name], run.sequence[step], run.position[step], index - 1)
            for name in token
        ]
        rows.append(np.column_stack([known[step], np.full(len(step), index), *signals]))
        followed.append((run.gamma[step] >= index + drawn).astype(np.int64))
    model, classes = _grow((*before, "draft_index", *token), np.concatenate(rows), np.concatenate(followed))
    share = model.value[:, classes == 1].sum(axis=1, keepdims=True)
    number = Trees(
        model.inputs, model.root, model.feature, model.threshold, model.left, model.right, share, np.zeros(1)
    )
    return Score(number, np.full(len(COMPRESSIONS), 0.5), drawn=drawn)


def _grow(names: tuple[str, ...], inputs: FloatArray, labels: IntArray) -> tuple[Trees, IntArray]:
    """A tree whose leaves hold the share of each class, and the classes."""
    from sklearn.tree import DecisionTreeClassifier

    least = min(LEAST_SAMPLES, len(labels))
    grown: Any = DecisionTreeClassifier(max_leaf_nodes=LEAVES, min_samples_leaf=least, random_state=0)
    grown.fit(inputs, labels)
    tree, nodes = grown.tree_, np.arange(grown.tree_.node_count)
    leaf = tree.children_left < 0
    model = Trees(
        Inputs(names, ("none",) * len(names)),
        root=np.zeros(1, dtype=np.int64),
        feature=np.where(leaf, 0, tree.feature),
        threshold=np.where(leaf, 0.0, tree.threshold),
        left=np.where(leaf, nodes, tree.children_left),
        right=np.where(leaf, nodes, tree.children_right),
        value=tree.value[:, 0, :],
        start=np.zeros(tree.value.shape[2]),
    )
    return model, grown.classes_.astype(np.int64)
