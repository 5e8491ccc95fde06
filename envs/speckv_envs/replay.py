"""speckv/Replay-v0: choosing gamma on recorded sequences."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FEATURES
from speckv.replaying import Session
from speckv.traces import Rollouts, TraceDataset

#: Everything that is known before the draft of a step.
OBSERVED = tuple(name for name, feature in FEATURES.items() if feature.when == "before")


class ReplayEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """
    ## Description
    An episode is one recorded sequence. In each step the agent chooses how many tokens the draft model proposes;
    the recording says how many of them the target accepts, and the cost model how long the step takes. The
    environment replays exactly what a live decoder would have done.

    ## Action Space
    `Discrete(len(gammas))`: an index into `gammas`. A gamma beyond what the sequence still has room for is cut.

    ## Observation Space
    `Box(0, largest float32, (14,), float32)`: the features of `speckv.features.FEATURES` that exist before the
    draft, in their order; units and meanings stand there.

    ## Rewards
    Committed tokens per second of the step.

    ## Starting State
    A sequence drawn at random (`options={"sequence": row}` chooses one), nothing committed.

    ## Episode End
    Terminates when the recorded path has been committed. Never truncates.

    ## Arguments
    - `traces`: `Rollouts` or `TraceDataset`.
    - `costs`: a `CostModel`.
    - `gammas`: the choices; by default 0..gamma_max of the traces.

    ## Information
    `gamma`, `accepted`, `committed` (tokens) and `seconds` of the step, so that the reward can be recomputed.

    ## Version History
    - v0: first.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(self, traces: Rollouts | TraceDataset, costs: CostModel, gammas: Sequence[int] | None = None) -> None:
        self.traces = traces.load() if isinstance(traces, TraceDataset) else traces
        self.costs = costs
        self.gammas = np.array(range(self.traces.gamma_max + 1) if gammas is None else gammas, dtype=np.int64)
        if not len(self.gammas) or self.gammas.min() < 0 or self.gammas.max() > self.traces.gamma_max:
            raise SpecKVError(f"gammas must be from 0 to {self.traces.gamma_max}, as recorded, and are {gammas}")
        self.action_space = gymnasium.spaces.Discrete(len(self.gammas))
        self.observation_space = gymnasium.spaces.Box(0, np.finfo(np.float32).max, (len(OBSERVED),), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        row = (options or {}).get("sequence")
        if row is None:
            row = int(self.np_random.integers(len(self.traces)))
        self.session = Session(self.traces.take([row]), self.costs, OBSERVED)
        self.observation = self._observe()
        return self.observation, {"sequence": row}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        gamma = np.minimum(self.gammas[[action]], self.session.limits)
        position = int(self.session.positions[0])
        accepted, seconds, going = self.session.play(gamma, gamma)
        committed = min(int(accepted[0]) + 1, int(self.session.traces.lengths[0]) - position)
        if going[0]:
            self.observation = self._observe()
        info = {
            "gamma": int(gamma[0]),
            "accepted": int(accepted[0]),
            "committed": committed,
            "seconds": float(seconds[0]),
        }
        return self.observation, committed / float(seconds[0]), not going[0], False, info

    def _observe(self) -> npt.NDArray[np.float32]:
        features = self.session.tracker.before(1)
        return np.array([features[name][0] for name in OBSERVED], dtype=np.float32)
