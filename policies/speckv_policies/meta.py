"""Policies made of others: a bandit over stop rules, and wrappers around any policy."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Memory, Outcome, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.policy import put_rows, select_rows
from speckv.saving import named_policy
from speckv.steplogs import StepLog
from speckv.tuning import forward_seconds, step_seconds, usual_context, usual_costs
from speckv_policies.parameters import check_count, check_range

#: Stop rules without parameters: whether to draft on behind a token.
RULES: dict[str, Callable[[Features], BoolArray]] = {
    "confidence": lambda features: features["draft_top1"] >= 0.6,
    "svip": lambda features: np.sqrt(0.15 * features["draft_entropy"]) <= 0.3,
    "adaedl": lambda features: 1 - np.sqrt(0.2 * features["draft_entropy"]) >= 0.5,
    "margin": lambda features: features["draft_top1"] - features["draft_top2"] >= 0.3,
}


class TapOut(Policy):
    """Chooses one of several stop rules before each step, as a bandit.

    The reward of a rule is share * accepted / drafted + (1 - share) * accepted / cap. What is known of the rules
    outlives a sequence, since that is the point of a bandit; each compression has its own.

    Args:
        algorithm: "ucb1" plays the largest mean + sqrt(exploration * ln(steps) / the rule's own pulls), each rule once
            before; "thompson" plays the largest draw from Beta(1 + rewards, 1 + pulls - rewards).
        arms: names of rules, from `confidence` (top probability at least 0.6), `svip` (sqrt(0.15 * entropy) at most
            0.3), `adaedl` (1 - sqrt(0.2 * entropy) at least 0.5) and `margin` (the two likeliest tokens at least 0.3
            apart).
        exploration: 0 or more; of ucb1.
        share: in [0, 1].
        cap: most tokens in a draft, from 1.
        random_state: of thompson.
    """

    name = "tapout"
    features = ("compression", "draft_top1", "draft_top2", "draft_entropy")
    source = (
        "TapOut (arXiv 2511.02017), from third-party accounts: UCB1 or Thompson sampling over stop rules without "
        "parameters; the rules' constants, the share of 0.5 in the reward, and the cap are ours"
    )

    def __init__(
        self,
        algorithm: str = "ucb1",
        arms: tuple[str, ...] = tuple(RULES),
        exploration: float = 2.0,
        share: float = 0.5,
        cap: int = 16,
        random_state: int = 0,
    ) -> None:
        super().__init__()
        if algorithm not in ("ucb1", "thompson"):
            raise ValueError(f"algorithm is {algorithm!r}; it must be 'ucb1' or 'thompson'")
        if not arms or not set(arms) <= set(RULES):
            raise ValueError(f"arms are {list(arms)}; they must be some of {', '.join(RULES)}")
        check_range(0, exploration=exploration)
        check_range(0, 1, share=share)
        check_count(1, cap=cap)
        self.algorithm, self.arms, self.exploration = algorithm, tuple(arms), exploration
        self.share, self.cap, self.random_state = share, cap, random_state

    def new_memory(self) -> Memory:
        shape = (len(COMPRESSIONS), len(self.arms))
        return {"pulls": np.zeros(shape), "rewards": np.zeros(shape), "draws": np.zeros((), dtype=np.int64)}

    def new_state(self, rows: int) -> State:
        return {"compression": np.zeros(rows, dtype=np.int64), "arm": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        code = state["compression"] = features["compression"].astype(np.int64)
        pulls, rewards = self.memory["pulls"][code], self.memory["rewards"][code]
        if self.algorithm == "thompson":
            draws = int(self.memory["draws"])
            score = np.random.default_rng([self.random_state, draws]).beta(1 + rewards, 1 + pulls - rewards)
            self.memory["draws"] = np.array(draws + 1)
        else:
            played = np.maximum(pulls, 1)
            bonus = np.sqrt(self.exploration * np.log(np.maximum(pulls.sum(axis=1, keepdims=True), 1)) / played)
            score = np.where(pulls == 0, np.inf, rewards / played + bonus)
        state["arm"] = score.argmax(axis=1)
        return self.cap

    def propensity(self, state: State) -> npt.ArrayLike:
        # How many tokens are drafted depends on the rule, whose chance of being drawn has no closed form.
        return np.nan if self.algorithm == "thompson" else 1.0

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        answers = np.stack([RULES[name](features) for name in self.arms])
        return answers[state["arm"], np.arange(features.rows)]

    def observe(self, outcome: Outcome, state: State) -> None:
        drafted = outcome.drafted > 0
        rate = outcome.accepted / np.maximum(outcome.drafted, 1)
        reward = self.share * rate + (1 - self.share) * outcome.accepted / self.cap
        arm = state["compression"][drafted], state["arm"][drafted]
        np.add.at(self.memory["pulls"], arm, 1.0)
        np.add.at(self.memory["rewards"], arm, reward[drafted])


class _InnerFeatures:
    """The features of a wrapper: those of the policy inside. The class itself, which has none inside, has none."""

    def __get__(self, wrapper: "_Wrapper | None", owner: type) -> tuple[str, ...]:
        return () if wrapper is None else tuple(dict.fromkeys(wrapper.inner.features + wrapper.own_features))


class _Wrapper(Policy):
    """Passes every question on to another policy, named by `policy` as users name it. Both share one state, one
    memory and one set of fitted arrays.

    A policy inside that has nothing left to learn, such as a saved one, plays as it is; a wrapper that learns nothing
    itself is then fitted, too.
    """

    features = _InnerFeatures()
    own_features: tuple[str, ...] = ()
    #: Whether it learns more than the policy inside does.
    learns: ClassVar[bool] = False

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy

    @functools.cached_property
    def inner(self) -> Policy:
        # Made late: policies are known by name only when all of them are registered, this one included.
        return named_policy(self.policy)

    @property
    def inner_policies(self) -> tuple[Policy, ...]:
        return (self.inner,)

    @property
    def fitted(self) -> dict[str, npt.NDArray[Any]]:
        self._take_if_ready()
        return self._fitted

    @fitted.setter
    def fitted(self, fitted: dict[str, npt.NDArray[Any]]) -> None:
        self._fitted = fitted

    def forget(self) -> Self:
        self._take_if_ready()  # what the policy inside remembers is forgotten, too
        return super().forget()

    def _take_if_ready(self) -> None:
        """Be fitted if nothing is left to learn, here and inside."""
        if not self._fitted and not self.learns and not _has_to_learn(self.inner):
            self._check_inner()
            self._take(np.zeros(len(COMPRESSIONS)))

    @property
    def required_gamma(self) -> int:
        return self.inner.required_gamma

    def overrides(self, method: str) -> bool:
        inside = self.inner.overrides(method)
        if method == "fit_steps":
            return inside or not _has_to_learn(named_policy(self.policy))
        return inside or (method not in ("draw_token", "keep_drafting", "new_memory") and super().overrides(method))

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        self._renew()
        if _has_to_learn(self.inner):
            self.inner.fit(traces, costs, seed)
        return self._take(step_seconds(costs, traces)[1][:, 1] + costs.overhead)

    def fit_steps(self, log: StepLog, costs: CostModel, seed: int = 0) -> Self:
        self._renew()
        if _has_to_learn(self.inner):
            self.inner.fit_steps(log, costs, seed)
        costs = usual_costs(log, costs)
        return self._take(forward_seconds(costs, usual_context(log), 0)[1][:, 1] + costs.overhead)

    def _renew(self) -> None:
        """Have the policy inside as it is named, whatever became of it since."""
        self.inner = named_policy(self.policy)
        self._check_inner()

    def _check_inner(self) -> None:
        """Raise SpecKVError if this can't be played around the policy inside."""

    def _take(self, plain_seconds: FloatArray) -> Self:
        """Take over what the policy inside has learned."""
        self.fitted = self.inner.fitted | self._own_fitted(plain_seconds)
        self.memory = self.new_memory() | self.inner.memory
        return self

    def _own_fitted(self, plain_seconds: FloatArray) -> dict[str, npt.NDArray[Any]]:
        """What the wrapper itself learns; its names must differ from those of any policy inside.

        Args:
            plain_seconds: of a step without a draft, (number of known compressions,).
        """
        return {f"{self.name}.fitted": np.array(1)}

    def new_memory(self) -> Memory:
        return self.inner.new_memory()

    def new_state(self, rows: int) -> State:
        self.inner.fitted, self.inner.memory = self.fitted, self.memory
        return self.inner.new_state(rows)

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.inner.choose_gamma(features, state)

    def propensity(self, state: State) -> npt.ArrayLike:
        return self.inner.propensity(state)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return self.inner.draw_token(features, state)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self.inner.keep_drafting(features, state)

    def observe(self, outcome: Outcome, state: State) -> None:
        self.inner.observe(outcome, state)


def _has_to_learn(policy: Policy) -> bool:
    """Whether a policy can't be played before it is fitted."""
    return type(policy).fit is not Policy.fit and not policy.fitted


class Hysteresis(_Wrapper):
    """Another policy's gamma, changed only when it has been kept for a while and the new one is far enough away.

    Where decoders capture a graph for each gamma, or batch by it, changing it costs time. Stops inside a draft are
    the other policy's own. A policy that moves by small steps from the gamma last played, as the heuristic does, never
    gets beyond a margin that is larger than those.

    Args:
        policy: as users call it, such as "heuristic:start=3" or the folder of a saved one; it must choose gamma before
            the step.
        dwell: steps that a gamma is kept at least, from 1.
        margin: tokens by which the new gamma must differ at least, from 1.
    """

    name = "hysteresis"
    source = "dwell time and hysteresis as decoders have added them against flipping (SGLang); the constants are ours"

    def __init__(self, policy: str = "heuristic", dwell: int = 4, margin: int = 1) -> None:
        super().__init__(policy)
        check_count(1, dwell=dwell, margin=margin)
        self.dwell, self.margin = dwell, margin

    def _check_inner(self) -> None:
        if not self.inner.overrides("choose_gamma"):
            raise SpecKVError(f"policy {self.policy!r} chooses no gamma that {self.name} could steady; name another")

    def new_state(self, rows: int) -> State:
        # As if a gamma had been kept for long enough, so that the first one is taken as it is.
        return super().new_state(rows) | {
            "hysteresis.gamma": np.full(rows, -self.margin, dtype=np.int64),
            "hysteresis.age": np.full(rows, self.dwell, dtype=np.int64),
            "hysteresis.propensity": np.ones(rows),
        }

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        held, age = state["hysteresis.gamma"], state["hysteresis.age"]
        wanted = np.broadcast_to(np.asarray(self.inner.choose_gamma(features, state), dtype=np.int64), held.shape)
        change = (age >= self.dwell) & (np.abs(wanted - held) >= self.margin)
        state["hysteresis.gamma"] = np.where(change, wanted, held)
        state["hysteresis.age"] = np.where(change, 1, age + 1)
        # A gamma that might have changed is kept for any of those within the margin, whose chances are not known.
        inside = np.asarray(self.inner.propensity(state), dtype=float)
        known = change | (inside == 1) | (self.margin == 1)
        state["hysteresis.propensity"] = np.where(age < self.dwell, 1.0, np.where(known, inside, np.nan))
        return state["hysteresis.gamma"]

    def propensity(self, state: State) -> npt.ArrayLike:
        return state["hysteresis.propensity"]


class Explore(_Wrapper):
    """Another policy that now and then plays a gamma drawn at random, and says with which chance it played what it did.

    Live decoders log that chance. From such a log the throughput of policies that were never played can be estimated
    (`speckv evaluate`); a log without exploration can't tell what a gamma that was not played would have been worth.
    With probability `epsilon` each gamma from 0 to `largest` is equally likely.

    Args:
        policy: as users call it, such as "heuristic:start=3" or the folder of a saved one; it must decide before the
            step alone.
        epsilon: chance of drawing lots, above 0 and at most 1.
        largest: most tokens that are drawn, from 1.
        random_state: seed of the lots.
    """

    name = "explore"
    explores = True
    source = (
        "epsilon-greedy exploration with logged propensities, as off-policy evaluation needs it; constants are ours"
    )

    def __init__(
        self, policy: str = "heuristic", epsilon: float = 0.1, largest: int = 8, random_state: int = 0
    ) -> None:
        super().__init__(policy)
        check_range(1e-9, 1, epsilon=epsilon)
        check_count(1, largest=largest)
        self.epsilon, self.largest, self.random_state = epsilon, largest, random_state

    @property
    def required_gamma(self) -> int:
        return max(self.largest, self.inner.required_gamma)

    def overrides(self, method: str) -> bool:
        return method == "new_memory" or super().overrides(method)

    def _check_inner(self) -> None:
        if self.inner.kind != "before":
            raise SpecKVError(
                f"policy {self.policy!r} stops inside the draft, so that the chance of what {self.name} would play "
                "can't be known; name one that decides before the step"
            )

    def new_memory(self) -> Memory:
        return super().new_memory() | {"explore.draws": np.zeros((), dtype=np.int64)}

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {"explore.propensity": np.ones(rows)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        wanted = np.broadcast_to(np.asarray(super().choose_gamma(features, state), dtype=np.int64), features.rows)
        random = np.random.default_rng([self.random_state, int(self.memory["explore.draws"])])
        self.memory["explore.draws"] = self.memory["explore.draws"] + 1
        lots = random.integers(self.largest + 1, size=features.rows)
        chosen = np.where(random.random(features.rows) < self.epsilon, lots, wanted)
        by_lot = np.where(chosen <= self.largest, self.epsilon / (self.largest + 1), 0.0)
        # Of a policy that draws lots itself it is not known how likely it was to want what it did not.
        inside = np.asarray(super().propensity(state), dtype=float)
        by_choice = np.where(chosen == wanted, inside, np.where(inside == 1, 0.0, np.nan))
        state["explore.propensity"] = by_lot + (1 - self.epsilon) * by_choice
        return chosen

    def propensity(self, state: State) -> npt.ArrayLike:
        return state["explore.propensity"]


class OffSwitch(_Wrapper):
    """Another policy, switched off while it is slower than decoding without speculation, and tried again later.

    Its speed is tokens / seconds over its own drafting steps, both sums with weights that fall by `decay` a step.
    After `patience` such steps it is switched off if that is below the target's measured speed alone. After
    `probe_every` steps without a draft it is on again with new sums, and judged after `probe` drafting steps. Speed
    and switch belong to a sequence, since whether speculation pays changes with the text.

    Args:
        policy: as users call it, such as "fixed:gamma=6" or the folder of a saved one.
        decay: in [0, 1].
        patience, probe: drafting steps before the first judgement, and before those after a pause, from 1.
        probe_every: steps of a pause, from 1.
    """

    name = "off-switch"
    own_features = ("compression",)
    learns = True
    source = (
        "switching speculation off where it does not pay, as TensorRT-LLM's `acceptance_rate_threshold` (which is for "
        "good); judging by measured time, trying again, and the constants are ours"
    )

    def __init__(
        self, policy: str = "heuristic", decay: float = 0.9, patience: int = 6, probe: int = 3, probe_every: int = 16
    ) -> None:
        super().__init__(policy)
        check_range(0, 1, decay=decay)
        check_count(1, patience=patience, probe=probe, probe_every=probe_every)
        self.decay, self.patience, self.probe, self.probe_every = decay, patience, probe, probe_every

    def _own_fitted(self, plain_seconds: FloatArray) -> dict[str, npt.NDArray[Any]]:
        return {"off-switch.plain_seconds": plain_seconds}

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {
            "off-switch.plain": np.zeros(rows),
            "off-switch.tokens": np.zeros(rows),
            "off-switch.seconds": np.zeros(rows),
            "off-switch.to_judge": np.full(rows, self.patience, dtype=np.int64),
            "off-switch.pause": np.zeros(rows, dtype=np.int64),
        }

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        code = features["compression"].astype(np.int64)
        state["off-switch.plain"] = self.fitted["off-switch.plain_seconds"][code]
        return np.where(state["off-switch.pause"] > 0, 0, self.inner.choose_gamma(features, state))

    def propensity(self, state: State) -> npt.ArrayLike:
        return np.where(state["off-switch.pause"] > 0, 1.0, self.inner.propensity(state))

    def observe(self, outcome: Outcome, state: State) -> None:
        paused = state["off-switch.pause"] > 0
        self._let_inner_observe(outcome, state, np.flatnonzero(~paused))
        drafted = outcome.drafted > 0
        tokens = self._decayed(state["off-switch.tokens"], (outcome.accepted + 1).astype(float), drafted)
        seconds = self._decayed(state["off-switch.seconds"], outcome.seconds, drafted)
        to_judge = np.maximum(state["off-switch.to_judge"] - drafted, 0)
        off = drafted & (to_judge == 0) & (tokens * state["off-switch.plain"] < seconds)
        state["off-switch.tokens"] = np.where(off, 0.0, tokens)
        state["off-switch.seconds"] = np.where(off, 0.0, seconds)
        state["off-switch.to_judge"] = np.where(off, self.probe, to_judge)
        state["off-switch.pause"] = np.where(off, self.probe_every, np.maximum(state["off-switch.pause"] - 1, 0))

    def _decayed(self, old: FloatArray, newest: FloatArray, drafted: BoolArray) -> FloatArray:
        return np.where(drafted, self.decay * old + newest, old)

    def _let_inner_observe(self, outcome: Outcome, state: State, rows: IntArray) -> None:
        """The policy inside learns from the steps that were its own."""
        if len(rows) == len(outcome.drafted):
            self.inner.observe(outcome, state)
        elif len(rows):
            part = select_rows(state, rows)
            self.inner.observe(Outcome(outcome.drafted[rows], outcome.accepted[rows], outcome.seconds[rows]), part)
            put_rows(state, part, rows, f"{self.inner.name}.observe")
