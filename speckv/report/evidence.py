"""What a report is made of: the result of a comparison, and the recording and costs that it was made from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from speckv.comparison import BASELINE, Comparison
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.plugins import make_policy
from speckv.policy import Clairvoyant, Policy
from speckv.report.heldout import HeldOut, play
from speckv.traces import Rollouts, TraceDataset

#: How many of the fastest policies are replayed, if nobody says which.
FASTEST = 4


@dataclass(frozen=True)
class Evidence:
    """A result with all that its pictures need.

    Attributes:
        comparison: the result.
        dataset: the recording that it was made from.
        costs: the cost models that it was made under, in its order.
        policies: those to replay; some of the result's.
    """

    comparison: Comparison
    dataset: TraceDataset
    costs: list[CostModel]
    policies: list[Policy]

    @classmethod
    def of(
        cls, comparison: Comparison, dataset: TraceDataset, costs: Sequence[CostModel], specs: Sequence[str] = ()
    ) -> Self:
        """Check that recording and costs are those of the result, and choose the policies.

        Args:
            costs: among others, all that the result names; one that it names at a batch size, with its batches.
            specs: `NAME` or `NAME:PARAMETER=VALUE,…` of the policies to replay beside the best fixed gamma and the
                bounds. By default the fastest ones and gamma = 4.

        Raises:
            SpecKVError: the recording is another one, a cost model is missing, or the result lacks a policy.
        """
        settings = comparison.settings
        if dataset.manifest.settings != settings["traces"]:
            raise SpecKVError(
                f"{dataset.path}: the result was made from another recording, of {settings['traces']}; name that one"
            )
        sizes = settings.get("batch_sizes", [1])
        by_name = {at.name: at for model in costs for at in _at_batches(model, sizes)}
        if missing := [name for name in settings["costs"] if name not in by_name]:
            raise SpecKVError(
                f"the result was made under costs {missing[0]!r}, which are not among {', '.join(by_name)}; name their "
                "file with --costs"
            )
        chosen = [make_policy(spec) for spec in specs] if specs else _fastest(comparison)
        if foreign := [policy.label for policy in chosen if policy.label not in settings["policies"]]:
            raise SpecKVError(f"the result has no policy {foreign[0]!r}; it has {', '.join(settings['policies'])}")
        references = [_labelled(name) for name in (comparison.against, BASELINE, "perfect-judge", "oracle")]
        unique = {policy.label: policy for policy in [*chosen, *references] if policy is not None}
        return cls(comparison, dataset, [by_name[name] for name in settings["costs"]], list(unique.values()))

    @cached_property
    def rollouts(self) -> Rollouts:
        rollouts, settings = self.dataset.load(), self.comparison.settings
        if (len(rollouts), int(rollouts.lengths.sum())) != (settings["sequences"], settings["tokens"]):
            raise SpecKVError(
                f"{self.dataset.path}: holds {len(rollouts)} sequences of {rollouts.lengths.sum()} tokens, the result "
                f"was made from {settings['sequences']} of {settings['tokens']}; name that recording, or "
                "compare again"
            )
        return rollouts

    @cached_property
    def held_out(self) -> HeldOut:
        """The policies on the prompts of the comparison's first fold."""
        settings = self.comparison.settings
        return play(self.policies, self.rollouts, self.costs, settings["folds"], settings["seed"], settings["hold_out"])


def _at_batches(model: CostModel, sizes: Sequence[int]) -> list[CostModel]:
    """The model at those of the batch sizes that it knows."""
    known = model.batch_sizes
    return [model.at_batch(size) for size in {known[0], *sizes} if known[0] <= size <= known[-1]]


def _fastest(comparison: Comparison) -> list[Policy]:
    """The policies with the highest gain, averaged over machines and compressions, and gamma = 4."""
    gains: dict[str, list[float]] = {}
    for cell in comparison.cells:
        if cell.compression != "all" and cell.p is not None:  # which baseline and bounds don't have
            gains.setdefault(cell.policy, []).append(cell.gain)
    ranked = sorted(gains, key=lambda label: -sum(gains[label]))
    found: list[Policy] = []
    for label in ranked:
        policy = _labelled(label)
        if policy is not None and not isinstance(policy, Clairvoyant) and len(found) < FASTEST:
            found.append(policy)
    return [*found, make_policy("fixed:gamma=4")]


def _labelled(label: str) -> Policy | None:
    """The policy that tables call `label`; None if its plugin is not here, or the label does not say all of it."""
    try:
        policy = make_policy(re.sub(r"^fixed-(\d+)$", r"fixed:gamma=\1", label))
    except SpecKVError:
        return None
    return policy if policy.label == label else None
