"""What a policy may look at, and when it exists (rule R1).

The replay, the environments and the live decoder all build features with `FeatureTracker`, so a policy sees
the same numbers wherever it runs, and never one from its own future.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: When a feature comes into being: before the draft of a step; once the distribution of the next drafted
#: token is known; once that token has been drawn from it.
When = Literal["before", "distribution", "drawn"]
_ORDER: dict[When, int] = {"before": 0, "distribution": 1, "drawn": 2}


@dataclass(frozen=True)
class Feature:
    """A number that policies can ask for by name."""

    name: str
    when: When
    unit: str
    description: str


_LAST = "the most recent step that drafted; 0 before there is one"

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("position", "before", "tokens", "committed so far in this sequence"),
        Feature("context_length", "before", "tokens", "of the prompt and committed so far"),
        Feature("compression", "before", "code", "of the target: index into speckv.compression.COMPRESSIONS"),
        Feature("cost_ratio", "before", "ratio", "seconds of a draft forward to those of a one-token target forward"),
        Feature("is_first", "before", "0 or 1", "1 in the first step of a sequence"),
        Feature("last_gamma", "before", "tokens", "drafted in the previous step; 0 in the first"),
        Feature("last_accepted", "before", "tokens", "accepted in the previous step; 0 in the first"),
        Feature("last_mean_entropy", "before", "nats", f"mean of draft_entropy over {_LAST}"),
        Feature("last_max_entropy", "before", "nats", f"maximum of draft_entropy over {_LAST}"),
        Feature("last_mean_top1", "before", "probability", f"mean of draft_top1 over {_LAST}"),
        Feature("last_min_top1", "before", "probability", f"minimum of draft_top1 over {_LAST}"),
        Feature(
            "running_acceptance",
            "before",
            "probability",
            "(accepted + 1) / (tried + 2) in this sequence; a token is tried if all before it were accepted",
        ),
        Feature("target_entropy", "before", "nats", "of the target at the last committed token; 0 in the first step"),
        Feature("target_margin", "before", "logits", "of the target at the last committed token; 0 in the first step"),
        Feature("batch_size", "before", "sequences", "decoded together in this step; in a replay as its costs say"),
        Feature("draft_index", "distribution", "tokens", "position of the token in the draft, from 1"),
        Feature("draft_entropy", "distribution", "nats", "of the draft's distribution at this token"),
        Feature("draft_top1", "distribution", "probability", "of the draft's likeliest token"),
        Feature("draft_top2", "distribution", "probability", "of the draft's second likeliest token"),
        Feature("draft_top10", "distribution", "probability", "of the draft's ten likeliest tokens together"),
        Feature("draft_probability", "drawn", "probability", "of the drawn token under the draft"),
        Feature("draft_token", "drawn", "id", "of the drawn token, in the models' vocabulary"),
    )
}

#: Features that are means, maxima and minima of a signal over the previous draft: name -> (signal, reduction).
_REDUCTIONS = {
    "last_mean_entropy": ("draft_entropy", "mean"),
    "last_max_entropy": ("draft_entropy", "max"),
    "last_mean_top1": ("draft_top1", "mean"),
    "last_min_top1": ("draft_top1", "min"),
}
_TARGET_SIGNALS = ("target_entropy", "target_margin")
#: Signals of a token -> the recorded signal that holds them. Greedy drafts draw the likeliest token.
TOKEN_SIGNALS = {
    "draft_entropy": "draft_entropy",
    "draft_top1": "draft_top1",
    "draft_top2": "draft_top2",
    "draft_top10": "draft_top10",
    "draft_probability": "draft_top1",
}
#: Features of a token -> the name by which a recording gives them. Every drafter knows the id of its token.
_TOKEN_FEATURES = TOKEN_SIGNALS | {"draft_token": "draft_token"}


class Features(Mapping[str, FloatArray]):
    """Features by name, each (n,): one value a sequence. What does not exist yet can't be read."""

    def __init__(self, values: dict[str, FloatArray], rows: int, when: When) -> None:
        self._values, self._rows, self._when = values, rows, when

    @property
    def rows(self) -> int:
        """How many sequences are being decided on at once."""
        return self._rows

    def __getitem__(self, name: str) -> FloatArray:
        try:
            return self._values[name]
        except KeyError:
            pass
        if name not in FEATURES:
            raise SpecKVError(f"feature {name!r} is unknown; the known ones are {', '.join(FEATURES)}")
        if _ORDER[FEATURES[name].when] > _ORDER[self._when]:
            raise SpecKVError(
                f"feature {name!r} does not exist yet at this decision: it is of kind {FEATURES[name].when!r}"
            )
        raise SpecKVError(f"feature {name!r} was not asked for; add it to the policy's `features`")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def check_features(names: Sequence[str]) -> None:
    """Raise SpecKVError if a name is not a feature."""
    for name in names:
        if name not in FEATURES:
            raise SpecKVError(f"feature {name!r} is unknown; the known ones are {', '.join(FEATURES)}")


