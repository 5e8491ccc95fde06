"""What policies were trained on, so that they are judged on other prompts (rule R5)."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.policy import Policy
from speckv.steplogs import StepLog
from speckv.traces import Rollouts
from speckv.training import fingerprints

#: What an adapter's log calls a sequence: a hash of its prompt, and what keeps it apart from others of that prompt.
_ADAPTERS = re.compile(r"(?:.*/)?([0-9a-f]{12}) [0-9a-f]{8}")
#: What a replay's log calls one: its prompt, and the compression.
_REPLAYS = re.compile(rf"(.+) at (?:{'|'.join(COMPRESSIONS)})")


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


def training_of(policy: Policy) -> dict[str, Any]:
    """What is known of the data that a policy was trained on, and of each inside it, as JSON can hold it; or nothing.

    Of a recording: `prompts`, their names, and `sequences`, the `fingerprints` of what was recorded. Of a step log:
    `logged`, the names of its sequences. `inside` lists the same of the policies inside.
    """
    inside = [known for held in policy.inner_policies if (known := training_of(held))]
    return (policy.training or {}) | ({"inside": inside} if inside else {})


def is_untold(policy: Policy) -> bool:
    """Whether a loaded policy, or one inside it, has learned from nobody knows what."""
    return (policy.training == {} and bool(policy.fitted)) or any(map(is_untold, policy.inner_policies))


def seen_in(policy: Policy, data: Rollouts | StepLog) -> set[str]:
    """Names of the prompts of a recording or a step log that a policy, or one inside it, was trained on.

    Two recordings may call different prompts alike: what was recorded is compared, where both sides are recordings.
    """
    training = training_of(policy)
    if not training:
        return set()
    logged = {prompt_of(name) for name in _told(training, "logged")}
    if isinstance(data, StepLog):
        return {*logged, *_told(training, "prompts")} & set(prompts_of(data).tolist())
    recorded = np.isin(fingerprints(data), list(_told(training, "sequences")))
    return set(data.ids[recorded | np.isin(data.ids, list(logged))].tolist())


def _told(training: dict[str, Any], key: str) -> Iterator[str]:
    yield from training.get(key, ())
    for inside in training.get("inside", ()):
        yield from _told(inside, key)
