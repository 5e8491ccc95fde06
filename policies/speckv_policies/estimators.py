"""Rules that estimate the chance of a drafted token to be accepted, and stop by it."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Memory, Outcome, Policy, Rollouts, State, replay
from speckv.compression import COMPRESSIONS
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import Program, Score, Table
from speckv.tuning import fastest_by_compression, step_seconds
from speckv_policies.fixed import Fixed
from speckv_policies.parameters import check_count, check_order, check_range

_SIGNALS = ("draft_top1", "draft_top2", "draft_top10", "draft_entropy", "draft_index")


class Disco(Policy):
    """Stops behind a token that a classifier finds too likely to be rejected.

    The classifier sees the draft's distribution at the token (the likeliest, the second, and the ten likeliest
    together, in logits; entropy) and the token's place in the draft. The paper's sees each of the ten
    probabilities, which are not recorded one by one, through a small network; here it is a logistic regression.

    Args:
        threshold: chance of acceptance in [0, 1] below which the draft stops; None for the fastest on the training
            prompts, for each compression.
        cap: most tokens in a draft, from 0.
    """

    name = "disco"
    features = ("compression", *_SIGNALS)
    source = (
        "DISCO (arXiv 2405.04304), from third-party accounts; the logistic form, the thresholds to choose from, and "
        "the cap are ours"
    )

    THRESHOLDS = (0.3, 0.5, 0.7, 0.9)

    def __init__(self, threshold: float | None = None, cap: int = 20) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold)
        check_count(0, cap=cap)
        self.threshold, self.cap = threshold, cap

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        signals, right = drafted_tokens(traces, costs)
        weights = fit_logistic(_inputs(signals), right)
        thresholds = self.THRESHOLDS if self.threshold is None else (self.threshold,)
        candidates = [Disco(threshold, self.cap) for threshold in thresholds]
        for candidate in candidates:
            candidate.fitted = {"weights": weights, "threshold": np.full(len(COMPRESSIONS), candidate.threshold)}
        best = fastest_by_compression(candidates, traces, costs) if len(candidates) > 1 else np.zeros(1, dtype=int)
        self.fitted = {
            "weights": weights,
            "threshold": np.broadcast_to(np.array(thresholds, dtype=float)[best], len(COMPRESSIONS)).copy(),
        }
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.cap

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        threshold = self.fitted["threshold"][features["compression"].astype(np.int64)]
        return np.asarray(self.acceptance(features) >= threshold)

    def program(self) -> Program:
        cap = np.full(len(COMPRESSIONS), self.cap)
        return Program(Table(cap), Score(_model(self.fitted["weights"]), self.fitted["threshold"]))

    def acceptance(self, features: Features) -> FloatArray:
        return chance(_inputs(features), self.fitted["weights"])


class SpecDecPlusPlus(Policy):
    """Stops once some token of the draft is likely enough to be rejected: 1 - the product of the chances so far.

    The chances come from a classifier trained with the loss of a rejected token weighted. The published one is a
    head on the draft's hidden states; those are not among the signals, and here a logistic regression reads the
    draft's distribution and the token's place instead.

    Args:
        threshold: chance in [0, 1] that some token is rejected, above which the draft stops.
        weight: of a rejected token in training, above 0.
        smallest, largest: bounds of a draft, tokens, from 0.
    """

    name = "specdec-pp"
    features = _SIGNALS
    source = (
        "SpecDec++ (arXiv 2405.19715), read in its source: threshold 0.3 to 0.7, of which 0.7 is the default here, "
        "weight 6, 2 to 20 tokens; the classifier's input and form are ours"
    )

    def __init__(self, threshold: float = 0.7, weight: float = 6.0, smallest: int = 2, largest: int = 20) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold)
        check_range(0.001, weight=weight)
        check_count(0, smallest=smallest, largest=largest)
        check_order(smallest=smallest, largest=largest)
        self.threshold, self.weight, self.smallest, self.largest = threshold, weight, smallest, largest

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        signals, right = drafted_tokens(traces, costs)
        self.fitted = {"weights": fit_logistic(_inputs(signals), right, self.weight)}
        return self

    def new_state(self, rows: int) -> State:
        return {"survival": np.ones(rows)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["survival"] = np.ones(features.rows)
        return self.largest

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        state["survival"] = state["survival"] * self.acceptance(features)
        return (features["draft_index"] < self.smallest) | (1 - state["survival"] <= self.threshold)

    def program(self) -> Program:
        cap, least = np.full(len(COMPRESSIONS), self.largest), np.full(len(COMPRESSIONS), 1 - self.threshold)
        model = _model(self.fitted["weights"])
        return Program(Table(cap), Score(model, least, cumulative=True, least=self.smallest))

    def acceptance(self, features: Features) -> FloatArray:
        return chance(_inputs(features), self.fitted["weights"])


class _Budget(Policy):
    """Drafts as many tokens as give the most expected ones a second of measured step time.

    The survival of a token is the chance that it and all before it are accepted. Before a token is drawn, its
    distribution gives its own chance, and each one behind it is taken to have the chance `_ahead`. Of all drafts that
    are still possible, the one with the largest

        (1 + sum of survivals) / seconds of its draft forwards and of the target forward

    is aimed at: the maximum over all of them, since the seconds are a staircase in the number of tokens. It must be
    better than stopping by `gain`; else the token is not drawn, or nothing more is drafted behind it.
    """

    def __init__(self, gain: float) -> None:
        super().__init__()
        check_range(0, gain=gain)
        self.gain = gain

    def _here(self, features: Features, state: State) -> FloatArray:
        """Chance of acceptance of the token whose distribution is known, (n,)."""
        raise NotImplementedError

    def _ahead(self, compression: IntArray) -> FloatArray:
        """Chance of acceptance of a token whose distribution is not known yet, (n,)."""
        raise NotImplementedError

    def new_state(self, rows: int) -> State:
        return {"survival": np.ones(rows), "expected": np.ones(rows), "aim": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> IntArray:
        code = features["compression"].astype(np.int64)
        state["survival"], state["expected"] = np.ones(len(code)), np.ones(len(code))
        none = np.zeros(len(code), dtype=np.int64)
        aim, speed = self._best(state, none, self._ahead(code), code)
        with np.errstate(divide="ignore"):  # where no forward was timed, one takes no time, and nothing is drafted
            pays = speed >= (1 + self.gain) / self.fitted["verify_seconds"][code, 1]
        return np.where(pays, aim, 0)

    def draw_token(self, features: Features, state: State) -> BoolArray:
        code, index = features["compression"].astype(np.int64), features["draft_index"].astype(np.int64)
        here = self._here(features, state)
        aim, speed = self._best(state, index - 1, here, code)
        verify, forwards = self.fitted["verify_seconds"], index * self.fitted["draft_seconds"]
        stop = state["expected"] / (forwards + verify[code, index])
        draw = speed >= (1 + self.gain) * stop
        state["survival"] = state["survival"] * here
        state["expected"] = state["expected"] + state["survival"]
        enough = state["expected"] / (forwards + verify[code, index + 1])
        state["aim"] = np.where(speed >= (1 + self.gain) * enough, aim, index)
        return np.asarray(draw)

    def keep_drafting(self, features: Features, state: State) -> BoolArray:
        return state["aim"] > features["draft_index"]

    def _best(self, state: State, drawn: IntArray, here: FloatArray, code: IntArray) -> tuple[IntArray, FloatArray]:
        """The best length of the draft above `drawn` tokens, and its expected tokens a second, both (n,).

        Args:
            drawn: (n,) tokens in the draft.
            here: (n,) chance of the next one.
        """
        verify = self.fitted["verify_seconds"][code]
        lengths = np.arange(1, verify.shape[1] - 1)
        behind = lengths - drawn[:, None] - 1  # tokens behind the next one
        survival = np.where(behind >= 0, self._ahead(code)[:, None] ** np.maximum(behind, 0), 0.0)
        survival *= (state["survival"] * here)[:, None]
        seconds = lengths * self.fitted["draft_seconds"] + verify[:, 2:]
        speed = (state["expected"][:, None] + np.cumsum(survival, axis=1)) / seconds
        speed = np.where(behind >= 0, speed, 0.0)
        best = speed.argmax(axis=1)
        return lengths[best], speed[np.arange(len(best)), best]


class SurvivalBudget(_Budget):
    """Drafts as many tokens as give the most expected ones a second; chances are calibrated on the training prompts.

    The survival of a token is the chance that it and all before it are accepted. Its own chance is a logistic
    regression on the draft's top probability at it; tokens whose distribution is not known yet have the average
    chance. Of all drafts that are still possible, the one with the largest

        (1 + sum of survivals) / seconds of its draft forwards and of the target forward

    is aimed at: the maximum over all of them, since the seconds are a staircase in the number of tokens.

    Args:
        gain: the least relative gain in tokens a second for which to draft on, 0 or more.
    """

    name = "survival-budget"
    features = ("compression", "draft_index", "draft_top1")
    source = (
        "vLLM, TensorRT-LLM and DSpark, read in their sources and papers: survival against measured step time, the "
        "global maximum, 1 % minimum gain; average chances for tokens ahead, and stopping where the aim is reached, "
        "are ours"
    )

    def __init__(self, gain: float = 0.01) -> None:
        super().__init__(gain)

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        signals, right = drafted_tokens(traces, costs)
        draft, verify = step_seconds(costs, traces)
        self.fitted = {
            "weights": fit_logistic(logit(signals["draft_top1"])[:, None], right),
            "ahead": np.array(right.mean() if len(right) else 0.5),
            "draft_seconds": np.array(draft),
            "verify_seconds": verify,
        }
        return self

    def acceptance(self, features: Features) -> FloatArray:
        return chance(logit(features["draft_top1"])[:, None], self.fitted["weights"])

    def _here(self, features: Features, state: State) -> FloatArray:
        return self.acceptance(features)

    def _ahead(self, compression: IntArray) -> FloatArray:
        return np.full(len(compression), float(self.fitted["ahead"]))


class OnlineEstimator(_Budget):
    """Drafts as many tokens as give the most expected ones a second; chances are learned while decoding.

    The chance of token k is sigmoid(slope * logit(top probability) + intercept of k). Labels are the tokens up to the
    first rejected one. Every `every` steps, slope and intercepts take a Newton step on the labels since the last
    one, with ridge `ridge`, each at most 1 long and shortened by n / (n + damping), n being its own number of labels.
    Tokens whose distribution is not known yet have the average chance so far. The aim is that of `SurvivalBudget`.

    What is learned outlives a sequence, as in vLLM, where a server has one estimator; each compression has its own.
    After `probe_every` - 1 steps in which nothing was drafted, one token is, so that it can find back from there.

    Args:
        slope, intercept: to start with.
        start: average chance in [0, 1] before anything was tried; it counts as much as ten tokens.
        every: steps between updates, from 1.
        damping: labels, 0 or more.
        ridge: pull of slope and intercepts to 0, above 0.
        positions: places in the draft with an intercept of their own, from 1; those behind share the last.
        probe_every: steps from one draft to the next where none pays, from 1.
        gain: the least relative gain in tokens a second for which to draft on, 0 or more.
    """

    name = "online-estimator"
    features = ("compression", "draft_index", "draft_top1")
    source = (
        "vLLM's online acceptance estimator, read in its source: slope 0.5, intercept -0.2, Newton steps every 100 "
        "steps, damping 50, ridge 0.001; damping each coefficient by itself, the bound on a step, `start`, "
        "`positions`, the probes, and all that is ours in `SurvivalBudget`, are ours"
    )

    def __init__(
        self,
        slope: float = 0.5,
        intercept: float = -0.2,
        start: float = 0.7,
        every: int = 100,
        damping: float = 50.0,
        ridge: float = 0.001,
        positions: int = 16,
        probe_every: int = 16,
        gain: float = 0.01,
    ) -> None:
        super().__init__(gain)
        check_range(-100, 100, slope=slope, intercept=intercept)
        check_range(0, 1, start=start)
        check_count(1, every=every, positions=positions, probe_every=probe_every)
        check_range(0, damping=damping)
        check_range(1e-9, ridge=ridge)
        self.slope, self.intercept, self.start, self.every = slope, intercept, start, every
        self.damping, self.ridge, self.positions, self.probe_every = damping, ridge, positions, probe_every

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        draft, verify = step_seconds(costs, traces)
        self.fitted = {"draft_seconds": np.array(draft), "verify_seconds": verify}
        return self.forget()

    def new_memory(self) -> Memory:
        # Coefficients: the slope, then the intercepts. Gradient, curvature and labels are sums since the last update.
        kinds, size = len(COMPRESSIONS), 1 + self.positions
        coefficients = np.full((kinds, size), float(self.intercept))
        coefficients[:, 0] = self.slope
        return {
            "coefficients": coefficients,
            "gradient": np.zeros((kinds, size)),
            "curvature": np.zeros((kinds, size, size)),
            "labels": np.zeros((kinds, size)),
            "steps": np.zeros(kinds, dtype=np.int64),
            "right": np.full(kinds, 10.0 * self.start),
            "tried": np.full(kinds, 10.0),
        }

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {
            "compression": np.zeros(rows, dtype=np.int64),
            "logits": np.zeros((rows, self.positions)),
            "idle": np.zeros(rows, dtype=np.int64),
        }

    def choose_gamma(self, features: Features, state: State) -> IntArray:
        state["compression"] = features["compression"].astype(np.int64)
        return np.maximum(super().choose_gamma(features, state), state["idle"] >= self.probe_every - 1)

    def draw_token(self, features: Features, state: State) -> BoolArray:
        return super().draw_token(features, state) | (state["idle"] >= self.probe_every - 1)

    def keep_drafting(self, features: Features, state: State) -> BoolArray:
        return super().keep_drafting(features, state) & (state["idle"] < self.probe_every - 1)

    def _here(self, features: Features, state: State) -> FloatArray:
        place = np.minimum(features["draft_index"].astype(np.int64), self.positions)
        coefficients = self.memory["coefficients"][state["compression"]]
        row = np.arange(len(place))
        value = logit(features["draft_top1"])
        state["logits"][row, place - 1] = value
        return sigmoid(coefficients[:, 0] * value + coefficients[row, place])

    def _ahead(self, compression: IntArray) -> FloatArray:
        return np.asarray(self.memory["right"][compression] / self.memory["tried"][compression])

    def observe(self, outcome: Outcome, state: State) -> None:
        tried = np.minimum(outcome.accepted + 1, outcome.drafted)
        state["idle"] = np.where(tried > 0, 0, state["idle"] + 1)
        for code in set(state["compression"][tried > 0].tolist()):
            batch = state["compression"] == code
            self.memory["right"][code] += outcome.accepted[batch].sum()
            self.memory["tried"][code] += tried[batch].sum()
            row, place = np.nonzero(np.arange(self.positions) < (tried * batch)[:, None])
            self._learn(code, state["logits"][row, place], place + 1, place < outcome.accepted[row])

    def _learn(self, code: int, logits: FloatArray, place: IntArray, right: BoolArray) -> None:
        """Add the labels of a step, and move the coefficients if it is time."""
        memory = self.memory
        coefficients, curvature = memory["coefficients"][code], memory["curvature"][code]
        predicted = sigmoid(coefficients[0] * logits + coefficients[place])
        inputs = np.zeros((len(logits), len(coefficients)))
        inputs[:, 0] = logits
        inputs[np.arange(len(place)), place] = 1
        memory["gradient"][code] += inputs.T @ (right - predicted)
        curvature += inputs.T @ (inputs * (predicted * (1 - predicted))[:, None])
        memory["labels"][code] += np.append(len(place), np.bincount(place, minlength=len(coefficients))[1:])
        memory["steps"][code] += 1
        if memory["steps"][code] % self.every == 0:
            gradient = memory["gradient"][code] - self.ridge * coefficients
            move = np.linalg.solve(curvature + self.ridge * np.eye(len(coefficients)), gradient)
            move = np.clip(move, -1.0, 1.0)  # where predictions are near 0 and 1, a Newton step can be far too long
            labels = memory["labels"][code]
            coefficients += move * labels / np.maximum(labels + self.damping, 1e-9)
            for sums in ("gradient", "curvature", "labels"):
                memory[sums][code] = 0


def drafted_tokens(traces: Rollouts, costs: CostModel) -> tuple[dict[str, FloatArray], BoolArray]:
    """Every drafted token up to the first wrong one in steps of the longest drafts: its signals by feature name, and
    whether it is right, each (n,)."""
    run = replay(Fixed(traces.gamma_max), traces, costs)
    length, limit = traces.run[run.sequence, run.position], traces.limit[run.sequence, run.position]
    columns: dict[str, list[FloatArray]] = {name: [] for name in _SIGNALS}
    right = []
    for index in range(traces.gamma_max):
        step = np.flatnonzero((length >= index) & (limit > index))
        for name in _SIGNALS[:-1]:
            values = traces.drafted_signal(name, run.sequence[step], run.position[step], index)
            columns[name].append(values.astype(float))
        columns["draft_index"].append(np.full(len(step), index + 1.0))
        right.append(length[step] > index)
    return {name: np.concatenate(column) for name, column in columns.items()}, np.concatenate(right)


def fit_logistic(inputs: FloatArray, right: BoolArray, weight: float = 1.0, regularisation: float = 1.0) -> FloatArray:
    """Weights (inputs + 1,) of a logistic regression, the intercept last.

    Args:
        weight: of a wrong token.
        regularisation: inverse strength C of scikit-learn's logistic regression.
    """
    from sklearn.linear_model import LogisticRegression

    if right.all() or not right.any():  # one class only, or nothing
        return np.append(np.zeros(inputs.shape[1]), logit(share_of(right)))
    center, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale[scale < 1e-9] = 1.0  # equal but for rounding
    model = LogisticRegression(C=regularisation, max_iter=1000, class_weight={True: 1.0, False: weight})
    model.fit((inputs - center) / scale, right)
    weights = model.coef_[0] / scale
    return np.append(weights, model.intercept_[0] - weights @ center)


def share_of(right: BoolArray) -> FloatArray:
    """Share of the right among `right`, (): a little away from 0 and 1, and 1/2 of nothing."""
    return np.asarray((right.sum() + 0.5) / (len(right) + 1))


def chance(inputs: FloatArray, weights: FloatArray) -> FloatArray:
    """Chance of acceptance, (n,), from inputs (n, k) and weights (k + 1,)."""
    return sigmoid(inputs @ weights[:-1] + weights[-1])


def sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -500, 500))))


def logit(probability: FloatArray) -> FloatArray:
    clipped = np.clip(probability, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(clipped / (1 - clipped)))


def _inputs(signals: Features | dict[str, FloatArray]) -> FloatArray:
    *probabilities, entropy, index = (signals[name] for name in _SIGNALS)
    return np.stack([*logit(np.stack(probabilities)), entropy, np.log(index)], axis=1)


def _model(weights: FloatArray) -> Network:
    """The logistic regression on `_inputs` in portable form."""
    return logistic(Inputs(_SIGNALS, ("logit", "logit", "logit", "none", "log")), weights)


def logistic(inputs: Inputs, weights: FloatArray) -> Network:
    """A logistic regression in portable form, of `weights` as `fit_logistic` gives them."""
    return Network(inputs, (weights[:-1, None],), (weights[-1:],), output="logistic")
