"""Logged steps as estimators need them, with what the evaluated policy would have chosen in each."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel, StepCosts
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.evaluation.recording import CHOSEN
from speckv.features import FEATURES, BoolArray, Features, FeatureTracker, FloatArray, IntArray
from speckv.policy import Clairvoyant, Outcome, Policy, as_integers, check_playable, select_rows
from speckv.replaying import known_controller
from speckv.steplogs import StepLog

#: Features that follow from the outcomes of the earlier steps.
DERIVED = ("position", "is_first", "last_gamma", "last_accepted", "running_acceptance")
#: Tokens in front of a step whose context was not logged: where the cost models' ratio is taken, too.
USUAL_CONTEXT = 256


@dataclass(frozen=True)
class Situations:
    """n logged steps of S sequences, at one compression.

    Attributes:
        sequence: (n,) code of the sequence, from 0; sorted.
        chosen: (n,) tokens that were asked for.
        drafted, accepted: (n,) tokens; fewer are drafted than chosen where the text's end left no room.
        wanted: (n,) tokens that the evaluated policy would have asked for.
        propensity: (n,) chance with which the log chose; None if any is unknown.
        seconds: (n, gamma_max + 1) of the step if so many tokens were drafted, the evaluated policy's time included.
        catching_up: (n,) seconds that the policy's step leaves to the next one if all that it drafted is accepted, one
            token or more: the draft has not seen its own last token. They are counted where they are caused.
        played_seconds: (n,) of the step as it was played, in the same terms.
        covariates: (n, k) features before the draft, and in the policy's own steps what it wants, standardised; 0 where
            a value is unknown.
        weight: (n,) how many of the evaluated policy's own steps each stands for.
        replayed: (S, 3) tokens, seconds and steps of the policy on the text that is rebuilt from the log; empty before
            it is replayed.
    """

    sequence: IntArray
    chosen: IntArray
    drafted: IntArray
    accepted: IntArray
    wanted: IntArray
    propensity: FloatArray | None
    seconds: FloatArray
    catching_up: FloatArray
    played_seconds: FloatArray
    covariates: FloatArray
    weight: FloatArray
    replayed: FloatArray

    @property
    def sequences(self) -> int:
        """S."""
        return int(self.sequence[-1]) + 1

    @property
    def gamma_max(self) -> int:
        return int(self.seconds.shape[1]) - 1

    @property
    def agrees(self) -> BoolArray:
        """(n,) whether the evaluated policy would have chosen what was chosen."""
        return np.asarray(self.wanted == self.chosen)

    def take(self, rows: IntArray) -> Self:
        """The steps at `rows`."""
        of_steps: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "replayed"}
        known = {name: column[rows] for name, column in of_steps.items() if column is not None}
        return replace(self, **known)

    def by_sequence(self, *columns: npt.ArrayLike) -> FloatArray:
        """(S, columns) sums of (n,) columns, each step counted by its weight."""
        return np.column_stack(
            [np.bincount(self.sequence, self.weight * np.asarray(column), self.sequences) for column in columns]
        )


def ordered(log: StepLog, rows: BoolArray) -> StepLog:
    """The steps of a log at `rows` (n,), sequence by sequence in the order of their numbers."""
    order = np.flatnonzero(rows)
    order = order[np.lexsort((log.step[order], log.sequence[order]))]
    return StepLog.from_columns({name: values[order] for name, values in log.columns.items()}, log.provenance)


def chosen_gammas(log: StepLog) -> IntArray:
    """(n,) tokens asked for in each step; those drafted where the log does not say it."""
    asked = log.signals.get(CHOSEN, np.full(len(log), np.nan))
    return np.where(asked > log.gamma, np.nan_to_num(asked), log.gamma).astype(np.int64)


def batch_sizes(log: StepLog, costs: CostModel) -> IntArray:
    """(n,) sequences that shared each step; where the log does not say it, as many as the costs are of."""
    stated = log.signals.get("batch_size", np.full(len(log), np.nan))
    return np.where(np.isnan(stated), costs.batch_size, stated).astype(np.int64)


def by_batch_size(sizes: IntArray, costs: CostModel) -> Iterator[tuple[IntArray, CostModel]]:
    """The rows of each batch size in (n,) `sizes`, and the costs of it.

    Raises:
        SpecKVError: the costs were not measured for a size.
    """
    for size in np.unique(sizes).tolist():
        yield np.flatnonzero(sizes == size), costs.at_batch(size)


def check_evaluable(policy: Policy) -> None:
    """Raise SpecKVError if no step log can tell what the policy would do."""
    if isinstance(policy, Clairvoyant) or policy.kind != "before":
        raise SpecKVError(
            f"policy {policy.label!r} does not decide before the step alone, and of what is inside the draft a step "
            "log knows nothing; replay it on a recording with `speckv compare`"
        )
    if policy.online:
        raise SpecKVError(
            f"policy {policy.label!r} learns from its own steps, which the log does not hold; replay it on a recording "
            "with `speckv compare`"
        )


def make_situations(
    log: StepLog, policy: Policy, costs: CostModel, gamma_max: int, measured: bool = False
) -> Situations:
    """What is known of all logged steps; each stands for one of the policy's, which is shown them as its own.

    Args:
        log: at one compression, ordered.
        policy: decides before the step alone, from features in the log; fitted, if it learns.
        costs: how long forwards take; each step is priced as one of a batch of its own size.
        gamma_max: no step of the evaluated policy drafts more.
        measured: whether a step's own seconds, where they were logged, are taken in place of the cost model's.

    Raises:
        SpecKVError: the policy decides inside the draft, learns online, or reads what the log lacks; or the costs were
            not measured for a batch size in the log.
    """
    check_evaluable(policy)
    check_playable(policy, gamma_max)
    _, sequence = np.unique(log.sequence, return_inverse=True)
    known = _known_features(log, costs)
    _check_known(policy, known, len(log))
    seconds, catching_up = _step_seconds(log, known, costs, max(gamma_max, int(log.gamma.max()), 1))
    seconds = seconds + (known_controller(policy, costs) or (0.0, 0.0))[0]
    whole = (log.accepted == log.gamma) & (log.gamma > 0)
    played = seconds[np.arange(len(log)), log.gamma] + catching_up * whole
    if measured and log.seconds is not None:
        played = np.where(np.isnan(log.seconds), played, log.seconds)
        catching_up = np.zeros(len(log))
    wanted, derived = _walk(log, sequence, policy, known, played)
    of_log = {name: column for name, column in (derived | known).items() if name not in {"compression", "cost_ratio"}}
    all_known = log.propensity is not None and not np.isnan(log.propensity).any()
    return Situations(
        sequence=sequence,
        chosen=chosen_gammas(log),
        drafted=log.gamma,
        accepted=log.accepted,
        wanted=np.minimum(wanted, gamma_max),
        propensity=log.propensity if all_known else None,
        seconds=seconds,
        catching_up=catching_up,
        played_seconds=played,
        covariates=standardised(of_log),
        weight=np.ones(len(log)),
        replayed=np.zeros((0, 3)),
    )


def _check_known(policy: Policy, known: dict[str, FloatArray], steps: int) -> None:
    """Raise SpecKVError if the policy reads what the log lacks."""
    if missing := [name for name in policy.features if name not in known and name not in DERIVED]:
        raise SpecKVError(
            f"policy {policy.label!r} reads {missing[0]}, which the log has not; it has {', '.join(sorted(known))}, "
            f"and {', '.join(DERIVED)} follow from its outcomes"
        )
    if gaps := [name for name in policy.features if name in known and np.isnan(known[name]).any()]:
        unknown = int(np.isnan(known[gaps[0]]).sum())
        raise SpecKVError(
            f"policy {policy.label!r} reads {gaps[0]}, which is unknown in {unknown} of the {steps} steps; leave these "
            "out of the log"
        )


def _step_seconds(
    log: StepLog, known: dict[str, FloatArray], costs: CostModel, most: int
) -> tuple[FloatArray, FloatArray]:
    """`seconds` (n, most + 1) and `catching_up` (n,) of `Situations`, the policy's own time left out."""
    lengths = known.get("context_length", np.full(len(log), float(USUAL_CONTEXT)))
    context = np.where(np.isnan(lengths), USUAL_CONTEXT, lengths).astype(np.int64)
    seconds, catching_up, drafts = np.zeros((len(log), most + 1)), np.zeros(len(log)), np.arange(most + 1)
    for rows, model in by_batch_size(batch_sizes(log, costs), costs):
        behind = context[rows]
        step = StepCosts(model, log.compression[:1], most + 2, int(behind.max()))  # type: ignore[index]
        first = np.zeros(len(rows), dtype=np.int64)
        seconds[rows] = step.seconds(first[:, None], behind[:, None], first[:, None] + 1, drafts, drafts)
        catching_up[rows] = step.seconds(first, behind, first + 2, 1, 1) - step.seconds(first, behind, first + 1, 1, 1)
    return seconds, catching_up


