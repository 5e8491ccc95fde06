"""What every plugin must keep to, and everything that it registers."""

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speckv.plugins import KINDS, Plugin, Registry, collect, registry
from speckv.testing.checks import Check, CheckFailed, CheckSkipped, expecting, make_checks, require
from speckv.testing.drafters import drafter_checks
from speckv.testing.environments import env_checks
from speckv.testing.exporters import exporter_checks
from speckv.testing.policies import policy_checks

#: What takes long to import, and must not be by the mere presence of a plugin.
HEAVY = ("torch", "transformers", "stable_baselines3", "sklearn", "matplotlib")


def plugin_checks(
    module: str,
    *,
    everything: bool = True,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of a plugin, and of the policies, environments, drafters and exporters that it registers.

    Args:
        module: that implements the hooks, as its entry point names it. It need not be installed, only importable.
        everything: False for those of the plugin alone.
        arguments: name of an environment or drafter -> what it is made with.
        expected_failed_checks: name of a check -> why it fails; `SUBJECT-NAME` means the check of one thing alone.

    Raises:
        SpecKVError: no check has such a name.
    """
    case = _Case(module)
    functions: list[Callable[[_Case], None]] = [
        imports_quietly,
        implements_known_hooks,
        registers_something,
        takes_no_names,
        loads_its_cost_models,
        explains_its_commands,
    ]
    checks = make_checks(module, functions, case)
    if everything and not isinstance(case.found, Exception):
        checks += _checks_of_everything(case.found, arguments or {})
    return expecting(checks, expected_failed_checks)


def _checks_of_everything(found: Registry, arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """The checks of what a plugin registers."""
    import gymnasium

    for policy in found.policies.values():
        yield from policy_checks(policy.value())
    for name, environment in found.environments.items():
        if name not in gymnasium.registry:
            gymnasium.register(**environment.value)
        yield from env_checks(name, **arguments.get(name, {}))
    for name, drafter in found.drafters.items():
        place, _, attribute = drafter.value.partition(":")
        factory = functools.partial(_make, place, attribute)
        yield from drafter_checks(factory, subject=name, **arguments.get(name, {}))
    for exporter in found.exporters.values():
        yield from exporter_checks(exporter.value())


def _make(module: str, attribute: str, *args: Any, **parameters: Any) -> Any:
    """What the factory at a place makes; its module is imported only now."""
    return getattr(importlib.import_module(module), attribute)(*args, **parameters)


class _Case:
    """A plugin to be checked."""

    def __init__(self, module: str) -> None:
        self.module = module

    @functools.cached_property
    def found(self) -> Registry | Exception:
        """What it registers, or why it can't."""
        place, _, attribute = self.module.partition(":")

        def load() -> object:
            loaded = importlib.import_module(place)
            return getattr(loaded, attribute) if attribute else loaded

        try:
            return collect(Plugin(self.module, "", self.module), load, Registry())
        except Exception as error:
            return error

    @property
    def registered(self) -> Registry:
        if isinstance(self.found, Exception):
            raise CheckSkipped("it can't be loaded: see the check 'implements_known_hooks'") from self.found
        return self.found


def imports_quietly(case: _Case) -> None:
    """To import it takes no heavy package, prints nothing and leaves no file behind."""
    place = case.module.partition(":")[0]
    program = f"import sys, {place}; sys.exit(' '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
    path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=folder,
            timeout=120,
        )
        files = sorted(os.listdir(folder))
    error = done.stderr.strip().splitlines()
    require(done.returncode == 0 or not error or "Traceback" not in done.stderr, f"it can't be imported: {error[-1:]}")
    require(done.returncode == 0, f"it imports {', '.join(error)}; import that inside the functions that need it")
    require(not done.stdout and not error, f"it prints {(done.stdout + done.stderr).strip()!r} when it is imported")
    require(not files, f"it writes {', '.join(files)} when it is imported")


def implements_known_hooks(case: _Case) -> None:
    """Its hooks exist, and what they register is what they may."""
    if isinstance(error := case.found, Exception):
        raise CheckFailed(f"{type(error).__name__}: {error}") from error


def registers_something(case: _Case) -> None:
    """It brings at least one thing."""
    found = case.registered
    require(any(found.of_kind(kind) for kind in KINDS), "it registers nothing; implement a hook with @speckv.hookimpl")


def takes_no_names(case: _Case) -> None:
    """What it registers has names that no other plugin has taken."""
    found = case.registered
    for kind, (noun, _) in KINDS.items():
        for name, entry in registry().of_kind(kind).items():
            taken = name in found.of_kind(kind) and entry.plugin.module != case.module
            require(not taken, f"the {noun} {name!r} is registered by {entry.origin} already; rename yours")


def loads_its_cost_models(case: _Case) -> None:
    """Each of its cost models can be loaded, and has the name that it is registered under."""
    for entry in case.registered.cost_models.values():
        entry.value()


def explains_its_commands(case: _Case) -> None:
    """Each of its commands has a help text."""
    for name, entry in case.registered.commands.items():
        require(entry.value.help, f"the command {name!r} has no help text")
