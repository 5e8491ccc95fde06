"""Choosing among candidates on training prompts, one choice for each compression."""

import copy
from collections.abc import Sequence

import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.features import FloatArray, IntArray
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import Rollouts


def fastest_by_compression(candidates: Sequence[Policy], traces: Rollouts, costs: CostModel) -> IntArray:
    """Index of the candidate with the highest throughput on `traces`, for each compression.

    Ties go to the earlier candidate, so put the simpler ones first. Compressions that the traces lack get 0. Every
    candidate starts with a new memory, and what it learns here is not kept.

    Returns:
        (number of known compressions,) integers, by compression code.
    """
    seconds = np.stack(
        [replay(copy.deepcopy(policy).forget(), traces, costs).sequence_seconds for policy in candidates]
    )
    best = np.zeros(len(COMPRESSIONS), dtype=np.int64)
    for code, name in enumerate(COMPRESSIONS):
        if (mask := traces.compressions == name).any():
            best[code] = seconds[:, mask].sum(axis=1).argmin()
    return best


def settle_rate(policy: Policy, traces: Rollouts, costs: CostModel, rounds: int = 4) -> None:
    """Find the throughput that a policy's decisions reach when they are made at that very throughput.

    A step of `tokens` in `seconds` is worth tokens - rate * seconds, where rate is the throughput of the whole
    run; only then does the best step belong to the best run (Dinkelbach's method for ratios). Starts from no
    speculation and leaves the rate of the best round in `policy.fitted["rate"]`, (number of known compressions,)
    tokens a second. Every round starts with a new memory, and what the policy learns in it is not kept.
    """
    context = int(traces.prompt_lengths.mean())
    rate = np.zeros(len(COMPRESSIONS))
    for code, name in enumerate(COMPRESSIONS):
        if name in costs.verify:
            rate[code] = 1 / costs.verify[name].at(1, context)
    best_rate, best = rate.copy(), np.zeros(len(COMPRESSIONS))
    for _ in range(rounds):
        policy.fitted["rate"] = rate
        run = replay(copy.deepcopy(policy).forget(), traces, costs)
        reached = rate.copy()
        for code, name in enumerate(COMPRESSIONS):
            if (mask := traces.compressions == name).any():
                reached[code] = run.tokens[mask].sum() / run.sequence_seconds[mask].sum()
        better = reached > best
        best_rate[better], best[better] = rate[better], reached[better]
        rate = reached
    policy.fitted["rate"] = best_rate


def step_seconds(costs: CostModel, traces: Rollouts) -> tuple[float, FloatArray]:
    """Seconds at the middle of the recorded contexts, for policies that weigh a step's cost.

    Returns:
        Seconds of a draft forward of one token, and of a target forward of 0..gamma_max + 1 tokens for each known
        compression, (number of known compressions, gamma_max + 2); those without timings are all 0.
    """
    context = int(np.median(traces.prompt_lengths + traces.lengths // 2))
    verify = np.zeros((len(COMPRESSIONS), traces.gamma_max + 2))
    for code, name in enumerate(COMPRESSIONS):
        if name in costs.verify:
            verify[code] = costs.verify[name].table(traces.gamma_max + 1, context)[:, context]
    return costs.draft.at(1, context), verify
