"""The paper's numbers: published, reproduced, and under an honest protocol, with the study repeated beside them."""

from collections.abc import Callable, Sequence
from typing import Any

from speckv.costs import CostModel
from speckv.machine import machine
from speckv.paper import honest, protocol, study, timing
from speckv.paper.data import CORRELATION, PaperData
from speckv.traces import Rollouts

FORMAT = "speckv-paper"
SCHEMA_VERSION = 1
STAGES = ("reproducing", "asking the data", "repeating the study", "timing decisions")


def reproduce(
    paper: PaperData,
    traces: Rollouts,
    costs: Sequence[CostModel],
    jobs: int = 1,
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Everything about the paper that its data and a recording can tell.

    Args:
        paper: what was published.
        traces: a recording up to gamma 8 or more, to repeat the study on.
        costs: cost models for it.
        jobs: processes to work in.
        progress: called with the name of each stage as it starts, from `STAGES`.

    Returns:
        As JSON can hold it: the reproduced results in the form of `PaperData.published`; `published` and `honest` in
        the same form, the latter with what else it found; `differences` of the first two; `study`; `decision_ms`.

    Raises:
        SpecKVError: the costs lack a compression of the recording, or it stops below gamma 8.
    """
    progress(STAGES[0])
    reproduction = protocol.reproduce(paper)
    progress(STAGES[1])
    examined = honest.examine(paper, reproduction)
    progress(STAGES[2])
    repeated = study.repeat_study(traces, costs, jobs)
    progress(STAGES[3])
    inputs = protocol.anticipating_inputs(paper.steps)
    seconds = {name: timing.time_predictor(model, inputs) for name, model in reproduction.judges.items()}
    seconds["mlp"] = timing.time_policy(traces, costs)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "machine": machine(),
        "software": _versions(),
        **reproduction.results,
        "decision_ms": {name: float(f"{1000 * value:.2g}") for name, value in seconds.items()},
        "published": paper.published | {"correlation": CORRELATION},
        "differences": protocol.find_differences(
            {name: part for name, part in paper.published.items() if name != "decision_ms"},  # of another machine
            reproduction.results,
        ),
        "honest": examined,
        "study": repeated,
    }


def _versions() -> dict[str, str]:
    import numpy
    import sklearn

    return {"numpy": numpy.__version__, "scikit-learn": sklearn.__version__}
