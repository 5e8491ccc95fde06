"""The evaluation of a policy on a step log: every estimate with its interval, and how far the log carries it."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from speckv.costs import CostModel, fit_costs_to_log
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.evaluation.estimators import ESTIMATORS, Estimator, Ips, inverse_propensities
from speckv.evaluation.paths import Paths
from speckv.evaluation.situations import Situations, check_evaluable, chosen_gammas, make_situations, ordered
from speckv.features import FloatArray
from speckv.policy import Policy
from speckv.steplogs import StepLog

#: Resamples of an interval, and texts that are drawn where the log leaves them open.
RESAMPLES, DRAWS = 999, 10
LEVEL = 0.95
#: Fewer steps than these tell little, and of fewer sequences intervals are too narrow, whatever they say.
FEW, FEW_SEQUENCES = 50, 20


@dataclass(frozen=True)
class Estimate:
    """What one estimator says of a policy.

    Attributes:
        estimator: its name.
        throughput: expected committed tokens of a step over its expected seconds, tokens a second.
        interval: of it, 95 %: percentiles of a bootstrap by sequence; None if the log holds only one.
        tokens_per_step, tokens_interval: the same of the tokens alone.
        assumes: when it is right, in words.
    """

    estimator: str
    throughput: float
    interval: tuple[float, float] | None
    tokens_per_step: float
    tokens_interval: tuple[float, float] | None
    assumes: str


@dataclass(frozen=True)
class Evaluation:
    """A policy on the steps of a log at one compression.

    Attributes:
        policy, compression, costs: names.
        estimates: one an estimator; those that the log can't support are missing.
        logged: tokens a second of the log's own steps, in the same seconds.
        steps, sequences: of the log.
        agreement: share of the policy's steps in which the log chose what the policy chooses.
        effective_steps: (sum of weights)^2 / sum of squared weights: how many steps played by the policy itself the
            weighted ones are worth; None without propensities.
        warnings: what should make one doubt.
    """

    policy: str
    compression: str
    costs: str
    estimates: list[Estimate]
    logged: float
    steps: int
    sequences: int
    agreement: float
    effective_steps: float | None
    warnings: list[str]

    def of(self, estimator: str) -> Estimate:
        """The estimate of that estimator. Raises KeyError if the log can't support it."""
        return {estimate.estimator: estimate for estimate in self.estimates}[estimator]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    policy: Policy,
    log: StepLog,
    costs: CostModel | None = None,
    gamma_max: int | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    draws: int = DRAWS,
) -> list[Evaluation]:
    """Estimate from a step log which throughput a policy reaches by itself, at each compression in the log.

    The interval is a percentile bootstrap over sequences: steps of one text resemble each other. Models of acceptance
    are fitted anew in each resample (the hazard by one Newton step), those of the doubly robust estimator once.
    What the log leaves open of the text is drawn several times.

    Args:
        policy: decides before the step alone, from features in the log; fitted, if it learns.
        log: with the compression of every step.
        costs: how long forwards take, in a batch of each step's own size if the log has the signal `batch_size`; None
            takes the log's own seconds, and a cost model that is fitted to them.
        gamma_max: no step of the evaluated policy drafts more; by default the most that the log asked for.
        seed: of resampling.
        resamples: of each interval.
        draws: of what the log leaves open.

    Raises:
        SpecKVError: the log lacks compressions, or seconds where no costs are given; or as of `make_situations`.
    """
    if not len(log):
        raise SpecKVError("the step log holds no step")
    if log.compression is None or (log.compression == "").any():
        raise SpecKVError("the log does not say the target's compression of every step; import it again with that")
    check_evaluable(policy)
    model = costs or fit_costs_to_log(log, "the log's own seconds", "the evaluated log")
    most = int(chosen_gammas(log).max()) if gamma_max is None else gamma_max
    found = []
    for stored in np.unique(log.compression):
        part = ordered(log, log.compression == stored)
        situations = make_situations(part, policy, model, most, measured=costs is None)
        counts = _resampled(situations.sequences, resamples, seed)
        paths, random = Paths(part, situations, most), np.random.default_rng([seed, 1])
        played = [paths.play(policy, model, counts[min(draw, resamples)], random) for draw in range(draws)]
        estimates = [
            _estimate(kind.name, kind.assumes, _over_draws(kind(), played, counts), situations.sequences)
            for kind in ESTIMATORS
            if not kind.weighs or situations.propensity is not None
        ]
        found.append(_evaluation(policy.label, str(stored), model.name, situations, played[0], estimates))
    return found


def _over_draws(estimator: Estimator, played: Sequence[Situations], counts: FloatArray) -> FloatArray:
    """(M, 2) tokens and seconds of a step: the estimate is the mean over all draws of what the log leaves open, each
    resample goes with one or two of them, as the estimator says."""
    values, resamples = np.zeros((len(counts), 2)), np.arange(1, len(counts))
    goes_with = min(estimator.draws, len(played))
    for draw, situations in enumerate(played):
        rows = resamples[(resamples - draw) % len(played) < goes_with]
        found = estimator.estimate(situations, counts[np.append(0, rows)])
        values[0] += found[0] / len(played)
        values[rows] += found[1:] / goes_with
    return values


