"""Rebuilding the text from a step log, to replay a policy on it and to find the logged steps that are like its own.

The text does not depend on gamma. So a log tells for nearly every token whether the draft was right there, and with
that where any policy would begin its steps. Which of these the log began a step at, too, is a matter of its own gammas:
weighed by the inverse of that chance, the logged steps stand for the policy's.
"""

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.evaluation.situations import Situations, batch_sizes, by_batch_size, standardised
from speckv.evaluation.survival import HazardModel
from speckv.features import BoolArray, Features, FloatArray, IntArray
from speckv.policy import Policy, State
from speckv.replaying import Replay, known_controller, replay
from speckv.steplogs import StepLog
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, Rollouts

#: Features that a rebuilt path has.
REBUILT = ("position", "is_first", "last_gamma", "last_accepted", "running_acceptance", "compression", "cost_ratio",
           "context_length", "draft_index", "batch_size")  # fmt: skip

#: From how many tokens a run of right ones is of the next class.
_RUNS = (1, 3, 6)
_CLASSES = len(_RUNS) + 1


def can_replay(policy: Policy) -> bool:
    """Whether a rebuilt path shows a policy all that it reads: outcomes, but no signals of the models."""
    return set(policy.features) <= set(REBUILT)


class _Wanted(Policy):
    """Plays what stands in a table (S, T) for each sequence and position."""

    name = "wanted"
    features = ("position",)

    def __init__(self, table: IntArray) -> None:
        super().__init__()
        self.table = table

    def new_state(self, rows: int) -> State:
        return {"row": np.arange(rows)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return np.asarray(self.table[state["row"], features["position"].astype(np.int64)])


class Paths:
    """Where the draft was right along the sequences of a log, and how likely it was where that is not known.

    A step tells of each of its accepted tokens that the draft was right there, and of the first rejected one that it
    was wrong. Of the token behind a draft that was accepted whole, and of one where nothing was drafted, it tells
    nothing: there the odds are those of the logistic hazard at that depth in that step, times how much likelier the run
    of right tokens behind it is if the draft was right than if it was wrong.

    Args:
        log: at one compression, ordered.
        situations: of all its steps.
        gamma_max: no step of a replay drafts more.
    """

    def __init__(self, log: StepLog, situations: Situations, gamma_max: int) -> None:
        self.log, self.situations, self.gamma_max = log, situations, gamma_max
        tokens = situations.accepted + 1
        self.lengths = np.bincount(situations.sequence, tokens).astype(np.int64)
        before = np.cumsum(tokens) - tokens
        first = np.searchsorted(situations.sequence, np.arange(situations.sequences))
        self.start = before - before[first][situations.sequence]
        self.prompts = np.full(situations.sequences, 256)
        if (context := log.signals.get("context_length")) is not None and not np.isnan(context[first]).any():
            self.prompts = context[first].astype(np.int64)
        self.compression = log.compression[first]  # type: ignore[index]
        self.right = self._known()
        self.behind = self._runs_behind()
        self.limit = self._room()
        self.step = np.full(self.right.shape, -1)
        self.step[situations.sequence, self.start] = np.arange(len(self.start))

    def _room(self) -> IntArray:
        """(S, T + 1) how many tokens a step can draft, as far as drafts that were cut short tell.

        The last of them was cut by the budget, if no other went further; the others ended by themselves. A text that is
        as long as one that was cut by its budget had the same.
        """
        s = self.situations
        cut, ends = s.drafted < s.chosen, self.start + s.drafted + 1
        budget, latest = np.zeros(s.sequences, dtype=np.int64), np.zeros(s.sequences, dtype=np.int64)
        np.maximum.at(latest, s.sequence, ends)
        np.maximum.at(budget, s.sequence[cut], ends[cut])
        known = budget == latest
        alike = ~known & np.isin(self.lengths, budget[known])
        budget[alike] = latest[alike] = self.lengths[alike]
        room = budget[:, None] - np.arange(self.right.shape[1] + 1) - 1
        limit = np.clip(np.where((budget == latest)[:, None], room, self.gamma_max), 0, self.gamma_max)
        limit[s.sequence[cut], self.start[cut]] = np.minimum(s.drafted[cut], self.gamma_max)
        return limit

    def play(self, policy: Policy, costs: CostModel, counts: FloatArray, random: np.random.Generator) -> Situations:
        """Replay a policy where what is unknown is drawn, and keep the logged steps that begin where it begins one.

        A policy that reads signals of the models wants, at each position, what it wanted in the log's last step.

        Args:
            policy: decides before the step alone. It is left as it is.
            costs: how long forwards take; each sequence is replayed as one of a batch of the size, to the next whole
                number, that its logged steps had on average.
            counts: (S,) how often each sequence counts in the chances to draw and to weigh by.
            random: to draw with.
        """
        paths = self.draw(counts, random)
        run = self._replay(policy, paths, costs)
        step = self.step[run.sequence, run.position]
        began = step >= 0
        chance = _chances_to_begin(run, began, paths.run[:, :-1] > 0, counts)
        sums = [np.bincount(run.sequence, column) for column in (run.accepted + 1, run.seconds, np.ones(len(step)))]
        own, wanted = self.situations.take(step[began]), np.minimum(run.chosen, self.gamma_max)[began]
        return replace(
            own,
            wanted=wanted,
            covariates=np.hstack([own.covariates, standardised({"wanted": wanted})]),
            weight=1 / chance[began],
            replayed=np.column_stack(sums),
        )

    def _replay(self, policy: Policy, paths: Rollouts, costs: CostModel) -> Replay:
        """The steps of all sequences, each under the costs of its batch."""
        sequence, controller = self.situations.sequence, known_controller(policy, costs) or (0.0, 0.0)
        sizes = np.rint(np.bincount(sequence, batch_sizes(self.log, costs)) / np.bincount(sequence)).astype(np.int64)
        wanted = None if can_replay(policy) else self._wanted_since()
        runs, tokens = [], np.zeros(len(sizes), dtype=np.int64)
        for rows, model in by_batch_size(sizes, costs):
            player = copy.deepcopy(policy) if wanted is None else _Wanted(wanted[rows])
            run = replay(player, paths.take(rows), model, controller=controller)
            runs.append(replace(run, sequence=rows[run.sequence]))
            tokens[rows] = run.tokens
        order = np.argsort(np.concatenate([run.sequence for run in runs]), kind="stable")
        names = [field.name for field in fields(Replay) if field.name not in {"tokens", "features"}]
        steps: dict[str, Any] = {name: np.concatenate([getattr(run, name) for run in runs])[order] for name in names}
        return Replay(**steps, tokens=tokens)

    def _wanted_since(self) -> IntArray:
        """(S, T) what the policy wants in the last logged step at or before each position."""
        latest = np.maximum.accumulate(self.step, axis=1)
        return self.situations.wanted[latest]

    def _known(self) -> FloatArray:
        """(S, T) 1 where the draft was right, 0 where it was wrong, NaN where that is unknown."""
        s = self.situations
        right = np.full((s.sequences, int(self.lengths.max())), np.nan)
        for index in range(int(s.accepted.max(initial=0))):
            rows = s.accepted > index
            right[s.sequence[rows], self.start[rows] + index] = 1.0
        rejected = s.accepted < s.drafted
        right[s.sequence[rejected], (self.start + s.accepted)[rejected]] = 0.0
        return right

    def draw(self, counts: FloatArray, random: np.random.Generator) -> Rollouts:
        """Paths on which what is unknown is drawn.

        Args:
            counts: (S,) how often each sequence counts in the chances to draw by.
            random: to draw with.
        """
        s = self.situations
        unknown = s.accepted == s.drafted
        row, position = s.sequence[unknown], (self.start + s.accepted)[unknown]
        # What the text's end cut off was not tried.
        model = HazardModel.fit(replace(s, chosen=s.drafted), counts[None])
        hazards = model.hazards(s.covariates[unknown], int(s.accepted.max(initial=0)) + 1)
        chance = np.clip(hazards[np.arange(len(row)), s.accepted[unknown]], 1e-6, 1 - 1e-6)
        odds = chance / (1 - chance) * self._likelihood_ratios(counts)[self.behind[row, position]]
        right = self.right.copy()
        right[row, position] = random.random(len(row)) < odds / (1 + odds)
        return self._rollouts(right == 1.0)

    def _runs_behind(self) -> IntArray:
        """(S, T) the class of the run of right tokens behind each position; -1 where what is unknown hides it."""
        run, ended = np.zeros((2, len(self.right), self.right.shape[1] + 1))
        for position in reversed(range(self.right.shape[1])):
            right, wrong = self.right[:, position] == 1, self.right[:, position] == 0
            run[:, position] = np.where(right, run[:, position + 1] + 1, 0)
            ended[:, position] = np.where(right, ended[:, position + 1], wrong)
        classes = np.digitize(run, _RUNS)
        return np.where((ended == 1) | (classes == len(_RUNS)), classes, -1)[:, 1:]

    def _likelihood_ratios(self, counts: FloatArray) -> FloatArray:
        """By class, how much likelier a run is behind a right token than behind a wrong one; 1 for that of -1."""
        shares = []
        for outcome in (1, 0):
            of = [(((self.right == outcome) & (self.behind == c)).sum(axis=1) * counts).sum() for c in range(_CLASSES)]
            shares.append((np.array(of) + 1) / (sum(of) + _CLASSES))
        return np.append(shares[0] / shares[1], 1.0)

    def _rollouts(self, right: BoolArray) -> Rollouts:
        """Dense traces of paths (S, T), their signals unknown and hence 0."""
        size, gamma_max = right.shape, self.gamma_max
        run = np.zeros((size[0], size[1] + 1), dtype=np.int64)
        for position in reversed(range(size[1])):
            run[:, position] = np.where(right[:, position], run[:, position + 1] + 1, 0)
        nothing = np.zeros(size, dtype=np.float32)
        off = np.zeros((*size, max(0, gamma_max - 1)), dtype=np.float32)
        return Rollouts(
            manifest=Manifest(gamma_max, size[1], {}),
            ids=np.arange(size[0]).astype(np.str_),
            tasks=np.full(size[0], ""),
            compressions=self.compression,
            prompt_lengths=self.prompts,
            lengths=self.lengths,
            tokens=np.zeros(size, dtype=np.int32),
            draft_tokens=np.zeros(size, dtype=np.int32),
            off_tokens=off.astype(np.int32),
            run=run,
            limit=self.limit,
            signals=dict.fromkeys(DRAFT_SIGNALS | TARGET_SIGNALS, nothing),
            off_signals=dict.fromkeys(DRAFT_SIGNALS, off),
        )


def _chances_to_begin(run: Replay, began: BoolArray, right: BoolArray, counts: FloatArray) -> FloatArray:
    """(n,) the chance that the log begins a step where the policy begins one.

    Behind a wrong token every decoder does. Elsewhere the chance is logistic in how right the draft was before.

    Args:
        run: n steps of the policy.
        began: (n,) whether the log began one there.
        right: (S, T) whether the draft is right along the texts.
        counts: (S,) how often each sequence counts.
    """
    from sklearn.linear_model import LogisticRegression

    chance = np.ones(len(began))
    past = _past(right)[run.sequence, run.position]
    inside = past[:, 0] > 0
    told = inside & (counts[run.sequence] > 0)
    if told.any() and began[told].min() < began[told].max():
        inputs = (past - past[told].mean(axis=0)) / (past[told].std(axis=0) + 1e-9)
        model = LogisticRegression(solver="newton-cholesky")
        model.fit(inputs[told], began[told], sample_weight=counts[run.sequence[told]])
        chance[inside] = model.predict_proba(inputs[inside])[:, 1]
    return chance


#: By how much less the token before counts in the shares of right ones: over about 5 and 20 tokens.
_FADING = (0.8, 0.95)


def _past(right: BoolArray) -> FloatArray:
    """(S, T + 1, 4) of the text before each position: right tokens since the last wrong one, shares of right tokens
    over about 5 and 20 tokens, and its length; counts as logarithms."""
    past = np.zeros((len(right), right.shape[1] + 1, 4))
    since = np.zeros(len(right))
    sums, sizes = np.full((len(right), 2), 0.5), np.ones(2)
    for position in range(right.shape[1] + 1):
        past[:, position] = np.column_stack([np.log1p(since), sums / sizes, np.full(len(right), np.log1p(position))])
        if position < right.shape[1]:
            now = right[:, position]
            since = np.where(now, since + 1, 0.0)
            sums, sizes = sums * _FADING + now[:, None], sizes * _FADING + 1
    return past
