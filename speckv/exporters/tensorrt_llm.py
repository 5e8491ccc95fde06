"""The number of tokens that TensorRT-LLM drafts, by how many requests it decodes together."""

from collections.abc import Mapping
from typing import Any

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporters.schedule import FileEach, Schedule, constant_gammas, ranges
from speckv.policy import Policy
from speckv.traces import Rollouts

_LENGTH, _SCHEDULE = "max_draft_len", "draft_len_schedule"


class TensorRtLlmExporter(FileEach):
    """What a `speculative_config` holds: `max_draft_len`, and a `draft_len_schedule` if it depends on the batch size.

    The schedule names the first and the last batch size of each length. TensorRT-LLM 1.2 takes a length from a key on,
    1.3 and later up to a key: both read the same lengths here. Above the largest batch nothing is drafted.

    With `--approximate` a policy is replaced by the fastest number of tokens for each batch size that the cost model
    was measured at, for each compression; those that the recording lacks get what is fastest over all sequences.
    """

    name = "tensorrt-llm"
    decoder = "TensorRT-LLM 1.2 to 1.4 (written to its documentation, not run)"
    observes = frozenset({"compression", "batch_size"})

    def files_of(self, policy: Policy) -> dict[str, dict[str, Any]]:
        if isinstance(policy, Schedule):
            return {name: _options(policy.gammas.get(name, {})) for name in COMPRESSIONS}
        if gammas := constant_gammas(policy):
            return {name: _options({1: gamma}) for name, gamma in gammas.items()}
        raise SpecKVError("its number of tokens changes from step to step, and TensorRT-LLM's with the batch alone")

    def policy_of(self, files: Mapping[str, dict[str, Any]]) -> Policy:
        return Schedule({name: _gammas(options) for name, options in files.items()})

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        return Schedule.best(traces, costs)


def _options(gammas: Mapping[int, int]) -> dict[str, Any]:
    """Of batch sizes and the tokens up to them."""
    lengths = list(gammas.values()) or [0]
    if max(lengths) > lengths[0]:
        raise SpecKVError("TensorRT-LLM drafts for no batch more tokens than for a single request")
    if len(lengths) == 1 or not lengths[0]:
        return {_LENGTH: lengths[0]}
    return {_LENGTH: lengths[0], _SCHEDULE: _both_ends(gammas)}


def _both_ends(gammas: Mapping[int, int]) -> dict[str, int]:
    """Tokens at the first and the last batch size of each length, and none above the largest."""
    ends = ranges(gammas)
    if ends[-1][2]:
        ends.append((ends[-1][1] + 1, ends[-1][1] + 1, 0))
    return {str(size): gamma for first, last, gamma in ends for size in (first, last)}


def _gammas(options: Mapping[str, Any]) -> dict[int, int]:
    """Batch sizes and the tokens up to them, as TensorRT-LLM reads its options."""
    lengths = {1: options[_LENGTH]}
    if schedule := options.get(_SCHEDULE):
        lengths = {int(size): gamma for size, gamma in sorted(schedule.items(), key=lambda item: int(item[0]))}
    if not all(type(n) is int and n >= 0 for n in lengths.values()) or min(lengths) != 1:
        raise ValueError(f"{_SCHEDULE} is {lengths}")
    if lengths[1] != options[_LENGTH] or max(lengths.values()) > lengths[1]:
        raise ValueError(f"{_LENGTH} is {options[_LENGTH]!r}, and {_SCHEDULE} {lengths}")
    return lengths
