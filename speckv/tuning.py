"""What policies need that learn, from recordings and from step logs (`Policy.fit` and `Policy.fit_steps`)."""

import copy
from collections.abc import Callable, Sequence

import joblib
import numpy as np

from speckv.comparison import folds_of, naming
from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.evaluation.ranking import throughput_by_compression
from speckv.evaluation.situations import USUAL_CONTEXT, batch_sizes
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.policy import Policy
from speckv.replaying import Replay, known_controller, measure_controller, replay
from speckv.steplogs import StepLog
from speckv.traces import Rollouts


def fastest_by_compression(candidates: Sequence[Policy], traces: Rollouts, costs: CostModel) -> IntArray:
    """Index of the candidate with the highest throughput on `traces`, for each compression.

    Ties go to the earlier candidate, so put the simpler ones first. Compressions that the traces lack get 0. Every
    candidate starts with a new memory, and what it learns here is not kept.

    Returns:
        (number of known compressions,) integers, by compression code.
    """
    return np.asarray(seconds_by_compression(candidates, traces, costs).argmin(axis=0))


def seconds_by_compression(candidates: Sequence[Policy], traces: Rollouts, costs: CostModel) -> FloatArray:
    """Seconds that each candidate takes, (candidates, number of known compressions); 0 where there are no sequences.

    Their decisions take what `costs` says of policies of their name: whatever the parameters, they are judged alike.
    """
    seconds = np.stack(
        [
            replay(copy.deepcopy(policy).forget(), traces, costs, costs.controller.get(policy.name)).sequence_seconds
            for policy in candidates
        ]
    )
    return np.stack([seconds[:, traces.compressions == name].sum(axis=1) for name in COMPRESSIONS], axis=1)


def fastest_on_other_prompts(
    fitted: Callable[[Rollouts], Sequence[Policy]], traces: Rollouts, costs: CostModel, folds: int = 2, seed: int = 0
) -> IntArray:
    """Index of the candidate with the highest throughput on prompts that it was not fitted on, for each compression.

    Args:
        fitted: makes all candidates from the sequences to learn from.
        traces: split by prompt; with fewer prompts than folds the first candidate is taken.
        folds: parts of the prompts; each is played once, by candidates fitted on the others.

    Returns:
        As of `fastest_by_compression`.
    """
    if len(np.unique(traces.ids)) < folds:
        return np.zeros(len(COMPRESSIONS), dtype=np.int64)
    fold_of = folds_of(traces, folds, seed)
    seconds = []
    for fold in range(folds):
        part = traces.take(fold_of == fold)
        seconds.append(seconds_by_compression(fitted(traces.take(fold_of != fold)), part, costs))
    return np.asarray(np.sum(seconds, axis=0).argmin(axis=0))


