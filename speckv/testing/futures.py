"""Recordings in which all that comes behind a moment is another story: what nobody may have looked at."""

from dataclasses import replace

import numpy as np

from speckv.traces import Rollouts, arrays_of


def change_future(traces: Rollouts, row: int, position: int, drafted: int, rng: np.random.Generator) -> Rollouts:
    """Traces in which all that comes behind a moment of one sequence is another story.

    Args:
        row: the sequence.
        position, drafted: the moment: so many tokens are committed, and so many of the next step are drafted. They stay
            as they are, but for the first of them being wrong.
    """
    runs, limits, lengths = traces.run.copy(), traces.limit.copy(), traces.lengths.copy()
    tokens, draft_tokens, off_tokens = traces.tokens.copy(), traces.draft_tokens.copy(), traces.off_tokens.copy()
    signals = {name: array.copy() for name, array in traces.signals.items()}
    off_signals = {name: array.copy() for name, array in traces.off_signals.items()}
    budget = traces.manifest.max_new_tokens
    starts = np.arange(runs.shape[1])
    reaching = (starts <= position) & (starts + runs[row] >= position)  # drafts that are right up to the moment
    runs[row] = np.where(starts > position, 0, np.where(reaching, position - starts, runs[row]))
    roomy = np.minimum(traces.gamma_max, np.maximum(budget - starts - 1, 0))
    lengths[row] = position + 1 if lengths[row] > position + 1 else tokens.shape[1]
    limits[row] = np.where((reaching | (starts > position)) & (starts < lengths[row]), roomy, limits[row])
    tokens[row, position:] = rng.integers(1000, 2000, tokens.shape[1] - position)
    draft_tokens[row, position:] = tokens[row, position:] + 1000
    off_tokens[row, position:] = rng.integers(1000, 2000, off_tokens[row, position:].shape)
    for name, array in signals.items():
        array[row, position:] = rng.random(array.shape[1] - position)
        if name in off_signals:
            off_signals[name][row, position:] = rng.random(off_signals[name][row, position:].shape)
    recorded = {name: (signals[name], off_signals[name]) for name in off_signals} | {
        "draft_token": (draft_tokens, off_tokens)
    }
    for name, (path, off) in recorded.items():
        for index in range(drafted):
            (value,) = traces.drafted_signal(name, np.array([row]), np.array([position]), index)
            if index == 0:
                path[row, position] = value
            else:
                off[row, position, index - 1] = value
    return replace(
        traces,
        run=runs,
        limit=limits,
        lengths=lengths,
        tokens=tokens,
        draft_tokens=draft_tokens,
        off_tokens=off_tokens,
        signals=signals,
        off_signals=off_signals,
    )


def overwrite(traces: Rollouts, other: Rollouts) -> None:
    """Make `traces` hold what `other` holds, in place: whoever has kept it sees the change."""
    for (_, mine), (_, theirs) in zip(arrays_of(traces), arrays_of(other), strict=True):
        mine[...] = theirs


def copy_of(traces: Rollouts) -> Rollouts:
    """The same in arrays of its own."""
    return traces.take(np.arange(len(traces)))
