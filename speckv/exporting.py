"""Shipping a policy to the decoder that people run.

An `Exporter` says what its decoder can show a policy, refuses the policies that need more, writes the others as
something that the decoder reads, and reads that back as a policy. What was written can therefore be replayed: an export
states its fidelity.
"""

import copy
import os
import pathlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FEATURES
from speckv.files import write_json
from speckv.policy import Clairvoyant, Policy, check_playable
from speckv.provenance import training_of
from speckv.replaying import Replay, known_controller, replay
from speckv.saving import FIDELITY, load_policy, save_policy
from speckv.traces import Rollouts


class Exporter(ABC):
    """Writes policies for one decoder.

    The constructor only stores its parameters under their own names; users give them as `NAME:PARAMETER=VALUE`.

    Attributes:
        name: how users call the exporter.
        decoder: what reads the artefact, and which versions of it that was tried with.
        observes: names from `speckv.features.FEATURES` of what the decoder can show a policy.
        kinds: of policies that it can hold: `before` the step, inside the `draft`, `both`.
        outcomes: whether it tells a policy what came of each step (`Policy.observe`).
        by_itself: whether the decoder decides by itself, as it was set, so that no decision takes time of a policy's.
    """

    name: ClassVar[str]
    decoder: ClassVar[str]
    observes: ClassVar[frozenset[str]] = frozenset()
    kinds: ClassVar[frozenset[str]] = frozenset()
    outcomes: ClassVar[bool] = False
    by_itself: ClassVar[bool] = False

    def check(self, policy: Policy) -> None:
        """Refuse a policy that the decoder can't run as it is.

        Raises:
            SpecKVError: with the reason.
        """
        check_playable(policy, policy.required_gamma)
        if reason := self.reason(policy):
            raise self._refusal(policy, reason)

    def _refusal(self, policy: Policy, reason: str) -> SpecKVError:
        hint = "; --approximate replaces it" if self.approximates and not isinstance(policy, Clairvoyant) else ""
        return SpecKVError(f"{self.name} can't hold policy {policy.label!r}: {reason}{hint}")

    def reason(self, policy: Policy) -> str | None:
        """Why the decoder can't run a policy as it is, once it is fitted; None if it can."""
        if isinstance(policy, Clairvoyant):
            return "it knows the future; no decoder can run it"
        if policy.kind not in self.kinds:
            return (
                f"it decides {_WHEN[policy.kind]}; {self.name} can hold policies that decide "
                f"{' or '.join(_WHEN[kind] for kind in _WHEN if kind in self.kinds)}"
            )
        if hidden := [name for name in policy.features if name not in self.observes]:
            return (
                f"it reads {', '.join(hidden)}, which {self.decoder} can't show; it shows "
                f"{', '.join(name for name in FEATURES if name in self.observes) or 'nothing'}"
            )
        if policy.overrides("observe") and not self.outcomes:
            return f"it learns from what came of each step, which {self.decoder} does not tell it"
        return None

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        """The nearest policy to one that `check` refuses, fitted to what that one does on `traces`.

        Raises:
            SpecKVError: the exporter knows of none.
        """
        raise SpecKVError(f"{self.name} can't approximate policy {policy.label!r}; choose another exporter")

    @property
    def approximates(self) -> bool:
        """Whether it fits what it can't hold to what it can."""
        return type(self).approximate is not Exporter.approximate

    def verdict(self, policy: Policy) -> tuple[str, str]:
        """How a policy fits once it is fitted, `exactly`, `approximately` or `not`, and why not exactly."""
        reason = self.reason(policy)
        if reason is None:
            return "exactly", ""
        possible = self.approximates and not isinstance(policy, Clairvoyant)
        return "approximately" if possible else "not", reason

    @abstractmethod
    def export(self, policy: Policy, out: pathlib.Path) -> None:
        """Write a policy that `check` lets pass to the folder `out`, which exists and is empty."""

    @abstractmethod
    def load(self, out: pathlib.Path) -> Policy:
        """Read what `export` wrote, as a policy that decides as the decoder will.

        Raises:
            SpecKVError: the folder does not hold it.
        """


_WHEN = {"before": "before the step", "draft": "inside the draft", "both": "at both times"}


class SpecKVExporter(Exporter):
    """A saved policy as it is, for speckv's own live decoder."""

    name = "speckv"
    decoder = "speckv.live.SpeculativeDecoder"
    observes = frozenset(FEATURES)
    kinds = frozenset(_WHEN)
    outcomes = True

    def export(self, policy: Policy, out: pathlib.Path) -> None:
        save_policy(policy, out)

    def load(self, out: pathlib.Path) -> Policy:
        return load_policy(out)


