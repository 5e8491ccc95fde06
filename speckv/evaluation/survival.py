"""Survival of drafted tokens: how likely so many of them are accepted, from steps that drafted fewer.

A step that accepted all it drafted is right-censored there. The hazards below are unbiased if what a step drafted does
not depend on what would have been accepted, given (for the second one) the covariates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speckv.evaluation.situations import Situations
from speckv.features import FloatArray, IntArray


def reach(hazards: FloatArray) -> FloatArray:
    """(..., J + 1) the chance to get to each depth from 0, of (..., J) chances to take the next token."""
    return np.concatenate([np.ones((*hazards.shape[:-1], 1)), np.cumprod(hazards, axis=-1)], axis=-1)


def kaplan_meier(
    count: IntArray,
    chosen: IntArray,
    situations: Situations,
    weights: FloatArray,
    depth: int,
    prior: FloatArray | None = None,
) -> FloatArray:
    """Kaplan-Meier: the chance to get from depth j - 1 to j, for j = 1 to `depth`.

    Args:
        count: (n,) how far each step got: its accepted tokens, or its drafted ones.
        chosen: (n,) how far it could have got.
        weights: (M, S) how often each sequence counts.
        prior: (M, depth) chances that count as much as one step at each depth.

    Returns:
        (M, depth). Where no step went so deep the chance of the depth before is taken.
    """
    depths = np.arange(1, depth + 1)
    at_risk = (chosen[:, None] >= depths) & (count[:, None] >= depths - 1)
    tried, taken = (
        weights @ situations.by_sequence(*columns.T) for columns in (at_risk, at_risk & (count[:, None] >= depths))
    )
    if prior is not None:
        tried, taken = tried + 1, taken + prior
    with np.errstate(invalid="ignore"):
        hazards = np.asarray(taken / tried)
    for index in range(depth):
        before = hazards[:, index - 1] if index else np.ones(len(hazards))
        hazards[:, index] = np.where(tried[:, index] > 0, hazards[:, index], before)
    return hazards


#: Size of the inputs that stand for a depth: the larger they are, the less their coefficients are penalised.
_INTERCEPT = 10.0


@dataclass(frozen=True)
class HazardModel:
    """A logistic hazard of acceptance with covariates: one intercept for each depth, the same slopes at all of them.

    Attributes:
        coefficients: (M, depth + k); intercepts in units of `_INTERCEPT`.
        depth: deepest token that was tried.
    """

    coefficients: FloatArray
    depth: int

    @classmethod
    def fit(cls, situations: Situations, weights: FloatArray, strength: float = 1.0) -> "HazardModel":
        """Fit to each set of weights: the first by penalised likelihood, the others by one Newton step from there.

        One step is what a bootstrap needs: it is off by an order less than the sampling error.

        Args:
            weights: (M, S) how often each sequence counts; the first row is the estimate itself.
            strength: of the penalty on the slopes, as if each had a normal prior of that precision; intercepts are
                hardly penalised.
        """
        from sklearn.linear_model import LogisticRegression

        depth = _deepest(situations)
        inputs, right, row = _examples(situations, depth)
        sequence, weight = situations.sequence[row], situations.weight[row]
        if not len(right) or right.min() == right.max():
            coefficients = np.zeros((len(weights), inputs.shape[1]))
            coefficients[:, :depth] = 3.0 if right.all() else -3.0
            return cls(coefficients, depth)
        model = LogisticRegression(C=1 / strength, fit_intercept=False, solver="newton-cholesky", max_iter=200)
        first = model.fit(inputs, right, sample_weight=weight * weights[0][sequence]).coef_[0]
        if len(weights) == 1:
            return cls(first[None], depth)
        chance = 1 / (1 + np.exp(-inputs @ first))
        slopes = inputs * (weight * (right - chance))[:, None]
        size = inputs.shape[1]
        gradient, curvature = np.zeros((situations.sequences, size)), np.zeros((situations.sequences, size, size))
        np.add.at(gradient, sequence, slopes)
        bends = weight * chance * (1 - chance)
        for one in range(situations.sequences):
            of_it = inputs[sequence == one]
            curvature[one] = (of_it * bends[sequence == one, None]).T @ of_it
        downhill = weights @ gradient - strength * first
        bend = np.tensordot(weights, curvature, axes=1) + strength * np.eye(size)
        coefficients = first + np.linalg.solve(bend, downhill[..., None])[..., 0]
        coefficients[0] = first
        return cls(coefficients, depth)

    def hazards(self, covariates: FloatArray, depth: int, row: int = 0) -> FloatArray:
        """(n, depth) chance to get from depth j - 1 to j under the set of weights number `row`."""
        at = np.minimum(np.arange(depth), self.depth - 1)
        scores = _INTERCEPT * self.coefficients[row, at] + (covariates @ self.coefficients[row, self.depth :])[:, None]
        return np.asarray(1 / (1 + np.exp(-scores)))


def _deepest(situations: Situations) -> int:
    """The deepest token that was tried: whether it is accepted is known."""
    return int(max(1, np.minimum(situations.chosen, situations.accepted + 1).max()))


def _examples(situations: Situations, depth: int) -> tuple[FloatArray, FloatArray, IntArray]:
    """One example for each token that was tried: (e, depth + k) inputs, (e,) whether it was right, (e,) step."""
    depths = np.arange(1, depth + 1)
    at_risk = (situations.chosen[:, None] >= depths) & (situations.accepted[:, None] >= depths - 1)
    row, index = np.nonzero(at_risk)
    inputs = np.hstack([_INTERCEPT * np.eye(depth)[index], situations.covariates[row]])
    return inputs, (situations.accepted[row] > index).astype(float), row


def expected_tokens(hazards: FloatArray, wanted: IntArray) -> FloatArray:
    """(n,) committed tokens of steps that ask for `wanted` (n,) tokens, of (n, depth) hazards."""
    survival = reach(hazards)[:, 1:]
    return np.asarray(1 + np.where(np.arange(1, survival.shape[1] + 1) <= wanted[:, None], survival, 0.0).sum(axis=1))


def drafted_shares(hazards: FloatArray) -> FloatArray:
    """(..., J + 1, J + 1) the chance that d tokens are drafted (last axis) of a asked for, of (..., J) hazards."""
    survival = reach(hazards)
    asked, drafted = np.indices((survival.shape[-1], survival.shape[-1]))
    ending = survival - np.append(survival[..., 1:], np.zeros((*survival.shape[:-1], 1)), axis=-1)
    return np.where(drafted < asked, ending[..., None, :], np.where(drafted == asked, survival[..., None, :], 0.0))


def split(sequences: int, parts: int) -> Sequence[IntArray]:
    """Sequences in so many parts of equal size, at random but always the same."""
    return np.array_split(np.random.default_rng(0).permutation(sequences), parts)
