"""Step logs of live decodes, for `speckv evaluate`."""

from collections.abc import Mapping

import numpy as np

from speckv.errors import SpecKVError
from speckv.evaluation.recording import BEFORE, CHOSEN
from speckv.features import FeatureTracker, FloatArray, signal_of
from speckv.live.results import Decoded
from speckv.steplogs import StepLog
from speckv.traces import TARGET_SIGNALS


def log_steps(texts: Mapping[str, tuple[int, Decoded]], compression: str, task: str = "") -> StepLog:
    """The steps of decoded texts: what was known before each, what was chosen with which chance, what came of it.

    Features that are made of signals are logged if the decoder recorded these (`record_signals=True`). What was chosen
    is logged if every policy decided before the step alone: one that stops a draft chooses how much to draft there.

    Args:
        texts: identifier -> tokens of the prompt, and what came of it.
        compression: of the target.
        task: category of the texts.

    Raises:
        SpecKVError: there is no text.
    """
    if not texts:
        raise SpecKVError("there is no text to log; decode one first")
    rows = [(name, number, step) for name, (_, text) in texts.items() for number, step in enumerate(text.steps)]
    steps = [step for _, _, step in rows]
    names = _features(texts)
    before = [_known(text, prompt_length, names) for prompt_length, text in texts.values()]
    signals = {name: np.concatenate([known[name] for known in before]) for name in names}
    propensity = None
    if all(text.kind == "before" for _, text in texts.values()):
        signals[CHOSEN] = np.array([float(step.chosen) for step in steps])
        propensity = np.array([step.propensity for step in steps])
    return StepLog(
        sequence=np.array([name for name, _, _ in rows]),
        step=np.array([number for _, number, _ in rows]),
        gamma=np.array([step.gamma for step in steps]),
        accepted=np.array([step.accepted for step in steps]),
        seconds=np.array([step.seconds for step in steps]),
        propensity=propensity,
        compression=np.full(len(steps), compression),
        task=np.full(len(steps), task),
        signals=signals,
        provenance={"source": "speckv, live decoder"},
    )


def _features(texts: Mapping[str, tuple[int, Decoded]]) -> list[str]:
    """The features that every step's recorded signals are enough for."""
    steps = [step for _, text in texts.values() for step in text.steps]
    of_draft = [set(step.signals) for step in steps if step.gamma]
    given = set.intersection(*of_draft, *[set(step.signals) | set().union(*of_draft) for step in steps])
    wanted = [*BEFORE, "batch_size"]
    return [
        name for name in wanted if (signal_of(name) or (name if name in TARGET_SIGNALS else None)) in {None, *given}
    ]


def _known(text: Decoded, prompt_length: int, names: list[str]) -> dict[str, FloatArray]:
    """Features before each step of a text, (steps,) each."""
    tracker = FeatureTracker(names, np.array([prompt_length]), np.zeros(1, dtype=np.int64), np.zeros(1))
    known: dict[str, list[float]] = {name: [] for name in names}
    for step in text.steps:
        tracker.batch_size = step.batch_size
        now = tracker.before(1)
        for name in names:
            known[name].append(float(now[name][0]))
        of_draft = {name: values[None] for name, values in step.signals.items() if name not in TARGET_SIGNALS}
        of_target = {name: values for name, values in step.signals.items() if name in TARGET_SIGNALS}
        tracker.verified(np.array([step.gamma]), np.array([step.accepted]), of_draft, of_target)
    return {name: np.array(values) for name, values in known.items()}
