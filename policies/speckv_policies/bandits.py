"""Bandits over gamma: they learn while they decode, from nothing but what their own steps came to.

All of them value a step by tokens - rate * seconds (see `speckv.tuning.settle_rate`), where rate is the throughput
of the best gamma so far. The gamma of the largest mean value is then the one of the highest throughput, which need be
neither the one with the most tokens a step nor the one whose steps have the highest mean of tokens a second. Tokens
and seconds of each gamma are summed apart, so that every earlier step is valued at the present rate. Nothing of it
needs training or a cost model. The sums never fade: texts that differ are told apart by `linucb` alone.

With `feedback="full"`, a step that drafted g tokens also tells what each shorter draft would have come to: its tokens
are the first ones of the same draft, and min(accepted, shorter) of them are accepted. Longer drafts learn nothing
from it. After a full acceptance their outcome is unknown; after a rejection it is known, but a gamma that learned
from rejections and not from full acceptances would look worse than it is.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from speckv import Features, Memory, Outcome, Policy, State
from speckv.compression import COMPRESSIONS
from speckv.features import BoolArray, FloatArray, IntArray
from speckv_policies.parameters import check_count, check_range

_SUMS = ("plays", "seconds", "squared_seconds", "count", "tokens", "squared_tokens")
GAMMAS = (0, 1, 2, 3, 4, 6, 8)
#: Batch sizes that are told apart: 1, 2, 3 to 4, …, more than 512.
_BATCHES = 11
_FULL = "; one-sided full feedback is published (abstract read), its form here is ours"


class _Bandit(Policy):
    """What the bandits share. K is the number of gammas; every context, a compression by default, has sums of its own.

    A gamma that was never played at a compression comes first, the shortest of them foremost: its seconds are seen
    in no other way. A step that had no room for the gamma chosen (the budget ends, or the draft proposes the end of
    the text) is no rejection: it says nothing of that gamma. A gamma that no budget has room for is therefore chosen
    again and again, and cut to what there is room for; leave it out.

    Attributes:
        contexts: how many there are.
    """

    features: tuple[str, ...] = ("compression",)
    contexts: ClassVar[int] = len(COMPRESSIONS)

    def __init__(self, gammas: tuple[int, ...], feedback: str, exploration: float) -> None:
        super().__init__()
        whole = all(isinstance(gamma, int) and gamma >= 0 for gamma in gammas)
        if not gammas or not whole or list(gammas) != sorted(set(gammas)):
            raise ValueError(f"gammas are {list(gammas)}; they must be whole numbers from 0, rising")
        if feedback not in {"bandit", "full"}:
            raise ValueError(f"feedback is {feedback!r}; it must be 'bandit' or 'full'")
        check_range(0, exploration=exploration)
        self.gammas, self.feedback, self.exploration = tuple(gammas), feedback, exploration

    @property
    def required_gamma(self) -> int:
        return self.gammas[-1]

    def new_memory(self) -> Memory:
        """Sums by context and gamma, (contexts, K): how often it was played, seconds and squared seconds of that; how
        many outcomes it learned from, tokens and squared tokens of those."""
        return {name: np.zeros((self.contexts, len(self.gammas))) for name in _SUMS}

    def new_state(self, rows: int) -> State:
        """What was chosen last: index of the gamma, and code of the context that it was chosen in."""
        return {"code": np.zeros(rows, dtype=np.int64), "arm": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["code"] = self._context(features)
        unplayed = self.memory["plays"][state["code"]] == 0
        state["arm"] = np.where(unplayed, np.inf, self._scores(features, state, unplayed.any(axis=1))).argmax(axis=1)
        return np.array(self.gammas)[state["arm"]]

    def _context(self, features: Features) -> IntArray:
        """(n,) codes, below `contexts`."""
        return features["compression"].astype(np.int64)

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        """(n, K); the gamma with the highest is played. Sequences that are `starting` play what was never played."""
        raise NotImplementedError

    def observe(self, outcome: Outcome, state: State) -> None:
        memory, code, arm = self.memory, state["code"], state["arm"]
        gammas = np.array(self.gammas)
        whole = outcome.drafted == gammas[arm]
        np.add.at(memory["plays"], (code, arm), whole)
        np.add.at(memory["seconds"], (code, arm), whole * outcome.seconds)
        np.add.at(memory["squared_seconds"], (code, arm), whole * outcome.seconds**2)
        if self.feedback == "full":
            seen = gammas <= outcome.drafted[:, None]
        else:
            seen = (np.arange(len(gammas)) == arm[:, None]) & whole[:, None]
        tokens = seen * (np.minimum(gammas, outcome.accepted[:, None]) + 1.0)
        np.add.at(memory["count"], code, seen)
        np.add.at(memory["tokens"], code, tokens)
        np.add.at(memory["squared_tokens"], code, tokens**2)
        self._learn(state, seen, tokens)

    def _learn(self, state: State, seen: BoolArray, tokens: FloatArray) -> None:
        """Take in the outcomes that were `seen`, (n, K), in `tokens`, beyond the sums that all bandits keep."""

    def _estimates(self, code: IntArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Mean tokens of a step; the tokens that its mean seconds are worth; the variance of the tokens; the squared
        standard error of the worth. Each (n, K).

        To every variance one outcome is added, off by half the range in which outcomes lie: 0 to gamma + 1 tokens,
        and half to one and a half times the mean seconds. A few outcomes that happen to agree prove nothing.
        """
        plays, seconds, squared_seconds, count, tokens, squared_tokens = (self.memory[name][code] for name in _SUMS)
        mean_tokens, mean_seconds = tokens / np.maximum(count, 1), seconds / np.maximum(plays, 1)
        rate = np.max(mean_tokens / np.where(plays > 0, mean_seconds, np.inf), axis=1, keepdims=True)
        of_tokens = np.maximum(squared_tokens - tokens * mean_tokens, 0) + ((np.array(self.gammas) + 1) / 2) ** 2
        of_seconds = np.maximum(squared_seconds - seconds * mean_seconds, 0) + (mean_seconds / 2) ** 2
        error = rate**2 * of_seconds / (plays + 1) / np.maximum(plays, 1)
        return mean_tokens, rate * mean_seconds, of_tokens / (count + 1), error

    def _values(self, code: IntArray) -> tuple[FloatArray, FloatArray]:
        """Mean value of a step in tokens, and its standard error, (n, K)."""
        tokens, paid, variance, error = self._estimates(code)
        return tokens - paid, np.sqrt(variance / np.maximum(self.memory["count"][code], 1) + error)

    def _patience(self, code: IntArray) -> FloatArray:
        """How many standard errors to hope for, (n, 1): it grows with the steps played, as in UCB1."""
        steps = self.memory["plays"][code].sum(axis=1, keepdims=True)
        return np.asarray(self.exploration * np.sqrt(2 * np.log(np.maximum(steps, 1))))


