"""How far the estimates are off, and how often their intervals hold the truth, where the truth is known.

A recording is the population. Again and again as many sequences are drawn from it as it has, a policy that draws lots
decodes them by replay, and other policies are evaluated on the log. Two truths stand beside the estimates: what the
policy reaches when it decodes the whole population itself (`replay`), and what its choices would have come to in the
situations that the logging policy met (`one_step`), over all logs together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import joblib
import numpy as np

from speckv.costs import CostModel
from speckv.evaluation.estimates import Estimate, evaluate
from speckv.evaluation.recording import to_steps
from speckv.evaluation.situations import make_situations, ordered
from speckv.features import FloatArray
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import Rollouts


@dataclass(frozen=True)
class Coverage:
    """One estimator of one policy's throughput, over many logs. Shares are of 1.

    Attributes:
        policy, estimator: names.
        one_step_bias, replay_bias: mean of the estimates over the truth, minus 1.
        spread: standard deviation of the estimates over the truth of the replay.
        half_width: of the intervals, mean over the truth of the replay.
        covers_one_step, covers_replay: share of the intervals that hold the truth.
    """

    policy: str
    estimator: str
    one_step_bias: float
    replay_bias: float
    spread: float
    half_width: float
    covers_one_step: float
    covers_replay: float


def study(
    traces: Rollouts,
    costs: CostModel,
    logging: str,
    policies: Sequence[Policy],
    seeds: int = 200,
    resamples: int = 199,
    draws: int = 10,
    jobs: int = 1,
) -> list[Coverage]:
    """Evaluate policies on many logs of one recording.

    Args:
        traces: the population, at one compression.
        costs: how long forwards take.
        logging: the policy that decodes, in the form of `make_policy`; it takes a parameter `random_state`.
        policies: to evaluate, fitted.
        seeds: number of logs.
        resamples, draws: as of `evaluate`.
        jobs: processes to work in.
    """
    runs = joblib.Parallel(n_jobs=jobs)(
        joblib.delayed(_one_log)(traces, costs, logging, policies, seed, resamples, draws) for seed in range(seeds)
    )
    rows = []
    for number, policy in enumerate(policies):
        run = replay(policy, traces, costs)
        replayed = float((run.accepted + 1).sum() / run.seconds.sum())
        tokens, seconds = np.sum([log[number][0] for log in runs], axis=0)
        by_name: dict[str, list[Estimate]] = {}
        for log in runs:
            for estimate in log[number][1]:
                by_name.setdefault(estimate.estimator, []).append(estimate)
        rows += [_coverage(policy.label, found, float(tokens / seconds), replayed) for found in by_name.values()]
    return rows


def _one_log(
    traces: Rollouts, costs: CostModel, logging: str, policies: Sequence[Policy], seed: int, resamples: int, draws: int
) -> list[tuple[FloatArray, list[Estimate]]]:
    """For each policy tokens and seconds of its choices in the situations of one log, and its estimates."""
    drawn = traces.take(np.random.default_rng(seed).integers(len(traces), size=len(traces)))
    drawn = replace(drawn, ids=np.array([f"{number:06}" for number in range(len(drawn))]))
    player = make_policy(f"{logging},random_state={seed}").fit(drawn, costs)
    log = to_steps(player, drawn, costs)
    log = ordered(log, np.ones(len(log), dtype=bool))
    found = []
    for policy in policies:
        (evaluation,) = evaluate(policy, log, costs, seed=seed, resamples=resamples, draws=draws)
        situations = make_situations(log, policy, costs, traces.gamma_max)
        where = situations.sequence, log.signals["position"].astype(np.int64)
        drafted = np.minimum(situations.wanted, drawn.limit[where])
        accepted = np.minimum(drafted, drawn.run[where])
        seconds = situations.seconds[np.arange(len(log)), drafted]
        seconds = seconds + situations.catching_up * (accepted == drafted) * (drafted > 0)
        found.append((np.array([(accepted + 1).sum(), seconds.sum()]), evaluation.estimates))
    return found


def _coverage(policy: str, found: Sequence[Estimate], one_step: float, replayed: float) -> Coverage:
    values = np.array([estimate.throughput for estimate in found])
    low, high = np.array([estimate.interval or (np.nan, np.nan) for estimate in found]).T
    return Coverage(
        policy=policy,
        estimator=found[0].estimator,
        one_step_bias=float(values.mean() / one_step - 1),
        replay_bias=float(values.mean() / replayed - 1),
        spread=float(values.std() / replayed),
        half_width=float((high - low).mean() / 2 / replayed),
        covers_one_step=float(((low <= one_step) & (one_step <= high)).mean()),
        covers_replay=float(((low <= replayed) & (replayed <= high)).mean()),
    )
