"""Games on recorded sequences. What happens in them is what `speckv.replay` says."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FeatureTracker, IntArray, signal_of
from speckv.observations import BEFORE, TOKEN, Layout, Observations, nothing_drafted
from speckv.replaying import Session
from speckv.shipped import shipped_costs, shipped_traces
from speckv.traces import Rollouts, TraceDataset
from speckv_envs.games import Info, Played, space_of
from speckv_envs.rewards import REWARDS, check_reward, rate_of

_shipped_traces = functools.cache(lambda: shipped_traces().load())
_shipped_costs = functools.cache(lambda: shipped_costs()[0])
#: Features that sum up the previous draft.
_LAST = tuple(name for name in BEFORE if signal_of(name))
#: Recording -> its `last_drafts`, as long as it is in use: a training makes new environments in every round.
_TABLES: weakref.WeakKeyDictionary[Rollouts, Observations] = weakref.WeakKeyDictionary()


def last_drafts(traces: Rollouts) -> Observations:
    """What `FeatureTracker` makes of every draft that there can be: a look-up in place of a computation in each step.

    Returns:
        (gamma_max + 1, S * T, len(_LAST)), by gamma and start of the step, for gammas within its limit.
    """
    if traces not in _TABLES:
        _TABLES[traces] = _last_drafts(traces)
    return _TABLES[traces]


def _last_drafts(traces: Rollouts) -> Observations:
    rows, positions = (grid.ravel() for grid in np.indices(traces.tokens.shape))
    count, nothing = len(rows), np.zeros(len(rows), dtype=np.int64)
    table = np.zeros((traces.gamma_max + 1, count, len(_LAST)), dtype=np.float32)
    signals: dict[str, npt.NDArray[np.float32]] = {}
    for gamma in range(1, traces.gamma_max + 1):
        tracker = FeatureTracker(_LAST, nothing, nothing, nothing.astype(float))
        if not signals:
            index = np.arange(traces.gamma_max)
            signals = {
                name: traces.drafted_signal(name, rows[:, None], positions[:, None], index)
                for name in tracker.draft_signals
            }
        tracker.verified(np.full(count, gamma), nothing, signals, {})
        features = tracker.before(count)
        table[gamma] = np.stack([features[name] for name in _LAST], axis=1)
    return table


class RecordedGame:
    """An episode is a recorded sequence; `play` is left to subclasses.

    Args:
        episodes: how many are played side by side.
        traces, costs: what was recorded, and how long forwards take; by default what ships with speckv.
        reward, rate: see `speckv_envs.rewards`.
        features: names of those that are observed.

    Attributes:
        limits: (episodes,) how many tokens the step can draft; 0 where the text has ended.
        drafted: (episodes,) how many tokens of the step are drafted already; the last one's features are observed.
    """

    observation_space: gymnasium.Space[Observations]
    action_space: gymnasium.spaces.Discrete

    def __init__(
        self,
        episodes: int,
        traces: Rollouts | TraceDataset | None,
        costs: CostModel | None,
        reward: str,
        rate: float | Mapping[str, float] | None,
        features: Sequence[str],
    ) -> None:
        self.episodes, self.reward = episodes, check_reward(reward)
        traces = _shipped_traces() if traces is None else traces
        self.traces = traces.load() if isinstance(traces, TraceDataset) else traces
        self.costs = _shipped_costs() if costs is None else costs
        self._table = last_drafts(self.traces) if episodes > 1 else None
        self._last = np.zeros((episodes, len(_LAST)), dtype=np.float32)
        tracked = [name for name in features if self._table is None or name not in _LAST]
        self.session = Session(self.traces, self.costs, tracked)
        self.layout = Layout(features)
        self.names = self.layout.names
        self.observation_space = space_of(self.layout, self.traces.gamma_max, self.traces.manifest.max_new_tokens)
        context = int(self.traces.prompt_lengths.mean())
        names, codes = np.unique(self.traces.compressions, return_inverse=True)
        self.rates = np.array([rate_of(str(name), rate, self.costs, context) for name in names])[codes]
        self.limits, self.drafted = (np.zeros(episodes, dtype=np.int64) for _ in range(2))

    def start(self, at: IntArray, rng: np.random.Generator, options: Mapping[str, Any]) -> Info:
        count = len(self.traces)
        rows = rng.integers(count, size=len(at))
        if "sequence" in options:
            chosen = np.asarray(options["sequence"])
            known = chosen.dtype.kind in "iu" and ((chosen >= 0) & (chosen < count)).all()
            if not known or chosen.shape not in {(), at.shape}:
                raise SpecKVError(
                    f"options['sequence'] is {options['sequence']}; it must be a row from 0 to {count - 1}, or one for "
                    "each environment"
                )
            rows = np.broadcast_to(chosen.astype(np.int64), at.shape)
        if len(at) == self.episodes:
            self.session.start(rows)
        else:
            self.session.restart(at, rows)
        self.drafted[at] = 0
        self.limits[at] = self.traces.limit[rows, 0]
        self._last[at] = 0
        return {"sequence": rows.copy()}

    def observe(self) -> Observations:
        features = dict(self.session.tracker.before(self.episodes))
        if self._table is not None:
            features |= dict(zip(_LAST, self._last.T, strict=True))
        if self.session.tracker.token_signals:
            features |= nothing_drafted(self.episodes) | {"draft_index": self.drafted.astype(float)}
            if len(at := np.flatnonzero(self.drafted)):
                for name, values in self.session.token_signals(at, self.drafted[at]).items():
                    features[name] = np.zeros(self.episodes)
                    features[name][at] = values
        return self.layout.vectors(features, self.episodes)

    def verify(self, at: IntArray, gammas: IntArray) -> Played:
        """Verify `gammas` (n,) tokens of the drafts at the indices `at`."""
        traces, whole = self.traces, len(at) == self.episodes
        part = self.session if whole else self.session.take(at)
        rows, positions = part.rows, part.positions
        accepted, seconds, going = part.advance(gammas, gammas)
        if not whole:
            self.session.put(at, part)
        if self._table is not None:
            last = self._table[gammas, rows * traces.tokens.shape[1] + positions]
            self._last[at] = np.where(gammas[:, None] > 0, last, self._last[at])
        self.drafted[at] = 0
        self.limits[at] = traces.limit[rows, np.minimum(part.positions, traces.limit.shape[1] - 1)]
        committed = np.minimum(accepted + 1, traces.lengths[rows] - positions)
        info: Info = {
            "gamma": gammas,
            "accepted": accepted,
            "committed": committed,
            "seconds": seconds,
            "forwards": gammas.copy(),
        }
        rates = self.rates[rows]
        if self.reward == "average":
            info["rate"] = rates
        rewards = REWARDS[self.reward](committed, accepted, seconds, rates)
        return Played(rewards, ~going, np.zeros(len(at), dtype=bool), info)


class ReplayGame(RecordedGame):
    """One action a step: how many tokens to draft, or, with `probe`, how many more than one.

    Args: as of `RecordedGame`, and
        gammas: what the actions mean; by default all that were recorded.
        probe: whether the first token of each step is drafted before the action.
    """

    def __init__(
        self,
        episodes: int,
        traces: Rollouts | TraceDataset | None,
        costs: CostModel | None,
        gammas: Sequence[int] | None,
        reward: str,
        rate: float | Mapping[str, float] | None,
        probe: bool,
    ) -> None:
        super().__init__(episodes, traces, costs, reward, rate, [*BEFORE, *TOKEN] if probe else BEFORE)
        self.probe = probe
        self.gammas = as_gammas(gammas, self.traces.gamma_max - probe)
        self.action_space = gymnasium.spaces.Discrete(len(self.gammas))

    def start(self, at: IntArray, rng: np.random.Generator, options: Mapping[str, Any]) -> Info:
        info = super().start(at, rng, options)
        self._draft_first(at)
        return info

    def play(self, at: IntArray, actions: IntArray, rng: np.random.Generator) -> Played:
        played = self.verify(at, np.minimum(self.drafted[at] + self.gammas[actions], self.limits[at]))
        self._draft_first(at)
        return played

    def _draft_first(self, at: IntArray) -> None:
        if self.probe:
            self.drafted[at] = np.minimum(self.limits[at], 1)


class StopGame(RecordedGame):
    """One action a drafted token: 0 stops, 1 drafts another."""

    def __init__(
        self,
        episodes: int,
        traces: Rollouts | TraceDataset | None,
        costs: CostModel | None,
        reward: str,
        rate: float | Mapping[str, float] | None,
    ) -> None:
        super().__init__(episodes, traces, costs, reward, rate, [*BEFORE, *TOKEN])
        self.action_space = gymnasium.spaces.Discrete(2)

    def play(self, at: IntArray, actions: IntArray, rng: np.random.Generator) -> Played:
        going, limits = actions == 1, self.limits[at]
        drafted = np.minimum(self.drafted[at] + going, limits)
        self.drafted[at] = drafted
        verifying = np.flatnonzero(~going | (drafted == limits))
        step = self.verify(at[verifying], drafted[verifying])

        def spread(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            whole = np.zeros(len(at), dtype=values.dtype)
            whole[verifying] = values
            return whole

        info = {name: spread(values) for name, values in step.info.items()}
        return Played(spread(step.rewards), spread(step.terminated), spread(step.truncated), info)


def as_gammas(gammas: Sequence[int] | None, largest: int) -> IntArray:
    """The gammas that actions stand for, all from 0 to `largest` if None are given; SpecKVError if one is not."""
    known = np.arange(largest + 1) if gammas is None else np.array(gammas)
    if not known.size or known.dtype.kind not in "iu" or known.min() < 0 or known.max() > largest:
        raise SpecKVError(f"gammas must be from 0 to {largest}, as recorded, and are {gammas}")
    return known.astype(np.int64)
