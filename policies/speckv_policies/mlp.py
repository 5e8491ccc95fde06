"""The acceptance predictor of the SpecKV paper, and a form of it that asks for throughput."""

from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State, replay
from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import FloatArray
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import Choice, Program
from speckv.steplogs import StepLog
from speckv.tuning import forward_seconds, settle_rate, settle_rate_on_log, step_seconds, usual_context, usual_costs
from speckv_policies.fixed import Fixed
from speckv_policies.parameters import check_count

SIGNALS = ("last_mean_entropy", "last_mean_top1", "last_max_entropy", "last_min_top1", "compression")


class AcceptancePredictor(Policy):
    """Plays the gamma with the most tokens a step, f * gamma + 1, where f is its predicted acceptance rate.

    f depends on mean and maximum entropy, mean and minimum confidence, compression, and gamma. The paper takes the
    signals of the very block whose length it chooses, which no decoder has at that moment; here they are those of
    the previous step (rule R1).
    """

    features = SIGNALS

    def __init__(self, gammas: tuple[int, ...], records: int) -> None:
        super().__init__()
        if not gammas or min(gammas) < 0:
            raise ValueError(f"gammas are {list(gammas)}; they must be a list of numbers from 0")
        check_count(1, records=records)
        self.gammas, self.records = tuple(gammas), records

    @property
    def required_gamma(self) -> int:
        return max(self.gammas)

    def _records(self, traces: Rollouts, costs: CostModel, seed: int) -> tuple[FloatArray, FloatArray]:
        """Inputs (n, 6) and acceptance rates (n,): each gamma played constantly, one record a step, as in the paper."""
        inputs, rates = [], []
        for gamma in self.gammas:
            if gamma == 0:
                continue
            run = replay(Fixed(gamma), traces, costs, features=SIGNALS)
            whole = run.gamma == gamma  # the budget may have cut the last steps of a sequence short
            columns = [run.features[name][whole] for name in SIGNALS]
            inputs.append(np.column_stack([*columns, np.full(whole.sum(), float(gamma))]))
            rates.append(run.accepted[whole] / gamma)
        x, y = np.concatenate(inputs), np.concatenate(rates)
        if not len(y):
            raise SpecKVError(
                f"policy {self.label!r} can't be fitted: no step of these traces has room for a draft of "
                f"{min(filter(None, self.gammas))} tokens; record longer texts"
            )
        chosen = np.random.default_rng(seed).permutation(len(y))[: self.records]
        return x[chosen], y[chosen]

    def _logged_records(self, log: StepLog, seed: int) -> tuple[FloatArray, FloatArray]:
        """The same from a step log: a step that drafted so many tokens tells what comes of every gamma up to that.

        One that drafted fewer and saw one rejected tells it too, but then of failures alone: it is left aside.
        """
        if missing := [name for name in SIGNALS[:-1] if name not in log.signals]:
            raise SpecKVError(f"policy {self.label!r} learns from {missing[0]}, which the log has not; log signals")
        if log.compression is None or (log.compression == "").any():
            raise SpecKVError(
                f"policy {self.label!r} learns from the target's compression, which the log does not say of every "
                "step; import it again with that"
            )
        known = np.column_stack([log.signals[name] for name in SIGNALS[:-1]])
        whole = ~np.isnan(known).any(axis=1)
        inputs, rates = [], []
        for gamma in filter(None, self.gammas):
            rows = whole & (log.gamma >= gamma)
            if not rows.any():
                raise SpecKVError(
                    f"policy {self.label!r} chooses among gammas up to {max(self.gammas)}, and no step of the log with "
                    f"signals drafted {gamma} tokens; give it smaller gammas, or log with `explore`"
                )
            code = np.array([list(COMPRESSIONS).index(name) for name in log.compression[rows].tolist()], dtype=float)
            inputs.append(np.column_stack([known[rows], code, np.full(rows.sum(), float(gamma))]))
            rates.append(np.minimum(log.accepted[rows], gamma) / gamma)
        x, y = np.concatenate(inputs), np.concatenate(rates)
        chosen = np.random.default_rng(seed).permutation(len(y))[: self.records]
        return x[chosen], y[chosen]

    def predict(self, features: Features) -> FloatArray:
        """Predicted acceptance rate of each gamma, (n, number of gammas), from 0 to 1."""
        raise NotImplementedError

    def _value(self, features: Features) -> FloatArray:
        """What each gamma is worth, (n, number of gammas)."""
        return np.asarray(self.predict(features) * np.array(self.gammas) + 1)

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return np.asarray(np.array(self.gammas)[self._value(features).argmax(axis=1)])


