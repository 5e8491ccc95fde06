"""Schedules: gamma goes up after steps that went well, and down after others."""

import math

import numpy as np
import numpy.typing as npt

from speckv import Features, Memory, Outcome, Policy, State
from speckv.compression import COMPRESSIONS
from speckv.runtime.programs import Additive, Program
from speckv_policies.parameters import check_count, check_order, check_range


class Heuristic(Policy):
    """Two tokens more after a step that was fully accepted, one fewer otherwise.

    Args:
        start: gamma of a sequence's first step.
        up, down: tokens by which gamma rises and falls.
        largest: upper bound, tokens. transformers has none.
    """

    name = "heuristic"
    source = (
        "transformers, `num_assistant_tokens_schedule='heuristic'`, read in its source: start 5, +2, -1, at least 1; "
        "`largest` is ours"
    )

    def __init__(self, start: int = 5, up: int = 2, down: int = 1, largest: int = 20) -> None:
        super().__init__()
        check_count(0, start=start, up=up, down=down, largest=largest)
        self.start, self.up, self.down, self.largest = start, up, down, largest

    @property
    def required_gamma(self) -> int:
        return self.start

    def new_state(self, rows: int) -> State:
        return {"gamma": np.full(rows, self.start, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return state["gamma"]

    def observe(self, outcome: Outcome, state: State) -> None:
        gamma = outcome.drafted  # what the host had room for, so that the schedule does not run ahead of it
        moved = np.where(outcome.accepted == outcome.drafted, gamma + self.up, np.maximum(gamma - self.down, 1))
        state["gamma"] = np.minimum(moved, self.largest)

    def program(self) -> Program:
        return Program(Additive(self.start, self.up, self.down, smallest=1, largest=self.largest))


class GammaTune(Policy):
    """Two tokens more than were accepted after a step that was fully accepted, else the running mean of accepted.

        full acceptance: gamma = accepted + up
        otherwise: mean = memory_share * mean + (1 - memory_share) * accepted; gamma = mean, rounded up

    Args:
        start: gamma of a sequence's first step, and the first mean; from `smallest` to `largest`.
        smallest, largest: bounds of gamma, tokens.
        up: tokens, from 0.
        memory_share: weight of the old mean, in [0, 1].
    """

    name = "gammatune"
    source = (
        "GammaTune, from third-party accounts: start 3, 1 to 10 tokens, +2, weight 0.7; that a full acceptance leaves "
        "the mean as it is, is our reading"
    )

    def __init__(
        self, start: int = 3, smallest: int = 1, largest: int = 10, up: int = 2, memory_share: float = 0.7
    ) -> None:
        super().__init__()
        check_count(0, start=start, smallest=smallest, largest=largest, up=up)
        check_order(smallest=smallest, start=start, largest=largest)
        check_range(0, 1, memory_share=memory_share)
        self.start, self.smallest, self.largest, self.up, self.memory_share = start, smallest, largest, up, memory_share

    def new_state(self, rows: int) -> State:
        return {"gamma": np.full(rows, self.start, dtype=np.int64), "mean": np.full(rows, float(self.start))}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return state["gamma"]

    def observe(self, outcome: Outcome, state: State) -> None:
        full = outcome.accepted == outcome.drafted
        mean = self.memory_share * state["mean"] + (1 - self.memory_share) * outcome.accepted
        state["mean"] = np.where(full, state["mean"], mean)
        gamma = np.where(full, outcome.accepted + self.up, _ceiling(state["mean"]))
        state["gamma"] = np.clip(gamma, self.smallest, self.largest)


class DraftWindow(Policy):
    """Drafts as many tokens as a running mean of the accepted ones, rounded up.

    Where the mean is too small nothing is drafted, but for a probe now and then. A fully accepted draft counts as one
    token more than it had. The mean rises by `up` and falls by `down` times the distance to the newest count; with
    `up` above 1 it overshoots.

    Args:
        start: first mean, tokens, from 0.
        up, down: rates, 0 or more, and in [0, 1].
        off_below: mean, tokens, below which nothing is drafted; 0 or more.
        probe: tokens of a probe, from 1.
        probe_every: steps from one draft to the next while nothing is drafted otherwise, from 1.
        largest: upper bound, tokens, from 1.
    """

    name = "draft-window"
    source = (
        "ExLlamaV3, read in its source: rates 1.30 and 0.65, nothing below 0.3, 2 tokens every 16 steps; start and "
        "upper bound are ours, and so is reading a rate as a share of the distance to the newest count"
    )

    def __init__(
        self,
        start: float = 4.0,
        up: float = 1.3,
        down: float = 0.65,
        off_below: float = 0.3,
        probe: int = 2,
        probe_every: int = 16,
        largest: int = 16,
    ) -> None:
        super().__init__()
        check_range(0, start=start, up=up, off_below=off_below)
        check_range(0, 1, down=down)
        check_count(1, probe=probe, probe_every=probe_every, largest=largest)
        self.start, self.up, self.down, self.off_below = start, up, down, off_below
        self.probe, self.probe_every, self.largest = probe, probe_every, largest

    def new_state(self, rows: int) -> State:
        return {"mean": np.full(rows, float(self.start)), "idle": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        probe = np.where(state["idle"] >= self.probe_every - 1, self.probe, 0)
        gamma = np.where(state["mean"] < self.off_below, probe, _ceiling(state["mean"]))
        return np.minimum(gamma, self.largest)

    def observe(self, outcome: Outcome, state: State) -> None:
        drafted = outcome.drafted > 0
        distance = outcome.accepted + (outcome.accepted == outcome.drafted) - state["mean"]
        moved = state["mean"] + np.where(distance > 0, self.up, self.down) * distance
        state["mean"] = np.where(drafted, np.clip(moved, 0.0, self.largest), state["mean"])
        state["idle"] = np.where(drafted, 0, state["idle"] + 1)


class HillClimb(Policy):
    """Tries a neighbouring gamma when acceptance suggests it, and keeps it if throughput holds.

    Acceptance and throughput are running means over the steps of a sequence. At rest, an acceptance below
    `shrink_below` tries one token fewer, one of at least `grow_from` one token more. The trial goes on until
    throughput is at least `keep_from` times what it was before (the new gamma is kept) or less than `reject_below`
    times (the old one comes back, and with it the throughput that it had). A step that had no room for its gamma says
    nothing, and ends a trial.

    Args:
        smallest, largest: bounds of gamma, tokens, from 1; a sequence starts with the smallest.
        shrink_below, grow_from: acceptance in [0, 1].
        keep_from, reject_below: ratio of throughputs, 0 or more; reject_below at most keep_from.
        weight: of the newest step in the running means, in (0, 1].
    """

    name = "hill-climb"
    source = (
        "ONNX Runtime GenAI, `min_adaptive_k`, read in its documentation: 50 % and 75 % acceptance, 97 % and 80 % "
        "throughput, weight 0.25, cap 16, starting at the floor; what happens between 80 % and 97 % is our reading"
    )

    def __init__(
        self,
        smallest: int = 1,
        largest: int = 16,
        shrink_below: float = 0.5,
        grow_from: float = 0.75,
        keep_from: float = 0.97,
        reject_below: float = 0.8,
        weight: float = 0.25,
    ) -> None:
        super().__init__()
        check_count(1, smallest=smallest, largest=largest)
        check_order(smallest=smallest, largest=largest)
        check_range(0, 1, shrink_below=shrink_below, grow_from=grow_from)
        check_range(0, keep_from=keep_from, reject_below=reject_below)
        check_order(shrink_below=shrink_below, grow_from=grow_from)
        check_order(reject_below=reject_below, keep_from=keep_from)
        check_range(0.001, 1, weight=weight)
        self.smallest, self.largest, self.weight = smallest, largest, weight
        self.shrink_below, self.grow_from = shrink_below, grow_from
        self.keep_from, self.reject_below = keep_from, reject_below

    def new_state(self, rows: int) -> State:
        return {
            "gamma": np.full(rows, self.smallest, dtype=np.int64),
            "trial": np.zeros(rows, dtype=np.int64),
            "steps": np.zeros(rows, dtype=np.int64),
            "acceptance": np.zeros(rows),
            "speed": np.zeros(rows),
            "speed_before": np.zeros(rows),
        }

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return state["gamma"] + state["trial"]

    def observe(self, outcome: Outcome, state: State) -> None:
        whole = outcome.drafted == state["gamma"] + state["trial"]
        weight = np.where(state["steps"] == 0, 1.0, self.weight) * whole
        rate = outcome.accepted / np.maximum(outcome.drafted, 1)
        acceptance = state["acceptance"] + weight * (rate - state["acceptance"])
        speed = state["speed"] + weight * ((outcome.accepted + 1) / outcome.seconds - state["speed"])

        gamma, trial, before = state["gamma"], state["trial"], state["speed_before"]
        trying = whole & (trial != 0)
        kept = trying & (speed >= self.keep_from * before)
        rejected = trying & ~kept & (speed < self.reject_below * before)
        gamma = np.where(kept, gamma + trial, gamma)
        speed = np.where(rejected, before, speed)
        trial = np.where(kept | rejected | ~whole, 0, trial)

        resting = whole & ~trying
        direction = (acceptance >= self.grow_from).astype(np.int64) - (acceptance < self.shrink_below)
        direction = np.clip(gamma + direction, self.smallest, self.largest) - gamma
        trial = np.where(resting, direction, trial)
        state["gamma"], state["trial"], state["steps"] = gamma, trial, state["steps"] + whole
        state["acceptance"], state["speed"] = acceptance, speed
        state["speed_before"] = np.where(resting, speed, before)


class Tiers(Policy):
    """Moves between a few gammas as a running mean of the accepted tokens passes their thresholds.

    Every `every` steps behind the warm-up, it goes down a tier while the mean is at most the tier below - 0.5 + `down`,
    and up one while the mean is above the present tier - 0.5 + `up`. Mean and tier outlive a sequence, as in SGLang,
    where a server has one of them; here each compression of the target has its own, as its own server would.

    Args:
        tiers: the gammas, increasing, tokens.
        start: the first of them to play.
        weight: of the newest step in the mean, in [0, 1].
        every: steps between decisions, from 1.
        warm_up: steps before the first, from 0.
        down, up: tokens by which the thresholds are shifted.
    """

    name = "tiers"
    features = ("compression",)
    source = (
        "SGLang, `--speculative-adaptive`, read in its source: weight 0.2, every 5 batches, warm-up 10, shifts -0.25 "
        "and 0, a mean that starts at start - 1; tiers 1, 3, 5, 7, of which the start, 3, is ours"
    )

    def __init__(
        self,
        tiers: tuple[int, ...] = (1, 3, 5, 7),
        start: int = 3,
        weight: float = 0.2,
        every: int = 5,
        warm_up: int = 10,
        down: float = -0.25,
        up: float = 0.0,
    ) -> None:
        super().__init__()
        if start not in tiers or list(tiers) != sorted(set(tiers)) or tiers[0] < 0:
            raise ValueError(f"tiers are {list(tiers)} and start is {start}; they must increase from 0 and hold start")
        check_range(0, 1, weight=weight)
        check_count(1, every=every)
        check_count(0, warm_up=warm_up)
        check_range(-math.inf, down=down, up=up)
        self.tiers, self.start, self.weight = tuple(tiers), start, weight
        self.every, self.warm_up, self.down, self.up = every, warm_up, down, up

    def new_memory(self) -> Memory:
        return {
            "mean": np.full(len(COMPRESSIONS), self.start - 1.0),
            "tier": np.full(len(COMPRESSIONS), self.tiers.index(self.start), dtype=np.int64),
            "steps": np.zeros(len(COMPRESSIONS), dtype=np.int64),
        }

    def new_state(self, rows: int) -> State:
        return {"compression": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["compression"] = features["compression"].astype(np.int64)
        return np.array(self.tiers)[self.memory["tier"][state["compression"]]]

    def observe(self, outcome: Outcome, state: State) -> None:
        mean, tier, steps = self.memory["mean"], self.memory["tier"], self.memory["steps"]
        for code in set(state["compression"][outcome.drafted > 0].tolist()):
            batch = (state["compression"] == code) & (outcome.drafted > 0)
            mean[code] += self.weight * (outcome.accepted[batch].mean() - mean[code])
            steps[code] += 1
            if steps[code] > self.warm_up and (steps[code] - self.warm_up) % self.every == 0:
                tier[code] = self._walk(int(tier[code]), float(mean[code]))

    def _walk(self, tier: int, mean: float) -> int:
        while tier > 0 and mean <= self.tiers[tier - 1] - 0.5 + self.down:
            tier -= 1
        while tier < len(self.tiers) - 1 and mean > self.tiers[tier] - 0.5 + self.up:
            tier += 1
        return tier


def _ceiling(mean: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Rounded up; what rounding errors added to a whole number does not count."""
    return np.ceil(mean - 1e-9).astype(np.int64)