def signal_of(name: str) -> str | None:
    """The recorded signal of drafted tokens that a feature is made of, None if there is none."""
    return TOKEN_SIGNALS.get(name) or _REDUCTIONS.get(name, (None,))[0]


class FeatureTracker:
    """Builds the features of n sequences from what happens to them.

    Args:
        names: the features that the policy asked for; nothing else is computed.
        prompt_lengths: (n,) tokens.
        compression: (n,) codes.
        cost_ratio: (n,) see FEATURES.
        batch_size: how many sequences share a forward. A replay runs many in lockstep, each as one of a batch of the
            size that its costs are of, mostly alone.

    Attributes:
        batch_size: a host that decodes batches sets it anew when sequences end.
    """

    def __init__(
        self,
        names: Sequence[str],
        prompt_lengths: npt.NDArray[np.int64],
        compression: npt.NDArray[np.int64],
        cost_ratio: npt.NDArray[np.float64],
        batch_size: npt.NDArray[np.int64] | int = 1,
    ) -> None:
        check_features(names)
        self.batch_size = batch_size
        self._before = [name for name in names if FEATURES[name].when == "before"]
        self._reductions = {name: _REDUCTIONS[name] for name in names if name in _REDUCTIONS}
        self._target = [name for name in _TARGET_SIGNALS if name in names]
        self._token = [name for name in names if name in _TOKEN_FEATURES]
        self._index = "draft_index" in names
        n = len(prompt_lengths)
        self._values: dict[str, npt.NDArray[np.float64]] = {
            "context_length": prompt_lengths.astype(float),
            "compression": compression.astype(float),
            "cost_ratio": cost_ratio.astype(float),
            "is_first": np.ones(n),
            "running_acceptance": np.full(n, 0.5),
            "batch_size": np.empty(n),
        }
        zero = ("position", "last_gamma", "last_accepted", "accepted", "tried", *_REDUCTIONS, *_TARGET_SIGNALS)
        self._values.update({name: np.zeros(n) for name in zero})
        self._needed = {"accepted", "tried"} if "running_acceptance" in names else set()
        self._needed.update(self._before)
        self._values = {name: array for name, array in self._values.items() if name in self._needed}
        self._now: dict[str, FloatArray] = {}

    @property
    def draft_signals(self) -> set[str]:
        """Signals of the drafted tokens that `verified` needs, by their recorded names."""
        return {signal for signal, _ in self._reductions.values()}

    @property
    def token_signals(self) -> dict[str, str]:
        """Features of a drafted token that the policy asked for -> what holds them in a recording."""
        return {name: _TOKEN_FEATURES[name] for name in self._token}

    @property
    def target_signals(self) -> list[str]:
        """Signals of the target that `verified` needs."""
        return self._target

    def select(self, keep: npt.NDArray[np.bool_]) -> None:
        """Forget the sequences where `keep` (n,) is False."""
        self._values = {name: array[keep] for name, array in self._values.items()}

    def put(self, at: npt.NDArray[np.int64], other: "FeatureTracker") -> None:
        """Replace the sequences at the indices `at` by all those of `other`, in their order."""
        values = {name: array.copy() for name, array in self._values.items()}  # features may show the old arrays
        for name, array in values.items():
            array[at] = other._values[name]
        self._values = values

    def before(self, rows: int) -> Features:
        """What is known before the draft of a step."""
        if "batch_size" in self._needed:
            self._values["batch_size"] = np.full(rows, self.batch_size, dtype=float)
        self._now = {name: self._values[name].view() for name in self._before}
        for array in self._now.values():
            array.flags.writeable = False  # what a policy does to its features must not change later steps
        return Features(self._now, rows, "before")

    def token(
        self, index: int, signals: Mapping[str, npt.NDArray[np.floating]], rows: npt.NDArray[np.int64], when: When
    ) -> Features:
        """What is known once token number `index` (from 1) of the draft has its distribution, or is drawn.

        Args:
            signals: by feature name, each (n,): of the sequences at `rows`.
            rows: (n,) indices of the sequences that are still drafting.
        """
        values = {name: array[rows] for name, array in self._now.items()}
        if self._index:
            values["draft_index"] = np.full(len(rows), float(index))
        for name in self._token:
            if when == "drawn" or FEATURES[name].when == "distribution":
                values[name] = np.asarray(signals[name], dtype=float)
        return Features(values, len(rows), when)

    def verified(
        self,
        drafted: npt.NDArray[np.int64],
        accepted: npt.NDArray[np.int64],
        draft_signals: Mapping[str, npt.NDArray[np.floating]],
        target_signals: Mapping[str, npt.NDArray[np.floating]],
    ) -> None:
        """Take in the outcome of a step.

        Args:
            drafted, accepted: (n,) tokens.
            draft_signals: by recorded name, (n, at least max(drafted)); entries from `drafted` on are ignored.
            target_signals: by name, (n,) at the last committed token.
        """
        values, needed = self._values, self._needed
        if "position" in needed:
            values["position"] = values["position"] + accepted + 1
        if "context_length" in needed:
            values["context_length"] = values["context_length"] + accepted + 1
        if "is_first" in needed:
            values["is_first"] = np.zeros(len(drafted))
        if "last_gamma" in needed:
            values["last_gamma"] = drafted.astype(float)
        if "last_accepted" in needed:
            values["last_accepted"] = accepted.astype(float)
        if "running_acceptance" in needed:
            values["accepted"] = values["accepted"] + accepted
            values["tried"] = values["tried"] + accepted + (accepted < drafted)
            values["running_acceptance"] = (values["accepted"] + 1) / (values["tried"] + 2)
        for name in self._target:
            values[name] = np.asarray(target_signals[name], dtype=float)
        if self._reductions and drafted.any():
            width = int(drafted.max())
            # One sequence, or all alike: the usual case of a live decoder, where every microsecond counts.
            kept = None if drafted.min() == width else np.arange(width) < drafted[:, None]
            for name, (signal, reduction) in self._reductions.items():
                reduced = _reduce(draft_signals[signal][:, :width], kept, drafted, reduction)
                values[name] = reduced if kept is None else np.where(drafted > 0, reduced, values[name])


def _reduce(
    signal: npt.NDArray[np.floating], kept: BoolArray | None, counts: npt.NDArray[np.int64], reduction: str
) -> FloatArray:
    """Mean, maximum or minimum of each row's kept entries, None: all; rows without any give a value to be ignored."""
    if reduction == "mean":
        # In double precision, so that the last bit does not depend on the columns of other rows.
        kept_ones = signal if kept is None else np.where(kept, signal, 0.0)
        return np.asarray(kept_ones.sum(axis=1, dtype=float) / np.maximum(counts, 1))
    if reduction == "max":
        kept_ones = signal if kept is None else np.where(kept, signal, -np.inf)
        return np.asarray(kept_ones.max(axis=1), dtype=float)
    kept_ones = signal if kept is None else np.where(kept, signal, np.inf)
    return np.asarray(kept_ones.min(axis=1), dtype=float)
