"""Rules that choose gamma from how often drafted tokens were accepted so far."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Memory, Outcome, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.features import FloatArray
from speckv.tuning import step_seconds
from speckv_policies.parameters import check_count, check_order, check_range


class Leviathan(Policy):
    """The gamma with the most expected tokens per unit time, if every drafted token is accepted with the same chance.

        maximise (1 - a^(gamma + 1)) / ((1 - a) * (1 + gamma * c))

    where a is the sequence's running acceptance and c the seconds of a draft forward to those of a target forward.
    Where that is 0 tokens, nothing more is learned in this sequence, and it stays at 0.

    Args:
        largest: upper bound, tokens, from 1.
    """

    name = "leviathan"
    features = ("running_acceptance", "cost_ratio")
    source = (
        "Leviathan et al., 2023 (arXiv 2211.17192), read in the paper; `largest` and putting the running acceptance in "
        "the place of a known one are ours"
    )

    def __init__(self, largest: int = 16) -> None:
        super().__init__()
        check_count(1, largest=largest)
        self.largest = largest

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        tokens = expected_tokens(features["running_acceptance"], self.largest)
        seconds = 1 + np.arange(self.largest + 1) * features["cost_ratio"][:, None]
        return np.asarray((tokens / seconds).argmax(axis=1))


class Goodput(Policy):
    """The gamma with the most expected tokens a second of measured step time, for one running acceptance.

        maximise (1 + a + a^2 + … + a^gamma) / (gamma draft forwards + a target forward of gamma + 1 tokens)

    where a is a running mean of accepted / tried over all sequences (a token is tried if all before it were
    accepted). It outlives a sequence, since a server measures it over all it serves, and each compression has its
    own. After `probe_every` - 1 steps without a draft one token is drafted, so that it can find back from there. Step
    times are those of one sequence at a time: the cost tables know no batch.

    Args:
        start: acceptance in [0, 1] before anything was tried.
        weight: of the newest step in the running acceptance, in [0, 1].
        probe_every: steps from one draft to the next where none pays, from 1.
    """

    name = "goodput"
    features = ("compression",)
    source = "SmartSpec / TurboSpec (arXiv 2406.14066), from memory; `start`, `weight` and the probes are ours"

    def __init__(self, start: float = 0.7, weight: float = 0.05, probe_every: int = 16) -> None:
        super().__init__()
        check_range(0, 1, start=start, weight=weight)
        check_count(1, probe_every=probe_every)
        self.start, self.weight, self.probe_every = start, weight, probe_every

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        draft, verify = step_seconds(costs, traces)
        self.fitted = {"seconds": np.arange(verify.shape[1] - 1) * draft + verify[:, 1:]}
        return self.forget()

    def new_memory(self) -> Memory:
        return {"acceptance": np.full(len(COMPRESSIONS), float(self.start))}

    def new_state(self, rows: int) -> State:
        return {"compression": np.zeros(rows, dtype=np.int64), "idle": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        code = state["compression"] = features["compression"].astype(np.int64)
        seconds = self.fitted["seconds"][code]
        tokens = expected_tokens(self.memory["acceptance"][code], seconds.shape[1] - 1)
        probe = state["idle"] >= self.probe_every - 1
        with np.errstate(divide="ignore"):  # where no forward was timed, one takes no time, and nothing is drafted
            best = (tokens / seconds).argmax(axis=1)
        return np.asarray(np.maximum(best, probe))

    def observe(self, outcome: Outcome, state: State) -> None:
        acceptance = self.memory["acceptance"]
        tried = outcome.accepted + (outcome.accepted < outcome.drafted)
        state["idle"] = np.where(tried > 0, 0, state["idle"] + 1)
        for code in set(state["compression"][tried > 0].tolist()):
            batch = state["compression"] == code
            rate = outcome.accepted[batch].sum() / tried[batch].sum()
            acceptance[code] += self.weight * (rate - acceptance[code])


class Dsde(Policy):
    """Drafts less where draft and target have moved apart of late, and all the more so where that is unsteady.

        gamma = (1 - factor * unsteadiness) * (largest - smallest) + smallest, rounded, within its bounds
        factor = exp(sharpness * divergence of the last step) - 1
        unsteadiness = variance of the last `short` divergences / that of the last `long`, weighted by decay^age

    The published divergence is that of the target's distributions from the draft's, nats, a mean over the tokens of a
    step. No signal holds it. Of a greedy target it is -ln of the chance that the draft gave to its token, for which
    stands here -ln(c) where the token was accepted and -ln(1 - c) where it was rejected, c being the mean top
    probability of the draft. With less than two steps, or no variance at all, unsteadiness is 1. All of it starts
    afresh with every sequence, as the method does for each request.

    Args:
        smallest, largest: bounds of gamma, tokens, from 1.
        sharpness: 0 or more.
        decay: in (0, 1].
        short, long: steps, from 2.
    """

    name = "dsde"
    features = ("last_gamma", "last_accepted", "last_mean_top1")
    source = (
        "DSDE (arXiv 2509.01083), from third-party accounts: sharpness 2, 10 and 30 steps, decay 0.85; the bounds, "
        "2 and 10, and the stand-in for the divergence are ours"
    )

    def __init__(
        self,
        smallest: int = 2,
        largest: int = 10,
        sharpness: float = 2.0,
        decay: float = 0.85,
        short: int = 10,
        long: int = 30,
    ) -> None:
        super().__init__()
        check_count(1, smallest=smallest, largest=largest)
        check_order(smallest=smallest, largest=largest)
        check_range(0, sharpness=sharpness)
        check_range(0.001, 1, decay=decay)
        check_count(2, short=short, long=long)
        check_order(short=short, long=long)
        self.smallest, self.largest, self.sharpness = smallest, largest, sharpness
        self.decay, self.short, self.long = decay, short, long

    def new_state(self, rows: int) -> State:
        # The newest divergence is the first.
        return {"divergences": np.zeros((rows, self.long)), "count": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        drafted = features["last_gamma"] > 0
        accepted = features["last_accepted"]
        tried = accepted + (accepted < features["last_gamma"])
        share, chance = accepted / np.maximum(tried, 1), np.clip(features["last_mean_top1"], 0.01, 0.99)
        newest = -share * np.log(chance) - (1 - share) * np.log(1 - chance)
        moved = np.column_stack([newest, state["divergences"][:, :-1]])
        state["divergences"] = np.where(drafted[:, None], moved, state["divergences"])
        state["count"] = np.minimum(state["count"] + drafted, self.long)
        short, long = (self._variance(state, steps) for steps in (self.short, self.long))
        unsteadiness = np.where(long > 0, short / np.where(long > 0, long, 1.0), 1.0)
        factor = np.expm1(self.sharpness * state["divergences"][:, 0])
        gamma = (1 - factor * unsteadiness) * (self.largest - self.smallest) + self.smallest
        return np.asarray(np.rint(np.clip(gamma, self.smallest, self.largest)), dtype=np.int64)

    def _variance(self, state: State, steps: int) -> FloatArray:
        """Weighted variance of the last `steps` divergences, (n,); 0 where there are none."""
        age = np.arange(steps)
        weights = self.decay**age * (age < state["count"][:, None])
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)
        values = state["divergences"][:, :steps]
        mean = (weights * values).sum(axis=1, keepdims=True)
        return np.asarray((weights * (values - mean) ** 2).sum(axis=1))


def expected_tokens(acceptance: FloatArray, largest: int) -> FloatArray:
    """Tokens of a step with 0..largest drafted ones, each accepted with the chance `acceptance` (n,) if those before
    it are; (n, largest + 1)."""
    return np.asarray(np.cumsum(acceptance[:, None] ** np.arange(largest + 1), axis=1))