class Ucb1(_Bandit):
    """Plays the gamma with the highest upper confidence bound, value + exploration * sqrt(2 ln t * variance / n).

    t counts the steps played and n the outcomes of that very gamma, both at the compression at hand.

    Args:
        gammas: the choices, tokens, rising.
        feedback: "bandit", to learn of the gamma played alone, or "full", of all shorter ones too.
        exploration: factor of the bonus; 0 plays what looks best.
    """

    name = "ucb1"
    source = (
        "UCB1 (Auer et al., 2002, from memory) on gammas as in BanditSpec (reference code and third-party accounts); "
        "the variance in place of the range, the value tokens - rate * seconds and the gammas are ours" + _FULL
    )

    def __init__(self, gammas: tuple[int, ...] = GAMMAS, feedback: str = "bandit", exploration: float = 1.0) -> None:
        super().__init__(gammas, feedback, exploration)

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        value, error = self._values(state["code"])
        return np.asarray(value + self._patience(state["code"]) * error)


class _Random(_Bandit):
    """A bandit that draws lots. The memory counts them, so that a policy saved and loaded goes on alike."""

    def __init__(self, gammas: tuple[int, ...], feedback: str, exploration: float, random_state: int) -> None:
        super().__init__(gammas, feedback, exploration)
        check_count(0, random_state=random_state)
        self.random_state = random_state

    def new_memory(self) -> Memory:
        return super().new_memory() | {"draws": np.zeros((), dtype=np.int64)}

    def _generator(self) -> np.random.Generator:
        self.memory["draws"] = self.memory["draws"] + 1
        return np.random.default_rng([self.random_state, int(self.memory["draws"])])


