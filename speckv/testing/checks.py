"""Small named checks, and the three ways to run them: raise, report, or become tests of pytest."""

import functools
import importlib.util
import unittest
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from speckv.errors import SpecKVError, SpecKVWarning

if TYPE_CHECKING:
    import pytest


class CheckFailed(AssertionError):
    """What was checked does not keep to its contract."""


class CheckSkipped(unittest.SkipTest):
    """A check can't be made here, or says nothing of what is checked. pytest shows it as a skipped test."""


def require(holds: object, message: str) -> None:
    """Raise CheckFailed unless it holds."""
    if not holds:
        raise CheckFailed(message)


def require_package(name: str, extra: str) -> None:
    """Raise CheckSkipped unless the package is installed."""
    if importlib.util.find_spec(name) is None:
        raise CheckSkipped(f"{name} is not installed; run: pip install 'speckv[{extra}]'")


@dataclass(frozen=True)
class Check:
    """One check of one thing; call it to make it.

    Attributes:
        name: of the check.
        subject: what is checked, in words that are short and unambiguous.
        function: returns nothing, or raises: `CheckSkipped`, or anything else if the check fails.
        expected_failure: the reason why it is expected to fail, empty if it is not.
    """

    name: str
    subject: str
    function: Callable[[], None]
    expected_failure: str = ""

    def __call__(self) -> None:
        self.function()

    def __str__(self) -> str:
        return f"{self.subject}-{self.name}"


def make_checks(subject: str, functions: Iterable[Callable[[Any], None]], case: object) -> list[Check]:
    """A check named like each function, which gets the case as its only argument."""
    return [Check(function.__name__, subject, functools.partial(function, case)) for function in functions]


def expecting(checks: list[Check], expected_failed_checks: Mapping[str, str] | None) -> list[Check]:
    """The checks, some of them expected to fail.

    Args:
        expected_failed_checks: name of a check, or its text, which has the subject in front -> why it fails.

    Raises:
        SpecKVError: there is no such check.
    """
    reasons = expected_failed_checks or {}
    known = dict.fromkeys(check.name for check in checks)
    if unknown := set(reasons) - set(known) - set(map(str, checks)):
        raise SpecKVError(f"there is no check {min(unknown)!r} to fail; the checks are {', '.join(known)}")
    return [replace(check, expected_failure=reasons.get(str(check)) or reasons.get(check.name, "")) for check in checks]


Status = Literal["passed", "failed", "skipped", "expected"]


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Attributes:
        status: `expected` if it failed and was expected to. One that passes and was expected to fail has `failed`.
        message: why it failed or was skipped, or what it warns of.
        error: what it raised.
    """

    check: Check
    status: Status
    message: str = ""
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.status:<8}  {self.check}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Report:
    """What came of all checks; printed, one line each."""

    results: tuple[Result, ...]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    def __str__(self) -> str:
        counts = [f"{sum(r.status == status for r in self.results)} {status}" for status in Status.__args__]  # type: ignore[attr-defined]
        return "\n".join([*map(str, self.results), ", ".join(counts)])


def _result(check: Check) -> Result:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SpecKVWarning)
        try:
            check()
        except CheckSkipped as skipped:
            return Result(check, "skipped", str(skipped))
        except Exception as error:  # whatever somebody else's code raises is a failure
            message = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            message = message.splitlines()[0]
            if check.expected_failure:
                return Result(check, "expected", check.expected_failure, error)
            return Result(check, "failed", message, error)
    if check.expected_failure:
        return Result(check, "failed", f"it passes, and is expected to fail: {check.expected_failure}")
    return Result(check, "passed", "; ".join(str(warning.message) for warning in caught))


def report(checks: Iterable[Check]) -> Report:
    """Make all checks, whatever comes of them."""
    return Report(tuple(map(_result, checks)))


def raise_first(checks: Iterable[Check]) -> Report:
    """Make the checks until one fails. Checks that are skipped, and what a check warns of, become warnings.

    Raises:
        CheckFailed: names the check and what is wrong; from what the check raised.
    """
    results = []
    for check in checks:
        results.append(result := _result(check))
        if result.status == "failed":
            raise CheckFailed(f"{check.subject}: {check.name}: {result.message}") from result.error
        if result.message and result.status != "expected":
            warnings.warn(f"{check}: {result.message}", SpecKVWarning, stacklevel=3)
    return Report(tuple(results))


def parametrize(checks: Iterable[Check]) -> "pytest.MarkDecorator":
    """A decorator that makes a test of each check; the test function calls its argument `check`.

    Checks that are expected to fail are marked `xfail`, strictly: one that passes fails the test.
    """
    import pytest

    parameters = []
    for check in checks:
        expected = check.expected_failure
        marks = [pytest.mark.xfail(reason=expected, strict=True)] if expected else []
        parameters.append(pytest.param(check, id=str(check), marks=marks))
    return pytest.mark.parametrize("check", parameters)