def search(
    candidates: Sequence[Policy],
    traces: Rollouts,
    costs: CostModel,
    folds: int = 5,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FloatArray:
    """Throughput of each candidate on prompts that it was not fitted on, summed over all compressions.

    Args:
        candidates: unfitted.
        traces: what to search on: training prompts alone, so that others can tell how good the best one is.
        folds: parts of the prompts; each is played once, by a candidate fitted on the others.
        jobs: processes to work in.
        progress: called with how many fits are done, and how many there are.

    Returns:
        (candidates,) committed tokens a second, in the time of `play`.

    Raises:
        SpecKVError: a candidate fails.
    """
    fold_of = folds_of(traces, folds, seed)
    tasks = [(number, fold) for number in range(len(candidates)) for fold in range(folds)]
    work = joblib.Parallel(n_jobs=jobs, return_as="generator")(
        joblib.delayed(_seconds)(candidates[number], traces, costs, fold_of == fold, seed) for number, fold in tasks
    )
    seconds = np.zeros(len(candidates))
    for done, ((number, _), of_fold) in enumerate(zip(tasks, work, strict=True), start=1):
        seconds[number] += of_fold
        progress(done, len(tasks))
    return np.asarray(traces.lengths.sum() / seconds)


def _seconds(policy: Policy, traces: Rollouts, costs: CostModel, held_out: BoolArray, seed: int) -> float:
    """Of the held-out sequences, by a copy of the policy that was fitted on the others."""
    with naming(policy):
        fitted = copy.deepcopy(policy).forget().fit(traces.take(~held_out), costs, seed)
        return float(play(fitted, traces.take(held_out), costs).seconds.sum())


def play(policy: Policy, traces: Rollouts, costs: CostModel) -> Replay:
    """Replay a fitted policy, its own time included; what `costs` does not know of that is measured here.

    It plays as a copy, from the memory that `fit` left: the policy itself stays as it is.
    """
    controller = known_controller(policy, costs)
    if controller is None:  # a few sequences from all over hold hundreds of decisions
        some = traces.take(np.linspace(0, len(traces) - 1, 8, dtype=np.int64))
        controller = measure_controller(policy, some, costs)
    return replay(copy.deepcopy(policy), traces, costs, controller)


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
            rate[code] = costs.plain_rate(name, context)
    best_rate, best = rate.copy(), np.zeros(len(COMPRESSIONS))
    for _ in range(rounds):
        policy.fitted["rate"] = rate
        run = replay(copy.deepcopy(policy).forget(), traces, costs, costs.controller.get(policy.name))
        reached = rate.copy()
        for code, name in enumerate(COMPRESSIONS):
            if (mask := traces.compressions == name).any():
                reached[code] = run.tokens[mask].sum() / run.sequence_seconds[mask].sum()
        better = reached > best
        best_rate[better], best[better] = rate[better], reached[better]
        rate = reached
    policy.fitted["rate"] = best_rate


def settle_rate_on_log(policy: Policy, log: StepLog, costs: CostModel, rounds: int = 3) -> None:
    """As `settle_rate`, with the throughput that the log's steps let expect in place of a replay's."""
    rate = best_rate = throughput_by_compression(policy, log, costs)
    best = np.zeros(len(COMPRESSIONS))
    for _ in range(rounds):
        policy.fitted["rate"] = rate
        reached = throughput_by_compression(policy, log, costs)
        best_rate, best = np.where(reached > best, rate, best_rate), np.maximum(reached, best)
        rate = reached
    policy.fitted["rate"] = best_rate


def step_seconds(costs: CostModel, traces: Rollouts) -> tuple[float, FloatArray]:
    """Seconds at the middle of the recorded contexts, for policies that weigh a step's cost.

    Returns:
        Seconds of a draft forward of one token, and of a target forward of 0..gamma_max + 1 tokens for each known
        compression, (number of known compressions, gamma_max + 2); those without timings are all 0.
    """
    context = int(np.median(traces.prompt_lengths + traces.lengths // 2))
    return forward_seconds(costs, context, traces.gamma_max)


def forward_seconds(costs: CostModel, context: int, gamma_max: int) -> tuple[float, FloatArray]:
    """As of `step_seconds`, behind a context of so many tokens."""
    verify = np.zeros((len(COMPRESSIONS), gamma_max + 2))
    for code, name in enumerate(COMPRESSIONS):
        if name in costs.verify:
            verify[code] = costs.verify[name].table(gamma_max + 1, context)[:, context]
    return costs.draft.at(1, context), verify


def usual_context(log: StepLog) -> int:
    """The median context of a log's steps, tokens, where it says any."""
    context = log.signals.get("context_length", np.zeros(0))
    known = context[~np.isnan(context)]
    return int(np.median(known)) if len(known) else USUAL_CONTEXT


def usual_costs(log: StepLog, costs: CostModel) -> CostModel:
    """The costs of a batch of a log's median size.

    Raises:
        SpecKVError: the log is empty, or the costs were not measured for that size.
    """
    if not len(log):
        raise SpecKVError("the log holds no steps to learn from; log some")
    return costs.at_batch(int(np.median(batch_sizes(log, costs))))
