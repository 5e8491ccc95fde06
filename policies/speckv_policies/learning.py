"""How the agents are trained: stable-baselines3 on the environments' vector forms, round by round.

A round starts with new environments, random numbers and, for DQN, an empty replay buffer; the network, its optimiser
and the rate go on. So a training that was killed, and goes on from its last round, comes to the same agent.

Only this module imports torch and stable-baselines3.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.vec_env import VecEnv

from speckv import CostModel, Rollouts, replay
from speckv.compression import COMPRESSIONS
from speckv.features import FloatArray
from speckv.observations import Observations
from speckv.plugins import register_environments
from speckv.replaying import Replay
from speckv.training import Checkpoint, Watch, identify
from speckv_policies.agents import Agent, scaled
from speckv_policies.fixed import BestFixed

Arrays = dict[str, npt.NDArray[Any]]
Learner = DQN | PPO

ENVIRONMENTS = 64
ROUNDS = 10
#: Of stable-baselines3's own log lines, in iterations or episodes; `_Report` writes them.
NEVER = 10**9


class Lockstep(VecEnv):
    """A vector environment of Gymnasium as stable-baselines3 plays it, with observations and rewards scaled.

    Args:
        envs: in the autoreset mode SAME_STEP.
        columns: which numbers of its observations to show.
        center, scale: (len(columns),), see `speckv_policies.agents.scaled`.
        reward_scale: what rewards are divided by.
        by_step: whether each decoding step is an episode of its own, so that nothing behind it counts.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        columns: list[int],
        center: Observations,
        scale: Observations,
        reward_scale: npt.ArrayLike = 1.0,
        by_step: bool = False,
    ) -> None:
        self.envs, self.columns, self.center, self.scale = envs, columns, center, scale
        self.reward_scale, self.by_step = np.asarray(reward_scale), by_step
        shown = gymnasium.spaces.Box(-np.inf, np.inf, (len(columns),))
        super().__init__(envs.num_envs, shown, envs.unwrapped.single_action_space)

    def _show(self, observations: Observations) -> Observations:
        return scaled(observations[:, self.columns], self.center, self.scale)

    def reset(self) -> Observations:
        observations, _ = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return self._show(observations)

    def step_async(self, actions: npt.NDArray[np.int64]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Observations, npt.NDArray[np.float32], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        observations, rewards, terminated, truncated, info = self.envs.step(self._actions)
        ended = terminated | truncated
        if self.by_step:
            ended = ended | (info["committed"] > 0)
        return self._show(observations), (rewards / self.reward_scale).astype(np.float32), ended, [{} for _ in ended]

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the environments are one object; set it there")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("the environments are one object; call it there")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def make_learner(
    algorithm: str,
    env: VecEnv,
    seed: int,
    steps: int,
    hidden: int = 64,
    learning_rate: float = 1e-3,
    discount: float = 0.0,
    exploration: float = 0.1,
) -> Learner:
    """An algorithm of stable-baselines3 that will learn for `steps` actions.

    Its settings were chosen by hand, on the training prompts of one fold of the shipped recording.

    Args:
        exploration: share of DQN's actions that are drawn at random.
    """
    shared: dict[str, Any] = {
        "policy": "MlpPolicy",
        "env": env,
        "learning_rate": learning_rate,
        "gamma": discount,
        "policy_kwargs": {"net_arch": [hidden, hidden], "activation_fn": torch.nn.ReLU},
        "seed": seed,
        "device": "cpu",
    }
    if algorithm == "PPO":
        # Two of them, rounded up: stable-baselines3 would begin a third for the rest.
        batch = max(2, -(-steps // (2 * env.num_envs)))
        return PPO(n_steps=batch, batch_size=max(2, batch * env.num_envs // 4), n_epochs=6, gae_lambda=1.0,
                   ent_coef=0.05, **shared)  # fmt: skip
    return DQN(
        buffer_size=steps,
        learning_starts=min(10 * env.num_envs, steps // 4),
        batch_size=256,
        n_steps=4 if discount == 1 else 1,
        tau=0.02,
        target_update_interval=env.num_envs,
        train_freq=1,
        gradient_steps=4,
        exploration_initial_eps=exploration,
        exploration_final_eps=exploration,
        **shared,
    )  # fmt: skip


def network(learner: Learner) -> Arrays:
    """The layers that decide, in the form of `speckv_policies.agents.best_actions`."""
    if isinstance(learner, PPO):
        modules = [*learner.policy.mlp_extractor.policy_net, learner.policy.action_net]
    else:
        modules = [*learner.q_net.q_net]
    layers = [module for module in modules if isinstance(module, torch.nn.Linear)]
    arrays: Arrays = {}
    for index, layer in enumerate(layers):
        arrays[f"weight_{index}"] = layer.weight.detach().numpy().T.copy()
        arrays[f"bias_{index}"] = layer.bias.detach().numpy().copy()
    return arrays


def save_learner(learner: Learner) -> Arrays:
    """All that a learner's next round needs: its networks, and the state of its optimiser."""
    arrays = {f"policy/{name}": tensor.numpy().copy() for name, tensor in learner.policy.state_dict().items()}
    for index, state in learner.policy.optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer/{index}/{name}": tensor.numpy().copy() for name, tensor in state.items()}
    return arrays


def load_learner(learner: Learner, arrays: Arrays) -> None:
    """Put what `save_learner` kept into a new learner of the same shape."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    learner.policy.load_state_dict(_under("policy/", tensors))
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in _under("optimizer/", tensors).items():
        index, _, key = name.partition("/")
        states.setdefault(int(index), {})[key] = tensor
    optimizer = learner.policy.optimizer
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _under(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Those whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def train(agent: Agent, traces: Rollouts, costs: CostModel, seed: int, watch: Watch) -> None:
    """Leave the network of the round that was fastest on `traces` in `agent.fitted`."""
    training = identify(agent, traces, costs, seed)
    reached = watch.last(training) or _start(agent, traces, costs, seed)
    logger = configure(str(watch.log_dir), ["tensorboard"]) if watch.log_dir else Logger(None, [])
    with _own_random_numbers():
        for number in range(reached.facts["rounds"], ROUNDS):
            reached = _round(agent, traces, costs, seed, number, reached, logger, watch)
            watch.keep(training, reached)
    logger.close()
    agent.fitted = _under("best/", reached.arrays)


def _start(agent: Agent, traces: Rollouts, costs: CostModel, seed: int) -> Checkpoint:
    """What the first round starts from: the rate of the best fixed gamma, and scales as of random actions."""
    rate = _throughputs(replay(BestFixed().fit(traces, costs), traces, costs, controller=(0.0, 0.0)), traces)
    envs = _environments(agent, traces, costs, rate)
    observations, _ = envs.reset(seed=seed)
    envs.action_space.seed(seed)
    seen, rewards = [], []
    for _ in range(200):
        seen.append(observations[:, _columns(agent, envs)])
        observations, reward, *_, info = envs.step(envs.action_space.sample())
        rewards.append(reward[info["committed"] > 0])
    logarithms, reward_scale = np.log1p(np.concatenate(seen)), 4 * np.concatenate(rewards).std()
    spread = logarithms.std(axis=0)
    arrays = {
        "rate": rate,
        "center": logarithms.mean(axis=0),
        "scale": np.where(spread > 0, spread, np.float32(1)),
        # Rewards so small that DQN's loss is the square; all equal, they need no scale.
        "reward_scale": np.array(reward_scale if reward_scale > 0 else 1.0),
    }
    return Checkpoint(arrays, {"rounds": 0, "throughput": 0.0})


def _round(
    agent: Agent,
    traces: Rollouts,
    costs: CostModel,
    seed: int,
    number: int,
    before: Checkpoint,
    logger: Logger,
    watch: Watch,
) -> Checkpoint:
    """Train for a round, and see how fast the agent is now."""
    kept, steps = before.arrays, max(1, agent.steps // ROUNDS)
    envs = _environments(agent, traces, costs, kept["rate"])
    scales = {name: kept[name] for name in ("center", "scale", "reward_scale")}
    learner = make_learner(
        agent.algorithm,
        Lockstep(envs, _columns(agent, envs), by_step=agent.by_step, **scales),
        seed=int(np.random.SeedSequence([seed, number]).generate_state(1)[0]),
        steps=steps,
        hidden=agent.hidden,
        learning_rate=agent.learning_rate * (1 - number / ROUNDS),
        discount=agent.discount,
        exploration=max(0.05, 1 - 2 * number / ROUNDS),
    )
    if number:
        load_learner(learner, kept)
    learner.set_logger(logger)
    learner.learn(steps, _Report(watch, number * steps, ROUNDS * steps), log_interval=NEVER)

    agent.fitted = {name: kept[name] for name in ("center", "scale")} | network(learner)
    run = replay(agent, traces, costs, controller=(0.0, 0.0))
    logger.record("speckv/throughput", run.throughput)
    logger.dump((number + 1) * steps)
    best = {f"best/{name}": array for name, array in agent.fitted.items()}
    if run.throughput <= before.facts["throughput"]:
        best = {name: array for name, array in kept.items() if name.startswith("best/")}
    rate = np.maximum(kept["rate"], _throughputs(run, traces))
    facts = {"rounds": number + 1, "throughput": max(run.throughput, before.facts["throughput"])}
    return Checkpoint(scales | {"rate": rate} | best | save_learner(learner), facts)


def _environments(agent: Agent, traces: Rollouts, costs: CostModel, rate: FloatArray) -> VectorEnv[Any, Any, Any]:
    register_environments()
    rates = {name: rate[code] for code, name in enumerate(COMPRESSIONS) if name in traces.compressions}
    return gymnasium.make_vec(
        agent.environment, num_envs=ENVIRONMENTS, traces=traces, costs=costs, reward=agent.reward, rate=rates,
        autoreset_mode=AutoresetMode.SAME_STEP, **agent.arguments,
    )  # fmt: skip


def _columns(agent: Agent, envs: VectorEnv[Any, Any, Any]) -> list[int]:
    """Where what the agent reads stands in the observations."""
    names: tuple[str, ...] = envs.unwrapped.names  # type: ignore[attr-defined]
    return [names.index(name) for name in agent.layout.names]


def _throughputs(run: Replay, traces: Rollouts) -> FloatArray:
    """(number of known compressions,) tokens a second in a replay of these traces; 0 where they hold none."""
    rates = np.zeros(len(COMPRESSIONS))
    for code, name in enumerate(COMPRESSIONS):
        if (mask := traces.compressions == name).any():
            rates[code] = run.tokens[mask].sum() / run.sequence_seconds[mask].sum()
    return rates


class _Report(BaseCallback):
    """Tells how far the training is, and logs what stable-baselines3 notes about it."""

    def __init__(self, watch: Watch, done: int, total: int) -> None:
        super().__init__()
        self.watch, self.done, self.total = watch, done, total
        self.rewards: list[float] = []

    def _on_step(self) -> bool:
        self.rewards.append(float(self.locals["rewards"].mean()))
        self.watch.progress(min(self.done + self.num_timesteps, self.total), self.total)
        return True

    def _on_rollout_end(self) -> None:
        if len(self.rewards) >= 20:
            self.logger.record("rollout/reward", float(np.mean(self.rewards)))
            self.logger.dump(self.done + self.num_timesteps)
            self.rewards.clear()


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """stable-baselines3 seeds the generators of the whole process; leave them as they were. One thread: a network
    this small gains nothing from more, and sums in another order would give another agent."""
    python, old, new, threads = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(old)
        torch.set_rng_state(new)
        torch.set_num_threads(threads)
