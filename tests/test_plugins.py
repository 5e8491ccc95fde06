"""Plugins: the example from its folder to the leaderboard, and broken ones that must not matter."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
from click.testing import CliRunner

import speckv.shipped
import speckv_policies
from speckv.cli import main
from speckv.errors import SpecKVWarning
from speckv.plugins import SWITCH, make_policy, registry
from speckv.policy import Policy
from speckv.traces import TraceDataset

from .plugin_files import fresh_registry, install  # noqa: F401 (a fixture)
from .synthetic import make_costs, make_sequences, write_dataset

EXAMPLE = pathlib.Path(__file__).parents[1] / "plugins" / "speckv-example"
ZOO: set[str] = set()
speckv_policies.speckv_register_policies(lambda policy: ZOO.add(policy.name))

pytestmark = pytest.mark.usefixtures("fresh_registry")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> TraceDataset:
    folder = tmp_path_factory.mktemp("traces") / "traces"
    return write_dataset(folder, make_sequences(prompts=6, compressions=["bf16"], budget=12), budget=12)


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("costs") / "toy.json"
    make_costs(compressions=["bf16"]).save(path)
    return path


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> pathlib.Path:
    """The folder into which pip has installed plugins/speckv-example."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check",
               "--target", str(target), str(EXAMPLE)]  # fmt: skip
    if importlib.util.find_spec("hatchling"):  # otherwise pip fetches it
        command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


HOOK = """
    import speckv

    class Mine(speckv.Policy):
        name = "{policy}"
        def choose_gamma(self, features, state):
            return 1

    @speckv.hookimpl
    def speckv_register_policies(register):
        register(Mine)
    """
