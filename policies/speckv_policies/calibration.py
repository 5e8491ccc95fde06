"""How well the chances of the hazards hold on prompts that they were not fitted on.

`python -m speckv_policies.calibration` prints it for the shipped recording.
"""

import copy

import numpy as np

from speckv import CostModel, Rollouts
from speckv.comparison import folds_of
from speckv.features import BoolArray, FloatArray
from speckv.report.heldout import Reliability
from speckv_policies.stopping import KINDS, Kind, SurvivalStop, drafted_tokens


def calibration(
    policy: SurvivalStop, traces: Rollouts, costs: CostModel, folds: int = 5, seed: int = 0
) -> dict[Kind, Reliability]:
    """Calibration of each chance, every prompt held out once.

    Args:
        policy: unfitted.
        folds: the prompts are split into so many parts; each is foretold by a fit on the others.
    """
    fold_of = folds_of(traces, folds, seed)
    chances: dict[Kind, list[FloatArray]] = {kind: [] for kind in KINDS}
    right: dict[Kind, list[BoolArray]] = {kind: [] for kind in KINDS}
    for fold in range(folds):
        fitted = copy.deepcopy(policy).fit(traces.take(fold_of != fold), costs, seed)
        for kind, examples in drafted_tokens(traces.take(fold_of == fold), costs).items():
            chances[kind].append(fitted.foretell(kind, examples))
            right[kind].append(examples.right)
    return {kind: Reliability.of(np.concatenate(chances[kind]), np.concatenate(right[kind])) for kind in KINDS}


def main() -> None:
    """Print expected calibration error and Brier score of each hazard on the shipped recording."""
    from rich.console import Console
    from rich.table import Table

    from speckv.shipped import shipped_costs, shipped_traces
    from speckv_policies.boosted import BoostedHazard
    from speckv_policies.hazard import Hazard, TokenHazard
    from speckv_policies.neural import NeuralHazard

    traces, costs = shipped_traces().load(), shipped_costs()[0]
    table = Table("hazard", "chance of", "tokens", "ECE", "Brier", title="on held-out prompts")
    for policy in (Hazard(), TokenHazard(), BoostedHazard(), NeuralHazard()):
        if policy.untrainable:
            continue
        for kind, found in calibration(policy, traces, costs).items():
            table.add_row(policy.name, kind, f"{found.tokens.sum()}", f"{found.ece:.4f}", f"{found.brier:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
