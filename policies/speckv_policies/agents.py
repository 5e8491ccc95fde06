"""Agents: policies that reinforcement learning finds by playing the environments.

stable-baselines3 trains them (`speckv_policies.learning`). What is kept is the network, as arrays; its decisions are
made in NumPy, so that neither stable-baselines3 nor torch is needed to replay or decode with a trained agent.

All but `ltd` are rewarded by tokens - rate * seconds of a step, the one reward whose best policy is the one of the best
throughput. The rate, one for each compression, is the throughput of the best fixed gamma on the training prompts and,
once the agent is faster, its own.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.observations import Layout, Observations, nothing_drafted
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import LONGEST, Choice, Gate, Program, Score
from speckv.training import TrainedPolicy, Watch
from speckv_policies.bandits import GAMMAS
from speckv_policies.parameters import check_count, check_range

#: What the agents read before a step. The batch size is not among it: it is 1 in all that they are trained on.
BEFORE = (
    "compression",
    "cost_ratio",
    "context_length",
    "is_first",
    "last_gamma",
    "last_accepted",
    "last_mean_entropy",
    "last_max_entropy",
    "last_mean_top1",
    "last_min_top1",
    "running_acceptance",
    "target_entropy",
    "target_margin",
)
TOKEN = ("draft_index", "draft_entropy", "draft_top1", "draft_top2", "draft_top10", "draft_probability")


def scaled(observations: Observations, center: Observations, scale: Observations) -> Observations:
    """What the networks see of observations, (n, width): logarithms, for lengths and margins have long tails."""
    return np.asarray((np.log1p(observations) - center) / scale)


def best_actions(network: Mapping[str, npt.NDArray[Any]], seen: Observations) -> IntArray:
    """(n,) the actions that a network likes best.

    Args:
        network: `weight_0` (width, hidden), `bias_0` (hidden,), `weight_1`, … of its layers.
        seen: (n, width).
    """
    last = sum(name.startswith("weight_") for name in network) - 1
    values = seen
    for layer in range(last + 1):
        values = values @ network[f"weight_{layer}"] + network[f"bias_{layer}"]
        if layer < last:
            values = np.maximum(values, 0)
    return np.asarray(values.argmax(axis=1))


class Agent(TrainedPolicy):
    """What the agents share: a network of two hidden layers, and how it is trained.

    Attributes:
        algorithm: of stable-baselines3, `DQN` or `PPO`.
        environment, reward: the one that it plays, and what it is rewarded with there.
        discount: of the reward of the next action.
        by_step: whether nothing behind the end of a decoding step counts.
    """

    requires = ("torch", "stable_baselines3")
    extra = "rl"
    algorithm: ClassVar[str]
    environment: ClassVar[str]
    reward: ClassVar[str] = "average"
    discount: float
    by_step: ClassVar[bool] = False

    def __init__(self, steps: int, hidden: int, learning_rate: float) -> None:
        super().__init__(steps)
        check_count(1, hidden=hidden)
        check_range(0, 1, learning_rate=learning_rate)
        self.hidden, self.learning_rate = hidden, learning_rate
        self.layout = Layout(self.features)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the environment, beside what all agents give it."""
        return {}

    def learn(self, traces: Rollouts, costs: CostModel, seed: int, watch: Watch) -> None:
        from speckv_policies.learning import train

        train(self, traces, costs, seed, watch)

    def act(self, features: Mapping[str, FloatArray], rows: int) -> IntArray:
        """(rows,) actions."""
        observations = self.layout.vectors(features, rows)
        return best_actions(self.fitted, scaled(observations, self.fitted["center"], self.fitted["scale"]))

    def network(self, features: Collection[str]) -> Network:
        """The network in portable form, of some of its features; the others are 0."""
        parts = [name.partition("=") for name in self.layout.names]
        codes = list(COMPRESSIONS)
        transforms = [f"={codes.index(value)}" if value else "log1p" for _, _, value in parts]
        depth = sum(name.startswith("weight_") for name in self.fitted)
        weights, biases = (
            [self.fitted[f"{kind}_{layer}"].astype(float) for layer in range(depth)] for kind in ("weight", "bias")
        )
        # Centre and scale go into the first layer, and so does the logarithm of what is 0 or 1.
        weights[0] = weights[0] / self.fitted["scale"][:, None]
        biases[0] = biases[0] - self.fitted["center"].astype(float) @ weights[0]
        weights[0] *= np.array([np.log(2) if value else 1.0 for _, _, value in parts])[:, None]
        keep = [index for index, (name, _, _) in enumerate(parts) if name in features]
        weights[0] = weights[0][keep]
        inputs = Inputs(tuple(parts[index][0] for index in keep), tuple(transforms[index] for index in keep))
        return Network(inputs, tuple(weights), tuple(biases))


class _GammaAgent(Agent):
    """Chooses gamma before the step. The defaults are those of Q-learning."""

    features = BEFORE
    environment = "speckv/Replay-v0"

    def __init__(
        self, gammas: tuple[int, ...] = GAMMAS, steps: int = 30_000, hidden: int = 64, learning_rate: float = 1e-3
    ) -> None:
        super().__init__(steps, hidden, learning_rate)
        if len(gammas) < 2 or not all(isinstance(gamma, int) and gamma >= 0 for gamma in gammas):
            raise ValueError(f"gammas are {list(gammas)}; they must be two or more whole numbers from 0")
        self.gammas = tuple(gammas)

    @property
    def required_gamma(self) -> int:
        return max(self.gammas)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"gammas": self.gammas}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return np.array(self.gammas)[self.act(features, features.rows)]

    def program(self) -> Program:
        shape = len(COMPRESSIONS), len(self.gammas)
        model = self.network(self.features)
        return Program(Choice(np.array(self.gammas), model, scale=np.ones(shape[1]), offset=np.zeros(shape)))