GOOD = HOOK.format(policy="good-one")
BROKEN = {
    "raises": ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "syntax": ("def (:", "SyntaxError"),
    "missing": ("import a_module_that_nobody_has", "ModuleNotFoundError"),
    "misspelt": (HOOK.format(policy="lost").replace("def speckv_register_policies", "def speckv_register_policy"),
                 "speckv_register_policy"),
    "duplicate": (HOOK.format(policy="fixed"),
                  "'fixed' of plugin-duplicate 1.2 is registered by speckv (speckv_policies) already"),
    "twice": (HOOK.format(policy="again") + "    register(Mine)\n", "'again' is registered twice"),
    "number": (HOOK.format(policy="x").replace("register(Mine)", "register(42)"), "42 is not a Policy subclass"),
    "instance": (HOOK.format(policy="x").replace("register(Mine)", "register(Mine())"), "is not a Policy subclass"),
    "nameless": (HOOK.format(policy="x").replace('name = "x"', ""), "is not a Policy subclass with a name"),
    "feature": (HOOK.format(policy="x").replace('name = "x"', 'name = "x"; features = ("mood",)'), "'mood' is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_skipped_by_name(name, tmp_path, monkeypatch):
    source, reason = BROKEN[name]
    install(tmp_path, name, source)
    install(tmp_path, "works", GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning, match=f"plugin plugin-{name} 1.2 is skipped"):
        found = registry()
    ((plugin, why),) = found.skipped
    assert str(plugin) == f"plugin-{name} 1.2" and reason in why
    assert set(found.policies) == ZOO | {"good-one"}
    assert found.policies["good-one"].origin == "plugin-works 1.2"
    assert found.policies["fixed"].origin == "speckv (speckv_policies)"
    assert make_policy("good-one").choose_gamma(None, {}) == 1


def test_nothing_of_a_broken_plugin_is_kept(tmp_path, monkeypatch):
    """Its first policy is fine, its second one is not."""
    install(tmp_path, "half", HOOK.format(policy="first") + "    register(42)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning, match="plugin-half"):
        assert set(registry().policies) == ZOO


def test_a_hook_that_calls_register_before_it_raises(tmp_path, monkeypatch):
    source = HOOK.format(policy="first") + "    raise OSError('disk is gone')\n"
    install(tmp_path, "late", source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning, match="OSError: disk is gone"):
        assert set(registry().policies) == ZOO


def test_an_empty_switch_leaves_outsiders_out(tmp_path, monkeypatch):
    install(tmp_path, "works", GOOD)
    install(tmp_path, "raises", BROKEN["raises"][0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(SWITCH, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(registry().policies) == ZOO and not registry().skipped
    assert "plugin_raises" not in sys.modules and "plugin_works" not in sys.modules


def test_a_policy_that_cannot_be_made_does_not_stop_the_rest(tmp_path, monkeypatch):
    source = HOOK.format(policy="needy").replace(
        'name = "needy"', 'name = "needy"; __init__ = lambda self, gamma: None'
    )
    install(tmp_path, "needy", source)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)
        done = CliRunner().invoke(main, ["policies", "--json"])
    assert done.exit_code == 0
    assert {row["name"] for row in json.loads(done.stdout)} >= ZOO


def test_check_reports_a_broken_plugin(tmp_path, monkeypatch, dataset, costs):
    from speckv.costs import CostModel

    monkeypatch.setattr(speckv.shipped, "shipped_traces", lambda: dataset)
    monkeypatch.setattr(speckv.shipped, "shipped_costs", lambda: [CostModel.load(costs)])
    for name, entry in registry().policies.items():  # what training does is not what this is about
        if entry.value.fit is not Policy.fit and name != "hazard":
            monkeypatch.setattr(entry.value, "fit", lambda self, traces, costs, seed=0: make_policy("fixed"))
    install(tmp_path, "raises", BROKEN["raises"][0])
    install(tmp_path, "fails", HOOK.format(policy="failing").replace("return 1", "return 1 / 0"))
    monkeypatch.syspath_prepend(tmp_path)
    registry.cache_clear()
    done = CliRunner().invoke(main, ["check"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("speckv: error: ")
    assert "plugin plugin-raises 1.2 is broken: RuntimeError: out of order" in line
    assert "policy failing of plugin-fails 1.2: ZeroDivisionError" in line
    assert "policy hazard: ok" in done.stdout and "all is well" not in done.stdout

    monkeypatch.setenv(SWITCH, "")
    registry.cache_clear()
    done = CliRunner().invoke(main, ["check"])
    assert (done.exit_code, done.stderr) == (0, "") and "all is well" in done.stdout


def run(folders, *command: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that knows nothing but these folders and the packages."""
    path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "speckv", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        cwd=folders[-1],
        timeout=120,
    )


def test_the_example_is_installed_and_listed_by_a_new_process(example, tmp_path):
    """Beside a broken plugin."""
    install(tmp_path, "raises", BROKEN["raises"][0])
    done = run([example, tmp_path], "policies", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == ZOO | {"streak"}
    assert rows["streak"]["origin"] == "speckv-example 0.1.0" and rows["streak"]["kind"] == "before"
    assert rows["streak"]["family"] == "speckv_example" and rows["confidence"]["family"] == "thresholds"
    assert rows["oracle"]["kind"] == "bound" and rows["hazard"]["trainable"] and not rows["fixed"]["trainable"]
    assert rows["ucb1"]["online"] and not rows["hazard"]["online"]
    assert all(row["source"] and row["summary"] for row in rows.values())
    assert "plugin-raises 1.2" in done.stderr and "Traceback" not in done.stderr


def test_the_example_stands_in_the_leaderboard(example, dataset, costs, tmp_path):
    out = tmp_path / "out.json"
    done = run([example, tmp_path], "compare", "--traces", str(dataset.path), "--costs", str(costs), "--policy",
               "streak:long=5", "--folds", "2", "--json", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "streak" in done.stdout
    value = json.loads(out.read_text())
    assert value["settings"]["policies"]["streak:long=5"] == "Streak(long=5, short=2)"
    cell = next(c for c in value["cells"] if (c["policy"], c["compression"]) == ("streak:long=5", "bf16"))
    assert cell["gamma_share"][5] > 0 and cell["gamma_share"][2] > 0 and cell["throughput"] > 0


def test_the_example_is_short():
    lines = sum(len(file.read_text().splitlines()) for file in EXAMPLE.rglob("*") if file.suffix in {".py", ".toml"})
    assert 10 < lines < 100
