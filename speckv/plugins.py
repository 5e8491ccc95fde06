"""What plugins add: the built-in ones' and those of installed projects, through the same hooks.

`registry()` collects everything once; the functions behind it find or make one thing by its name.
"""

import functools
import importlib
import importlib.metadata
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy

import speckv
from speckv import hookspecs, specs
from speckv.errors import SpecKVError, SpecKVWarning

if TYPE_CHECKING:
    import click

    from speckv.costs import CostModel
    from speckv.exporting import Exporter
    from speckv.live.drafting import Drafter
    from speckv.live.models import LanguageModel
    from speckv.policy import Policy
    from speckv.steplogs import Importer

T = TypeVar("T")

GROUP = "speckv"
#: Set to an empty value to switch off everything but the built-in plugins.
SWITCH = "SPECKV_PLUGINS"
_BUILT_IN = ("speckv.builtin", "speckv_policies", "speckv_envs")
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Plugin:
    """Where something was registered: a module of an installed distribution.

    Attributes:
        name, version: of the distribution.
        module: that implements the hooks.
        built_in: whether it is part of speckv.
    """

    name: str
    version: str
    module: str
    built_in: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.module})" if self.built_in else f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True)
class Registered(Generic[T]):
    """Something that a plugin brought, under the name that users call it by."""

    name: str
    value: T
    plugin: Plugin

    @property
    def origin(self) -> str:
        """The plugin, in words."""
        return str(self.plugin)


@dataclass(frozen=True)
class Registry:
    """All that is registered, by kind and name, and the plugins that were skipped, each with the reason.

    Attributes:
        policies, importers, exporters: classes.
        environments: arguments of `gymnasium.register`.
        drafters: the place of the factory, `module:attribute`.
        cost_models: functions that make them.
        commands: click commands.
    """

    policies: "dict[str, Registered[type[Policy]]]" = field(default_factory=dict)
    environments: dict[str, Registered[dict[str, Any]]] = field(default_factory=dict)
    drafters: dict[str, Registered[str]] = field(default_factory=dict)
    cost_models: "dict[str, Registered[Callable[[], CostModel]]]" = field(default_factory=dict)
    importers: "dict[str, Registered[type[Importer]]]" = field(default_factory=dict)
    exporters: "dict[str, Registered[type[Exporter]]]" = field(default_factory=dict)
    commands: "dict[str, Registered[click.Command]]" = field(default_factory=dict)
    skipped: list[tuple[Plugin, str]] = field(default_factory=list)

    def of_kind(self, kind: str) -> dict[str, Registered[Any]]:
        """What is registered of one kind, by name."""
        found: dict[str, Registered[Any]] = getattr(self, kind)
        return found


def _class_entry(value: Any, base: type, noun: str) -> tuple[str, Any]:
    if not (isinstance(value, type) and issubclass(value, base) and isinstance(getattr(value, "name", None), str)):
        raise SpecKVError(f"{value!r} is not {noun} subclass with a name")
    return value.name, value  # type: ignore[attr-defined]


def _policy_entry(policy: Any) -> tuple[str, Any]:
    from speckv.features import check_features
    from speckv.policy import Policy

    entry = _class_entry(policy, Policy, "a Policy")
    if "@" in entry[0]:  # what follows it names a preset
        raise SpecKVError(f"{entry[0]!r} can't name a policy; give a text without an @")
    check_features(policy.features)
    policy()  # it must be possible to make one without arguments
    return entry


def _environment_entry(id: str, entry_point: str, **settings: Any) -> tuple[str, Any]:
    from gymnasium.envs.registration import EnvSpec

    EnvSpec(id, entry_point, **settings)  # refuses what gymnasium.register would refuse later
    for place in (entry_point, settings.get("vector_entry_point") or entry_point):
        _check_place(f"environment {id!r}", place)
    return id, {"id": id, "entry_point": entry_point} | settings


def _drafter_entry(name: str, place: str) -> tuple[str, Any]:
    _check_place(f"drafter {name!r}", place)
    return name, place


