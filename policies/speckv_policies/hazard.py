"""Logistic hazards of acceptance, weighed against measured cost."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.features import FloatArray, IntArray
from speckv.runtime.models import Inputs, Model
from speckv.tuning import fastest_on_other_prompts
from speckv_policies.estimators import chance, fit_logistic, logistic, logit, share_of, sigmoid
from speckv_policies.parameters import check_range
from speckv_policies.stopping import Examples, Kind, SurvivalStop, token_inputs


class Hazard(SurvivalStop):
    """Drafts on while the next tokens are worth their time; the chances are logistic regressions.

    Args:
        regularisation: inverse strength C of scikit-learn's logistic regression, above 0.
    """

    name = "hazard"
    source = (
        "survival times measured cost, what published controllers have converged on (vLLM's online estimator, "
        "TurboSpec's goodput); this form and its signals are ours"
    )

    def __init__(self, regularisation: float = 1.0) -> None:
        super().__init__()
        check_range(1e-9, regularisation=regularisation)
        self.regularisation = regularisation

    def learn(self, kind: Kind, examples: Examples, seed: int) -> dict[str, npt.NDArray[Any]]:
        return {kind: fit_logistic(examples.inputs, examples.right, regularisation=self.regularisation)}

    def chance(self, kind: Kind, inputs: FloatArray) -> FloatArray:
        return chance(inputs, self.fitted[kind])

    def model(self, kind: Kind, inputs: Inputs) -> Model:
        return logistic(inputs, self.fitted[kind])


class TokenHazard(Hazard):
    """A hazard that also knows which token was drafted: behind some, the next one is right far more often.

    How often the draft was right behind a token, and behind a pair of tokens, is counted in training, as if
    `shrinkage` tokens at the average had been seen besides. Log odds and counts are further inputs of the logistic
    regression for the token behind the drawn one. There each example is counted in the other prompts alone: what was
    counted in its own prompt would give its label away.

    That chance is trusted in part: its log odds are mixed with those of the average chance, and the result is
    discounted. Every drafted token is drawn and verified: to weigh that as well costs as much time as it saves.

    Args:
        regularisation: as of `Hazard`.
        shrinkage: tokens, above 0.
        trust: share of the learned log odds, and factor of the chance, each 0 or more; None for the fastest of some on
            training prompts that the chances were not learned from, for each compression.
    """

    name = "token-hazard"
    features = (*Hazard.features, "draft_token")
    source = "ours: `hazard`, with counts by token that are shrunk as in empirical Bayes"

    #: The ways to choose from.
    TRUST = ((1.0, 1.0), (1.0, 0.9), (0.5, 0.9), (0.0, 0.8))

    def __init__(
        self, regularisation: float = 0.1, shrinkage: float = 8.0, trust: tuple[float, float] | None = None
    ) -> None:
        super().__init__(regularisation)
        check_range(1e-9, shrinkage=shrinkage)
        if trust is not None and not (len(trust) == 2 and min(trust) >= 0):
            raise ValueError(f"trust is {trust}; it must be two numbers, 0 or more")
        self.shrinkage = shrinkage
        self.trust = None if trust is None else (float(trust[0]), float(trust[1]))

    def parameters(self, traces: Rollouts, costs: CostModel, seed: int) -> dict[str, npt.NDArray[Any]]:
        ways = [self.trust] if self.trust is not None else list(self.TRUST)

        def candidates(part: Rollouts) -> list[Policy]:
            """One fit, trusted in each of the ways."""
            first = type(self)(self.regularisation, self.shrinkage, ways[0]).fit(part, costs, seed)
            others = [copy.copy(first) for _ in ways]
            for other, way in zip(others, ways, strict=True):
                other.fitted = first.fitted | {"trust": np.tile(way, (len(COMPRESSIONS), 1))}
            return [*others]

        best = np.zeros(len(COMPRESSIONS), dtype=np.int64)
        if len(ways) > 1:
            best = fastest_on_other_prompts(candidates, traces, costs, seed=seed)
        return {"trust": np.array(ways, dtype=float)[best]}

    def learn(self, kind: Kind, examples: Examples, seed: int) -> dict[str, npt.NDArray[Any]]:
        model = super().learn(kind, examples, seed)
        if kind != "ahead":
            return model
        inputs, average = [examples.inputs], share_of(examples.right)
        for table, keys in (("token", examples.tokens), ("pair", _pairs(examples.previous, examples.tokens))):
            known, place = np.unique(keys, return_inverse=True)
            tried, right = np.bincount(place, np.ones(len(keys))), np.bincount(place, examples.right)
            _, own = np.unique(place * (examples.prompts.max(initial=0) + 1) + examples.prompts, return_inverse=True)
            own_tried, own_right = np.bincount(own, np.ones(len(own)))[own], np.bincount(own, examples.right)[own]
            inputs.append(self._odds(tried[place] - own_tried, right[place] - own_right, float(average)))
            # The last row is for what was never seen.
            odds = self._odds(np.append(tried, 0), np.append(right, 0.0), float(average))
            model |= {f"ahead_{table}": np.append(known, np.iinfo(np.int64).max), f"ahead_{table}_odds": odds}
        weights = fit_logistic(np.hstack(inputs), examples.right, regularisation=self.regularisation)
        return model | {"ahead_drawn": weights, "ahead_average": logit(average)}

    def foretell(self, kind: Kind, examples: Examples) -> FloatArray:
        if kind != "ahead":
            return super().foretell(kind, examples)
        return sigmoid(self._behind(examples.inputs, examples.tokens, examples.previous))

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {"token": np.full(rows, -1)}

    draw_token = Policy.draw_token  # which makes it a decision that hosts need not ask for
    program = Policy.program  # portable models know no token ids

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["token"] = np.full(features.rows, -1)
        return super().choose_gamma(features, state)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        fitted = self.fitted
        code, index, token = (features[name].astype(np.int64) for name in ("compression", "draft_index", "draft_token"))
        inputs = token_inputs(features)
        state["survival"] = survival = state["survival"] * self.chance("here", inputs)
        share, factor = fitted["trust"][code].T
        behind = share * self._behind(inputs, token, state["token"]) + (1 - share) * fitted["ahead_average"]
        state["token"] = token
        return np.asarray(survival * factor * sigmoid(behind) > fitted["rate"][code] * fitted["price"][code, index])

    def _behind(self, inputs: FloatArray, tokens: IntArray, previous: IntArray) -> FloatArray:
        """Log odds of the token behind a drawn one, (n,).

        Args:
            inputs: (n, k) of the drawn token.
            tokens, previous: (n,) its id, and that of the token in front of it in the draft, or -1.
        """
        columns = [inputs]
        for table, keys in (("token", tokens), ("pair", _pairs(previous, tokens))):
            known = self.fitted[f"ahead_{table}"]
            place = known.searchsorted(keys)
            columns.append(self.fitted[f"ahead_{table}_odds"][np.where(known[place] == keys, place, -1)])
        weights = self.fitted["ahead_drawn"]
        return np.asarray(np.hstack(columns) @ weights[:-1] + weights[-1])

    def _odds(self, tried: npt.NDArray[Any], right: npt.NDArray[Any], average: float) -> FloatArray:
        """Two inputs, (n, 2): log odds of `right` among `tried`, drawn to the average, and how many were tried."""
        share = (right + self.shrinkage * average) / (tried + self.shrinkage)
        return np.column_stack([logit(share), np.log1p(tried)])


def _pairs(previous: IntArray, tokens: IntArray) -> IntArray:
    """One number for each pair of ids."""
    return np.asarray((previous + 1) * 2**32 + tokens)
