"""Settings of transformers' own assisted generation."""

from typing import Any

from speckv.exporters.settings import Setting, SettingsExporter
from speckv.plugins import make_policy
from speckv.policy import Policy

_CAP, _THRESHOLD = "num_assistant_tokens", "assistant_confidence_threshold"
_SCHEDULE = {"num_assistant_tokens_schedule": "constant"}


class AssistedExporter(SettingsExporter):
    """Tokens of each draft, for `model.generate(assistant_model=draft)` without speckv.

    They belong to the draft's `generation_config`. Where scikit-learn is installed, transformers keeps no threshold: it
    moves one above 0 after every step of a text.
    """

    name = "assisted"
    decoder = "assisted generation of transformers 5.24"
    default = Setting(20, 0.4)
    family = "transformers"
    host = "transformers"
    note = "where scikit-learn is not installed, a threshold can be kept, too: ask about assisted-threshold"

    def to_native(self, setting: Setting) -> dict[str, Any]:
        return {_CAP: setting.cap, **_SCHEDULE, _THRESHOLD: setting.threshold}

    def from_native(self, native: dict[str, Any]) -> Setting:
        if (schedule := native["num_assistant_tokens_schedule"]) != "constant":
            raise ValueError(f"num_assistant_tokens_schedule is {schedule!r}; expected 'constant'")
        return Setting(native[_CAP], native[_THRESHOLD])

    def paste(self, native: dict[str, Any]) -> str:
        return f"draft.generation_config.update({', '.join(f'{name}={value!r}' for name, value in native.items())})"

    def untouched(self) -> Policy | None:
        # Nearly: it fits its threshold without the last token of drafts that were stopped by their length.
        return make_policy(f"adaptive-confidence:threshold={self.default.threshold},cap={self.default.cap}")


class AssistedThresholdExporter(AssistedExporter):
    """The same with a threshold, for an environment without scikit-learn.

    A draft ends behind a token whose probability is below the threshold, and that token is verified too, as read in the
    source of transformers 5.24.
    """

    name = "assisted-threshold"
    decoder = "assisted generation of transformers 5.24 without scikit-learn"
    signal = "draft_probability"
    family = name
    note = "where scikit-learn is installed, transformers moves the threshold after every step, and nothing here holds"

    def untouched(self) -> Policy | None:
        return super(AssistedExporter, self).untouched()