def _check_place(what: str, place: object) -> None:
    if not (isinstance(place, str) and _PLACE.fullmatch(place)):
        raise SpecKVError(f"{what} is registered with {place!r}; give its place as 'module:attribute'")


def _cost_model_entry(name: str, source: "str | os.PathLike[str] | Callable[[], CostModel]") -> tuple[str, Any]:
    def load() -> "CostModel":
        from speckv.costs import CostModel

        model = source() if callable(source) else CostModel.load(os.fspath(source))
        if model.name != name:
            raise SpecKVError(f"the cost model that is registered as {name!r} calls itself {model.name!r}; rename one")
        return model

    return name, load


def _importer_entry(importer: Any) -> tuple[str, Any]:
    from speckv.steplogs import Importer

    return _class_entry(importer, Importer, "an Importer")


def _exporter_entry(exporter: Any) -> tuple[str, Any]:
    from speckv.exporting import Exporter

    return _class_entry(exporter, Exporter, "an Exporter")


def _command_entry(command: Any) -> tuple[str, Any]:
    import click

    if not isinstance(command, click.Command) or not command.name:
        raise SpecKVError(f"{command!r} is not a click command with a name")
    return command.name, command


#: Kind -> its singular, and what turns the arguments of `register` into a name and a value, or refuses them.
#: The hook of a kind is `speckv_register_` and its name.
KINDS: dict[str, tuple[str, Callable[..., tuple[str, Any]]]] = {
    "policies": ("policy", _policy_entry),
    "environments": ("environment", _environment_entry),
    "drafters": ("drafter", _drafter_entry),
    "cost_models": ("cost model", _cost_model_entry),
    "importers": ("importer", _importer_entry),
    "exporters": ("exporter", _exporter_entry),
    "commands": ("command", _command_entry),
}


@functools.cache
def registry() -> Registry:
    """Collect what the built-in plugins and all installed ones register, once.

    A broken plugin is skipped whole, with a warning. A built-in one is not supposed to be broken: its error is raised.
    """
    found = Registry()
    for plugin, load in _plugins():
        try:
            added = collect(plugin, load, found)
        except (Exception, SystemExit) as error:  # whatever an outsider's module raises must not stop the host
            if plugin.built_in:
                raise
            reason = f"{type(error).__name__}: {error}"
            found.skipped.append((plugin, reason))
            warnings.warn(f"plugin {plugin} is skipped ({reason})", SpecKVWarning, stacklevel=2)
        else:
            for kind in KINDS:
                found.of_kind(kind).update(added.of_kind(kind))
    return found


def _plugins() -> Iterator[tuple[Plugin, Callable[[], object]]]:
    """Each plugin and what imports it: the built-in ones first, then the others in the order of their names."""
    for module in _BUILT_IN:
        plugin = Plugin("speckv", speckv.__version__, module, built_in=True)
        yield plugin, functools.partial(importlib.import_module, module)
    for entry in outside_entry_points():
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else (entry.name, "")
        yield Plugin(name, version, entry.module), entry.load


def outside_entry_points() -> list[importlib.metadata.EntryPoint]:
    """The entry points of installed plugins, none where they are switched off."""
    if os.environ.get(SWITCH) == "":
        return []
    return sorted(
        importlib.metadata.entry_points(group=GROUP),
        key=lambda entry: (entry.dist.name if entry.dist else "", entry.name),
    )