class Thompson(_Random):
    """Draws a mean value for each gamma from its posterior, and plays the gamma with the highest.

    The posterior is normal, around the value of the mean outcome, with the variance of that mean: what a flat prior
    and outcomes of a known variance give. The variance is the measured one.

    Args:
        gammas: the choices, tokens, rising.
        feedback: "bandit", to learn of the gamma played alone, or "full", of all shorter ones too.
        exploration: factor of the posterior's standard deviation; 0 plays what looks best.
        random_state: of the draws.
    """

    name = "thompson"
    source = (
        "Thompson sampling with a normal posterior (textbook form, from memory); on gammas after TapOut, whose arms "
        "are stop rules (third-party account); the value tokens - rate * seconds and the gammas are ours" + _FULL
    )

    def __init__(
        self,
        gammas: tuple[int, ...] = GAMMAS,
        feedback: str = "bandit",
        exploration: float = 1.0,
        random_state: int = 0,
    ) -> None:
        super().__init__(gammas, feedback, exploration, random_state)

    def new_state(self, rows: int) -> State:
        """`drawn`: whether the gamma was chosen by lot."""
        return super().new_state(rows) | {"drawn": np.zeros(rows, dtype=bool)}

    def propensity(self, state: State) -> npt.ArrayLike:
        # That one of several normal numbers is the largest has no closed form.
        return np.where(state["drawn"], np.nan, 1.0)

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        state["drawn"] = ~starting & (self.exploration > 0)
        value, error = self._values(state["code"])
        return np.asarray(value + self.exploration * error * self._generator().standard_normal(error.shape))


class Exp3(_Random):
    """Draws a gamma with a chance that grows exponentially with its gain so far; it assumes nothing of the text.

    The gain of an outcome is its value by the largest number of tokens a step can have, clipped to [-1, 1], and
    divided by the chance that it would be seen: that the gamma is played or, with full feedback, one as long.
    Values are centred (the best gamma has about 0), which leaves less noise than gains in [0, 1] do.

    Args:
        gammas: the choices, tokens, rising.
        feedback: "bandit", to learn of the gamma played alone, or "full", of all shorter ones too.
        exploration: share of the steps in which all gammas are equally likely, in (0, 1]; by the number of gammas,
            it is also the rate of learning.
        random_state: of the draws.
    """

    name = "exp3"
    source = (
        "EXP3 (Auer et al., 2002, from memory) on gammas as in BanditSpec (third-party accounts); exploration 0.1, "
        "the value tokens - rate * seconds, its centring and the gammas are ours" + _FULL
    )

    def __init__(
        self,
        gammas: tuple[int, ...] = GAMMAS,
        feedback: str = "bandit",
        exploration: float = 0.1,
        random_state: int = 0,
    ) -> None:
        super().__init__(gammas, feedback, exploration, random_state)
        if not 0 < exploration <= 1:
            raise ValueError(f"exploration is {exploration}; it must be above 0 and at most 1")

    def new_memory(self) -> Memory:
        """`weights` are logarithms, the largest 0."""
        memory = super().new_memory()
        return memory | {"weights": np.zeros_like(memory["count"])}

    def new_state(self, rows: int) -> State:
        """`chance`: of drawing each gamma; infinite where none was drawn by lot, which then counts for nothing."""
        return super().new_state(rows) | {"chance": np.ones((rows, len(self.gammas)))}

    def propensity(self, state: State) -> npt.ArrayLike:
        return np.minimum(state["chance"][np.arange(len(state["arm"])), state["arm"]], 1.0)

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        weights = np.exp(self.memory["weights"][state["code"]])
        chance = (1 - self.exploration) * weights / weights.sum(axis=1, keepdims=True)
        chance = chance + self.exploration / len(self.gammas)
        state["chance"] = np.where(starting[:, None], np.inf, chance)
        # The largest of logarithm + Gumbel noise is a draw with these chances.
        return np.asarray(np.log(chance) + self._generator().gumbel(size=chance.shape))

    def _learn(self, state: State, seen: BoolArray, tokens: FloatArray) -> None:
        _, paid, _, _ = self._estimates(state["code"])
        chance = state["chance"]
        to_be_seen = chance[:, ::-1].cumsum(axis=1)[:, ::-1] if self.feedback == "full" else chance
        gains = np.clip((tokens - paid) / (self.gammas[-1] + 1), -1, 1) / to_be_seen
        weights = self.memory["weights"]
        np.add.at(weights, state["code"], seen * gains * self.exploration / len(self.gammas))
        weights -= weights.max(axis=1, keepdims=True)


