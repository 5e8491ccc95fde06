"""The rule by which SGLang changes its number of draft steps while it serves."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS, check_compression
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporters.schedule import FileEach, constant_gammas
from speckv.exporters.settings import fastest
from speckv.features import Features
from speckv.policy import Memory, Outcome, Policy, State
from speckv.traces import Rollouts
from speckv.tuning import seconds_by_compression

#: What the file calls the first of its steps, which the server takes from the command line.
_START = "speculative_num_steps"


@dataclass(frozen=True)
class Rule:
    """How SGLang 0.5.23 moves between numbers of draft steps, for all batch sizes alike.

    Attributes:
        candidate_steps: those numbers, increasing, from 0, which is no speculation.
        start: the first of them to play.
        ema_alpha: weight of the newest batch in the running mean of accepted tokens, which starts at start - 1.
        update_interval: batches from one move to the next.
        warmup_batches: before the first.
        down_hysteresis, up_hysteresis: tokens by which the thresholds for a step down and up are shifted.
    """

    candidate_steps: tuple[int, ...]
    start: int
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        steps = self.candidate_steps
        if not steps or list(steps) != sorted(set(steps)) or not all(type(n) is int and n >= 0 for n in steps):
            raise SpecKVError(f"candidate_steps are {list(steps)}; they must be whole numbers that increase from 0")
        if self.start not in steps:
            raise SpecKVError(f"{_START} is {self.start!r}, none of the candidate_steps {list(steps)}")
        counts = (self.update_interval, self.warmup_batches)
        if not all(type(n) is int and n >= 0 for n in counts) or self.update_interval < 1:
            raise SpecKVError("update_interval and warmup_batches must be whole numbers, from 1 and from 0")
        reals = (self.ema_alpha, self.down_hysteresis, self.up_hysteresis)
        if not all(isinstance(x, int | float) and np.isfinite(x) for x in reals) or not 0 <= self.ema_alpha <= 1:
            raise SpecKVError("ema_alpha must be a number from 0 to 1, the hystereses must be numbers")

    def move(self, step: int, mean: float) -> tuple[int, float]:
        """The next number of steps, and the mean that it starts from."""
        steps, at = self.candidate_steps, self.candidate_steps.index(step)
        if step == 0:  # nothing is seen while nothing is drafted: try the next
            step = steps[min(1, len(steps) - 1)]
            return step, step - 1.0 if step and mean < 0 else mean
        here = at
        while here > 0 and mean <= abs(steps[here - 1] - 0.5) + self.down_hysteresis:  # 0.5 for 0 as well as for 1
            here -= 1
        if here == at:
            while here < len(steps) - 1 and mean > steps[here] - 0.5 + self.up_hysteresis:
                here += 1
        return steps[here], mean

    def to_native(self) -> dict[str, Any]:
        value = asdict(self) | {"candidate_steps": list(self.candidate_steps)}
        slot = {name: value.pop(name) for name in ("candidate_steps", "down_hysteresis", "up_hysteresis")}
        return {"1": slot, _START: value.pop("start"), **value}

    @classmethod
    def from_native(cls, native: Mapping[str, Any]) -> "Rule":
        value = dict(native)
        slot = value.pop("1")
        return cls(tuple(slot.pop("candidate_steps")), value.pop(_START), **slot, **value)


class AdaptiveSteps(Policy):
    """SGLang's adaptive number of draft steps. Its mean outlives a sequence, one for each compression.

    Args:
        rules: by compression; those that are missing don't speculate.
    """

    name = "adaptive-steps"
    features = ("compression",)

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.rules = {check_compression(name): rule for name, rule in rules.items()}
        self._by_code = [self.rules.get(name, Rule((0,), 0)) for name in COMPRESSIONS]

    @property
    def label(self) -> str:
        return self.name

    @property
    def required_gamma(self) -> int:
        return max(max(rule.candidate_steps) for rule in self._by_code)

    def new_memory(self) -> Memory:
        step = np.array([rule.start for rule in self._by_code], dtype=np.int64)
        return {"step": step, "mean": step - 1.0, "batches": np.zeros(len(step), dtype=np.int64)}

    def new_state(self, rows: int) -> State:
        return {"compression": np.zeros(rows, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["compression"] = features["compression"].astype(np.int64)
        return np.asarray(self.memory["step"][state["compression"]])

    def observe(self, outcome: Outcome, state: State) -> None:
        step, mean, batches = self.memory["step"], self.memory["mean"], self.memory["batches"]
        for code in np.unique(state["compression"]):
            rule = self._by_code[code]
            # At the end of a text there may be no room for a draft, which says nothing of it.
            seen = (state["compression"] == code) & ((outcome.drafted > 0) | (step[code] == 0))
            if not seen.any():
                continue
            if step[code] > 0:
                mean[code] += rule.ema_alpha * (outcome.accepted[seen].mean() - mean[code])
            batches[code] += 1
            moved = batches[code] - rule.warmup_batches
            if moved > 0 and moved % rule.update_interval == 0:
                step[code], mean[code] = rule.move(int(step[code]), float(mean[code]))


class SglangExporter(FileEach):
    """The file that `--speculative-adaptive-config` of SGLang reads.

    The server sees how many tokens each draft had accepted, and nothing else of it: a policy that needs more, or
    another rule, can't run there. With `--approximate` such a policy is replaced by the fastest of a few rules that the
    server has, for each compression; those that the recording lacks get what is fastest over all sequences.
    """

    name = "sglang"
    decoder = "SGLang 0.5.23 (EAGLE or EAGLE3, top-k 1; written to its source, not run)"
    outcomes = True

    def files_of(self, policy: Policy) -> dict[str, dict[str, Any]]:
        return {name: rule.to_native() for name, rule in _rules_of(policy).items()}

    def policy_of(self, files: Mapping[str, dict[str, Any]]) -> Policy:
        return AdaptiveSteps({name: Rule.from_native(native) for name, native in files.items()})

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        rules = candidates(traces.gamma_max)
        played = [AdaptiveSteps(dict.fromkeys(COMPRESSIONS, rule)) for rule in rules]
        best = fastest(seconds_by_compression(played, traces, costs))
        return AdaptiveSteps({name: rules[index] for name, index in zip(COMPRESSIONS, best, strict=True)})


def candidates(gamma_max: int) -> list[Rule]:
    """The rules that a search tries: constant numbers of steps first, then some that move."""
    constant = [Rule((gamma,), gamma) for gamma in range(min(gamma_max, 8) + 1)]
    tiers = [(1, 2, 3, 4), (1, 3, 5, 7), (2, 4, 6, 8), (0, 1, 2, 4), (1, 4, 8, 16)]
    moving = [
        Rule(steps, steps[1], up_hysteresis=up, down_hysteresis=down)
        for steps in tiers
        if steps[-1] <= gamma_max
        for up, down in ((0.0, -0.25), (0.5, 0.0), (1.0, 0.5))
    ]
    return constant + moving


def _rules_of(policy: Policy) -> dict[str, Rule]:
    if isinstance(policy, AdaptiveSteps):
        return {name: policy.rules.get(name, Rule((0,), 0)) for name in COMPRESSIONS}
    if gammas := constant_gammas(policy):
        return {name: Rule((gamma,), gamma) for name, gamma in gammas.items()}
    if policy.name == "tiers":
        of = policy.get_params()
        rule = Rule(of["tiers"], of["start"], of["weight"], of["every"], of["warm_up"], of["down"], of["up"])
        if rule.candidate_steps[0] == 0 or rule.down_hysteresis > rule.up_hysteresis:
            raise SpecKVError("SGLang treats no speculation, and a `down` above `up`, in a way of its own")
        return dict.fromkeys(COMPRESSIONS, rule)
    raise SpecKVError("its rule is not SGLang's, which moves between a few numbers by the mean of accepted tokens")
