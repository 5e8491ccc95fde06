"""A policy bundle: a folder of JSON and safetensors that holds a policy in portable form."""

import itertools
import pathlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from speckv.compression import COMPRESSIONS, check_compression
from speckv.errors import SpecKVError
from speckv.features import FEATURES, signal_of
from speckv.files import check_version, read_json, write_atomically, write_json
from speckv.runtime.models import Inputs, Network, Trees
from speckv.runtime.programs import LONGEST, Additive, Choice, Draft, Gate, Program, Score, Table, Threshold, Worth
from speckv.runtime.sequence import Sequence

FORMAT = "speckv-bundle"
SCHEMA_VERSION = 1
_FORMS = {
    cls.__name__.lower(): cls
    for cls in (Program, Table, Additive, Choice, Gate, Threshold, Score, Worth, Inputs, Network, Trees)
}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
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
        """What it has to be asked inside the draft: `draw_token`, `keep_drafting`, both, or None for nothing.

        Whichever it is, and if it is nothing but there are `signals`, `draw_token` has to be called for every token:
        it is what tells them.
        """
        stop = self.program.stop
        if stop is None:
            return None
        return "both" if isinstance(stop, Worth) else "keep_drafting" if stop.drawn else "draw_token"

    def start(self, context_length: int = 0, compression: str = "bf16", cost_ratio: float | None = None) -> Sequence:
        """A new sequence.

        Args:
            context_length: tokens of the prompt.
            compression: of the target, one of `speckv.compression.COMPRESSIONS`.
            cost_ratio: seconds of a draft forward to those of a one-token target forward; only needed by policies that
                read it.

        Raises:
            SpecKVError: the compression is unknown, or the cost ratio missing.
        """
        if cost_ratio is None and "cost_ratio" in self.program.features:
            raise SpecKVError(f"cost_ratio is missing; policy {self.policy!r} reads it, so start has to be told it")
        code = list(COMPRESSIONS).index(check_compression(compression))
        return Sequence(self, context_length, code, cost_ratio or 0.0)

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
        compressions = value["compressions"]
        if not compressions or compressions != list(COMPRESSIONS)[: len(compressions)]:
            raise ValueError(f"it counts compressions as {', '.join(compressions)}")
        _try(program, len(compressions))
        policy = str(value["policy"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, SafetensorError) as error:
        raise SpecKVError(f"{path}: is not a whole policy bundle ({error}); export it again") from None
    replayed = path / "fidelity.json"
    return Bundle(policy, program, read_json(replayed, "the fidelity of an export") if replayed.exists() else {})


def _try(program: Program, compressions: int) -> None:
    """Decide at each compression, so that a damaged bundle fails where it is loaded and not in the middle of a text."""
    for name in program.features:
        if name not in FEATURES:
            raise ValueError(f"it reads {name!r}, which is no feature")
    if (least := min(program.gamma.gammas)) < 0:
        raise ValueError(f"it drafts {least} tokens")
    for code, index in itertools.product(range(compressions), (1, LONGEST)):
        values = dict.fromkeys(FEATURES, 0.0) | {"compression": float(code), "draft_index": float(index)}
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
            array = arrays[value["array"]]
            if np.isnan(array).any():
                raise ValueError(f"{value['array']} holds what is no number")
            return array
        form = _FORMS[value["form"]]
        parts = {name: _decode(value[name], arrays) for name in value if name != "form"}
        for item in fields(form):
            if item.type in {int, str, bool} and type(parts[item.name]) is not item.type:
                raise ValueError(f"{item.name} is {parts[item.name]!r}")
        return form(**parts)
    return value
