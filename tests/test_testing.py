"""The three front ends of the kit, and its page in the docs."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

from speckv.errors import SpecKVError, SpecKVWarning
from speckv.testing import Check, CheckFailed, CheckSkipped, plugin_checks, report
from speckv.testing.checks import expecting, raise_first, require, require_package

from .plugin_files import fresh_registry  # noqa: F401

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "testing-a-plugin.md"


def passes():
    pass


def fails():
    require(1 > 2, "1 is not above 2\nnor will it be")


def breaks():
    raise ZeroDivisionError("by nothing")


def skips():
    raise CheckSkipped("not here")


def warns():
    import warnings

    warnings.warn("rather slow", SpecKVWarning, stacklevel=2)


def checks(*functions, **expected):
    return expecting([Check(function.__name__, "it", function) for function in functions], expected)


def test_a_report_tells_everything():
    made = report(checks(passes, fails, breaks, skips, warns, fails="known", passes="outdated"))
    assert [(result.check.name, result.status, result.message) for result in made.results] == [
        ("passes", "failed", "it passes, and is expected to fail: outdated"),
        ("fails", "expected", "known"),
        ("breaks", "failed", "ZeroDivisionError: by nothing"),
        ("skips", "skipped", "not here"),
        ("warns", "passed", "rather slow"),
    ]
    assert [result.check.name for result in made.failures] == ["passes", "breaks"]
    assert str(made).splitlines()[2:] == [
        "failed    it-breaks: ZeroDivisionError: by nothing",
        "skipped   it-skips: not here",
        "passed    it-warns: rather slow",
        "1 passed, 2 failed, 1 skipped, 1 expected",
    ]


def test_the_first_failure_is_raised():
    with pytest.raises(CheckFailed, match=r"^it: fails: 1 is not above 2$") as caught:
        raise_first(checks(passes, fails, breaks))
    assert isinstance(caught.value.__cause__, CheckFailed)
    with pytest.raises(CheckFailed, match="it passes, and is expected to fail: outdated"):
        raise_first(checks(fails, passes, passes="outdated", fails="known"))
    with pytest.warns(SpecKVWarning) as warned:
        made = raise_first(checks(passes, skips, warns, breaks, breaks="known"))
    assert [str(warning.message) for warning in warned] == ["it-skips: not here", "it-warns: rather slow"]
    assert [result.status for result in made.results] == ["passed", "skipped", "passed", "expected"]


def test_a_check_that_does_not_exist():
    with pytest.raises(SpecKVError, match="there is no check 'passs' to fail; the checks are passes, fails"):
        checks(passes, fails, passs="a typo")


def test_a_check_of_one_thing_alone():
    both = [Check("fails", "one", fails), Check("fails", "two", fails)]
    marked = expecting(both, {"two-fails": "known"})
    assert [result.status for result in report(marked).results] == ["failed", "expected"]


def test_a_package_that_is_missing():
    require_package("numpy", "live")
    with pytest.raises(CheckSkipped, match=r"no_such_package is not installed; run: pip install 'speckv\[live\]'"):
        require_package("no_such_package", "live")


TESTS = """
from speckv.testing import parametrize
from tests.test_testing import checks, breaks, fails, passes, skips

@parametrize(checks(passes, fails, breaks, skips, breaks="known"))
def test_it(check):
    check()

@parametrize(checks(passes, passes="outdated"))
def test_strictly(check):
    check()
"""


def test_each_check_is_a_test_of_pytest(tmp_path):
    (tmp_path / "test_kit.py").write_text(TESTS)
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "test_kit.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
    )
    found = set(re.findall(r"^(\w+) (?:\[\d+\] )?test_kit.py(?:::|:\d+: )(\S+)", done.stdout, re.MULTILINE))
    assert {("PASSED", "test_it[it-passes]"), ("FAILED", "test_it[it-fails]"), ("XFAIL", "test_it[it-breaks]"),
            ("FAILED", "test_strictly[it-passes]")} <= found, done.stdout  # fmt: skip
    assert re.search(r"2 failed, 1 passed, 1 skipped, 1 xfailed", done.stdout), done.stdout
    assert "not here" in done.stdout and "XPASS(strict)" in done.stdout


def test_importing_the_kit_imports_nothing_heavy():
    heavy = {"torch", "transformers", "pytest", "sklearn", "stable_baselines3", "gymnasium", "pyarrow", "matplotlib"}
    program = f"import sys, speckv.testing; print({heavy} & {{*sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "set()\n", done.stderr


# Plugins

PLUGIN = """
import speckv