class _FarSighted(_GammaAgent):
    """A gamma agent to which the steps behind this one count, too."""

    def __init__(
        self,
        gammas: tuple[int, ...] = GAMMAS,
        steps: int = 30_000,
        hidden: int = 64,
        learning_rate: float = 1e-3,
        discount: float = 0.5,
    ) -> None:
        super().__init__(gammas, steps, hidden, learning_rate)
        check_range(0, 1, discount=discount)
        self.discount = discount


class _StopAgent(Agent):
    """Decides whether to draft at all and, behind each drafted token, whether to draft another."""

    features: tuple[str, ...] = (*BEFORE, *TOKEN)
    environment = "speckv/ReplayStop-v0"
    discount = 1.0  # a longer draft must not lose by being more actions
    by_step = True

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        goes_on = self._goes_on({**features, **nothing_drafted(features.rows)}, features.rows)
        return np.where(goes_on, np.iinfo(np.int64).max, 0)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self._goes_on(features, features.rows)

    def program(self) -> Program:
        def value_of_going_on(features: Collection[str]) -> Network:
            network = self.network(features)
            weight, bias = (layers[-1][..., [1]] - layers[-1][..., [0]] for layers in (network.weights, network.biases))
            return replace(network, weights=(*network.weights[:-1], weight), biases=(*network.biases[:-1], bias))

        nothing = np.zeros(len(COMPRESSIONS))
        before = value_of_going_on([name for name in self.features if name not in nothing_drafted(0)])
        return Program(Gate(before, nothing, LONGEST), Score(value_of_going_on(self.features), nothing, strict=True))

    def _goes_on(self, features: Mapping[str, FloatArray], rows: int) -> BoolArray:
        return np.asarray(self.act(features, rows) == 1)


class Dqn(_FarSighted):
    """Q-learning over gamma: the network predicts the value of each gamma, and the highest is played.

    Args:
        gammas: the choices, tokens.
        steps: of training, in actions.
        hidden: units of each of the two hidden layers.
        learning_rate: of the first round; it falls to 0.
        discount: of the value of the next step; 0 counts this one alone.
    """

    name = "dqn"
    algorithm = "DQN"
    source = "DQN (Mnih et al., 2015) of stable-baselines3; observations, reward, gammas and its settings are ours"


class ContextualBandit(_GammaAgent):
    """Q-learning over gamma that looks no further than the step: a contextual bandit with a network.

    Args: as of `Dqn`, without a discount.
    """

    name = "contextual-bandit"
    algorithm = "DQN"
    discount = 0.0
    by_step = True
    source = (
        "an epsilon-greedy contextual bandit (textbook form, from memory), which is DQN without a next step; trained "
        "with stable-baselines3; observations, reward, gammas and its settings are ours"
    )


class Ppo(_FarSighted):
    """Proximal policy optimisation over gamma; the likeliest gamma is played.

    Args: as of `Dqn`.
    """

    name = "ppo"
    algorithm = "PPO"
    source = "PPO (Schulman et al., 2017) of stable-baselines3; observations, reward, gammas and its settings are ours"

    def __init__(
        self,
        gammas: tuple[int, ...] = GAMMAS,
        steps: int = 40_000,
        hidden: int = 64,
        learning_rate: float = 1e-3,
        discount: float = 0.5,
    ) -> None:
        super().__init__(gammas, steps, hidden, learning_rate, discount)


class DqnStop(_StopAgent):
    """Q-learning of stop or go behind each drafted token.

    Args:
        steps: of training, in actions.
        hidden: units of each of the two hidden layers.
        learning_rate: of the first round; it falls to 0.
    """

    name = "dqn-stop"
    algorithm = "DQN"
    source = "DQN (Mnih et al., 2015) of stable-baselines3; observations, reward and its settings are ours"

    def __init__(self, steps: int = 30_000, hidden: int = 64, learning_rate: float = 3e-4) -> None:
        super().__init__(steps, hidden, learning_rate)


class PpoStop(_StopAgent):
    """Proximal policy optimisation of stop or go behind each drafted token; what is likelier is done.

    Args: as of `DqnStop`.
    """

    name = "ppo-stop"
    algorithm = "PPO"
    source = "PPO (Schulman et al., 2017) of stable-baselines3; observations, reward and its settings are ours"

    def __init__(self, steps: int = 40_000, hidden: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__(steps, hidden, learning_rate)


class Ltd(PpoStop):
    """Learning to Draft: stop or go from depth, length and the last drafted distribution, rewarded with accepted
    tokens a second of the step.

    As it looks at distributions alone, the token that was drawn has no say. Its second policy, how many branches of a
    draft tree to verify, has nothing to choose in a draft without branches.

    Args: as of `DqnStop`.
    """

    name = "ltd"
    features = ("context_length", "draft_index", "draft_top1", "draft_top2", "draft_top10")
    reward = "accepted"
    source = (
        "Learning to Draft (arXiv 2603.01639): inputs, reward accepted / (draft + verify seconds) and PPO read in the "
        "paper; trained with stable-baselines3, the network and its settings are ours"
    )