def _known_features(log: StepLog, costs: CostModel) -> dict[str, FloatArray]:
    """Features by name that the log holds, (n,) each, and those that follow from its compression."""
    assert log.compression is not None
    stored = str(log.compression[0])
    known = {
        name: column
        for name, column in log.signals.items()
        if name in FEATURES and FEATURES[name].when == "before"
    }  # fmt: skip
    code, ratio = float(list(COMPRESSIONS).index(stored)), np.zeros(len(log))
    for rows, model in by_batch_size(batch_sizes(log, costs), costs):
        ratio[rows] = model.cost_ratio(stored)
    return known | {"compression": np.full(len(log), code), "cost_ratio": ratio}


def _walk(
    log: StepLog, sequence: IntArray, policy: Policy, known: dict[str, FloatArray], seconds: FloatArray
) -> tuple[IntArray, dict[str, FloatArray]]:
    """Follow all sequences step by step, and ask the policy in each.

    It is shown what the log's steps came to, in `seconds` (n,), as if it had played them. What was left out of the log
    is not there: the features that follow from earlier outcomes are those of the steps that are.

    Returns:
        (n,) tokens that it wants, and the derived features by name, (n,) each.
    """
    start = np.searchsorted(sequence, np.arange(sequence[-1] + 1))
    length = np.diff(np.append(start, len(log)))
    if gaps := int((log.step[start + length - 1] != length - 1).sum()):
        warnings.warn(
            f"{gaps} sequences lack steps of theirs: what policies know of the previous step is off there",
            SpecKVWarning,
            stacklevel=2,
        )
    zeros = np.zeros(len(start), dtype=np.int64)
    tracker = FeatureTracker(DERIVED, zeros, zeros, zeros.astype(float))
    derived = {name: np.zeros(len(log)) for name in DERIVED}
    wanted = np.zeros(len(log), dtype=np.int64)
    state, going = policy.new_state(len(start)), np.arange(len(start))
    for number in range(int(length.max())):
        rows = start[going] + number
        now = tracker.before(len(rows))
        for name in DERIVED:
            derived[name][rows] = now[name]
        values = {name: known[name][rows] if name in known else np.array(now[name]) for name in policy.features}
        answer = policy.choose_gamma(Features(values, len(rows), "before"), state)
        wanted[rows] = as_integers(answer, len(rows), f"{policy.name}.choose_gamma")
        if policy.overrides("observe"):
            policy.observe(Outcome(log.gamma[rows], log.accepted[rows], seconds[rows]), state)
        tracker.verified(log.gamma[rows], log.accepted[rows], {}, {})
        left = number + 1 < length[going]
        tracker.select(left)
        state, going = select_rows(state, left), going[left]
    return wanted, derived


def standardised(columns: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
    """(n, k) columns of mean 0 and variance 1; those that never change are left out."""
    kept: list[npt.NDArray[Any]] = []
    for column in columns.values():
        centred = column - np.nanmean(column) if not np.isnan(column).all() else np.zeros(len(column))
        if (spread := np.nanstd(centred)) > 0:
            kept.append(np.nan_to_num(centred / spread))
    return np.column_stack(kept) if kept else np.zeros((len(next(iter(columns.values()))), 0))
