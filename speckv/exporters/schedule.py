"""What exporters for servers share: one file for each compression, and how many tokens to draft by batch size."""

import pathlib
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS, check_compression
from speckv.costs import CostModel
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.exporters.portable import BundlePolicy
from speckv.exporting import Exporter
from speckv.features import Features
from speckv.files import read_json, write_json
from speckv.policy import Policy, State
from speckv.runtime import Bundle
from speckv.runtime.programs import Program, Table, Threshold
from speckv.traces import Rollouts
from speckv.tuning import seconds_by_compression


def best_by_batch(
    traces: Rollouts, costs: CostModel, gammas: Iterable[int] | None = None, follows: bool = False
) -> dict[int, int]:
    """The constant gamma with the highest throughput over all of `traces`, for each batch size that was measured.

    A server plays one gamma for all sequences of a batch, and a step takes as long as the forwards of the whole batch.

    Args:
        traces: what the server is to be fast on; those of one compression, if it runs one.
        costs: its `batch_sizes` are the keys.
        gammas: to choose from; of equals the first is taken. 0 to the recording's gamma_max by default.
        follows: the draft takes in every token, so that a step without speculation takes one of its forwards, too.
    """
    choices = list(range(traces.gamma_max + 1) if gammas is None else gammas)
    constant = [_constant(gamma, follows) for gamma in choices]
    found = {}
    for size in costs.batch_sizes:
        seconds = seconds_by_compression(constant, traces, costs.at_batch(size)).sum(axis=1)
        found[size] = choices[int(seconds.argmin())]
    return found


def ranges(gammas: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """First batch size, last batch size and tokens of each range with a number of its own, the first of them from 1.

    Args:
        gammas: batch size -> tokens for batches up to that size, above the next smaller one.
    """
    found: list[tuple[int, int, int]] = []
    for size, gamma in sorted(gammas.items()):
        first = found[-1][1] + 1 if found else 1
        if found and found[-1][2] == gamma:
            first = found.pop()[0]
        found.append((first, size, gamma))
    return found


def _constant(gamma: int, follows: bool) -> BundlePolicy:
    stop = None
    if follows and not gamma:  # a forward of the draft that no token is drawn from
        gamma, stop = 1, Threshold("draft_index", np.zeros(len(COMPRESSIONS)), above=False, drawn=False)
    return BundlePolicy(Bundle(f"fixed-{gamma}", Program(Table(np.full(len(COMPRESSIONS), gamma)), stop)))


class Schedule(Policy):
    """Drafts a number of tokens that depends on nothing but the compression and how many sequences share the step.

    Args:
        gammas: compression -> batch size -> tokens for batches up to that size, above the next smaller one; larger
            batches get those of the largest. Compressions that it lacks don't speculate.
    """

    name = "schedule"
    features = ("compression", "batch_size")

    def __init__(self, gammas: Mapping[str, Mapping[int, int]]) -> None:
        super().__init__()
        self.gammas = {check_compression(name): dict(sorted(of.items())) for name, of in gammas.items()}

    @classmethod
    def best(cls, traces: Rollouts, costs: CostModel, follows: bool = False) -> "Schedule":
        """The fastest on `traces` for each compression, never longer for a batch than for a smaller one.

        More sequences in a batch leave less room for a draft; where a measurement says otherwise, it is not followed.
        Compressions that the traces lack get what is fastest over all sequences. Costs of one batch size alone give
        the same number for all sizes, with a warning.

        Args:
            traces, costs: as of `best_by_batch`.
            follows: as there, unless no batch speculates: then there is no draft.
        """
        if len(costs.batch_sizes) == 1:
            warnings.warn(
                f"the costs of {costs.name} are of batches of {costs.batch_size} alone, so the number of tokens is the "
                "same for all; profile them with --batch-sizes",
                SpecKVWarning,
                stacklevel=3,
            )

        def searched(part: Rollouts) -> dict[int, int]:
            gammas: dict[int, int] = {}
            longest = part.gamma_max
            for size in costs.batch_sizes:
                # If the smallest batch does not speculate none does, and no draft runs.
                found = best_by_batch(part, costs.at_batch(size), range(longest + 1), follows and bool(gammas))
                longest = gammas[size] = found[size]
            return gammas

        known = {str(name): traces.take(traces.compressions == name) for name in np.unique(traces.compressions)}
        found = {name: searched(part) for name, part in known.items()}
        return cls(dict.fromkeys(COMPRESSIONS, searched(traces)) | found)

    @property
    def label(self) -> str:
        return self.name

    @property
    def required_gamma(self) -> int:
        return max((gamma for of in self.gammas.values() for gamma in of.values()), default=0)

    def at(self, compression: str, batch_size: int) -> int:
        """Tokens for a batch."""
        of = self.gammas.get(compression, {})
        return next((gamma for size, gamma in of.items() if batch_size <= size), next(reversed(of.values()), 0))

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        names = list(COMPRESSIONS)
        asked = zip(features["compression"].astype(np.int64), features["batch_size"], strict=True)
        return np.array([self.at(names[code], int(size)) for code, size in asked], dtype=np.int64)


class FileEach(Exporter):
    """Writes a JSON file for each compression of the target, since a server runs one of them and reads its own."""

    observes = frozenset({"compression"})
    kinds = frozenset({"before"})
    by_itself = True

    @abstractmethod
    def files_of(self, policy: Policy) -> dict[str, dict[str, Any]]:
        """What to write, by compression.

        Raises:
            SpecKVError: the server has no such rule; the reason.
        """

    @abstractmethod
    def policy_of(self, files: Mapping[str, dict[str, Any]]) -> Policy:
        """The policy that decides as servers with these files do.

        Raises:
            SpecKVError, KeyError, TypeError, ValueError or AttributeError: they are none of ours.
        """

    def reason(self, policy: Policy) -> str | None:
        if reason := super().reason(policy):
            return reason
        if type(policy).fit is not Policy.fit and not policy.fitted:
            return policy.unportable
        try:
            self.files_of(policy)
        except SpecKVError as error:
            return str(error)
        return None

    def export(self, policy: Policy, out: pathlib.Path) -> None:
        for name, value in self.files_of(policy).items():
            write_json(out / f"{name}.json", value)

    def load(self, out: pathlib.Path) -> Policy:
        files = {name: read_json(out / f"{name}.json", f"what {self.decoder} reads") for name in COMPRESSIONS}
        try:
            return self.policy_of(files)
        except (KeyError, TypeError, ValueError, AttributeError, SpecKVError) as error:
            reason = error if isinstance(error, SpecKVError) else repr(error)
            raise SpecKVError(f"{out}: not whole files for {self.decoder} ({reason}); export them again") from None


def constant_gammas(policy: Policy) -> dict[str, int] | None:
    """The tokens that a policy drafts in every step, by compression; None if it does not draft a constant number."""
    if type(policy).program is Policy.program:
        return None
    program = policy.program()
    if program.stop is not None or not isinstance(program.gamma, Table):
        return None
    return {name: int(gamma) for name, gamma in zip(COMPRESSIONS, program.gamma.gamma, strict=True)}
