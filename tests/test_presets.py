"""Presets: what `NAME@tuned` and `NAME@FILE` are, those that come with the zoo, and files that are none."""

import importlib.util
import inspect
import itertools
import json
import pathlib
import shlex
import sys
from types import ModuleType

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from speckv.cli import main
from speckv.comparison import folds_of
from speckv.errors import SpecKVError
from speckv.plugins import load_costs, make_policy, registry
from speckv.policy import Clairvoyant, Policy
from speckv.presets import tuned_preset, write_preset
from speckv.shipped import shipped_traces
from speckv.traces import Rollouts

from .plugin_files import fresh_registry, install  # noqa: F401 (a fixture)
from .synthetic import make_costs, make_sequences, write_dataset

ROOT = pathlib.Path(__file__).parents[1]
ZOO = {name: entry.value for name, entry in registry().policies.items() if entry.plugin.built_in}
PRESETS = {name: path for name, policy in ZOO.items() if (path := tuned_preset(policy))}


def learns(policy: type[Policy]) -> bool:
    return (policy.fit is not Policy.fit or policy().online) and not (
        policy.explores or issubclass(policy, Clairvoyant)
    )


def test_every_learner_has_a_preset_but_those_that_choose_all_they_have_in_fit():
    to_choose = {
        name: [parameter.default for parameter in inspect.signature(policy).parameters.values()]
        for name, policy in ZOO.items()
        if learns(policy)
    }
    assert set(PRESETS) == {
        name for name, defaults in to_choose.items() if any(value is not None for value in defaults)
    }
    assert len(PRESETS) > 20


@pytest.fixture(scope="module")
def traces() -> Rollouts:
    return shipped_traces().load()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_of_the_zoo(name, traces):
    preset = json.loads(PRESETS[name].read_text(encoding="utf-8"))
    tuned, best = make_policy(f"{name}@tuned"), max(preset["tried"], key=preset["tried"].get)
    assert json.loads(json.dumps(tuned.get_params())) == preset["params"]
    assert tuned.get_params() == make_policy(best).get_params() and len(preset["tried"]) > 1
    default = make_policy(name).get_params()
    assert default in [make_policy(spec).get_params() for spec in preset["tried"]], "the default must have been tried"
    held_out = folds_of(traces, preset["folds"], preset["seed"]) == 0
    assert set(preset["prompts"]) == set(traces.ids[~held_out]) and len(set(traces.ids[held_out])) == 16
    assert not set(preset["prompts"]) & set(traces.ids[held_out])
    assert preset["costs"] == "epyc-float32" and preset["command"].startswith(f"speckv tune {name} ")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    place = importlib.util.spec_from_file_location("benchmark_of_presets", ROOT / "benchmarks" / "presets.py")
    module = importlib.util.module_from_spec(place)
    sys.modules[place.name] = module  # where its dataclass looks for it
    place.loader.exec_module(module)
    return module


def test_the_script_finds_the_presets_that_are_there(script):
    assert set(script.SEARCHES) == set(PRESETS)
    for name, grids in script.SEARCHES.items():
        words = shlex.split(json.loads(PRESETS[name].read_text(encoding="utf-8"))["command"])
        assert [grid for option, grid in itertools.pairwise(words) if option == "--grid"] == list(grids)


def test_the_page_shows_them(script, traces, monkeypatch):
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    shown = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) > 6}
    for name in PRESETS:
        assert shown[name][2].strip() == (script.changed(name) or "as it is")
    costs = load_costs("epyc-float32")
    # The page's decision times were measured; a test must not hang on how busy its machine is.
    monkeypatch.setattr(script, "measure_controller", lambda policy, *_: costs.controller[policy.name])
    row = script.judge("survival-budget", traces, costs)
    assert float(shown["survival-budget"][4].split("%")[0]) == pytest.approx(100 * row.gain, abs=0.2)


@pytest.fixture
def preset(tmp_path) -> pathlib.Path:
    path = tmp_path / "preset.json"
    write_preset(path, make_policy("gammatune:start=2,largest=5"), {})
    return path


