"""llama.cpp: start-up flags of its server, and policies that llama-cpp-python plays."""

import json
import pathlib
from typing import Any

from speckv.errors import SpecKVError
from speckv.exporters.bundle import BundleExporter
from speckv.exporters.settings import WITHOUT_DRAFT, Setting, SettingsExporter
from speckv.files import write_atomically
from speckv.runtime import Bundle

#: The file beside the settings that says how to start the server.
COMMANDS = "commands.txt"


class LlamaCppExporter(SettingsExporter):
    """Start-up flags of llama.cpp's server, and the command line that holds them, one for each compression.

    The server keeps its flags for all requests. It drafts greedily, and draws no token whose probability among the
    draft's ten likeliest is below `p_min`. A draft shorter than `n_min` is thrown away; here that is always 0, since
    its forwards are spent by then.
    """

    name = "llamacpp"
    decoder = "llama.cpp's server, build 11549"
    signal = "draft_top1"
    of = "draft_top10"
    drawn = False
    default = Setting(3)
    host = "llama-cpp-python"

    def to_native(self, setting: Setting) -> dict[str, Any]:
        # With a draft model, build 11549 drafts one token at an n_max of 0, and fails an assertion of its own.
        return {"n_max": setting.cap, "n_min": 0, "p_min": setting.threshold} if setting.cap else WITHOUT_DRAFT

    def from_native(self, native: dict[str, Any]) -> Setting:
        if native == WITHOUT_DRAFT:
            return Setting(0)
        if native["n_max"] == 0:
            raise SpecKVError(f"an n_max of 0 ends the server; no speculation is {json.dumps(WITHOUT_DRAFT)}")
        if (least := native["n_min"]) not in (0, 1):  # no draft at all is all that is shorter than 1
            raise SpecKVError(f"n_min {least!r} throws drafts away; only 0 and 1 can be replayed")
        return Setting(native["n_max"], native["p_min"])

    def paste(self, native: dict[str, Any]) -> str:
        flags = [] if native == WITHOUT_DRAFT else ["--spec-draft-model DRAFT.gguf", "--spec-type draft-simple"]
        flags += [f"--spec-draft-{name.replace('_', '-')} {value}" for name, value in native.items() if flags]
        return " ".join(["llama-server --model TARGET.gguf", *flags])

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        super().write(bundle, out)
        lines = [f"{name}: {self.paste(self.to_native(setting))}\n" for name, setting in self.read(out).items()]
        write_atomically(out / COMMANDS, lambda partial: partial.write_text("".join(lines), encoding="utf-8"))


class LlamaCppPythonExporter(BundleExporter):
    """A policy bundle for `speckv.runtime.llamacpp`, which shows a policy nothing of the target's distributions."""

    name = "llama-cpp-python"
    decoder = "llama-cpp-python 0.3.36"
    observes = BundleExporter.observes - {"target_entropy", "target_margin"}
