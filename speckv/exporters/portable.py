"""What the exporters of portable policies share: which policies they hold, and what the export is replayed with."""

import pathlib
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.exporting import Exporter
from speckv.features import FEATURES, Features
from speckv.policy import Policy, State
from speckv.runtime import Bundle
from speckv.runtime.programs import Draft, Program
from speckv.traces import Rollouts


class PortableExporter(Exporter):
    """Writes policies that have a portable form (`speckv.Policy.program`) for one decoder."""

    # A portable policy knows no token by its id.
    observes: ClassVar[frozenset[str]] = frozenset(FEATURES) - {"draft_token"}
    kinds = frozenset({"before", "draft", "both"})
    outcomes = True

    def reason(self, policy: Policy) -> str | None:
        return super().reason(policy) or policy.unportable

    def export(self, policy: Policy, out: pathlib.Path) -> None:
        self.write(Bundle(policy.label, policy.program()), out)

    def check(self, policy: Policy) -> None:
        super().check(policy)
        # A policy may be told what came of a step where its portable form reads it.
        if hidden := [name for name in policy.program().features if name not in self.observes]:
            raise self._refusal(policy, f"it reads {', '.join(hidden)}, which {self.decoder} can't show")

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        from speckv.exporters.imitation import imitate

        inside = bool(self.kinds - {"before"})
        program = imitate(policy, traces, costs, self.observes, inside)
        return BundlePolicy(Bundle(f"{policy.label}, approximated", program))

    @abstractmethod
    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        """Write a portable policy to the folder `out`, which exists and is empty."""


class BundlePolicy(Policy):
    """A bundle as a policy, for what plays policies: a replay, or the live decoder.

    It asks the code that a decoder runs, once for each sequence: a replay of it shows what the decoder will do.
    """

    name = "portable"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.bundle, self.features = bundle, bundle.program.features

    @property
    def label(self) -> str:
        return self.bundle.policy

    def program(self) -> Program:
        return self.bundle.program

    def overrides(self, method: str) -> bool:
        if method in {"draw_token", "keep_drafting"}:
            return self.bundle.asks in {method, "both"}
        return super().overrides(method)

    def new_state(self, rows: int) -> State:
        return {"survival": np.ones(rows), "goes_on": np.ones(rows, dtype=bool)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["survival"][:], state["goes_on"][:] = 1.0, True
        return self._each(lambda values, draft: self.bundle.program.gamma.choose(values), features, state)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        stop = self.bundle.program.stop
        return self._each(lambda values, draft: stop is None or stop.draws(values, draft), features, state)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        stop = self.bundle.program.stop
        return self._each(lambda values, draft: stop is None or stop.keeps(values, draft), features, state)

    def _each(
        self, decide: Callable[[dict[str, float], Draft], int], features: Features, state: State
    ) -> npt.NDArray[np.int64] | npt.NDArray[np.bool_]:
        columns = [features[name].tolist() for name in features]
        drafts = [Draft(*of) for of in zip(state["survival"].tolist(), state["goes_on"].tolist(), strict=True)]
        rows = zip(*columns, strict=True) if columns else [()] * features.rows
        answers = [
            decide(dict(zip(features, row, strict=True)), draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        state["survival"] = np.array([draft.survival for draft in drafts])
        state["goes_on"] = np.array([draft.goes_on for draft in drafts], dtype=bool)
        return np.array(answers)
