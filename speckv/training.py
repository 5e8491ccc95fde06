"""Training that takes a while: what it tells meanwhile, and how it goes on after it was killed."""

import hashlib
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.files import write_atomically
from speckv.policy import Policy
from speckv.traces import Rollouts, arrays_of

FORMAT = "speckv-checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """How far a training has come: arrays by name, and facts that JSON can hold."""

    arrays: dict[str, npt.NDArray[Any]]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Watch:
    """Follows a training.

    Attributes:
        checkpoint: file in which it keeps how far it has come, and from which it goes on; None keeps nothing.
        log_dir: folder of TensorBoard logs; None writes none.
        progress: called with the steps done and the steps in all.
    """

    checkpoint: pathlib.Path | None = None
    log_dir: pathlib.Path | None = None
    progress: Callable[[int, int], None] = lambda done, total: None

    def keep(self, training: dict[str, str], checkpoint: Checkpoint) -> None:
        """Write how far it has come, whole or not at all. `training` says of what, see `identify`."""
        from safetensors.numpy import save_file

        if self.checkpoint is None:
            return
        # One file, so that arrays and facts are always of the same moment.
        metadata = {"format": FORMAT, "training": json.dumps(training), "facts": json.dumps(checkpoint.facts)}
        arrays = {name: np.array(array, order="C") for name, array in checkpoint.arrays.items()}
        write_atomically(self.checkpoint, lambda partial: save_file(arrays, partial, metadata))

    def last(self, training: dict[str, str]) -> Checkpoint | None:
        """The checkpoint to go on from, if there is one.

        Raises:
            SpecKVError: the file is not a checkpoint, or is of another training.
        """
        from safetensors import SafetensorError, safe_open

        if self.checkpoint is None or not self.checkpoint.exists():
            return None
        try:
            with safe_open(self.checkpoint, framework="numpy") as file:
                metadata = file.metadata()
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            kept, facts = json.loads(metadata["training"]), json.loads(metadata["facts"])
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']}")
            if not (isinstance(kept, dict) and isinstance(facts, dict)):
                raise ValueError("its facts are no JSON object")
        except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise SpecKVError(f"{self.checkpoint}: is not a checkpoint ({error}); remove it, and start anew") from None
        if other := [name for name in training if kept.get(name) != training[name]]:
            raise SpecKVError(
                f"{self.checkpoint}: is of another training: {other[0]} is {kept.get(other[0])} there, and "
                f"{training[other[0]]} here; give the same, or start anew"
            )
        return Checkpoint(arrays, facts)


class TrainedPolicy(Policy):
    """A policy whose `fit` takes a while: it can be watched, and goes on after it was killed. Override `learn`.

    Attributes:
        steps: how long it is trained, in actions. Few are enough to see that it can be.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps}; it must be a whole number from 1")
        self.steps = steps

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        return self.train(traces, costs, seed, Watch())

    def train(self, traces: Rollouts, costs: CostModel, seed: int, watch: Watch) -> Self:
        """`fit`, and tell `watch` of it. Stopped and gone on, it comes to the same policy.

        Raises:
            SpecKVError: a module that the training needs is missing, or the checkpoint is of another training.
        """
        if (reason := self.untrainable) is not None:
            raise SpecKVError(f"policy {self.label!r} {reason}, or load a trained one")
        self.learn(traces, costs, seed, watch)
        return self.forget()

    def learn(self, traces: Rollouts, costs: CostModel, seed: int, watch: Watch) -> None:
        """Leave what was learned in `fitted`."""
        raise NotImplementedError


def identify(policy: Policy, traces: Rollouts, costs: CostModel, seed: int) -> dict[str, str]:
    """What a training depends on. Two that agree in it come to the same policy."""
    recording = hashlib.sha256()
    for name, array in arrays_of(traces):
        recording.update(f"{name} {array.shape} {array.dtype}".encode())
        recording.update(array.tobytes())
    timings = json.dumps(
        [costs.overhead, costs.draft.to_json(), {name: t.to_json() for name, t in costs.verify.items()}]
    )
    return {
        "policy": repr(policy),
        "features": ", ".join(policy.features),
        "seed": str(seed),
        "traces": recording.hexdigest()[:16],
        "costs": hashlib.sha256(timings.encode()).hexdigest()[:16],
    }


def fingerprints(traces: Rollouts) -> list[str]:
    """Of each sequence, by its prompt's name and length and its texts: the same in whatever recording it stands."""
    marks = []
    for row, length in enumerate(traces.lengths):
        about = [str(traces.ids[row]), str(traces.compressions[row]), int(traces.prompt_lengths[row])]
        texts = [array[row, :length].tolist() for array in (traces.tokens, traces.draft_tokens)]
        marks.append(hashlib.sha256(json.dumps([about, texts]).encode()).hexdigest()[:16])
    return marks
