"""The recording, cost models and prompts that ship with the package."""

import pathlib

from speckv.costs import CostModel
from speckv.traces import TraceDataset

DATA = pathlib.Path(__file__).parent / "data"
PROMPTS = DATA / "prompts.jsonl"
RECORDING = DATA / "recording"
COSTS = DATA / "costs"


def shipped_traces() -> TraceDataset:
    """The shipped recording; `speckv/data/README.md` says how it was made and under which licences."""
    return TraceDataset(RECORDING)


def shipped_costs() -> list[CostModel]:
    """The shipped cost models, each with its source inside."""
    return [CostModel.load(path) for path in sorted(COSTS.glob("*.json"))]
