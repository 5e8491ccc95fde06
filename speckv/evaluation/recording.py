"""Step logs of what was recorded as rollouts: what a production decoder would have logged, with the truth at hand."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.comparison import folds_of
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FEATURES, BoolArray
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.steplogs import StepLog, concatenate
from speckv.traces import Rollouts

#: The signal of a log that says how many tokens were asked for, where the text's end may have left room for fewer.
CHOSEN = "chosen"
#: What a log keeps of the moment before each step. A cost ratio belongs to the machine, the rest stands in columns.
BEFORE = tuple(
    name
    for name, feature in FEATURES.items()
    if feature.when == "before" and name not in {"compression", "cost_ratio", "batch_size"}
)


def names_of(traces: Rollouts) -> npt.NDArray[np.str_]:
    """(S,) what the sequences are called in the logs of their replays."""
    return np.array([f"{prompt} at {stored}" for prompt, stored in zip(traces.ids, traces.compressions, strict=True)])


def to_steps(policy: Policy, traces: Rollouts, costs: CostModel, features: Sequence[str] = BEFORE) -> StepLog:
    """Replay a policy on a recording and log its steps, as a decoder in production would.

    Args:
        policy: fitted, if it learns. It is left as it is. The propensities are those that it states.
        traces: what was recorded.
        costs: how long forwards take; the seconds of the log are this model's.
        features: names of features before the draft to be logged as signals; of a batch its size is one in any case.

    Raises:
        SpecKVError: as of `replay`.
    """
    if costs.batch_size > 1:
        features = [*dict.fromkeys([*features, "batch_size"])]
    run = replay(copy.deepcopy(policy), traces, costs, features=features)
    first = np.searchsorted(run.sequence, run.sequence)
    chosen = np.minimum(run.chosen, traces.gamma_max).astype(float)
    before = policy.kind == "before"  # one that stops a draft chooses how much to draft there
    return StepLog(
        sequence=names_of(traces)[run.sequence],
        step=np.arange(len(first)) - first,
        gamma=run.gamma,
        accepted=run.accepted,
        seconds=run.seconds,
        propensity=run.propensity if before else None,
        compression=traces.compressions[run.sequence],
        task=traces.tasks[run.sequence],
        signals=run.features | ({CHOSEN: chosen} if before else {}),
        provenance={"source": "replayed", "policy": repr(policy), "costs": costs.name}
        | {"traces": traces.manifest.settings},
    )


def to_held_out_steps(policy: Policy, traces: Rollouts, costs: CostModel, folds: int = 5) -> StepLog:
    """`to_steps`, where every prompt is played by a policy that was fitted to the others, if it learns from them.

    Lots are drawn by the row in a fold: in logs of policies that learn and draw lots, up to `folds` sequences share
    theirs.

    Args:
        policy: to fit; it is left as it is.
        traces, costs: as of `to_steps`.
        folds: of prompts; as many as there are prompts, if they are fewer.

    Raises:
        SpecKVError: the policy learns, and the traces hold one prompt only; or as of `to_steps`.
    """

    def fitted_to(rows: BoolArray) -> Policy:
        return copy.deepcopy(policy).forget().fit(traces.take(rows), costs)

    every = np.ones(len(traces), dtype=bool)
    if type(policy).fit is Policy.fit:
        return to_steps(fitted_to(every), traces, costs)
    prompts = len(np.unique(traces.ids))
    if prompts == 1:
        raise SpecKVError(
            f"policy {policy.label!r} learns, and the traces hold one prompt only: it can't be fitted to others than "
            "that"
        )
    fold_of = folds_of(traces, min(folds, prompts), seed=0)
    held_out = [fold_of == fold for fold in range(fold_of.max() + 1)]
    players = [fitted_to(~rows) for rows in held_out]
    if all(_same(player.fitted, players[0].fitted) for player in players):  # a wrapper around one that learns nothing
        return to_steps(players[0], traces, costs)
    logs = [to_steps(player, traces.take(rows), costs) for player, rows in zip(players, held_out, strict=True)]
    columns = concatenate([log.columns for log in logs])
    return StepLog.from_columns(columns, logs[0].provenance | {"fitted to": f"the other prompts, in {len(logs)} folds"})


def _same(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def join(logs: Mapping[str, StepLog]) -> StepLog:
    """One log of several, each under a name that its sequences then bear. What one of them lacks is unknown there.

    Propensities stay only if every log drew lots: steps of a policy that never does say nothing of the gammas that it
    did not choose, so that weights by propensity would not average 1.
    """
    if len(logs) == 1:
        return next(iter(logs.values()))
    columns = concatenate([log.columns for log in logs.values()])
    if not all(log.propensity is not None and (log.propensity < 1).any() for log in logs.values()):
        columns.pop("propensity", None)
    columns["sequence"] = np.array([f"{of}, {name}" for name, log in logs.items() for of in log.sequence.tolist()])
    return StepLog.from_columns(columns, {"logs": {name: log.provenance for name, log in logs.items()}})