@given(chosen=st.fixed_dictionaries({}, optional={"start": st.integers(2, 5), "largest": st.integers(5, 9)}))
def test_a_parameter_that_is_given_wins(tmp_path_factory, chosen):
    path = tmp_path_factory.getbasetemp() / "gammatune.json"
    write_preset(path, make_policy("gammatune:start=2,largest=5"), {})
    spec = f"gammatune@{path}:{','.join(f'{name}={value}' for name, value in chosen.items())}"
    expected = make_policy("gammatune").get_params() | {"start": 2, "largest": 5} | chosen
    assert make_policy(spec).get_params() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "is not a preset"),
        ({"schema_version": 2}, "schema version 2 is newer than 1"),
        ({"schema_version": None}, "has no schema version"),
        ({"policy": "fixed"}, "is a preset of 'fixed', not of 'gammatune'"),
        ({"policy": ["gammatune"]}, "is a preset of ['gammatune'], not of"),
        ({"params": {"gama": 1}}, "is no preset that 'gammatune' can be made with"),
        ({"params": {"start": -1}}, "is no preset that 'gammatune' can be made with (start is -1"),
        ({"params": [1]}, "is no preset that 'gammatune' can be made with"),
    ],
)
def test_a_file_that_is_no_preset_of_the_policy(preset, change, message):
    preset.write_text(json.dumps(json.loads(preset.read_text()) | change))
    with pytest.raises(SpecKVError) as caught:
        make_policy(f"gammatune@{preset}")
    assert message in str(caught.value) and str(preset) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_preset(preset):
    preset.write_text(preset.read_text()[:40])
    with pytest.raises(SpecKVError, match="not readable as a preset"):
        make_policy(f"gammatune@{preset}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("svip@tuned", "policy 'svip' comes with no preset; `speckv tune svip --grid … --out FILE` finds one"),
        ("svip@tune", "policy 'svip' has no preset 'tune', which is no file; `speckv tune svip --grid … --out FILE`"),
        ("svip@", "policy 'svip' has no preset ''"),
        ("hazrd@tuned", "policy 'hazrd' is unknown; did you mean 'hazard'?"),
        ("hazard@tuned:strength=1", "policy 'hazard' has no parameter 'strength'"),
    ],
)
def test_no_such_preset_is_one_line(spec, message):
    with pytest.raises(SpecKVError) as caught:
        make_policy(spec)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_policy_inside_another_may_have_one(preset):
    assert make_policy(f"off-switch:policy=gammatune@{preset},patience=2").inner.label == "gammatune:start=2,largest=5"


def test_commands_take_it(preset, tmp_path):
    """Comparison, log, estimate and training, each by the file that `tune` would have written."""
    folder = tmp_path / "traces"
    write_dataset(folder, make_sequences(prompts=6, compressions=["bf16"], budget=16), budget=16)
    make_costs().save(tmp_path / "costs.json")
    files = ["--traces", str(folder), "--costs", str(tmp_path / "costs.json")]
    spec, label = f"gammatune@{preset}", "gammatune:start=2,largest=5"

    def run(*command: str) -> str:
        done = CliRunner().invoke(main, list(command))
        assert done.exit_code == 0, done.output
        return done.output

    run("compare", "--policy", spec, "--policy", f"{spec}:start=4", *files, "--folds", "2",
        "--json", str(tmp_path / "result.json"))  # fmt: skip
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    assert {label, "gammatune:start=4,largest=5"} <= {cell["policy"] for cell in cells}
    run("traces", "to-steps", *files, "--policy", spec, "--out", str(tmp_path / "log.parquet"))
    assert label in run("evaluate", str(tmp_path / "log.parquet"), "--policy", spec)

    hazard = tmp_path / "hazard.json"
    write_preset(hazard, make_policy("hazard:regularisation=0.25"), {})
    run("train", f"hazard@{hazard}", *files, "--folds", "2", "--out", str(tmp_path / "trained"))
    assert json.loads((tmp_path / "trained" / "policy.json").read_text())["params"] == {"regularisation": 0.25}
    told = run("tune", f"hazard@{hazard}", "--grid", "regularisation=0.5;2", *files, "--folds", "2")
    assert f" against hazard@{hazard}, " in told


def test_the_list_of_policies_says_which_have_one():
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(main, ["policies", "--json"]).output)}
    assert {name for name, row in rows.items() if row["tuned"] and name in ZOO} == set(PRESETS)


PLUGIN = """
    from speckv import Policy, hookimpl

    class Steady(Policy):
        name = "{name}"

        def __init__(self, gamma: int = 1) -> None:
            super().__init__()
            self.gamma = gamma

        def choose_gamma(self, features, state):
            return self.gamma

    @hookimpl
    def speckv_register_policies(register):
        register(Steady)
"""


def test_a_plugin_brings_its_own(fresh_registry, tmp_path, monkeypatch):  # noqa: F811
    install(tmp_path, "steady", PLUGIN.format(name="steady"))
    monkeypatch.syspath_prepend(tmp_path)
    assert tuned_preset(type(make_policy("steady"))) is None
    write_preset(tmp_path / "presets" / "steady.json", make_policy("steady:gamma=3"), {})
    assert make_policy("steady@tuned").gamma == 3 and make_policy("steady@tuned:gamma=2").gamma == 2


def test_a_policy_of_a_session_has_none():
    policy = type("Loose", (Policy,), {"name": "loose", "__module__": "__main__ of nowhere"})
    assert tuned_preset(policy) is None


def test_a_name_with_an_at_sign_is_refused(fresh_registry, tmp_path, monkeypatch):  # noqa: F811
    install(tmp_path, "steady", PLUGIN.format(name="steady@home"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="'steady@home' can't name a policy; give a text without an @"):
        registry()