@dataclass(frozen=True)
class Fidelity:
    """How an exported policy replays beside the original.

    Attributes:
        equal_decisions: share of the original's steps that the exported one plays as well: at the same place of the
            same text, with as many tokens drafted and as many draft forwards.
        throughput, original_throughput: committed tokens a second, of each sequence of a batch. Of a decoder that
            decides by itself no decision takes time; of others both policies are charged that of the original.
        interval: of `throughput`, 95 % (bootstrap by prompt); None of a single prompt.
        steps: of the original.
        sequences: replayed.
        batch_size: sequences that share each step of the replay, the fewest that the costs were measured for.
        costs: name of the cost model.
    """

    equal_decisions: float
    throughput: float
    original_throughput: float
    interval: tuple[float, float] | None
    steps: int
    sequences: int
    batch_size: int
    costs: str


def fidelity(exporter: Exporter, policy: Policy, traces: Rollouts, costs: CostModel) -> Fidelity:
    """Export a policy, read it back, and replay both.

    Args:
        exporter: writes the policy to a temporary folder.
        policy: fitted, if it learns. It is left as it is.
        traces: which it should not have learned from.
        costs: how long forwards take.

    Raises:
        SpecKVError: the exporter refuses the policy.
    """
    exporter.check(policy)
    with tempfile.TemporaryDirectory() as folder:
        exporter.export(policy, pathlib.Path(folder))
        return _fidelity_of(exporter, pathlib.Path(folder), policy, traces, costs)


def _fidelity_of(
    exporter: Exporter, folder: pathlib.Path, policy: Policy, traces: Rollouts, costs: CostModel
) -> Fidelity:
    controller = known_controller(policy, costs) or (0.0, 0.0)
    original = replay(copy.deepcopy(policy), traces, costs, controller)
    other = replay(exporter.load(folder), traces, costs, (0.0, 0.0) if exporter.by_itself else controller)
    equal = _equal_steps(original, other)
    return Fidelity(
        equal_decisions=equal / len(original.gamma),
        throughput=other.throughput,
        original_throughput=original.throughput,
        interval=throughput_interval(other, traces),
        steps=len(original.gamma),
        sequences=len(traces),
        batch_size=costs.batch_size,
        costs=costs.name,
    )


def throughput_interval(run: Replay, traces: Rollouts, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the throughput of a replay of `traces`: percentiles of a bootstrap by prompt.

    None of a single prompt, which tells nothing of others.
    """
    from speckv.comparison import gain_interval  # of a ratio of sums, minus 1

    _, prompt_of = np.unique(traces.ids, return_inverse=True)
    tokens, seconds = (np.bincount(prompt_of, weights=of).astype(float) for of in (run.tokens, run.sequence_seconds))
    if len(tokens) < 2:
        return None
    low, high = gain_interval(seconds, tokens, seed)
    return low + 1, high + 1


def _equal_steps(one: Replay, other: Replay) -> int:
    """How many steps two replays have in common."""
    width = int(one.tokens.max())
    here, there = (run.sequence * width + run.position for run in (one, other))
    _, at, to = np.intersect1d(here, there, assume_unique=True, return_indices=True)
    same = (one.gamma[at] == other.gamma[to]) & (one.forwards[at] == other.forwards[to])
    return int(same.sum())


def _check_approximable(policy: Policy) -> None:
    check_playable(policy, policy.required_gamma)
    if isinstance(policy, Clairvoyant):
        raise SpecKVError(f"policy {policy.label!r} knows the future; there is nothing to fit")


def export(
    exporter: Exporter,
    policy: Policy,
    out: pathlib.Path,
    traces: Rollouts,
    costs: CostModel,
    approximate: bool = False,
) -> Fidelity:
    """Export a policy to a new folder, whole or not at all; its fidelity and its training stand in `fidelity.json`.

    Args:
        exporter, policy, traces, costs: as of `fidelity`.
        out: must not exist.
        approximate: fit a policy that the exporter refuses to the nearest that it can hold, on half of the prompts;
            fidelity is then that on the other half.

    Raises:
        SpecKVError: the exporter refuses the policy, or the folder exists or cannot be written.
    """
    if out.exists():
        raise SpecKVError(f"{out}: exists already; choose another folder")
    held, judged = policy, traces
    approximated = approximate and exporter.reason(policy) is not None
    if approximated:
        _check_approximable(policy)
        from speckv.comparison import folds_of

        half = folds_of(traces, 2, seed=0) == 0
        held, judged = exporter.approximate(policy, traces.take(half), costs), traces.take(~half)
    exporter.check(held)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        exporter.export(held, partial)
        result = _fidelity_of(exporter, partial, policy, judged, costs)
        facts = {
            "exporter": exporter.name,
            "decoder": exporter.decoder,
            "policy": policy.label,
            "approximated": approximated,
            "training": training_of(policy) or None,
        }
        write_json(partial / FIDELITY, facts | asdict(result))
        partial.rename(out)
    except OSError as error:
        raise SpecKVError(f"{out}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return result
