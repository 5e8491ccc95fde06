"""Step logs of live decodes, for `speckv evaluate`: row by row as they happen."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from speckv.evaluation.recording import BEFORE, CHOSEN
from speckv.features import FeatureTracker, signal_of
from speckv.live.results import Step
from speckv.traces import TARGET_SIGNALS

_FEATURES = (*BEFORE, "batch_size")
#: Draft signals that these features are made of.
_REDUCED = frozenset(signal for name in _FEATURES if (signal := signal_of(name)))


class StepSink(Protocol):
    """Takes the steps of live decoders as they happen: a `StepLogWriter`, or `speckv.metrics.SpeculationMetrics`.

    Attributes:
        wants_features: whether rows need the features before each step, for which the decoder has to read signals.
    """

    wants_features: ClassVar[bool]

    def write(
        self,
        *,
        sequence: str,
        step: int,
        gamma: int,
        accepted: int,
        seconds: float | None = None,
        propensity: float | None = None,
        compression: str = "",
        task: str = "",
        **signals: float,
    ) -> None:
        """Take in one step, see `StepLogWriter.write`. What this raises, as a log does that was closed, ends the
        decode."""


class StepRows:
    """Makes the rows of one sequence's steps: what was known before each, what was chosen, what came of it.

    Args:
        sequence: its name in the log.
        prompt_length: tokens.
        compression: of the target.
        features: names of those that are logged; the steps hold the signals that they are made of.
        kind: of the policy. What one chose that stops a draft is not logged: it chooses how much to draft there.
        task: category of the text.
        prompt_in_first: whether the seconds of the first step hold the prompt's; they are not logged then.
    """

    def __init__(
        self,
        sequence: str,
        prompt_length: int,
        compression: str,
        features: Sequence[str],
        kind: str,
        task: str = "",
        prompt_in_first: bool = False,
    ) -> None:
        self._constant = {"sequence": sequence, "compression": compression, "task": task}
        self._features, self._chooses, self._number = features, kind == "before", 0
        self._prompt_in_first = prompt_in_first
        self._tracker = FeatureTracker(features, np.array([prompt_length]), np.zeros(1, dtype=np.int64), np.zeros(1))

    def row(self, step: Step) -> dict[str, Any]:
        """The row of the next step, by the names of `StepLogWriter.write`."""
        self._tracker.batch_size = step.batch_size
        now = self._tracker.before(1)
        row: dict[str, Any] = {"step": self._number, "gamma": step.gamma, "accepted": step.accepted, **self._constant}
        row["seconds"] = None if self._prompt_in_first and not self._number else step.seconds
        for name in self._features:
            row[name] = now[name].item()
        if self._chooses:
            row["propensity"], row[CHOSEN] = step.propensity, float(step.chosen)
        of_draft = {name: values[None] for name, values in step.signals.items() if name in _REDUCED}
        of_target = {name: values for name, values in step.signals.items() if name in TARGET_SIGNALS}
        self._tracker.verified(np.array([step.gamma]), np.array([step.accepted]), of_draft, of_target)
        self._number += 1
        return row

    def write(self, step: Step, logs: Sequence[StepSink]) -> None:
        """Write the row of the next step to each of the logs."""
        row = self.row(step)
        for log in logs:
            log.write(**row)


def want_features(logs: Sequence[StepSink]) -> bool:
    """Whether any of the logs takes more than outcomes."""
    return any(log.wants_features for log in logs)


def known_features(signals: frozenset[str]) -> list[str]:
    """The features before a step that can be logged of a decoder whose steps hold these signals."""
    return [
        name
        for name in _FEATURES
        if (signal_of(name) or (name if name in TARGET_SIGNALS else None)) in {None, *signals}
    ]


def name_sequence(prompt: Sequence[int]) -> str:
    """A name for the text behind a prompt (token ids): the same beginning for the same prompt, and never twice."""
    return f"{hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:12]} {secrets.token_hex(4)}"