class LinUcb(_Bandit):
    """Upper confidence bounds as of `ucb1`, on tokens that are linear in what is known before the step.

    Each gamma has a ridge regression of its tokens, less their mean, on five inputs in [0, 1]: 1, running_acceptance,
    last_accepted / last_gamma (1/2 if nothing was drafted), exp(-last_mean_entropy) and exp(-target_entropy). With x
    for the inputs and A for their moments in the outcomes of that gamma, the bonus is
    exploration * sqrt(2 ln t * variance * x' A^-1 x).

    Args:
        gammas: the choices, tokens, rising.
        feedback: "bandit", to learn of the gamma played alone, or "full", of all shorter ones too.
        exploration: factor of the bonus; 0 plays what looks best.
    """

    name = "linucb"
    features = (
        "compression",
        "running_acceptance",
        "last_gamma",
        "last_accepted",
        "last_mean_entropy",
        "target_entropy",
    )
    source = (
        "LinUCB with a model for each arm and ridge 1 (Li et al., 2010, from memory); inputs, the growing bonus, the "
        "value tokens - rate * seconds and the gammas are ours" + _FULL
    )

    def __init__(self, gammas: tuple[int, ...] = GAMMAS, feedback: str = "bandit", exploration: float = 1.0) -> None:
        super().__init__(gammas, feedback, exploration)

    def new_memory(self) -> Memory:
        """`moments` (number of known compressions, K, 5, 5) of the inputs, and of inputs and `tokens` (…, K, 5)."""
        memory = super().new_memory()
        shape = memory["count"].shape
        return memory | {"moments": np.zeros((*shape, 5, 5)), "products": np.zeros((*shape, 5))}

    def new_state(self, rows: int) -> State:
        return super().new_state(rows) | {"inputs": np.zeros((rows, 5))}

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        code = state["code"]
        drafted = features["last_gamma"]
        inputs = state["inputs"] = np.column_stack(
            [
                np.ones(features.rows),
                features["running_acceptance"],
                np.where(drafted > 0, features["last_accepted"] / np.maximum(drafted, 1), 0.5),
                np.exp(-features["last_mean_entropy"]),
                np.exp(-features["target_entropy"]),
            ]
        )
        tokens, paid, variance, error = self._estimates(code)
        moments = self.memory["moments"][code]
        # The first input is 1, so that the first row of the moments holds the sums of the inputs.
        deviations = self.memory["products"][code] - tokens[..., None] * moments[..., 0, :]
        weighed = np.linalg.solve(moments + np.eye(5), np.broadcast_to(inputs[:, None, :, None], (*tokens.shape, 5, 1)))
        weighed = weighed[..., 0]
        slope = (weighed * deviations).sum(axis=2)
        reach = (weighed * inputs[:, None]).sum(axis=2)
        return np.asarray(tokens + slope - paid + self._patience(code) * np.sqrt(variance * reach + error))

    def _learn(self, state: State, seen: BoolArray, tokens: FloatArray) -> None:
        inputs = state["inputs"]
        squares = inputs[:, :, None] * inputs[:, None, :]
        np.add.at(self.memory["moments"], state["code"], seen[..., None, None] * squares[:, None])
        np.add.at(self.memory["products"], state["code"], tokens[..., None] * inputs[:, None])


class Nightjar(_Bandit):
    """Upper confidence bounds as of `ucb1`, for each batch size apart, less what it costs to change gamma.

    A batch shares its forwards, so that the gamma that is worth its time falls with the number of sequences, down to 0.
    Batch sizes are told apart by powers of two: 1, 2, 3 to 4, 5 to 8, and so on. A gamma other than the one played last
    in a sequence has to be worth `switching` tokens more.

    Args:
        gammas: the choices, tokens, rising.
        feedback: "bandit", to learn of the gamma played alone, or "full", of all shorter ones too.
        exploration: factor of the bonus; 0 plays what looks best.
        switching: tokens that a change costs, 0 or more.
    """

    name = "nightjar"
    features = ("compression", "batch_size")
    source = (
        "Nightjar (arXiv 2512.22420, third-party account and abstract): a bandit over gamma with the batch size as its "
        "context, gamma 0 among the choices and a cost of switching; upper confidence bounds in place of its own way "
        "of exploring, batch sizes by powers of two, switching 0.1 and the gammas are ours" + _FULL
    )
    contexts = len(COMPRESSIONS) * _BATCHES

    def __init__(
        self,
        gammas: tuple[int, ...] = GAMMAS,
        feedback: str = "bandit",
        exploration: float = 1.0,
        switching: float = 0.1,
    ) -> None:
        super().__init__(gammas, feedback, exploration)
        check_range(0, switching=switching)
        self.switching = switching

    def new_state(self, rows: int) -> State:
        """As of the others; in the first step there is no last gamma."""
        return super().new_state(rows) | {"arm": np.full(rows, -1)}

    def _context(self, features: Features) -> IntArray:
        batch = np.ceil(np.log2(features["batch_size"])).astype(np.int64)
        return super()._context(features) * _BATCHES + np.minimum(batch, _BATCHES - 1)

    def _scores(self, features: Features, state: State, starting: BoolArray) -> FloatArray:
        value, error = self._values(state["code"])
        last = state["arm"][:, None]
        changed = (last >= 0) & (np.arange(len(self.gammas)) != last)
        return np.asarray(value + self._patience(state["code"]) * error - self.switching * changed)
