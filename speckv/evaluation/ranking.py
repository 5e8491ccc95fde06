"""Policies ranked on a step log, and what policies need that learn from one (`Policy.fit_steps`)."""

import copy
import pathlib
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import joblib
import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel, fit_costs_to_log
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.evaluation.estimates import Evaluation, evaluate
from speckv.evaluation.situations import batch_sizes, check_evaluable
from speckv.features import FloatArray
from speckv.files import read_json
from speckv.policy import Policy
from speckv.steplogs import StepLog

#: Of each estimate: fewer than `evaluate` takes, so that a ranking of many policies is a matter of minutes.
RESAMPLES, DRAWS = 199, 4
#: The estimator that ranks: every log supports it, and of those it is the least off (docs/step-logs.md).
RANKED_BY = "path"
#: Tokens in front of a step of a log that does not say it.
_CONTEXT = 256
#: What an adapter's log calls a sequence: a hash of its prompt, and what keeps it apart from others of that prompt.
_ADAPTERS = re.compile(r"(?:.*/)?([0-9a-f]{12}) [0-9a-f]{8}")
#: What a replay's log calls one: its prompt, and the compression.
_REPLAYS = re.compile(rf"(.+) at (?:{'|'.join(COMPRESSIONS)})")


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


def settle_rate_on_log(policy: Policy, log: StepLog, costs: CostModel, rounds: int = 3) -> None:
    """As `speckv.tuning.settle_rate`, with the throughput that the log's steps let expect in place of a replay's."""
    rate = best_rate = throughput_by_compression(policy, log, costs)
    best = np.zeros(len(COMPRESSIONS))
    for _ in range(rounds):
        policy.fitted["rate"] = rate
        reached = throughput_by_compression(policy, log, costs)
        best_rate, best = np.where(reached > best, rate, best_rate), np.maximum(reached, best)
        rate = reached
    policy.fitted["rate"] = best_rate


def usual_context(log: StepLog) -> int:
    """The median context of the log's steps, tokens, where it says any."""
    context = log.signals.get("context_length", np.zeros(0))
    known = context[~np.isnan(context)]
    return int(np.median(known)) if len(known) else _CONTEXT


def usual_costs(log: StepLog, costs: CostModel) -> CostModel:
    """The costs of a batch of the log's median size."""
    return costs.at_batch(int(np.median(batch_sizes(log, costs))))


def prompt_of(sequence: str) -> str:
    """What the prompt of a logged sequence is called.

    Sequences are of one prompt where SpecKV's own names say so: those of the adapters, which begin with a hash of the
    prompt, and those of replays, PROMPT at COMPRESSION. Any other is a prompt of its own.
    """
    named = _ADAPTERS.fullmatch(sequence) or _REPLAYS.fullmatch(sequence)
    return named[1] if named else sequence


def prompts_of(log: StepLog) -> npt.NDArray[np.str_]:
    """(n,) of each step."""
    names, code = np.unique(log.sequence, return_inverse=True)
    return np.array([prompt_of(name) for name in names.tolist()], dtype=np.str_)[code]


def fitted_to(spec: str | pathlib.Path) -> set[str]:
    """The prompts that a saved policy was trained on, as far as its folder says; none if it is no such folder."""
    path = pathlib.Path(spec) / "training.json"
    if not path.is_file():
        return set()
    about = read_json(path, "what a policy was trained on")
    return {*about.get("prompts", ()), *map(prompt_of, about.get("logged", ()))}


def split_by_prompt(log: StepLog, folds: int, seed: int = 0, seen: Collection[str] = ()) -> tuple[StepLog, StepLog]:
    """The log without the sequences of one in `folds` prompts, and these; see `prompt_of`.

    Args:
        seen: prompts that stay in the first part; all others can be in the second.

    Raises:
        SpecKVError: the log holds one prompt only, or all of them were seen.
    """
    names, code = np.unique(prompts_of(log), return_inverse=True)
    unseen = np.flatnonzero(~np.isin(names, list(seen)))
    if not len(unseen):
        raise SpecKVError("a policy was fitted to all texts of the log, or several together: rank them on another log")
    if len(names) < 2:
        raise SpecKVError("the log holds 1 prompt: too few to hold some out; log others, too")
    drawn = np.random.default_rng(seed).permutation(unseen)[: -(-len(names) // folds)]
    held_out = np.isin(code, drawn)
    learned, others = (
        StepLog.from_columns({name: values[rows] for name, values in log.columns.items()}, log.provenance)
        for rows in (~held_out, held_out)
    )
    return learned, others
