"""Policies ranked on a step log."""

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import joblib
import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel, fit_costs_to_log
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.evaluation.estimates import Evaluation, evaluate
from speckv.evaluation.situations import check_evaluable
from speckv.features import FloatArray
from speckv.policy import Policy
from speckv.provenance import prompts_of
from speckv.steplogs import StepLog

#: Of each estimate: fewer than `evaluate` takes, so that a ranking of many policies is a matter of minutes.
RESAMPLES, DRAWS = 199, 4
#: The estimator that ranks: every log supports it, and of those it is the least off (docs/step-logs.md).
RANKED_BY = "path"


@dataclass(frozen=True)
class Ranking:
    """Policies at one compression, the best first.

    Attributes:
        compression, costs: names.
        evaluations: of the policies.
        held_out: whether some learned, and were evaluated on prompts that none of them learned from.
    """

    compression: str
    costs: str
    evaluations: list[Evaluation]
    held_out: bool


def rank(
    policies: Sequence[Policy],
    log: StepLog,
    costs: CostModel | None = None,
    seed: int = 0,
    jobs: int = 1,
    seen: Collection[str] = (),
) -> tuple[list[Ranking], dict[str, list[str]]]:
    """Rank policies by what they would reach by themselves, at each compression of a log.

    If some have to be fitted, these learn from one half of the prompts (`Policy.fit_steps`), and all are evaluated on
    the other.

    Args:
        policies: fitted or not.
        log: with the compression of every step.
        costs: how long forwards take; None takes the log's own seconds.
        seed: of the halves, of fitting and of resampling.
        jobs: processes to work in.
        seen: prompts that some of the policies were fitted to before; none is evaluated on these.

    Returns:
        A ranking for each compression, and by reason the labels of the policies that a step log can't judge.

    Raises:
        SpecKVError: it can judge none of them, or as of `evaluate`.
    """
    learning = any(type(policy).fit is not Policy.fit and not policy.fitted for policy in policies)
    seen = set(seen) & set(prompts_of(log).tolist())
    learned, judged = log, log
    if learning or seen:
        learned, judged = split_by_prompt(log, 2 if learning else 1, seed, seen)
    most = int(log.gamma.max())
    answers = joblib.Parallel(n_jobs=jobs)(
        joblib.delayed(_judge)(policy, learned, judged, costs, most, seed) for policy in policies
    )
    left_out: dict[str, list[str]] = {}
    found: list[Evaluation] = []
    for policy, answer in zip(policies, answers, strict=True):
        if isinstance(answer, str):
            left_out.setdefault(answer, []).append(policy.label)
        else:
            found += answer
    if not found:
        raise SpecKVError(f"the log can judge none of these policies: {'; '.join(left_out)}")
    rankings = []
    for stored in dict.fromkeys(evaluation.compression for evaluation in found):
        of_it = [evaluation for evaluation in found if evaluation.compression == stored]
        of_it.sort(key=lambda evaluation: -evaluation.of(RANKED_BY).throughput)
        rankings.append(Ranking(stored, of_it[0].costs, of_it, learning or bool(seen)))
    return rankings, left_out


def _judge(
    policy: Policy, learned: StepLog, judged: StepLog, costs: CostModel | None, gamma_max: int, seed: int
) -> list[Evaluation] | str:
    """Its evaluations, or why the log can't judge it."""
    policy = copy.deepcopy(policy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpecKVWarning)  # they are in the evaluations
            check_evaluable(policy)
            if type(policy).fit is not Policy.fit and not policy.fitted:
                policy.fit_steps(learned, costs or fit_costs_to_log(learned, "the log's own seconds", "the log"), seed)
            return evaluate(policy, judged, costs, gamma_max, seed, RESAMPLES, DRAWS)
    except SpecKVError as error:
        return str(error).removeprefix(f"policy {policy.label!r} ")


def throughput_by_compression(
    policy: Policy, log: StepLog, costs: CostModel, gamma_max: int | None = None
) -> FloatArray:
    """Estimated tokens a second, (number of known compressions,); 0 at those that the log lacks.

    Args, errors: as of `evaluate`.
    """
    reached = np.zeros(len(COMPRESSIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)
        for found in evaluate(policy, log, costs, gamma_max, resamples=0, draws=DRAWS):
            reached[list(COMPRESSIONS).index(found.compression)] = found.of(RANKED_BY).throughput
    return reached


def split_by_prompt(log: StepLog, folds: int, seed: int = 0, seen: Collection[str] = ()) -> tuple[StepLog, StepLog]:
    """The log without the sequences of one in `folds` prompts, and these; see `speckv.provenance.prompt_of`.

    Args:
        seen: prompts that stay in the first part; all others can be in the second.

    Raises:
        SpecKVError: the log holds one prompt only, or all of them were seen.
    """
    names, code = np.unique(prompts_of(log), return_inverse=True)
    unseen = np.flatnonzero(~np.isin(names, list(seen)))
    if len(names) < 2:
        raise SpecKVError(f"the log holds {len(names) or 'no'} prompt: too few to hold some out; log others, too")
    if not len(unseen):
        raise SpecKVError("a policy was fitted to all texts of the log, or several together: rank them on another log")
    drawn = np.random.default_rng(seed).permutation(unseen)[: -(-len(names) // folds)]
    held_out = np.isin(code, drawn)
    learned, others = (
        StepLog.from_columns({name: values[rows] for name, values in log.columns.items()}, log.provenance)
        for rows in (~held_out, held_out)
    )
    return learned, others
