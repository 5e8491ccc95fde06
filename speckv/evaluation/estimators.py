"""Estimators of what a policy is worth: tokens and seconds of its steps.

They look at the logged steps that begin where one of the policy's own does, each weighed by how many of these it stands
for (`speckv.evaluation.paths`), and differ in how they come from what was played there to what the policy would have
played. `Path` looks at the replay itself.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
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
        draws: of what the log leaves open, with how many each resample goes. With all of them an interval would know
            nothing of their chances, which are estimates, too. With one it holds all of the noise that a mean is rid
            of: little, where everything is drawn, and too much, where a draw says which logged steps count.
    """

    name: ClassVar[str]
    assumes: ClassVar[str]
    weighs: ClassVar[bool] = False
    draws: ClassVar[int] = 2

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
    """Direct: one curve of survival for the situations in which the policy chooses alike."""

    name = "kaplan-meier"
    assumes = "what the log chose does not depend on the situation, among those in which the policy chooses alike"

    def estimate(self, situations: Situations, weights: FloatArray) -> FloatArray:
        most, sums = situations.gamma_max, np.zeros((len(weights), 3))
        all_alike = kaplan_meier(situations.accepted, situations.chosen, situations, weights, most)
        shares = _drafted_shares(situations, weights)
        for wanted in np.unique(situations.wanted).tolist():
            part = replace(situations, weight=np.where(situations.wanted == wanted, situations.weight, 0.0))
            survival = reach(kaplan_meier(part.accepted, part.chosen, part, weights, most, prior=all_alike))
            steps, lagging = (weights @ part.by_sequence(1.0, part.catching_up * (wanted > 0))).T
            forwards = weights @ part.by_sequence(*part.seconds[:, : most + 1].T)
            tokens = steps * survival[:, : wanted + 1].sum(axis=1)
            seconds = (forwards * shares[:, wanted]).sum(axis=1) + lagging * survival[:, wanted]
            sums += np.column_stack([tokens, seconds, steps])
        return np.asarray(sums[:, :2] / sums[:, 2:])


class Hazard(Estimator):
    """Direct: a discrete hazard of acceptance with the features before the draft, and what the policy wants, as
    covariates."""

    name = "hazard"
    assumes = "the hazard is logistic in the log's features, and these say all that its choice depended on"

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
    draws = 1

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
