"""The paper's step log as a step log of this project."""

import pathlib

import numpy as np

from speckv.paper.data import ODDITIES, SIGNALS, find_oddities, read_runs, read_steps
from speckv.steplogs import Fault, Imported, Importer, StepLog

_NATS = np.log(2)


class PaperImporter(Importer):
    """Reads the published CSV files of the SpecKV paper (arXiv 2605.02888): a folder, or its step log.

    Rows that say something else than what was done are mended and listed: the number of drafted tokens where the budget
    of the run left room for fewer, and, left as they were, steps that commit a token beyond the budget. The signals are
    those of the step's own block, known only after it was drafted; entropies become nats.
    """

    name = "paper"

    def read(self, path: pathlib.Path) -> Imported:
        folder, log = (path, path / "phase2_step_results.csv") if path.is_dir() else (path.parent, path)
        steps, reasons = read_steps(log, read_runs(folder / "phase2_experiment_results.csv"))
        keep = np.ones(len(steps), dtype=bool)
        keep[list(reasons)] = False
        faults = [Fault(row + 2, reason) for row, reason in reasons.items()]
        for name, rows in find_oddities(steps).items():
            faults += [Fault(row + 2, ODDITIES[name], kept=True) for row in np.flatnonzero(rows & keep).tolist()]
        scale = [_NATS if unit == "bits" else 1.0 for unit in SIGNALS.values()]
        identifiers = np.array(
            [f"{prompt} at gamma {gamma}, {compression}"
             for prompt, gamma, compression in zip(steps.prompt, steps.gamma, steps.compression, strict=True)]
        )  # fmt: skip
        return Imported(
            StepLog(
                sequence=identifiers[keep],
                step=steps.number[keep],
                gamma=steps.drafted[keep],
                accepted=steps.accepted[keep],
                compression=steps.compression[keep],
                task=steps.task[keep],
                signals={name: column[keep] for name, column in zip(SIGNALS, (steps.signals * scale).T, strict=True)},
                provenance={"source": "SpecKV paper (arXiv 2605.02888), data by Shikhar Shukla, MIT licence"},
            ),
            sorted(faults, key=lambda fault: fault.row),
            len(steps),
        )
