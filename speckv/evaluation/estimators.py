"""Estimators of what a policy is worth: tokens and seconds of its steps.

They look at the logged steps that begin where one of the policy's own does, each weighed by how many of these it stands
for (`speckv.evaluation.paths`), and differ in how they come from what was played there to what the policy would have
played. `Path` looks at the replay itself.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from speckv.evaluation.situations import Situations
from speckv.evaluation.survival import HazardModel, drafted_shares, expected_tokens, kaplan_meier, reach, split
from speckv.features import FloatArray


class Estimator(ABC):
    """One way to estimate.

    Attributes:
        name: in tables.
        assumes: when its estimate is right, in words.
        weighs: whether it needs the chance with which the log chose.
        drawn: whether each resample goes with one draw of what the log leaves open, in place of the mean over all: of
            estimators that take so much from each step that a draw matters little, or nothing from steps at all.
    """

    name: ClassVar[str]
    assumes: ClassVar[str]
    weighs: ClassVar[bool] = False
    drawn: ClassVar[bool] = False

    @abstractmethod
    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        """(M, 2) tokens and seconds of a step, for each set of weights.

        Args:
            weights: (M, S) how often each sequence counts; the first row is the estimate itself, the others resamples.
        """


class Match(Estimator):
    """Replay-match: the steps in which the policy would have chosen what was chosen."""

    name = "match"
    assumes = "the log chose at random, in every situation alike"

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        agrees = situations.agrees.astype(float)
        return _means(situations, weights, agrees, of=agrees)


class Ips(Estimator):
    """Inverse propensity scoring: those steps, each counted as often as the log would have had to play it once."""

    name = "ips"
    assumes = "the propensities are right, and above 0 wherever the policy plays"
    weighs = True

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        return _means(situations, weights, inverse_propensities(situations), of=np.ones(len(situations.wanted)))


class Snips(Estimator):
    """Self-normalised: divided by the sum of the weights in place of the number of steps."""

    name = "snips"
    assumes = Ips.assumes
    weighs = True

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        inverse = inverse_propensities(situations)
        return _means(situations, weights, inverse, of=inverse)


class KaplanMeier(Estimator):
    """Direct: one curve of survival for all situations."""

    name = "kaplan-meier"
    assumes = "neither what the log chose nor what the policy chooses depends on the situation"

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        most = situations.gamma_max
        survival = reach(kaplan_meier(situations.accepted, situations.chosen, situations, weights, most))
        wanted = np.eye(most + 1)[situations.wanted]
        counts = weights @ situations.by_sequence(*wanted.T)
        tokens = (counts * np.cumsum(survival, axis=1)).sum(axis=1)
        lagging = (weights @ situations.by_sequence(*(wanted * situations.catching_up[:, None]).T)) * survival
        asked = np.zeros((situations.sequences, most + 1, most + 1))
        np.add.at(asked, (situations.sequence, situations.wanted), situations.seconds * situations.weight[:, None])
        shares = _drafted_shares(situations, weights)
        forwards = np.einsum("ms,sad,mad->m", weights, asked, shares, optimize=True)
        totals = np.column_stack([tokens, forwards + lagging[:, 1:].sum(axis=1)])
        return np.asarray(totals / counts.sum(axis=1)[:, None])


class Hazard(Estimator):
    """Direct: a discrete hazard of acceptance with the features before the draft as covariates."""

    name = "hazard"
    assumes = "the hazard is logistic in the log's features, and these say all that its choice depended on"
    drawn = True

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        model, forwards = HazardModel.fit(situations, weights), _forward_seconds(situations, weights[0])
        sums = np.zeros((len(weights), 3))
        for row, counts in enumerate(weights):
            tokens, lagging = _foretell(model, situations, row)
            sums[row] = counts @ situations.by_sequence(tokens, forwards + lagging, 1.0)
        return sums[:, :2] / sums[:, 2:]


class DoublyRobust(Estimator):
    """The hazard's expectation, corrected by IPS on what it got wrong; it is fitted on other sequences than it
    foretells."""

    name = "doubly-robust"
    assumes = "the propensities are right, or the hazard is"
    weighs = True
    folds = 2

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        tokens, seconds = np.zeros(len(situations.wanted)), np.zeros(len(situations.wanted))
        for part in split(situations.sequences, min(self.folds, situations.sequences)):
            fitted = np.ones((1, situations.sequences))
            if situations.sequences > 1:
                fitted[:, part] = 0.0
            rows = np.isin(situations.sequence, part)
            model = HazardModel.fit(situations, fitted)
            expected, lagging = _foretell(model, situations)
            tokens[rows] = expected[rows]
            seconds[rows] = (_forward_seconds(situations, fitted[0]) + lagging)[rows]
        inverse = inverse_propensities(situations)
        tokens += inverse * (situations.accepted + 1 - tokens)
        seconds += inverse * (situations.played_seconds - seconds)
        sums = weights @ situations.by_sequence(tokens, seconds, 1.0)
        return np.asarray(sums[:, :2] / sums[:, 2:])


class Path(Estimator):
    """The replay of the policy on the text that is rebuilt from the log."""

    name = "path"
    assumes = "the hazard of what is drawn is logistic; of signals the policy sees those of the log's last step"
    drawn = True

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        sums = weights @ situations.replayed
        return np.asarray(sums[:, :2] / sums[:, 2:])


def inverse_propensities(situations: Situations) -> FloatArray:
    """(n,) by how much a step counts: 0 where the policy would have chosen another gamma."""
    assert situations.propensity is not None
    return np.where(situations.agrees, 1 / situations.propensity, 0.0)


def _means(situations: Situations, weights: FloatArray, inverse: FloatArray, of: FloatArray) -> FloatArray:
    """(M, 2) tokens and seconds, each step counted `inverse` (n,) times, over the sums of `of` (n,)."""
    sums = weights @ situations.by_sequence(
        inverse * (situations.accepted + 1), inverse * situations.played_seconds, of
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums[:, :2] / sums[:, 2:])


def _foretell(model: HazardModel, situations: Situations, row: int = 0) -> tuple[FloatArray, FloatArray]:
    """(n,) expected tokens of a step, and (n,) seconds that it leaves to the next one."""
    hazards = model.hazards(situations.covariates, situations.gamma_max, row)
    whole = reach(hazards)[np.arange(len(hazards)), situations.wanted]
    lagging = np.where(situations.wanted > 0, whole * situations.catching_up, 0.0)
    return expected_tokens(hazards, situations.wanted), lagging


def _drafted_shares(situations: Situations, weights: FloatArray) -> FloatArray:
    """(M, A, D) the chance that d tokens are drafted of a asked for: the text's end may leave room for fewer."""
    most = situations.gamma_max
    hazards = kaplan_meier(situations.drafted, situations.chosen, situations, weights, most)
    return drafted_shares(hazards)


def _forward_seconds(situations: Situations, counts: FloatArray) -> FloatArray:
    """(n,) expected seconds of a step, without what it leaves to the next one; `counts` (S,) of the sequences."""
    shares = _drafted_shares(situations, counts[None])[0]
    return np.asarray((shares[situations.wanted] * situations.seconds).sum(axis=1))


ESTIMATORS: tuple[type[Estimator], ...] = (KaplanMeier, Hazard, Match, Ips, Snips, DoublyRobust, Path)
