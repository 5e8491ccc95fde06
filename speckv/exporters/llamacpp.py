"""Start-up flags of llama.cpp's server."""

import pathlib
from typing import Any

from speckv.errors import SpecKVError
from speckv.exporters.settings import Setting, SettingsExporter
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

    def to_native(self, setting: Setting) -> dict[str, Any]:
        if setting.least:
            raise SpecKVError(f"{self.decoder} can't draft {setting.least} tokens whatever their probability")
        return {"n_max": setting.cap, "n_min": 0, "p_min": setting.threshold}

    def from_native(self, native: dict[str, Any]) -> Setting:
        if (least := native["n_min"]) not in (0, 1):  # no draft at all is all that is shorter than 1
            raise SpecKVError(f"n_min {least!r} throws drafts away; only 0 and 1 can be replayed")
        return Setting(native["n_max"], native["p_min"])

    def paste(self, native: dict[str, Any]) -> str:
        # With a draft model, build 11549 drafts one token at an n_max of 0, and fails an assertion of its own.
        flags = ["--spec-draft-model DRAFT.gguf", "--spec-type draft-simple"]
        flags += [f"--spec-draft-{name.replace('_', '-')} {value}" for name, value in native.items()]
        return " ".join(["llama-server --model TARGET.gguf", *(flags if native["n_max"] else [])])

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        super().write(bundle, out)
        lines = [f"{name}: {self.paste(self.to_native(setting))}\n" for name, setting in self.read(out).items()]
        write_atomically(out / COMMANDS, lambda partial: partial.write_text("".join(lines), encoding="utf-8"))
