"""What a plugin can add. Implement a hook with `@speckv.hookimpl` in a module that an entry point of the group
`speckv` names; `speckv plugins` lists what was found.

Every hook is called once, with a function that takes one thing to register at a time. Registering imports nothing that
is heavy: what needs torch is named by its place, `module:attribute`, and imported when it is used.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from speckv.costs import CostModel
    from speckv.exporting import Exporter
    from speckv.policy import Policy
    from speckv.steplogs import Importer

hookspec = pluggy.HookspecMarker("speckv")
hookimpl = pluggy.HookimplMarker("speckv")


@hookspec
def speckv_register_policies(register: "Callable[[type[Policy]], None]") -> None:
    """Call `register(PolicyClass)` for each policy. It must be possible to make one without arguments."""


@hookspec
def speckv_register_environments(register: Callable[..., None]) -> None:
    """Call `register(id, entry_point=…)` for each environment, with the arguments of `gymnasium.register`.

    Entry points are places, `module:Class`. Users reach the environment through `gymnasium.make`, after one call of
    `speckv.plugins.register_environments()`.
    """


@hookspec
def speckv_register_drafters(register: Callable[[str, str], None]) -> None:
    """Call `register(name, "module:factory")` for each drafter.

    The factory is called with the target, a `speckv.live.LanguageModel`, and with what users write behind the name in
    `speckv decode --drafter NAME:PARAMETER=VALUE`; it returns a `speckv.live.Drafter`, or a `LanguageModel` to draft
    with. A class whose constructor takes the target first is such a factory.
    """


@hookspec
def speckv_register_cost_models(
    register: "Callable[[str, str | os.PathLike[str] | Callable[[], CostModel]], None]",
) -> None:
    """Call `register(name, path)` for each cost model, with the path of its JSON file or a function that makes it.

    Wherever `--costs` takes a file it takes the name as well. The model's own `name` must be the same.
    """


@hookspec
def speckv_register_importers(register: "Callable[[type[Importer]], None]") -> None:
    """Call `register(ImporterClass)` for each importer of step logs."""


@hookspec
def speckv_register_exporters(register: "Callable[[type[Exporter]], None]") -> None:
    """Call `register(ExporterClass)` for each exporter of policies."""


@hookspec
def speckv_register_commands(register: "Callable[[click.Command], None]") -> None:
    """Call `register(command)` for each click command or group; users call it as `speckv NAME`."""
