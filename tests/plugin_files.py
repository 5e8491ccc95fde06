"""Plugins as pip leaves them on disk, and a registry that collects them anew."""

import pathlib
import sys
import textwrap

import pytest

from speckv.plugins import SWITCH, registry


@pytest.fixture
def fresh_registry(monkeypatch):
    """The test collects plugins anew, and leaves neither what they register nor modules behind."""
    monkeypatch.delenv(SWITCH, raising=False)
    modules = set(sys.modules)
    registry.cache_clear()
    yield
    registry.cache_clear()
    for name in set(sys.modules) - modules:
        if name.startswith(("speckv_example", "plugin_")):
            del sys.modules[name]


def install(folder: pathlib.Path, name: str, source: str) -> None:
    """A plugin as pip would have left it: a module and its metadata."""
    (folder / f"plugin_{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    info = folder / f"plugin_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[speckv]\n{name} = plugin_{name}\n", encoding="utf-8")