class Mine(speckv.Policy):
    \"\"\"Drafts two tokens.\"\"\"

    name = "mine"
    source = "a test"

    def choose_gamma(self, features, state):
        return 2

@speckv.hookimpl
def speckv_register_policies(register):
    register(Mine)
"""
COSTS = """
@speckv.hookimpl
def speckv_register_cost_models(register):
    from speckv.testing.recordings import make_costs
    register("mine", lambda: make_costs(name="another"))
"""
COMMAND = """
@speckv.hookimpl
def speckv_register_commands(register):
    import click
    register(click.command("mine")(lambda: None))
"""
#: Check -> a bad plugin, and the other checks that find fault with it as well.
SPECIMENS = {
    "imports_quietly": [
        ("import sklearn" + PLUGIN, "it imports sklearn"),
        ("print('hello')" + PLUGIN, "it prints 'hello'"),
        ("open('trace.txt', 'w').close()" + PLUGIN, "it writes trace.txt"),
    ],
    "implements_known_hooks": [
        (PLUGIN.replace("speckv_register_policies", "speckv_register_policy"), "speckv_register_policy"),
        (PLUGIN.replace("register(Mine)", "register(42)"), "42 is not a Policy subclass"),
    ],
    "registers_something": [(PLUGIN.replace("register(Mine)", "pass"), "it registers nothing")],
    "takes_no_names": [(PLUGIN.replace('"mine"', '"fixed"'), "the policy 'fixed' is registered by speckv")],
    "loads_its_cost_models": [(PLUGIN + COSTS, "calls itself 'another'")],
    "explains_its_commands": [(PLUGIN + COMMAND, "the command 'mine' has no help text")],
}


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [(name, *bad) for name, of_check in SPECIMENS.items() for bad in of_check],
    ids=lambda value: value if value in SPECIMENS else "",
)
def test_a_bad_plugin_is_caught(name, source, message, tmp_path, monkeypatch, fresh_registry):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin_bad.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (failed,) = report(plugin_checks("plugin_bad", everything=False)).failures
    assert failed.check.name == name and message in failed.message, failed.message


def test_everything_that_a_plugin_registers_is_checked(tmp_path, monkeypatch, fresh_registry):  # noqa: F811
    (tmp_path / "plugin_good.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    made = report(check for check in plugin_checks("plugin_good") if not check.name.startswith("decodes_"))
    assert not made.failures, str(made)
    assert {result.check.subject for result in made.results} == {"plugin_good", "mine"}
    names = {result.check.name for result in made.results if result.check.subject == "plugin_good"}
    assert names == set(SPECIMENS), "add a plugin that the new check catches"
    bad = PLUGIN.replace("return 2", "return 2.5")
    (tmp_path / "plugin_worse.py").write_text(bad)
    (failed,) = report(plugin_checks("plugin_worse")).failures
    assert str(failed.check) == "mine-answers_in_range"


# The page

BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path):
    policy, raising, tests, reporting, expected = BLOCKS
    (tmp_path / "patient.py").write_text(policy)
    (tmp_path / "test_patient.py").write_text(f"from patient import Patient\n{tests}")
    (tmp_path / "test_expected.py").write_text(f"from patient import Patient\n{expected}")
    script = f"from patient import Patient\n{raising}\n{reporting}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    common = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", script], **common)
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout.splitlines()[-1] and "passed    patient:least=1-sees_no_future" in done.stdout
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], **common)
    assert done.returncode == 0 and re.search(r"\d\d passed", done.stdout) and "1 xfailed" in done.stdout, done.stdout


def test_the_page_names_every_check():
    from speckv.testing import drafters, environments, exporters, plugins, policies, traces

    page = PAGE.read_text(encoding="utf-8")
    for module in (drafters, environments, exporters, plugins, policies, traces):
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["case"] and name[0] != "_"
        ]
        assert len(functions) >= 6
        for name in functions:
            assert f"`{name}`" in page, name
