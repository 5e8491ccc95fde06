"""Rebuilding the recorded path from a step log, to replay any policy on it that looks at outcomes alone."""

import numpy as np

from speckv.evaluation.situations import Situations
from speckv.evaluation.survival import kaplan_meier
from speckv.features import BoolArray, FloatArray
from speckv.policy import Policy
from speckv.steplogs import StepLog
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, Rollouts

#: Features that a rebuilt path has.
REBUILT = ("position", "is_first", "last_gamma", "last_accepted", "running_acceptance", "compression", "cost_ratio",
           "context_length", "draft_index", "batch_size")  # fmt: skip


def can_replay(policy: Policy) -> bool:
    """Whether a rebuilt path shows a policy all that it reads: outcomes, but no signals of the models."""
    return set(policy.features) <= set(REBUILT)


class Paths:
    """Where the draft was right along the sequences of a log, and how likely it was where that is not known.

    A step tells of each of its accepted tokens that the draft was right there, and of the first rejected one that it
    was wrong. Of the token behind a draft that was accepted whole, and of one where nothing was drafted, it tells
    nothing: there the chance is the hazard at that depth, times how much likelier the outcome behind it is if the
    draft was right than if it was wrong.

    Args:
        log: at one compression, ordered.
        situations: of it.
    """

    def __init__(self, log: StepLog, situations: Situations) -> None:
        self.situations = situations
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
        hazards = kaplan_meier(s.accepted, s.chosen, s, counts[None], int(s.accepted.max(initial=0)) + 1)[0]
        chance = np.clip(hazards[s.accepted[unknown]], 1e-6, 1 - 1e-6)
        behind = np.hstack([self.right, np.full((s.sequences, 1), np.nan)])[row, position + 1]
        odds = chance / (1 - chance) * self._likelihood_ratio(counts, behind)
        right = self.right.copy()
        right[row, position] = random.random(len(row)) < odds / (1 + odds)
        return self._rollouts(right == 1.0)

    def _likelihood_ratio(self, counts: FloatArray, behind: FloatArray) -> FloatArray:
        """How much likelier the outcome behind (n,) is where the draft was right than where it was wrong."""
        here, there = self.right[:, :-1], self.right[:, 1:]
        pairs = {
            (one, other): float((((here == one) & (there == other)).sum(axis=1) * counts).sum()) + 1
            for one in (0, 1)
            for other in (0, 1)
        }
        ratio = np.ones(len(behind))
        for other in (0, 1):
            after_right, after_wrong = (pairs[one, other] / (pairs[one, 0] + pairs[one, 1]) for one in (1, 0))
            ratio[behind == other] = after_right / after_wrong
        return ratio

    def _rollouts(self, right: BoolArray) -> Rollouts:
        """Dense traces of paths (S, T), their signals unknown and hence 0."""
        size, gamma_max = right.shape, self.situations.gamma_max
        run = np.zeros((size[0], size[1] + 1), dtype=np.int64)
        for position in reversed(range(size[1])):
            run[:, position] = np.where(right[:, position], run[:, position + 1] + 1, 0)
        room = self.lengths[:, None] - np.arange(size[1] + 1) - 1
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
            limit=np.clip(room, 0, gamma_max),
            signals=dict.fromkeys(DRAFT_SIGNALS | TARGET_SIGNALS, nothing),
            off_signals=dict.fromkeys(DRAFT_SIGNALS, off),
        )