def _evaluation(
    policy: str, compression: str, costs: str, log: Situations, own: Situations, estimates: list[Estimate]
) -> Evaluation:
    """The estimates that came to a number, and how far the log carries them; doubts are warnings, too.

    `own` are those of the steps in `log` that begin where the policy begins one.
    """
    tokens, seconds = log.by_sequence(log.accepted + 1, log.played_seconds).sum(axis=0)
    effective = weight = None
    if own.propensity is not None:
        times = inverse_propensities(own) * own.weight
        effective = float(times.sum() ** 2 / max((times**2).sum(), 1e-300))
        weight = _wrong_weight(own)
    doubts = _doubts(log, own, effective, weight)
    for doubt in doubts:
        warnings.warn(f"{policy} at {compression}: {doubt}", SpecKVWarning, stacklevel=3)
    return Evaluation(
        policy=policy,
        compression=compression,
        costs=costs,
        estimates=[
            estimate
            for estimate in estimates
            if np.isfinite(estimate.throughput) and not (weight is not None and estimate.estimator == Ips.name)
        ],
        logged=float(tokens / seconds),
        steps=len(log.chosen),
        sequences=log.sequences,
        agreement=float(np.average(own.agrees, weights=own.weight)),
        effective_steps=effective,
        warnings=doubts,
    )


def _resampled(sequences: int, resamples: int, seed: int) -> FloatArray:
    """(1 + resamples, S) how often each sequence counts: once in the first row."""
    random = np.random.default_rng(seed)
    drawn = random.multinomial(sequences, np.full(sequences, 1 / sequences), size=resamples)
    return np.vstack([np.ones(sequences), drawn]).astype(float)


def _estimate(name: str, assumes: str, values: FloatArray, sequences: int) -> Estimate:
    """From (M, 2) tokens and seconds of a step, the estimate itself first; one sequence can't be resampled."""
    with np.errstate(invalid="ignore"):
        both = np.column_stack([values[:, 0] / values[:, 1], values[:, 0]])
    known = both[1:][np.isfinite(both[1:]).all(axis=1)]
    intervals: list[tuple[float, float] | None] = [None, None]
    if sequences > 1 and len(known):
        tail = _tail(sequences)
        intervals = [(float(low), float(high)) for low, high in np.quantile(known, [tail, 1 - tail], axis=0).T]
    return Estimate(
        name,
        throughput=float(both[0, 0]),
        interval=intervals[0],
        tokens_per_step=float(both[0, 1]),
        tokens_interval=intervals[1],
        assumes=assumes,
    )


def _tail(sequences: int) -> float:
    """The share of resamples to leave out at either end, smaller the fewer sequences there are: percentiles of the
    bootstrap are too narrow as a normal distribution is in place of Student's, and by the root of (n - 1) / n.

    Hesterberg, "What teachers should know about the bootstrap", The American Statistician 69 (2015), expanded
    percentiles.
    """
    from scipy.special import ndtr, stdtrit

    quantile = stdtrit(sequences - 1, (1 + LEVEL) / 2) * np.sqrt(sequences / (sequences - 1))
    return float(ndtr(-quantile))


def _wrong_weight(situations: Situations) -> float | None:
    """The mean of the inverse propensities, if it is further from 1 than chance takes it. Few sequences can't tell."""
    if situations.sequences < FEW_SEQUENCES:
        return None
    sums = situations.by_sequence(inverse_propensities(situations), 1.0)
    mean = float(sums[:, 0].sum() / sums[:, 1].sum())
    error = np.sqrt(((sums[:, 0] - mean * sums[:, 1]) ** 2).sum()) / sums[:, 1].sum()
    return mean if abs(mean - 1) > max(4 * error, 0.01) else None


def _doubts(log: Situations, own: Situations, effective: float | None, weight: float | None) -> list[str]:
    doubts = []
    if log.sequences == 1:
        doubts.append(
            "the log holds one sequence, which no interval can be told from: give several logs, or longer ones"
        )
    elif log.sequences < FEW_SEQUENCES:
        doubts.append(f"the log holds only {log.sequences} sequences: the intervals are too narrow")
    chosen, wanted = set(log.chosen.tolist()), own.wanted
    if missing := sorted(set(wanted.tolist()) - chosen):
        share = np.average(np.isin(wanted, missing), weights=own.weight)
        doubts.append(
            f"the log never asked for {_listed(missing)} tokens, which the policy wants in {share:.0%} of the steps: "
            "weighted estimates lack them, the others go by what shorter or longer drafts showed"
        )
    if (deepest := int(wanted.max())) > max(chosen):
        doubts.append(f"no step asked for more than {max(chosen)} tokens: {deepest} is beyond what the log knows")
    if (agreeing := int(own.agrees.sum())) < FEW:
        doubts.append(f"only {agreeing} steps chose what the policy wants: do not rely on match, ips and snips")
    if effective is None:
        doubts.append(
            "the log holds no propensities, or not all: ips, snips and doubly-robust are left out; log with `explore`"
        )
        return doubts
    if effective < FEW:
        doubts.append(f"the weighted steps are worth {effective:.0f}: ips, snips and doubly-robust are rough")
    if weight is not None:
        doubts.append(
            f"the weights average {weight:.2f} and not 1, so that ips is left out: the propensities are wrong, or the "
            "log could not play what the policy wants everywhere"
        )
    return doubts


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
