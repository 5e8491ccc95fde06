"""vLLM: policies that the plugin speckv-vllm plays inside it, and numbers of tokens that it takes without one."""

import pathlib
from collections.abc import Mapping
from typing import Any

from speckv import runtime
from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporters.portable import BundlePolicy, PortableExporter
from speckv.exporters.schedule import Schedule, ranges
from speckv.exporters.settings import WITHOUT_DRAFT, Setting, SettingsExporter
from speckv.files import read_json, write_json
from speckv.policy import Policy
from speckv.runtime import Bundle
from speckv.traces import Rollouts

#: Where vLLM's own options stand in a file for `vllm serve --config`; JSON is YAML.
OPTIONS = "vllm.yaml"
_TOP, _MOST, _RANGES = "speculative-config", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"


class VllmExporter(PortableExporter):
    """A policy bundle for the plugin speckv-vllm, and beside it the options that vLLM has to be started with.

        vllm serve TARGET --config OUT/vllm.yaml --additional-config '{"speckv": {"bundle": "OUT"}}'

    Args:
        draft: the draft model, by name or folder.
    """

    name = "vllm"
    decoder = "vLLM 0.32 with the plugin speckv-vllm"

    def __init__(self, draft: str = "DRAFT") -> None:
        self.draft = _checked(draft)

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        most = max(bundle.gammas)
        bundle.save(out)
        # The plugin needs the table of ranges: it is what makes vLLM expect drafts of changing lengths.
        write_json(out / OPTIONS, {_TOP: _options(self.draft, {1: most}), "async-scheduling": False})

    def load(self, out: pathlib.Path) -> Policy:
        return BundlePolicy(runtime.load(out))


class VllmScheduleExporter(SettingsExporter):
    """Options for `vllm serve --config`, a file for each compression: how many tokens to draft for each batch size.

        vllm serve TARGET --config OUT/bf16.yaml

    With `--approximate` a policy is replaced by the fastest number of tokens for each batch size that the costs were
    measured at, and no more for a larger one. Above the largest, vLLM keeps that one's number. Compressions that the
    recording lacks get what is fastest over all sequences.

    Where no batch speculates, no draft model is named. In a table beside other numbers a 0 still takes one forward of
    the draft, which is counted where the numbers are chosen.

    Args:
        draft: the draft model, by name or folder.
    """

    name = "vllm-schedule"
    family = "vllm"
    host = "vllm"
    decoder = "vLLM 0.32"
    observes = frozenset({"compression", "batch_size"})

    def __init__(self, draft: str = "DRAFT") -> None:
        self.draft = _checked(draft)

    def to_native(self, setting: Setting) -> dict[str, Any]:
        if setting.threshold:
            raise SpecKVError(f"{self.decoder} has no threshold")
        return _options(self.draft, {1: setting.cap}) if setting.cap else WITHOUT_DRAFT

    def from_native(self, native: dict[str, Any]) -> Setting:
        if native == WITHOUT_DRAFT:
            return Setting(0)
        (cap,) = _gammas(native).values()
        return Setting(cap)

    def paste(self, native: dict[str, Any]) -> str:
        options = "" if native == WITHOUT_DRAFT else f" --speculative-config '{super().paste(native)}'"
        return f"vllm serve TARGET{options}"

    def reason(self, policy: Policy) -> str | None:
        return None if isinstance(policy, Schedule) else super().reason(policy)

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        """The fastest number of tokens on `traces` for each compression and measured batch size."""
        return Schedule.best(traces, costs, follows=True)

    def export(self, policy: Policy, out: pathlib.Path) -> None:
        if isinstance(policy, Schedule):
            gammas: Mapping[str, Mapping[int, int]] = policy.gammas
        else:
            gammas = {name: {1: setting.cap} for name, setting in self.settings_of(policy.program()).items()}
        for name in COMPRESSIONS:
            of = gammas.get(name, {})
            write_json(out / f"{name}.yaml", {_TOP: _options(self.draft, of)} if any(of.values()) else {})

    def load(self, out: pathlib.Path) -> Policy:
        found = {}
        for name in COMPRESSIONS:
            path = out / f"{name}.yaml"
            try:
                options = read_json(path, f"options of {self.decoder}")
                found[name] = _gammas(options[_TOP]) if options else {}
            except (KeyError, TypeError, ValueError) as error:
                raise SpecKVError(f"{path}: not whole options of {self.decoder} ({error!r}); export again") from None
        return Schedule(found)


def _options(draft: str, gammas: Mapping[int, int]) -> dict[str, Any]:
    """`speculative_config` of vLLM.

    Args:
        gammas: batch size -> tokens for batches up to that size, above the next smaller one.
    """
    most = max(1, *gammas.values())  # which may not be 0
    return {"method": "draft_model", "model": draft, _MOST: most, _RANGES: [list(of) for of in ranges(gammas)]}


def _checked(draft: str) -> str:
    if not isinstance(draft, str):
        raise SpecKVError(f"draft is {draft!r}; it must be the draft model's name or folder")
    return draft


def _gammas(options: Mapping[str, Any]) -> dict[int, int]:
    """The tokens that vLLM drafts by batch size, as `_options` takes them.

    Raises:
        KeyError, TypeError or ValueError: they are no options of ours.
    """
    most, end, found = options[_MOST], 0, {}
    for first, last, gamma in options[_RANGES]:
        if not (all(type(n) is int for n in (first, last, gamma, most)) and first == end + 1 <= last and gamma >= 0):
            raise ValueError(f"{_RANGES} is {options[_RANGES]}, and {_MOST} {most!r}")
        end = last
        found[last] = min(gamma, most)
    if not found:
        raise ValueError(f"{_RANGES} is empty")
    return found
