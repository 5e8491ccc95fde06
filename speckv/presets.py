"""Tuned parameters of a policy as a file: `speckv tune --out` writes it, `NAME@tuned` and `NAME@FILE` play it."""

import pathlib
import sys
from typing import Any

from speckv.errors import SpecKVError
from speckv.files import check_version, read_json, write_json
from speckv.policy import Policy

FORMAT = "speckv-preset"
SCHEMA_VERSION = 1
#: What users call the preset that comes with a policy.
TUNED = "tuned"


def tuned_preset(policy: type[Policy]) -> pathlib.Path | None:
    """The preset that comes with a policy: `presets/NAME.json` beside the module of its class, if it is there."""
    module = getattr(sys.modules.get(policy.__module__), "__file__", None)
    if module is None:  # written at a prompt
        return None
    path = pathlib.Path(module).parent / "presets" / f"{policy.name}.json"
    return path if path.is_file() else None


def write_preset(path: pathlib.Path, policy: Policy, about: dict[str, Any]) -> None:
    """Write the parameters of a policy, whole or not at all.

    Args:
        about: how they were found, as JSON holds it.
    """
    what = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "policy": policy.name, "params": policy.get_params()}
    write_json(path, what | about)


def read_preset(policy: type[Policy], which: str) -> dict[str, Any]:
    """The parameters in a preset of a policy.

    Args:
        which: `tuned`, for the one that comes with the policy, or a file.

    Raises:
        SpecKVError: there is none, it is of another policy, or it is damaged.
    """
    path = tuned_preset(policy) if which == TUNED else pathlib.Path(which)
    if path is None or not path.is_file():
        what = "comes with no preset" if which == TUNED else f"has no preset {which!r}, which is no file"
        raise SpecKVError(f"policy {policy.name!r} {what}; `speckv tune {policy.name} --grid … --out FILE` finds one")
    value = read_json(path, "a preset")
    if value.get("format") != FORMAT:
        raise SpecKVError(f"{path}: is not a preset; `speckv tune {policy.name} --grid … --out FILE` makes one")
    check_version(value.get("schema_version"), SCHEMA_VERSION, path)
    if value.get("policy") != policy.name:
        raise SpecKVError(f"{path}: is a preset of {value.get('policy')!r}, not of {policy.name!r}; name another")
    try:
        policy(**value["params"])
    except (KeyError, TypeError, ValueError) as error:
        raise SpecKVError(f"{path}: is no preset that {policy.name!r} can be made with ({error}); tune again") from None
    params: dict[str, Any] = value["params"]
    return params
