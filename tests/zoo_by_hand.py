"""A decoder that asks one rule about one sequence at a time, in plain numbers: what the zoo is checked against."""

from speckv.costs import CostModel
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import Manifest, Rollout, Rollouts

from .synthetic import drafted, make_costs, make_sequences, step_seconds

GAMMA_MAX, BUDGET = 12, 60
MANIFEST = Manifest(GAMMA_MAX, BUDGET, {})
SEQUENCES = make_sequences(prompts=6, gamma_max=GAMMA_MAX, budget=BUDGET, seed=3)
TRACES = Rollouts.from_sequences(SEQUENCES, MANIFEST)
COSTS = make_costs()


class Rule:
    """A policy written down a second time, for one sequence. Override what it decides."""

    def start(self, compression: str) -> None:
        """A sequence starts."""

    def gamma(self) -> int:
        return 10**6

    def draw(self, index: int, signals: dict[str, float]) -> bool:
        return True

    def keep(self, index: int, signals: dict[str, float]) -> bool:
        return True

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """What came of the step."""


def decode(rule: Rule, rollout: Rollout, manifest: Manifest, costs: CostModel) -> list[tuple[int, int, int]]:
    """Gamma, accepted tokens and draft forwards of each step of a recorded sequence."""
    rule.start(rollout.compression)
    steps, position, lag = [], 0, 1
    while position < len(rollout.tokens):
        possible = drafted(rollout, manifest, position)
        most = min(int(rule.gamma()), len(possible))
        gamma = forwards = 0
        while gamma < most:
            forwards += 1
            signals = possible[gamma][1]
            if not rule.draw(gamma + 1, signals):
                break
            gamma += 1
            if gamma == most or not rule.keep(gamma, signals):
                break
        accepted = 0
        while accepted < gamma and possible[accepted][0]:
            accepted += 1
        context = len(rollout.prompt_tokens) + position
        seconds = step_seconds(costs, rollout.compression, context, lag, forwards, gamma)
        rule.observe(gamma, accepted, seconds)
        steps.append((gamma, accepted, forwards))
        lag = accepted + 1 - min(accepted, forwards - 1) if forwards else lag + 1
        position += accepted + 1
    return steps


def played(policy: Policy, traces: Rollouts = TRACES) -> list[list[tuple[int, int, int]]]:
    """Gamma, accepted tokens and draft forwards of each step of each sequence."""
    run = replay(policy, traces, COSTS)
    steps = zip(run.sequence.tolist(), run.gamma.tolist(), run.accepted.tolist(), run.forwards.tolist(), strict=True)
    by_sequence = [[] for _ in range(len(traces))]
    for sequence, *step in steps:
        by_sequence[sequence].append(tuple(step))
    return by_sequence


def by_hand(rule: Rule) -> list[list[tuple[int, int, int]]]:
    """The same, by a rule that is asked about one sequence after the other."""
    return [decode(rule, sequence, MANIFEST, COSTS) for sequence in SEQUENCES]
