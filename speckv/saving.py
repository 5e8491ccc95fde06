"""Policies as files: JSON and safetensors, never pickle (rule R6)."""

import pathlib
from typing import Any

import numpy as np

import speckv
from speckv.errors import SpecKVError
from speckv.files import check_version, read_json, write_atomically, write_json
from speckv.plugins import make_policy, policy_class, registry
from speckv.policy import Memory, Policy

FORMAT = "speckv-policy"
SCHEMA_VERSION = 1
#: The files beside a saved policy that say what it was trained on: that of `speckv train`, and that of an export.
TRAINING, FIDELITY = "training.json", "fidelity.json"
#: In front of the names of a policy's memory, which share a file with its fitted arrays.
_MEMORY = "memory/"


def save_policy(policy: Policy, path: str | pathlib.Path) -> None:
    """Write a policy as a folder of `policy.json` and `policy.safetensors`. No pickle is involved.

    What it has learned while running is kept beside what `fit` learned: loaded, it goes on where it was.

    Raises:
        SpecKVError: there is a policy already, or the folder cannot be written.
    """
    from safetensors.numpy import save_file

    path = pathlib.Path(path)
    if (path / "policy.json").exists():
        raise SpecKVError(f"{path}: holds a policy already; choose another folder")
    # policy.json comes last: a folder without it is no policy yet.
    arrays = policy.fitted | {_MEMORY + name: array for name, array in policy.memory.items()}
    arrays = {name: np.array(array, order="C") for name, array in arrays.items()}
    write_atomically(path / "policy.safetensors", lambda partial: save_file(arrays, partial))
    write_json(
        path / "policy.json",
        {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "speckv": speckv.__version__,
            "policy": policy.name,
            "params": policy.get_params(),
            "features": list(policy.features),
            "memory": list(policy.memory),
        },
    )


def named_policy(spec: str) -> Policy:
    """A policy as users name it: as of `make_policy`, or the folder of a saved one.

    A name means the same whatever lies in the folder at hand; one that was saved under it is `./NAME`.
    """
    saved = spec not in registry().policies and (pathlib.Path(spec) / "policy.json").exists()
    return load_policy(spec) if saved else make_policy(spec)


def load_policy(path: str | pathlib.Path) -> Policy:
    """Read a policy that `save_policy` wrote, with what is known of its training.

    Raises:
        SpecKVError: the folder is not a policy, is of a newer format, or its policy is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = pathlib.Path(path)
    value = read_json(path / "policy.json", "a saved policy")
    if value.get("format") != FORMAT:
        raise SpecKVError(f"{path / 'policy.json'}: is not a saved policy")
    check_version(value.get("schema_version"), SCHEMA_VERSION, path / "policy.json")
    try:
        policy = policy_class(value["policy"])(**value["params"])
        policy.fitted = load_file(path / "policy.safetensors")
        if "memory" in value:  # a policy saved before there were memories starts with a new one
            memory = {name: policy.fitted.pop(_MEMORY + name) for name in value["memory"]}
            if (saved := _layout(memory)) != (installed := _layout(policy.new_memory())):
                raise ValueError(f"it remembers {saved}, and the installed one {installed}")
            policy.memory = memory
        if (names := value["features"]) != list(policy.features):
            raise ValueError(f"it reads {', '.join(names)}, and the installed one {', '.join(policy.features)}")
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise SpecKVError(f"{path}: is not a whole saved policy ({error}); save it again") from None
    policy.training = _read_training(path)
    return policy


def _read_training(path: pathlib.Path) -> dict[str, Any]:
    about = "what a policy was trained on"
    if (path / TRAINING).exists():
        return read_json(path / TRAINING, about)
    if (path / FIDELITY).exists():
        return read_json(path / FIDELITY, about).get("training") or {}
    return {}


def _layout(memory: Memory) -> dict[str, str]:
    """Type and shape of each array."""
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in sorted(memory.items())}
