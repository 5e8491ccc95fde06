"""The clairvoyant oracle: the fastest way through a recorded sequence (rule R5)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel, StepCosts
from speckv.features import IntArray
from speckv.traces import Rollouts

#: Seconds, of 8 bytes each, that are in memory at a time.
_CELLS = 2**24


@dataclass(frozen=True, eq=False)
class Oracle:
    """The shortest path in time through each sequence.

    Attributes:
        seconds: (S,) of the fastest way to commit all tokens of a sequence; no policy can be faster.
        gammas, forwards: (S, T) tokens to verify and draft forwards to spend at the positions that it visits;
            elsewhere 0.
    """

    seconds: npt.NDArray[np.float64]
    gammas: IntArray
    forwards: IntArray


def oracle(traces: Rollouts, costs: CostModel) -> Oracle:
    """Compute the exact optimum by dynamic programming over (position, lag).

    The lag is the number of committed tokens that the draft has not seen: 1 after a rejection, 2 after a full
    acceptance, and one more with every step that drafts nothing. It matters because the draft's next first
    forward has to take all of them in. A step may also spend one forward more than it verifies tokens, as a policy
    does that looks at a distribution and draws nothing from it; the draft has then seen its last token, and the
    next lag is 1. Only the edge without any draft forward depends on how large the lag is, so that all other edges
    of a position are reduced to one before the lag is looked at.

    The table over (position, lag) grows with the square of the longest text: it is made for a few sequences at a time.
    """
    size = int(traces.lengths.max())
    cells = (size + traces.gamma_max + 2) * (size + 3)
    rows = np.array_split(np.arange(len(traces)), -(-len(traces) * cells // _CELLS))
    parts = [_solve(traces.take(part), costs, size) for part in rows if len(part)]
    return Oracle(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _solve(traces: Rollouts, costs: CostModel, size: int) -> tuple[npt.NDArray[np.float64], IntArray, IntArray]:
    """The seconds, gammas and forwards of an `Oracle`, with `size` positions."""
    count, longest = len(traces), int(traces.prompt_lengths.max()) + size
    step = StepCosts(costs, traces.compressions, max(traces.gamma_max, size) + 1, longest)
    rows, one = np.arange(count), np.ones(count, dtype=np.int64)
    lags = np.arange(size + 2)
    # left[s, p, l]: seconds from position p with lag l to the end. Nothing is left at and behind the end.
    left = np.zeros((count, size + traces.gamma_max + 2, size + 3))
    best = _Drafting(
        np.full((count, size), np.inf),
        np.zeros((count, size), dtype=np.int64),
        np.zeros((count, size), dtype=np.int64),
    )
    for position in reversed(range(size)):
        alive = position < traces.lengths
        run, limit = traces.run[:, position], traces.limit[:, position]
        contexts = traces.prompt_lengths + position
        plain = step.seconds(rows, contexts, one, 0, 0)
        first = step.seconds(rows, contexts, one, 1, 0) - plain
        for forwards in range(1, traces.gamma_max + 1):
            for gamma in (forwards, forwards - 1):
                accepted = np.minimum(gamma, run)
                next_lag = accepted + 1 - np.minimum(accepted, forwards - 1)
                seconds = step.seconds(rows, contexts, one, forwards, gamma) - first
                seconds = seconds + left[rows, position + accepted + 1, next_lag]
                better = (seconds < best.seconds[:, position]) & (forwards <= limit)
                best.seconds[better, position] = seconds[better]
                best.gammas[better, position] = gamma
                best.forwards[better, position] = forwards
        waiting = plain[:, None] + left[:, position + 1, 1 : size + 3]
        catch_up = step.seconds(rows[:, None], contexts[:, None], np.maximum(lags, 1)[None], 1, 0) - plain[:, None]
        total = np.minimum(waiting, catch_up + best.seconds[:, position, None])
        left[:, position, : size + 2] = np.where(alive[:, None], total, 0.0)
    return left[:, 0, 1].copy(), *_walk(traces, step, left, best)


@dataclass(frozen=True, eq=False)
class _Drafting:
    """The best step with a draft at each position, (S, T) each: seconds from there to the end without the draft's
    first forward, tokens to verify, draft forwards."""

    seconds: npt.NDArray[np.float64]
    gammas: IntArray
    forwards: IntArray


def _walk(
    traces: Rollouts, step: StepCosts, left: npt.NDArray[np.float64], best: _Drafting
) -> tuple[IntArray, IntArray]:
    """Follow the optimum from the start of each sequence, and note what it plays."""
    gammas, forwards = np.zeros_like(best.gammas), np.zeros_like(best.gammas)
    rows = np.arange(len(traces))
    positions, lags = np.zeros_like(rows), np.ones_like(rows)
    while len(rows):
        contexts = traces.prompt_lengths[rows] + positions
        plain = step.seconds(rows, contexts, lags, 0, 0)
        waiting = plain + left[rows, positions + 1, lags + 1]
        drafts = step.seconds(rows, contexts, lags, 1, 0) - plain + best.seconds[rows, positions] < waiting
        gamma = np.where(drafts, best.gammas[rows, positions], 0)
        spent = np.where(drafts, best.forwards[rows, positions], 0)
        gammas[rows, positions], forwards[rows, positions] = gamma, spent
        accepted = np.minimum(gamma, traces.run[rows, positions])
        lags = np.where(drafts, accepted + 1 - np.minimum(accepted, spent - 1), lags + 1)
        positions = positions + accepted + 1
        going = positions < traces.lengths[rows]
        rows, positions, lags = rows[going], positions[going], lags[going]
    return gammas, forwards
