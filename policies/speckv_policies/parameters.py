"""Checks of constructor parameters, each with a message of one line. None, for what `fit` will choose, passes."""

import itertools
import math


def check_range(low: float, high: float = math.inf, **values: float | None) -> None:
    """Raise ValueError if a value is not a number from `low` to `high`."""
    for name, value in values.items():
        if value is not None and not low <= value <= high:
            bounds = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"{name} is {value}; it must be {bounds}")


def check_count(low: int, **values: int | None) -> None:
    """Raise ValueError if a value is not a whole number from `low`."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, int) and value >= low):
            raise ValueError(f"{name} is {value}; it must be a whole number from {low}")


def check_order(**values: float) -> None:
    """Raise ValueError if a value is larger than the one named behind it."""
    names = list(values)
    for smaller, larger in itertools.pairwise(names):
        if values[smaller] > values[larger]:
            raise ValueError(
                f"{smaller} is {values[smaller]} and {larger} {values[larger]}; {smaller} must not be larger"
            )
