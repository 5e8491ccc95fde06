"""What a plugin can add. Implement a hook with `@speckv.hookimpl` in a module that an entry point of the
group `speckv` names."""

from collections.abc import Callable

import pluggy

from speckv.policy import Policy

hookspec = pluggy.HookspecMarker("speckv")
hookimpl = pluggy.HookimplMarker("speckv")


@hookspec
def speckv_register_policies(register: Callable[[type[Policy]], None]) -> None:
    """Call `register(PolicyClass)` for each policy of the plugin."""
