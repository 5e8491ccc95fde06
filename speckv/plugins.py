"""Which policies there are: the zoo's and those of installed plugins, through the same hooks."""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import warnings
from dataclasses import dataclass

import pluggy

from speckv import hookspecs
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.features import check_features
from speckv.policy import Policy

GROUP = "speckv"
#: Set to an empty value to switch off everything but the built-in zoo.
SWITCH = "SPECKV_PLUGINS"
_ZOO = "speckv_policies"


@dataclass(frozen=True)
class Registered:
    """A policy class and the plugin that brought it."""

    policy: type[Policy]
    origin: str


@dataclass(frozen=True)
class Registry:
    """All registered policies by name, and what went wrong on the way (plugin name, reason)."""

    policies: dict[str, Registered]
    failures: list[tuple[str, str]]


@functools.cache
def registry() -> Registry:
    """Collect the policies of the zoo and of all plugins, once. A broken plugin is skipped with a warning."""
    policies: dict[str, Registered] = {}
    failures: list[tuple[str, str]] = []
    plugins = [(f"speckv ({_ZOO})", lambda: importlib.import_module(_ZOO))]
    if os.environ.get(SWITCH) != "":
        for entry in importlib.metadata.entry_points(group=GROUP):
            origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
            plugins.append((origin, entry.load))
    for origin, load in plugins:
        try:
            found = _collect(load, origin)
            for name in found:
                if name in policies:
                    raise SpecKVError(f"the policy {name!r} is registered by {policies[name].origin} already")
        except Exception as error:  # whatever an outsider's module raises must not stop the host
            if origin.startswith("speckv ("):
                raise
            reason = f"{type(error).__name__}: {error}"
            failures.append((origin, reason))
            warnings.warn(f"plugin {origin} is skipped ({reason})", SpecKVWarning, stacklevel=2)
        else:
            policies.update(found)
    return Registry(policies, failures)


def _collect(load: "functools.partial[object] | object", origin: str) -> dict[str, Registered]:
    """The policies of one plugin. It has a plugin manager of its own, so that it fails on its own."""
    manager = pluggy.PluginManager("speckv")
    manager.add_hookspecs(hookspecs)
    manager.register(load())  # type: ignore[operator]
    manager.check_pending()  # a misspelt hook is an error, not silence
    found: dict[str, Registered] = {}

    def register(policy: type[Policy]) -> None:
        if not (
            isinstance(policy, type) and issubclass(policy, Policy) and isinstance(getattr(policy, "name", None), str)
        ):
            raise SpecKVError(f"{policy!r} is not a Policy subclass with a name")
        if policy.name in found:
            raise SpecKVError(f"the policy {policy.name!r} is registered twice")
        check_features(policy.features)
        policy()  # it must be possible to make one without arguments
        found[policy.name] = Registered(policy, origin)

    manager.hook.speckv_register_policies(register=register)
    return found


def policy_class(name: str) -> type[Policy]:
    """The class of the policy called `name`.

    Raises:
        SpecKVError: there is none; the nearest name is suggested.
    """
    known = registry().policies
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(sorted(known))}"
        raise SpecKVError(f"policy {name!r} is unknown; {hint}")
    return known[name].policy


def make_policy(spec: str) -> Policy:
    """A policy from `NAME` or `NAME:PARAMETER=VALUE,PARAMETER=VALUE`; values are JSON.

    Raises:
        SpecKVError: the name or a parameter is unknown, or a value is not JSON.
    """
    name, _, text = spec.partition(":")
    cls = policy_class(name)
    known = inspect.signature(cls).parameters
    params = {}
    for part in filter(None, re.split(r",(?=\w+=)", text)):
        key, _, value = part.partition("=")
        if key not in known:
            raise SpecKVError(f"policy {name!r} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
        try:
            params[key] = json.loads(value)
        except json.JSONDecodeError:
            raise SpecKVError(f"policy {name!r}: the value of {key} is not a number or JSON: {value!r}") from None
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise SpecKVError(f"policy {name!r} can't be made with {text}: {error}") from None
