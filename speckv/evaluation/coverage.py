"""How far the estimates are off, and how often their intervals hold the truth, where the truth is known.

A recording is the population. Again and again as many sequences are drawn from it as it has, a policy that draws lots
decodes them by replay, and other policies are evaluated on the log. The truth beside the estimates is what the policy
reaches when it decodes the whole population itself, by replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import joblib
import numpy as np

from speckv.costs import CostModel
from speckv.evaluation.estimates import DRAWS, Estimate, evaluate
from speckv.evaluation.recording import to_steps
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import Rollouts


@dataclass(frozen=True)
class Coverage:
    """One estimator of one policy's throughput, over many logs. Shares are of 1, and of the truth.

    Attributes:
        policy, estimator: names.
        bias: mean of the estimates, minus 1.
        spread: standard deviation of the estimates.
        half_width: of the intervals, mean.
        covers: share of the intervals that hold the truth.
    """

    policy: str
    estimator: str
    bias: float
    spread: float
    half_width: float
    covers: float


def study(
    traces: Rollouts,
    costs: CostModel,
    logging: str,
    policies: Sequence[Policy],
    seeds: int = 200,
    gamma_max: int = 8,
    resamples: int = 399,
    draws: int = DRAWS,
    jobs: int = 1,
) -> list[Coverage]:
    """Evaluate policies on many logs of one recording.

    Args:
        traces: the population, at one compression.
        costs: how long forwards take.
        logging: the policy that decodes, in the form of `make_policy`; it takes a parameter `random_state`.
        policies: to evaluate, fitted.
        seeds: number of logs.
        gamma_max: no step of an evaluated policy drafts more.
        resamples, draws: as of `evaluate`.
        jobs: processes to work in.
    """
    runs = joblib.Parallel(n_jobs=jobs)(
        joblib.delayed(_one_log)(traces, costs, logging, policies, seed, gamma_max, resamples, draws)
        for seed in range(seeds)
    )
    capped = replace(traces, limit=np.minimum(traces.limit, gamma_max))
    rows = []
    for number, policy in enumerate(policies):
        run = replay(policy, capped, costs)
        truth = float((run.accepted + 1).sum() / run.seconds.sum())
        by_name: dict[str, list[Estimate]] = {}
        for log in runs:
            for estimate in log[number]:
                by_name.setdefault(estimate.estimator, []).append(estimate)
        rows += [_coverage(policy.label, found, truth) for found in by_name.values()]
    return rows


def _one_log(
    traces: Rollouts,
    costs: CostModel,
    logging: str,
    policies: Sequence[Policy],
    seed: int,
    gamma_max: int,
    resamples: int,
    draws: int,
) -> list[list[Estimate]]:
    """For each policy its estimates from one log."""
    drawn = traces.take(np.random.default_rng(seed).integers(len(traces), size=len(traces)))
    drawn = replace(drawn, ids=np.array([f"{number:06}" for number in range(len(drawn))]))
    log = to_steps(make_policy(f"{logging},random_state={seed}").fit(drawn, costs), drawn, costs)
    return [
        evaluate(policy, log, costs, gamma_max, seed, resamples=resamples, draws=draws)[0].estimates
        for policy in policies
    ]


def _coverage(policy: str, found: Sequence[Estimate], truth: float) -> Coverage:
    values = np.array([estimate.throughput for estimate in found]) / truth
    low, high = np.array([estimate.interval or (np.nan, np.nan) for estimate in found]).T / truth
    return Coverage(
        policy=policy,
        estimator=found[0].estimator,
        bias=float(values.mean() - 1),
        spread=float(values.std()),
        half_width=float((high - low).mean() / 2),
        covers=float(((low <= 1) & (high >= 1)).mean()),
    )