class Mlp(AcceptancePredictor):
    """Predicts the acceptance rate of each gamma with one hidden layer, and plays the most tokens a step.

    Args:
        gammas: the choices, tokens.
        hidden: units of the hidden layer.
        records: most training records, drawn at random; the paper had 4,089.
        random_state: of scikit-learn's regressor.
    """

    name = "mlp"
    source = (
        "SpecKV (arXiv 2605.02888), constants read in its source: gammas 2, 4, 6, 8, 16 units, scikit-learn "
        "MLPRegressor with max_iter 500 and seed 42; scaling of the inputs is ours"
    )
    objective: ClassVar[str] = "tokens"

    def __init__(
        self, gammas: tuple[int, ...] = (2, 4, 6, 8), hidden: int = 16, records: int = 4089, random_state: int = 42
    ) -> None:
        super().__init__(gammas, records)
        check_count(1, hidden=hidden)
        self.hidden, self.random_state = hidden, random_state

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        self._learn(*self._records(traces, costs, seed), *step_seconds(costs, traces))
        if self.objective == "throughput":
            settle_rate(self, traces, costs)
        return self

    def fit_steps(self, log: StepLog, costs: CostModel, seed: int = 0) -> Self:
        seconds = forward_seconds(usual_costs(log, costs), usual_context(log), max(self.gammas))
        self._learn(*self._logged_records(log, seed), *seconds)
        if self.objective == "throughput":
            settle_rate_on_log(self, log, costs)
        return self

    def _learn(self, inputs: FloatArray, rates: FloatArray, draft: float, verify: FloatArray) -> None:
        from sklearn.neural_network import MLPRegressor

        center, scale = inputs.mean(axis=0), inputs.std(axis=0)
        scale[scale == 0] = 1.0
        model = MLPRegressor(hidden_layer_sizes=(self.hidden,), max_iter=500, random_state=self.random_state)
        model.fit((inputs - center) / scale, rates)
        (hidden, out), (hidden_bias, out_bias) = model.coefs_, model.intercepts_
        gammas = np.array(self.gammas)
        self.fitted = {
            # The scaling is folded into the first layer, so that a decision is two small products.
            "hidden": hidden / scale[:, None],
            "hidden_bias": hidden_bias - (center / scale) @ hidden,
            "out": out[:, 0],
            "out_bias": out_bias,
            "seconds": gammas * draft + verify[:, gammas + 1],
            "rate": np.zeros(len(verify)),
        }

    def predict(self, features: Features) -> FloatArray:
        x = np.column_stack([features[name] for name in SIGNALS])
        shared = x @ self.fitted["hidden"][:-1] + self.fitted["hidden_bias"]
        by_gamma = np.outer(self.gammas, self.fitted["hidden"][-1])
        hidden = np.maximum(shared[:, None, :] + by_gamma[None], 0.0)
        return np.asarray(np.clip(hidden @ self.fitted["out"] + self.fitted["out_bias"][0], 0.0, 1.0))

    def _value(self, features: Features) -> FloatArray:
        value = super()._value(features)
        if self.objective == "throughput":
            code = features["compression"].astype(np.int64)
            value = value - self.fitted["rate"][code, None] * self.fitted["seconds"][code]
        return value

    def program(self) -> Program:
        # One network for all gammas: each has the hidden layer for itself, with its own bias.
        (*hidden, by_gamma), gammas = self.fitted["hidden"], np.array(self.gammas, dtype=float)
        weights = np.tile(hidden, len(gammas)), np.kron(np.eye(len(gammas)), self.fitted["out"][:, None])
        biases = (
            (self.fitted["hidden_bias"] + np.outer(gammas, by_gamma)).ravel(),
            np.repeat(self.fitted["out_bias"], len(gammas)),
        )
        model = Network(Inputs(SIGNALS, ("none",) * len(SIGNALS)), weights, biases, "relu", output="unit")
        # The rate is 0 where tokens alone count.
        offset = 1 - self.fitted["rate"][:, None] * self.fitted["seconds"]
        return Program(Choice(np.array(self.gammas), model, scale=gammas, offset=offset))


class MlpThroughput(Mlp):
    """The same predictor, asked for tokens a second: tokens - rate * seconds of the step, from measured costs.

    Args: as for `Mlp`; gamma 0, no speculation, is among the choices.
    """

    name = "mlp-throughput"
    source = Mlp.source + "; the objective is ours"
    objective = "throughput"

    def __init__(
        self, gammas: tuple[int, ...] = (0, 2, 4, 6, 8), hidden: int = 16, records: int = 4089, random_state: int = 42
    ) -> None:
        super().__init__(gammas, hidden, records, random_state)
