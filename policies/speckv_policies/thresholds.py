"""Rules that stop a draft when the draft model is no longer sure of itself."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Outcome, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.features import BoolArray, FloatArray
from speckv.runtime.programs import Program, Table, Threshold
from speckv.tuning import fastest_by_compression
from speckv_policies.parameters import check_count, check_order, check_range


class Confidence(Policy):
    """Stops behind a drafted token whose probability is below a threshold; that token is still verified.

    Args:
        threshold: probability in [0, 1]; 0 never stops. None for the fastest on the training prompts.
        cap: most tokens in a draft; 0 is no speculation. None for the fastest on the training prompts.

    What is None is tuned for each compression, which makes this the tuned confidence rule that other adaptive
    policies have to beat.
    """

    name = "confidence"
    features = ("compression", "draft_probability")
    source = (
        "transformers, `assistant_confidence_threshold`, read in its source (threshold 0.4, cap 20); the tuning for "
        "each compression is ours"
    )

    THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    CAPS = (0, 1, 2, 3, 4, 6, 8, 12, 16)

    def __init__(self, threshold: float | None = None, cap: int | None = None) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold)
        check_count(0, cap=cap)
        self.threshold, self.cap = threshold, cap
        if threshold is not None and cap is not None:
            self.fitted = {"threshold": np.full(len(COMPRESSIONS), threshold), "cap": np.full(len(COMPRESSIONS), cap)}

    @property
    def required_gamma(self) -> int:
        return self.cap or 0

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        if self.threshold is not None and self.cap is not None:
            return self
        thresholds = self.THRESHOLDS if self.threshold is None else (self.threshold,)
        caps = [cap for cap in self.CAPS if cap <= traces.gamma_max] if self.cap is None else [self.cap]
        candidates = [(threshold, cap) for cap in caps for threshold in (thresholds if cap > 1 else thresholds[:1])]
        best = fastest_by_compression([Confidence(*candidate) for candidate in candidates], traces, costs)
        self.fitted = {
            "threshold": np.array([candidates[index][0] for index in best]),
            "cap": np.array([candidates[index][1] for index in best]),
        }
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.fitted["cap"][features["compression"].astype(np.int64)]

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return features["draft_probability"] >= self.fitted["threshold"][features["compression"].astype(np.int64)]

    def program(self) -> Program:
        return Program(Table(self.fitted["cap"]), Threshold("draft_probability", self.fitted["threshold"]))


class AdaptiveConfidence(Policy):
    """Stops behind a drafted token whose probability is below a threshold that is fitted again after every step.

    The new threshold has the least false positive rate + `miss_weight` * false negative rate on this sequence's own
    tokens up to the first wrong one, "positive" being a token of at least that probability. It starts afresh with
    every sequence, as transformers does with every call of `generate`. The last token of a draft that was stopped
    by its length is not among the samples: no decision is asked for behind it, so that its probability isn't seen.

    Args:
        threshold: probability in [0, 1], until there are enough samples.
        cap: most tokens in a draft, from 1.
        miss_weight: of a right token below the threshold against a wrong one above it, 0 or more.
        least_samples: tokens before the first fit, from 2; both right and wrong ones are needed.
        window: most recent tokens that are kept, from 2.
    """

    name = "adaptive-confidence"
    features = ("draft_index", "draft_probability")
    source = (
        "transformers, `assistant_confidence_threshold` with its adjustment on the ROC curve, read in its source: "
        "threshold 0.4, cap 20, weight 3, at least 6 samples; `window` is ours, transformers keeps all"
    )

    def __init__(
        self,
        threshold: float = 0.4,
        cap: int = 20,
        miss_weight: float = 3.0,
        least_samples: int = 6,
        window: int = 256,
    ) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold)
        check_count(1, cap=cap)
        check_range(0, miss_weight=miss_weight)
        check_count(2, least_samples=least_samples, window=window)
        self.threshold, self.cap, self.miss_weight = threshold, cap, miss_weight
        self.least_samples, self.window = least_samples, window

    def new_state(self, rows: int) -> State:
        return {
            "threshold": np.full(rows, float(self.threshold)),
            "draft": np.zeros((rows, self.cap)),
            "seen": np.zeros(rows, dtype=np.int64),
            "samples": np.zeros((rows, self.window)),
            "right": np.zeros((rows, self.window), dtype=bool),
            "count": np.zeros(rows, dtype=np.int64),
        }

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["seen"] = np.zeros(features.rows, dtype=np.int64)
        return self.cap

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        index, probability = features["draft_index"].astype(np.int64), features["draft_probability"]
        state["draft"][np.arange(len(index)), index - 1] = probability
        state["seen"] = index
        return probability >= state["threshold"]

    def observe(self, outcome: Outcome, state: State) -> None:
        usable = np.minimum(state["seen"], outcome.accepted + (outcome.accepted < outcome.drafted))
        for index in range(int(usable.max(initial=0))):
            rows = np.flatnonzero(usable > index)
            slot = state["count"][rows] % self.window
            state["samples"][rows, slot] = state["draft"][rows, index]
            state["right"][rows, slot] = index < outcome.accepted[rows]
            state["count"][rows] += 1
        filled = np.arange(self.window) < state["count"][:, None]
        enough = (usable > 0) & (filled.sum(axis=1) >= self.least_samples)
        enough &= (state["right"] & filled).any(axis=1) & (~state["right"] & filled).any(axis=1)
        rows = np.flatnonzero(enough)
        if len(rows):
            state["threshold"][rows] = best_threshold(
                state["samples"][rows], state["right"][rows], filled[rows], self.miss_weight
            )


def best_threshold(samples: FloatArray, right: BoolArray, filled: BoolArray, miss_weight: float) -> FloatArray:
    """The sample that is the best threshold of each row: the highest of those with the least false positive rate +
    `miss_weight` * false negative rate; infinite where it is best to take no token for right.

    Args:
        samples, right, filled: (n, k) values, whether the token was right, and whether there is one at all. Each
            row has a right and a wrong one.
    """
    order = np.argsort(np.where(filled, -samples, np.inf), axis=1, kind="stable")
    samples = np.take_along_axis(samples, order, axis=1)
    right, filled = np.take_along_axis(right, order, axis=1), np.take_along_axis(filled, order, axis=1)
    hits, false_alarms = np.cumsum(right & filled, axis=1), np.cumsum(~right & filled, axis=1)
    cost = false_alarms / false_alarms[:, -1:] + miss_weight * (1 - hits / hits[:, -1:])
    # Of equal samples only the last stands for a threshold: all of them are at least as large as it.
    last = np.ones_like(filled)
    last[:, :-1] = (samples[:, :-1] != samples[:, 1:]) | ~filled[:, 1:]
    cost = np.where(filled & last, cost, np.inf)
    best = samples[np.arange(len(samples)), cost.argmin(axis=1)]
    return np.where(cost.min(axis=1) < miss_weight, best, np.inf)


class MinimumProbability(Policy):
    """Does not draw a token whose distribution has no likely one: its top probability is below `p_min`.

    llama.cpp discards a draft that ended up shorter than `n_min`. A token that was drawn must be verified here, so
    the rule is asked only behind token `n_min`: no draft is stopped while it is shorter than that.
    Its build 11549 divides by the probability of the ten likeliest first, as the exporter `llamacpp` does.

    Args:
        n_max: most tokens in a draft, from 0.
        n_min: tokens that are drafted whatever their probability, from 0 to n_max.
        p_min: probability in [0, 1]; 0 never stops.
    """

    name = "p-min"
    features = ("draft_index", "draft_top1")
    source = (
        "llama.cpp, `--spec-draft-n-max`, `-n-min` and `-p-min`, read in its source: 3, 0 and 0; drafting the first "
        "`n_min` tokens in any case instead of discarding shorter drafts is ours"
    )

    def __init__(self, n_max: int = 3, n_min: int = 0, p_min: float = 0.0) -> None:
        super().__init__()
        check_count(0, n_max=n_max, n_min=n_min)
        check_order(n_min=n_min, n_max=n_max)
        check_range(0, 1, p_min=p_min)
        self.n_max, self.n_min, self.p_min = n_max, n_min, p_min

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.n_max

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return (features["draft_top1"] >= self.p_min) | (features["draft_index"] <= self.n_min)

    def program(self) -> Program:
        return Program(
            Table(_same(self.n_max)), Threshold("draft_top1", _same(self.p_min), drawn=False, least=self.n_min)
        )


class Kangaroo(Policy):
    """Stops behind a token whose distribution had a top probability below a threshold.

    Args:
        threshold: probability in [0, 1].
        cap: most tokens in a draft, from 0.
    """

    name = "kangaroo"
    features = ("draft_top1",)
    source = "Kangaroo (arXiv 2404.18911), read in its source: threshold 0.6, cap 6"

    def __init__(self, threshold: float = 0.6, cap: int = 6) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold)
        check_count(0, cap=cap)
        self.threshold, self.cap = threshold, cap

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.cap

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return features["draft_top1"] >= self.threshold

    def program(self) -> Program:
        return Program(Table(_same(self.cap)), Threshold("draft_top1", _same(self.threshold)))


class Svip(Policy):
    """Stops behind a token with sqrt(scale * entropy) above a threshold.

    The entropy of the draft bounds how likely the target is to accept.

    Args:
        scale: factor of the entropy in nats, 0 or more.
        threshold: 0 or more.
        cap: most tokens in a draft, from 0.
    """

    name = "svip"
    features = ("draft_entropy",)
    source = "SVIP (arXiv 2411.18462), read in its source: scale 0.15, threshold 0.3, cap 40"

    def __init__(self, scale: float = 0.15, threshold: float = 0.3, cap: int = 40) -> None:
        super().__init__()
        check_range(0, scale=scale, threshold=threshold)
        check_count(0, cap=cap)
        self.scale, self.threshold, self.cap = scale, threshold, cap

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.cap

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return np.sqrt(self.scale * features["draft_entropy"]) <= self.threshold

    def program(self) -> Program:
        most = self.threshold**2 / self.scale if self.scale else np.inf
        return Program(Table(_same(self.cap)), Threshold("draft_entropy", _same(most), above=False))


class _Steered(Policy):
    """A threshold that is raised while too few drafted tokens are accepted, and lowered while enough are."""

    def __init__(
        self, threshold: float, cap: int, target: float, step: float, memory_share: float, smoothing: float
    ) -> None:
        super().__init__()
        check_range(0, 1, threshold=threshold, target=target, step=step)
        check_range(0, 1, memory_share=memory_share, smoothing=smoothing)
        check_count(0, cap=cap)
        self.threshold, self.cap, self.target, self.step = threshold, cap, target, step
        self.memory_share, self.smoothing = memory_share, smoothing

    def new_state(self, rows: int) -> State:
        return {"threshold": np.full(rows, float(self.threshold)), "acceptance": np.zeros(rows)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.cap

    def _steer(self, outcome: Outcome, state: State, hold: BoolArray) -> None:
        """Move the thresholds; those where `hold` (n,) is True are not lowered. A step without a draft says nothing."""
        drafted = outcome.drafted > 0
        rate = outcome.accepted / np.maximum(outcome.drafted, 1)
        acceptance = self.memory_share * state["acceptance"] + (1 - self.memory_share) * rate
        old = state["threshold"]
        aim = np.where(acceptance < self.target, old + self.step, np.where(hold, old, old - self.step))
        moved = np.clip(self.smoothing * old + (1 - self.smoothing) * aim, 0.0, 1.0)
        state["acceptance"] = np.where(drafted, acceptance, state["acceptance"])
        state["threshold"] = np.where(drafted, moved, old)


class DraftVerify(_Steered):
    """Stops behind a drafted token whose probability is below a threshold, and steers that threshold by acceptance.

    After a step, with a running mean of accepted / drafted:

        acceptance = memory_share * acceptance + (1 - memory_share) * accepted / drafted
        aim = threshold + step if acceptance < target, threshold if nothing stopped the draft, else threshold - step
        threshold = smoothing * threshold + (1 - smoothing) * aim

    Both start afresh with every sequence, as in the reference code, where they are local to one generation.

    Args:
        threshold: probability in [0, 1] to start with; the paper has 0.8 for greedy decoding, 0.5 for sampling.
        cap: most tokens in a draft, from 0.
        target: acceptance in [0, 1] to steer to.
        step: in [0, 1].
        memory_share, smoothing: weights of the old values, in [0, 1].
    """

    name = "draft-verify"
    features = ("draft_probability",)
    source = (
        "Draft & Verify (arXiv 2309.08168), read in its source: threshold 0.8, cap 8, target 0.9, step 0.01, weights "
        "0.5 and 0.9, running acceptance from 0; keeping the threshold within 0 and 1 is ours"
    )

    def __init__(
        self,
        threshold: float = 0.8,
        cap: int = 8,
        target: float = 0.9,
        step: float = 0.01,
        memory_share: float = 0.5,
        smoothing: float = 0.9,
    ) -> None:
        super().__init__(threshold, cap, target, step, memory_share, smoothing)

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {"stopped": np.zeros(rows, dtype=bool)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["stopped"] = np.zeros(features.rows, dtype=bool)
        return self.cap

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        state["stopped"] = features["draft_probability"] < state["threshold"]
        return ~state["stopped"]

    def observe(self, outcome: Outcome, state: State) -> None:
        self._steer(outcome, state, hold=~state["stopped"])


class AdaEdl(_Steered):
    """Does not draw a token with 1 - sqrt(scale * entropy) below a threshold, and steers that threshold by acceptance.

    The threshold moves as in `DraftVerify`, but is lowered whatever ended the draft. It starts afresh with every
    sequence, since nothing published says that it outlives one. A step that drew nothing leaves it as it is.

    Args:
        scale: factor of the entropy in nats, 0 or more.
        threshold: in [0, 1], to start with; the paper sweeps it from 0.3 to 0.9.
        cap: most tokens in a draft, from 0.
        target: acceptance in [0, 1] to steer to.
        step: in [0, 1].
        memory_share, smoothing: weights of the old values, in [0, 1].
    """

    name = "adaedl"
    features = ("draft_entropy",)
    source = (
        "AdaEDL (arXiv 2410.18351), from third-party accounts: scale 0.2, target 0.9, step 0.01, weights 0.5 and 0.9; "
        "the start, 0.5 out of a published 0.3 to 0.9, the cap, and keeping the threshold within 0 and 1 are ours"
    )

    def __init__(
        self,
        scale: float = 0.2,
        threshold: float = 0.5,
        cap: int = 20,
        target: float = 0.9,
        step: float = 0.01,
        memory_share: float = 0.5,
        smoothing: float = 0.9,
    ) -> None:
        super().__init__(threshold, cap, target, step, memory_share, smoothing)
        check_range(0, scale=scale)
        self.scale = scale

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return 1 - np.sqrt(self.scale * features["draft_entropy"]) >= state["threshold"]

    def observe(self, outcome: Outcome, state: State) -> None:
        self._steer(outcome, state, hold=np.zeros(len(outcome.drafted), dtype=bool))


def _same(value: float) -> FloatArray:
    """One value for every compression."""
    return np.full(len(COMPRESSIONS), value, dtype=float)
