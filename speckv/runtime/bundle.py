"""A policy bundle: a folder of JSON and safetensors that holds a policy in portable form."""

import pathlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from speckv.compression import COMPRESSIONS, check_compression
from speckv.errors import SpecKVError
from speckv.features import FEATURES, signal_of
from speckv.files import check_version, read_json, write_atomically, write_json
from speckv.runtime.models import Inputs, Network, Trees
from speckv.runtime.programs import Additive, Choice, Draft, Gate, Program, Score, Table, Threshold, Worth
from speckv.runtime.sequence import Sequence

FORMAT = "speckv-bundle"
SCHEMA_VERSION = 1
_FORMS = {
    cls.__name__.lower(): cls
    for cls in (Program, Table, Additive, Choice, Gate, Threshold, Score, Worth, Inputs, Network, Trees)
}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Bundle:
    """A portable policy. It never changes: any number of threads may share one, for any number of sequences.

    Attributes:
        policy: what users call the policy that it was made of.
        program: how it decides.
        fidelity: how its decisions replayed beside those of that policy, if it was exported: `fidelity.json`.
    """

    policy: str
    program: Program
    fidelity: dict[str, Any] = field(default_factory=dict)

    @property
    def gammas(self) -> tuple[int, ...]:
        """The numbers of tokens that it may draft, where nothing else ends a draft."""
        return self.program.gammas

    @property
    def signals(self) -> tuple[str, ...]:
        """What `Sequence.draw_token` has to be told of a token's distribution."""
        found = dict.fromkeys(filter(None, map(signal_of, self.program.features)))
        return tuple(found)

    @property
    def asks(self) -> str | None:
        """What it has to be asked inside the draft: `draw_token`, `keep_drafting`, both, or None for nothing."""
        stop = self.program.stop
        if stop is None:
            return None
        return "both" if isinstance(stop, Worth) else "keep_drafting" if stop.drawn else "draw_token"

    def start(self, context_length: int = 0, compression: str = "bf16", cost_ratio: float = 0.0) -> Sequence:
        """A new sequence.

        Args:
            context_length: tokens of the prompt.
            compression: of the target, one of `speckv.compression.COMPRESSIONS`.
            cost_ratio: seconds of a draft forward to those of a one-token target forward.

        Raises:
            SpecKVError: the compression is unknown.
        """
        return Sequence(self, context_length, list(COMPRESSIONS).index(check_compression(compression)), cost_ratio)

    def save(self, path: str | pathlib.Path) -> None:
        """Write it as `bundle.json` and `bundle.safetensors` into a folder.

        Raises:
            SpecKVError: there is a bundle already, or the folder cannot be written.
        """
        from safetensors.numpy import save_file

        path, arrays = pathlib.Path(path), Arrays()
        if (path / "bundle.json").exists():
            raise SpecKVError(f"{path}: holds a bundle already; choose another folder")
        program = _encode(self.program, "", arrays)
        write_atomically(path / "bundle.safetensors", lambda partial: save_file(arrays, partial))
        write_json(
            path / "bundle.json",
            {
                "format": FORMAT,
                "schema_version": SCHEMA_VERSION,
                "policy": self.policy,
                "form": self.program.form,
                "features": {
                    name: {"unit": FEATURES[name].unit, "exists": FEATURES[name].when} for name in self.program.features
                },
                "compressions": list(COMPRESSIONS),
                "gammas": list(self.gammas),
                "program": program,
            },
        )


def load(path: str | pathlib.Path) -> Bundle:
    """Read a policy bundle. Nothing but NumPy and safetensors is imported for it.

    Raises:
        SpecKVError: the folder holds none, or one that is damaged or of a newer format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = pathlib.Path(path)
    value = read_json(path / "bundle.json", "a policy bundle")
    if value.get("format") != FORMAT:
        raise SpecKVError(f"{path / 'bundle.json'}: is not a policy bundle")
    check_version(value.get("schema_version"), SCHEMA_VERSION, path / "bundle.json")
    try:
        program = _decode(value["program"], load_file(path / "bundle.safetensors"))
        if value["compressions"] != list(COMPRESSIONS)[: len(value["compressions"])]:
            raise ValueError(f"it counts compressions as {', '.join(value['compressions'])}")
        _try(program)
        policy = str(value["policy"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, SafetensorError) as error:
        raise SpecKVError(f"{path}: is not a whole policy bundle ({error}); export it again") from None
    replayed = path / "fidelity.json"
    return Bundle(policy, program, read_json(replayed, "the fidelity of an export") if replayed.exists() else {})


def _try(program: Program) -> None:
    """Decide once, so that a damaged bundle fails where it is loaded and not in the middle of a text."""
    values = dict.fromkeys(FEATURES, 0.0) | {"draft_index": 1.0}
    for name in program.features:
        if name not in FEATURES:
            raise ValueError(f"it reads {name!r}, which is no feature")
    program.gamma.choose(values)
    if program.stop is not None:
        program.stop.draws(values, draft := Draft())
        program.stop.keeps(values, draft)


def _encode(value: Any, place: str, arrays: Arrays) -> Any:
    """As JSON can hold it; arrays go into `arrays` under their place and are left out."""
    if isinstance(value, np.ndarray):
        arrays[place] = np.array(value, dtype=float if value.dtype.kind == "f" else np.int64, order="C")
        return {"array": place}
    if isinstance(value, tuple):
        return [_encode(part, f"{place}.{number}", arrays) for number, part in enumerate(value)]
    if type(value) in _FORMS.values():
        parts = {
            item.name: _encode(getattr(value, item.name), f"{place}.{item.name}".lstrip("."), arrays)
            for item in fields(value)
        }
        return {"form": type(value).__name__.lower()} | parts
    return value


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part, arrays) for part in value)
    if isinstance(value, dict):
        if "array" in value:
            return arrays[value["array"]]
        form = _FORMS[value["form"]]
        parts = {name: _decode(value[name], arrays) for name in value if name != "form"}
        for item in fields(form):
            if item.type in {int, str, bool} and type(parts[item.name]) is not item.type:
                raise ValueError(f"{item.name} is {parts[item.name]!r}")
        return form(**parts)
    return value