def collect(plugin: Plugin, load: Callable[[], object], known: Registry) -> Registry:
    """What one plugin registers. It has a plugin manager of its own, so that it fails on its own."""
    manager = pluggy.PluginManager("speckv")
    manager.add_hookspecs(hookspecs)
    manager.register(load())
    manager.check_pending()  # a misspelt hook is an error, not silence
    added = Registry()

    def register(kind: str, *args: Any, **kwargs: Any) -> None:
        noun, entry_of = KINDS[kind]
        name, value = entry_of(*args, **kwargs)
        if not isinstance(name, str) or not name or ":" in name:
            raise SpecKVError(f"{name!r} can't name a {noun}; give a text without a colon")
        if name in added.of_kind(kind):
            raise SpecKVError(f"the {noun} {name!r} is registered twice")
        if name in known.of_kind(kind):
            first = known.of_kind(kind)[name].origin
            raise SpecKVError(f"the {noun} {name!r} of {plugin} is registered by {first} already; rename one")
        added.of_kind(kind)[name] = Registered(name, value, plugin)

    for kind in KINDS:
        getattr(manager.hook, f"speckv_register_{kind}")(register=functools.partial(register, kind))
    return added


def policy_class(name: str) -> "type[Policy]":
    """The class of the policy called `name`.

    Raises:
        SpecKVError: there is none; the nearest name is suggested.
    """
    return specs.find("policy", name, registry().policies).value


def make_policy(spec: str) -> "Policy":
    """A policy from `NAME` or `NAME:PARAMETER=VALUE,PARAMETER=VALUE`; values are JSON.

    `NAME@tuned`, with or without parameters, starts from the preset that comes with the policy, and `NAME@FILE` from
    one that `speckv tune` wrote. Parameters that are given win over those of a preset.

    Raises:
        SpecKVError: the name, the preset or a parameter is unknown, or a value is not JSON.
    """
    from speckv.presets import read_preset

    head, colon, text = spec.partition(":")
    name, at, preset = head.partition("@")
    policy = policy_class(name)
    start = functools.partial(policy, **(read_preset(policy, preset) if at else {}))
    return specs.make("policy", name + colon + text, lambda _: start)


def make_importer(spec: str) -> "Importer":
    """An importer of step logs; spec and errors as of `make_policy`."""
    return specs.make("importer", spec, lambda name: specs.find("importer", name, registry().importers).value)


def make_exporter(spec: str) -> "Exporter":
    """An exporter of policies; spec and errors as of `make_policy`."""
    return specs.make("exporter", spec, lambda name: specs.find("exporter", name, registry().exporters).value)


def make_drafter(spec: str, target: "LanguageModel") -> "Drafter | LanguageModel":
    """What drafts for `target`, as `SpeculativeDecoder` takes it; spec and errors as of `make_policy`."""
    from speckv.live.drafting import Drafter
    from speckv.live.models import LanguageModel

    drafter = specs.make("drafter", spec, drafter_factory, target)
    if not isinstance(drafter, Drafter | LanguageModel):
        raise SpecKVError(f"drafter {spec!r} made a {type(drafter).__name__}, neither a Drafter nor a LanguageModel")
    return drafter


def drafter_factory(name: str) -> "Callable[..., Drafter | LanguageModel]":
    """What makes the drafter called `name` of a target and the drafter's parameters.

    Raises:
        SpecKVError: there is none, or what it was registered with can't be imported.
    """
    entry = specs.find("drafter", name, registry().drafters)
    module, _, attribute = entry.value.partition(":")
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SpecKVError(f"drafter {name!r} of {entry.origin} can't be imported ({error})") from None
    return factory


def load_costs(source: str | os.PathLike[str]) -> "CostModel":
    """A cost model from its file, or the registered one of that name. What is a file is read as one.

    Raises:
        SpecKVError: it is neither, or the file is not a cost model.
    """
    from speckv.costs import CostModel

    text = os.fspath(source)
    if os.path.exists(text):
        return CostModel.load(text)
    known = registry().cost_models
    if text not in known:
        raise SpecKVError(
            f"{text}: no such file; expected a cost model, or the name of one: {', '.join(sorted(known))}"
        )
    return known[text].value()


def register_environments() -> None:
    """Make the environments of all plugins known to `gymnasium.make` and `make_vec`. To call it twice does no harm."""
    import gymnasium

    for name, entry in registry().environments.items():
        if name not in gymnasium.registry:
            gymnasium.register(**entry.value)
