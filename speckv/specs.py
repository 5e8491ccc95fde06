"""What users call by name and with parameters: `NAME` or `NAME:PARAMETER=VALUE,PARAMETER=VALUE`."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from speckv.errors import SpecKVError

T = TypeVar("T")


def find(what: str, name: str, known: Mapping[str, T]) -> T:
    """What is called `name` among `known`.

    Args:
        what: the noun for messages, such as `policy`.

    Raises:
        SpecKVError: there is none; the nearest name is suggested.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(sorted(known)) or 'none'}"
        raise SpecKVError(f"{what} {name!r} is unknown; {hint}")
    return known[name]


def make(what: str, spec: str, factory_of: Callable[[str], Callable[..., T]], *given: Any) -> T:
    """Make what a spec asks for; values are JSON, and text may go without quotation marks where a parameter is text.

    Args:
        what: the noun for messages.
        spec: `NAME` or `NAME:PARAMETER=VALUE,…`.
        factory_of: finds by name what is to be called.
        given: its first arguments, which users can't set.

    Raises:
        SpecKVError: the name or a parameter is unknown, a parameter stands there twice, or a value is not JSON.
    """
    name, _, text = spec.partition(":")
    factory = factory_of(name)
    known = dict(list(inspect.signature(factory).parameters.items())[len(given) :])
    params = {}
    for part in filter(None, re.split(r",(?=\w+=)", text)):
        key, _, value = part.partition("=")
        if key not in known:
            raise SpecKVError(f"{what} {name!r} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
        if key in params:
            raise SpecKVError(f"{what} {name!r} is given {key} twice; leave one out")
        try:
            params[key] = json.loads(value)
        except json.JSONDecodeError:
            if known[key].annotation in (str, str | None) and not value.startswith(('"', "[", "{")):
                params[key] = value
                continue
            raise SpecKVError(f"{what} {name!r}: the value of {key} is not a number or JSON: {value!r}") from None
    try:
        return factory(*given, **params)
    except (TypeError, ValueError) as error:
        raise SpecKVError(f"{what} {name!r} can't be made with {text or 'no parameters'}: {error}") from None
