"""A plugin project to start from: `speckv new-policy`. `plugins/speckv-example` is what it writes."""

import importlib.metadata
import importlib.util
import keyword
import os
import pathlib
import re
import shutil
import string

from speckv.errors import SpecKVError
from speckv.plugins import registry
from speckv.shipped import DATA

_TEMPLATES = DATA / "new_policy"
_SUFFIX = ".template"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def new_policy(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a project with a policy called `name`, a test of it, and what `pip install` needs; whole or not at all.

    Args:
        name: lower-case letters and digits, words joined by hyphens.
        folder: gets the project's folder, `speckv-NAME`.

    Returns:
        The project's folder.

    Raises:
        SpecKVError: the name is no name or is taken, or the folder exists or cannot be written.
    """
    _check_name(name)
    path = folder / f"speckv-{name}"
    if path.exists():
        raise SpecKVError(f"{path}: exists already; choose another name or --out")
    partial = folder / f".{path.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        for file, text in render(name, path.name).items():
            (partial / file).write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise SpecKVError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def render(name: str, project: str) -> dict[str, str]:
    """The files of a project, by name.

    Args:
        name: of the policy.
        project: name of the distribution.
    """
    module = project.replace("-", "_")
    words = {"name": name, "project": project, "module": module, "class_name": _class_name(name)}
    return {
        path.name.removesuffix(_SUFFIX).replace("module", module): string.Template(
            path.read_text(encoding="utf-8")
        ).substitute(words)
        for path in sorted(_TEMPLATES.glob(f"*{_SUFFIX}"))
    }


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _check_name(name: str) -> None:
    if name in registry().policies:
        raise SpecKVError(
            f"there is a policy {name!r} already, from {registry().policies[name].origin}; choose another"
        )
    if not _NAME.fullmatch(name) or keyword.iskeyword(_class_name(name)):
        raise SpecKVError(f"{name!r} can't name a policy; use lower-case letters, digits and hyphens, as in my-rule")
    module = f"speckv_{name.replace('-', '_')}"
    if importlib.util.find_spec(module) or _is_installed(f"speckv-{name}"):
        raise SpecKVError(
            f"{name!r}: a module {module} or a project speckv-{name} is installed already; choose another"
        )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
