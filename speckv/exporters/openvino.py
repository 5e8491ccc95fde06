"""Generation parameters of OpenVINO GenAI, which every request can have its own of."""

from typing import Any

from speckv.errors import SpecKVError
from speckv.exporters.settings import WITHOUT_DRAFT, Setting, SettingsExporter
from speckv.runtime.programs import LONGEST

_CAP, _THRESHOLD = "num_assistant_tokens", "assistant_confidence_threshold"


class OpenVinoExporter(SettingsExporter):
    """Parameters for `LLMPipeline.generate` of OpenVINO GenAI, by compression of the target.

    A request takes a constant number of tokens or a threshold, not both: with a threshold, nothing but the end of the
    text limits a draft. The token below the threshold is verified too. A pipeline with a draft model drafts for every
    request, so that no speculation is a pipeline without one.
    """

    name = "openvino"
    decoder = "OpenVINO GenAI 2026.4"
    signal = "draft_probability"
    default = Setting(5)
    note = (
        "a draft that a threshold can end also ends behind a token whose log probability is 0 in float32, one that is "
        "surer than about 1 - 1e-6; predictions count it as any other"
    )

    def candidates(self, gamma_max: int) -> list[Setting]:
        thresholds = [Setting(LONGEST, threshold) for threshold in self.thresholds if threshold]
        return [setting for setting in super().candidates(gamma_max) if not setting.threshold] + thresholds

    def to_native(self, setting: Setting) -> dict[str, Any]:
        setting = setting.plain(self.drawn)
        if setting.threshold:
            if setting.cap < LONGEST:
                raise SpecKVError(f"{self.decoder} limits no draft by its length where there is a threshold")
            # Greedy requests get the probability to compare only where they ask for log probabilities.
            return {_THRESHOLD: setting.threshold, "logprobs": 1}
        # The number 0 would mean the default, which is 5.
        return {_CAP: setting.cap} if setting.cap else WITHOUT_DRAFT

    def from_native(self, native: dict[str, Any]) -> Setting:
        if native.get(_THRESHOLD):
            if native.get(_CAP) or native.get("logprobs") != 1:
                raise ValueError(f"{_THRESHOLD} goes with logprobs 1 and without {_CAP}")
            return Setting(LONGEST, native[_THRESHOLD])
        if native == WITHOUT_DRAFT:
            return Setting(0)
        return Setting(native[_CAP] or 5)
