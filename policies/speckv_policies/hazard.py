"""Logistic hazard of acceptance, weighed against measured cost."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State, replay
from speckv.features import FloatArray, IntArray
from speckv.tuning import settle_rate, step_seconds
from speckv_policies.fixed import Fixed

_BEFORE = ("running_acceptance", "target_entropy", "target_margin")
_TOKEN = ("draft_top1", "draft_top2", "draft_entropy")


class Hazard(Policy):
    """Drafts on while the next token is worth its time.

    Three logistic regressions give the chance that a token is right if all before it are: of the first token from
    what is known before the draft (`first`), of a token from the draft's own distribution there (`here`), and of
    the one behind it (`ahead`). Tokens further ahead are taken at their average chance in training. The product
    of the chances so far is the survival. Another k tokens are worth

        survival * chance * (1 + persistence + ... + persistence^(k - 1)) - rate * (their draft and verify seconds)

    tokens, where rate is the throughput that the policy itself reaches. The draft goes on while some k has a
    positive worth; looking at all k lets it cross a flat piece in a staircase of verify times. A token whose own
    chance does not pay for its place in the verify forward is not drawn.

    Args:
        regularisation: inverse strength C of scikit-learn's logistic regression.
    """

    name = "hazard"
    features = ("compression", "draft_index", *_BEFORE, *_TOKEN)
    source = (
        "survival times measured cost, what published controllers have converged on (vLLM's online estimator, "
        "TurboSpec's goodput); this form and its signals are ours"
    )

    def __init__(self, regularisation: float = 1.0) -> None:
        super().__init__()
        if regularisation <= 0:
            raise ValueError(f"regularisation is {regularisation}; it must be above 0")
        self.regularisation = regularisation

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        tokens, before, right, followed, next_right = _training_tokens(traces, costs)
        starts = tokens[:, 0] == 1
        draft, verify = step_seconds(costs, traces)
        self.fitted = {
            "first": self._regress(before[starts], right[starts]),
            "here": self._regress(tokens[:, 1:], right),
            "ahead": self._regress(tokens[followed, 1:], next_right[followed]),
            "persistence": np.array(next_right[followed].mean()),
            "draft_seconds": np.array(draft),
            "verify_seconds": verify,
        }
        settle_rate(self, traces, costs)
        return self

    def _regress(self, inputs: FloatArray, labels: npt.NDArray[np.bool_]) -> FloatArray:
        """Weights (inputs + 1,) of a logistic regression, the intercept last."""
        from sklearn.linear_model import LogisticRegression

        center, scale = inputs.mean(axis=0), inputs.std(axis=0)
        scale[scale == 0] = 1.0
        if labels.all() or not labels.any():  # one class only: the rate itself, a little away from 0 and 1
            rate = (labels.sum() + 0.5) / (len(labels) + 1)
            return np.append(np.zeros(inputs.shape[1]), np.log(rate / (1 - rate)))
        model = LogisticRegression(C=self.regularisation, max_iter=1000).fit((inputs - center) / scale, labels)
        weights = model.coef_[0] / scale
        return np.append(weights, model.intercept_[0] - weights @ center)

    def new_state(self, rows: int) -> State:
        return {"survival": np.ones(rows), "go_on": np.ones(rows, dtype=bool)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["survival"] = np.ones(features.rows)
        chance = _chance(_before_inputs(features), self.fitted["first"])
        worth = self._worth_of_more(features, np.zeros(features.rows, dtype=np.int64), chance)
        return np.where(worth.max(axis=1) > 0, self.fitted["verify_seconds"].shape[1] - 2, 0)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        inputs = _token_inputs(features)
        index = features["draft_index"].astype(np.int64)
        survival = state["survival"] * _chance(inputs, self.fitted["here"])
        worth = self._worth_of_more(features, index, survival * _chance(inputs, self.fitted["ahead"])).max(axis=1)
        verify = self.fitted["verify_seconds"][features["compression"].astype(np.int64)]
        row = np.arange(len(index))
        place = self._rate(features) * (verify[row, index + 1] - verify[row, index])
        state["survival"] = survival
        state["go_on"] = worth > 0
        return np.asarray(np.maximum(worth, 0) + survival > place)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return state["go_on"]

    def _rate(self, features: Features) -> FloatArray:
        return np.asarray(self.fitted["rate"][features["compression"].astype(np.int64)])

    def _worth_of_more(self, features: Features, index: IntArray, chance: FloatArray) -> FloatArray:
        """Worth in tokens of drafting 1, 2, … more behind token number `index`, (n, k); -inf beyond the table.

        Args:
            index: (n,) tokens in the draft so far.
            chance: (n,) that all of them and the next one are right.
        """
        verify = self.fitted["verify_seconds"][features["compression"].astype(np.int64)]
        more = np.arange(1, verify.shape[1] - 1 - index.min())
        persistence = self.fitted["persistence"]
        expected = chance[:, None] * np.cumsum(persistence ** (more - 1))
        row = np.arange(len(index))
        place = np.minimum(index[:, None] + 1 + more, verify.shape[1] - 1)
        seconds = more * self.fitted["draft_seconds"] + verify[row[:, None], place] - verify[row, index + 1][:, None]
        worth = expected - self._rate(features)[:, None] * seconds
        worth[index[:, None] + more > verify.shape[1] - 2] = -np.inf
        return np.column_stack([worth, np.full(len(index), -np.inf)])


def _logit(probability: FloatArray) -> FloatArray:
    clipped = np.clip(probability, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(clipped / (1 - clipped)))


def _before_inputs(features: Features | dict[str, FloatArray]) -> FloatArray:
    acceptance, entropy, margin = (features[name] for name in _BEFORE)
    return np.column_stack([_logit(acceptance), entropy, np.log1p(margin)])


def _token_inputs(features: Features | dict[str, FloatArray]) -> FloatArray:
    top1, top2, entropy = (features[name] for name in _TOKEN)
    return np.column_stack([_logit(top1), _logit(top2), entropy, np.sqrt(entropy), _before_inputs(features)])


def _chance(inputs: FloatArray, weights: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-(inputs @ weights[:-1] + weights[-1]))))


def _training_tokens(
    traces: Rollouts, costs: CostModel
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Every drafted token up to the first wrong one, in steps of short and of long drafts.

    Returns:
        tokens: (n, 8) index in the draft, then the inputs of `here` and `ahead`.
        before: (n, 3) inputs of `first`.
        right: (n,) whether the token is the target's.
        followed: (n,) whether it is right and the draft could go on.
        next_right: (n,) whether the one behind it is the target's; False where it was not followed.
    """
    parts = []
    for gamma in (min(2, traces.gamma_max), traces.gamma_max):
        run = replay(Fixed(gamma), traces, costs, features=_BEFORE)
        for index in range(traces.gamma_max):
            reach = traces.run[run.sequence, run.position], traces.limit[run.sequence, run.position]
            step = np.flatnonzero((reach[0] >= index) & (reach[1] > index))
            sequence, position = run.sequence[step], run.position[step]
            values = {name: run.features[name][step] for name in _BEFORE}
            for name in _TOKEN:
                values[name] = traces.drafted_signal(name, sequence, position, index).astype(float)
            right = reach[0][step] > index
            followed = right & (reach[1][step] > index + 1)
            tokens = np.column_stack([np.full(len(step), index + 1.0), _token_inputs(values)])
            parts.append((tokens, _before_inputs(values), right, followed, followed & (reach[0][step] > index + 1)))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]
