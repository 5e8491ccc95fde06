"""The clairvoyant oracle: the fastest way through a recorded sequence (rule R5)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel, StepCosts
from speckv.features import IntArray
from speckv.traces import Rollouts


@dataclass(frozen=True)
class Oracle:
    """The shortest path in time through each sequence.

    Attributes:
        seconds: (S,) of the fastest way to commit all tokens of a sequence; no policy can be faster.
        gammas: (S, T) what it plays at the positions that it visits; elsewhere 0.
    """

    seconds: npt.NDArray[np.float64]
    gammas: IntArray


def oracle(traces: Rollouts, costs: CostModel) -> Oracle:
    """Compute the exact optimum by dynamic programming over (position, lag).

    The lag is the number of committed tokens that the draft has not seen: 1 after a rejection, 2 after a full
    acceptance, and one more with every step that drafts nothing. It matters because the draft's next first
    forward has to take all of them in. Only the gamma = 0 edge depends on how large the lag is, so that all
    other edges of a position are reduced to one before the lag is looked at.
    """
    count, size = len(traces), int(traces.lengths.max())
    step = StepCosts(
        costs, traces.compressions, max(traces.gamma_max, size) + 1, int(traces.prompt_lengths.max()) + size
    )
    rows, one = np.arange(count), np.ones(count, dtype=np.int64)
    lags = np.arange(size + 2)
    # left[s, p, l]: seconds from position p with lag l to the end. Nothing is left at and behind the end.
    left = np.zeros((count, size + traces.gamma_max + 2, size + 3))
    best_gamma = np.zeros((count, size), dtype=np.int64)  # the best gamma above 0, whatever the lag
    drafting = np.full((count, size), np.inf)  # seconds to the end with it, without the draft's first forward
    for position in reversed(range(size)):
        alive = position < traces.lengths
        run, limit = traces.run[:, position], traces.limit[:, position]
        contexts = traces.prompt_lengths + position
        first = step.seconds(rows, contexts, one, 1, 0) - step.seconds(rows, contexts, one, 0, 0)
        for gamma in range(1, traces.gamma_max + 1):
            accepted = np.minimum(gamma, run)
            next_lag = np.where(accepted == gamma, 2, 1)
            seconds = step.seconds(rows, contexts, one, gamma, gamma) - first
            seconds = seconds + left[rows, position + accepted + 1, next_lag]
            seconds[gamma > limit] = np.inf
            better = seconds < drafting[:, position]
            drafting[better, position] = seconds[better]
            best_gamma[better, position] = gamma
        plain = step.seconds(rows, contexts, one, 0, 0)[:, None] + left[:, position + 1, 1 : size + 3]
        catch_up = step.seconds(rows[:, None], contexts[:, None], np.maximum(lags, 1)[None], 1, 0)
        catch_up = catch_up - step.seconds(rows, contexts, one, 0, 0)[:, None]
        total = np.minimum(plain, catch_up + drafting[:, position, None])
        left[:, position, : size + 2] = np.where(alive[:, None], total, 0.0)
    return Oracle(left[:, 0, 1].copy(), _walk(traces, step, left, best_gamma, drafting))


def _walk(
    traces: Rollouts,
    step: StepCosts,
    left: npt.NDArray[np.float64],
    best_gamma: IntArray,
    drafting: npt.NDArray[np.float64],
) -> IntArray:
    """Follow the optimum from the start of each sequence, and note the gammas."""
    gammas = np.zeros_like(best_gamma)
    rows = np.arange(len(traces))
    positions, lags = np.zeros_like(rows), np.ones_like(rows)
    while len(rows):
        contexts = traces.prompt_lengths[rows] + positions
        verify = step.seconds(rows, contexts, lags, 0, 0)
        plain = verify + left[rows, positions + 1, lags + 1]
        draft = step.seconds(rows, contexts, lags, 1, 0) - verify + drafting[rows, positions]
        gamma = np.where(draft < plain, best_gamma[rows, positions], 0)
        gammas[rows, positions] = gamma
        accepted = np.minimum(gamma, traces.run[rows, positions])
        lags = np.where(gamma > 0, np.where(accepted == gamma, 2, 1), lags + 1)
        positions = positions + accepted + 1
        going = positions < traces.lengths[rows]
        rows, positions, lags = rows[going], positions[going], lags[going]
    return gammas
