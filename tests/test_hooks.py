"""What plugins can add besides policies: one plugin that adds one of each kind, and what is refused."""

import json
import sys
import warnings

import gymnasium
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.plugins import (
    KINDS,
    SWITCH,
    drafter_factory,
    load_costs,
    make_exporter,
    make_importer,
    register_environments,
    registry,
)
from speckv.saving import save_policy
from speckv.shipped import COSTS

from .plugin_files import fresh_registry, install  # noqa: F401 (a fixture)
from .synthetic import make_costs, make_sequences, write_dataset

pytestmark = pytest.mark.usefixtures("fresh_registry")

#: One of each kind but a policy, which tests/test_plugins.py has.
ALL = """
    import pathlib

    import click
    import gymnasium
    import numpy as np

    import speckv
    from speckv.exporting import Exporter
    from speckv.steplogs import Fault, Importer, Imported, StepLog

    HERE = pathlib.Path(__file__).parent


    class Coin(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            return 0, float(action), True, False, {}


    def echo(target, times: int = 1):
        from speckv.live import PromptLookup

        return PromptLookup(longest=times)


    class Lines(Importer):
        "One line a step: gamma, accepted."
        name = "lines"

        def __init__(self, separator=","):
            self.separator = separator

        def read(self, path):
            rows, faults = [], []
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                try:
                    rows.append([int(part) for part in line.split(self.separator)])
                except ValueError as error:
                    faults.append(Fault(number, str(error)))
            gamma, accepted = np.array(rows, dtype=np.int64).T
            log = StepLog(np.full(len(gamma), "a"), np.arange(len(gamma)), gamma, accepted)
            return Imported(log, faults, len(rows) + len(faults))


    class Constant(Exporter):
        "Keeps a constant gamma as a number in a file."
        name = "constant"
        decoder = "a decoder that has one setting"
        kinds = frozenset({"before"})

        def export(self, policy, out):
            (out / "gamma").write_text(str(policy.gamma))

        def load(self, out):
            from speckv.plugins import make_policy

            return make_policy("fixed:gamma=" + (out / "gamma").read_text())


    @click.command()
    @click.argument("name")
    def hello(name):
        "Greet somebody."
        if name == "nobody":
            raise speckv.SpecKVError("there is nobody to greet")
        click.echo(f"hello, {name}")


    @speckv.hookimpl
    def speckv_register_environments(register):
        register(id="plugin/Coin-v0", entry_point="plugin_all:Coin", max_episode_steps=3)

    @speckv.hookimpl
    def speckv_register_drafters(register):
        register("echo", "plugin_all:echo")

    @speckv.hookimpl
    def speckv_register_cost_models(register):
        register("toy", HERE / "toy.json")
        register("made", lambda: speckv.CostModel.load(HERE / "made.json"))

    @speckv.hookimpl
    def speckv_register_importers(register):
        register(Lines)

    @speckv.hookimpl
    def speckv_register_exporters(register):
        register(Constant)

    @speckv.hookimpl
    def speckv_register_commands(register):
        register(hello)
    """


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The folder with the plugin and its cost models."""
    install(tmp_path, "all", ALL)
    make_costs(name="toy").save(tmp_path / "toy.json")
    make_costs(name="made", draft=0.02).save(tmp_path / "made.json")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    gymnasium.registry.pop("plugin/Coin-v0", None)


def speckv(*arguments: object, code: int = 0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done


ADDED = {
    "environment": ["plugin/Coin-v0"],
    "drafter": ["echo"],
    "cost model": ["made", "toy"],
    "importer": ["lines"],
    "exporter": ["constant"],
    "command": ["hello"],
}


def test_everything_is_listed_with_its_origin(plugin):
    listed = json.loads(speckv("plugins", "--json").stdout)
    assert listed["skipped"] == []
    mine = [row for row in listed["registered"] if row["plugin"] == "plugin-all"]
    assert {row["version"] for row in mine} == {"1.2"} and {row["origin"] for row in mine} == {"plugin-all 1.2"}
    assert {kind: sorted(row["name"] for row in mine if row["kind"] == kind) for kind in ADDED} == ADDED
    built_in = {(row["kind"], row["name"]): row["origin"] for row in listed["registered"] if row["plugin"] == "speckv"}
    assert built_in["environment", "speckv/Replay-v0"] == "speckv (speckv_envs)"
    assert built_in["policy", "hazard"] == "speckv (speckv_policies)"
    for kind, name in [("drafter", "prompt-lookup"), ("drafter", "early-exit"), ("cost model", "rtx3090"),
                       ("importer", "speckv"), ("exporter", "speckv"), ("command", "compare")]:  # fmt: skip
        assert built_in[kind, name] == "speckv (speckv.builtin)"
    table = speckv("plugins").stdout
    assert "plugin-all 1.2" in table and "made, toy" in table


def test_every_built_in_is_registered():
    """What is shipped or is a command can't be forgotten."""
    found = registry()
    assert set(found.cost_models) == {path.stem for path in COSTS.glob("*.json")}
    assert set(found.commands) == set(main.commands)
    assert set(found.environments) == {name for name in gymnasium.registry if name.startswith("speckv/")}
    for kind in KINDS:
        assert all(entry.plugin.built_in for entry in found.of_kind(kind).values()) and found.of_kind(kind)


def test_an_environment(plugin):
    with pytest.raises(gymnasium.error.Error):
        gymnasium.make("plugin/Coin-v0")
    register_environments()
    register_environments()
    environment = gymnasium.make("plugin/Coin-v0")
    environment.reset(seed=0)
    assert environment.step(1)[1] == 1.0 and environment.spec.max_episode_steps == 3


def test_a_drafter(plugin, small_pair_paths):
    arguments = ["decode", "--target", small_pair_paths.target, "--compression", "fp32", "--prompt", "Hello",
                 "--max-new-tokens", 8]  # fmt: skip
    alone = speckv(*arguments, "--drafter", "prompt-lookup:longest=2").stdout
    assert speckv(*arguments, "--drafter", "echo:times=2").stdout.split("\nfixed")[0] == alone.split("\nfixed")[0]
    assert "drafter 'echo' has no parameter 'size'" in speckv(*arguments, "--drafter", "echo:size=2", code=2).stderr


def test_a_cost_model_by_name(plugin):
    traces = write_dataset(plugin / "traces", make_sequences(prompts=6, budget=12), budget=12).path
    out = plugin / "out.json"
    speckv("compare", "--traces", traces, "--costs", "toy", "--costs", "made", "--policy", "none", "--folds", 2,
           "--json", out)  # fmt: skip
    assert json.loads(out.read_text())["settings"]["costs"] == ["toy", "made"]
    assert "toy: ms by tokens" in speckv("costs", "show", "toy").stdout
    assert (
        "expected a cost model, or the name of one: epyc-float32, made," in speckv("costs", "show", "to", code=2).stderr
    )


def test_a_file_goes_before_a_name(plugin, monkeypatch):
    monkeypatch.chdir(plugin)
    make_costs(name="mine").save(plugin / "rtx3090")
    assert load_costs("rtx3090").name == "mine"


def test_an_importer(plugin):
    source, out = plugin / "steps.txt", plugin / "steps.parquet"
    source.write_text("4;2\n4;four\n2;0\n")
    done = speckv("traces", "import", source, "--importer", 'lines:separator=";"', "--out", out)
    assert done.stdout == f"{out}: 2 of 3 steps, of 1 sequences; 1 faults\n"
    assert done.stderr == f"{source}: row 2: invalid literal for int() with base 10: 'four' (left out)\n"
    again = speckv("traces", "import", out, "--importer", "speckv", "--out", plugin / "again.parquet")
    assert "2 of 2 steps" in again.stdout and not again.stderr
    with pytest.raises(SpecKVError, match="importer 'lines' has no parameter 'sep'; it has separator"):
        make_importer("lines:sep=1")


def test_an_exporter(plugin):
    from speckv.plugins import make_policy

    traces = write_dataset(plugin / "traces", make_sequences(prompts=4, budget=12), budget=12).path
    save_policy(make_policy("fixed:gamma=3"), plugin / "saved")
    done = speckv("export", plugin / "saved", "--to", "constant", "--out", plugin / "artefact", "--traces", traces,
                  "--costs", "toy")  # fmt: skip
    assert "100.00% of" in done.stdout and (plugin / "artefact" / "gamma").read_text() == "3"
    rows = {row["name"]: row for row in json.loads(speckv("export", "--list", "--json").stdout)}
    assert rows["constant"]["observes"] == [] and rows["constant"]["kinds"] == ["before"]
    assert rows["constant"]["origin"] == "plugin-all 1.2"
    assert "plugin-all 1.2" in speckv("export", "--list").stdout
    with pytest.raises(SpecKVError, match="did you mean 'constant'"):
        make_exporter("constat")


def test_a_command(plugin):
    assert speckv("hello", "world").stdout == "hello, world\n"
    assert speckv("hello", "nobody", code=2).stderr == "speckv: error: there is nobody to greet\n"
    assert "Greet somebody." in speckv("--help").stdout
    assert "No such command 'helo'" in speckv("helo", code=2).stderr


def test_the_switch_leaves_all_of_it_out(plugin, monkeypatch):
    monkeypatch.setenv(SWITCH, "")
    listed = json.loads(speckv("plugins", "--json").stdout)
    assert {row["plugin"] for row in listed["registered"]} == {"speckv"} and listed["skipped"] == []
    assert "hello" not in speckv("--help").stdout
    speckv("hello", "world", code=2)
    assert "plugin_all" not in sys.modules


def test_help_collects_nothing_where_there_is_no_plugin():
    assert "compare" in speckv("--help").stdout and registry.cache_info().currsize == 0


HOOK = """
    import click, speckv
    from speckv.exporting import Exporter
    from speckv.steplogs import Importer

    class Name:
        name = "x"

    @speckv.hookimpl
    def speckv_register_{kind}(register):
        register({arguments})
    """
REFUSED = {
    "environment-class": ("environments", "'a/B-v0', object", "'a/B-v0' is registered with <class 'object'>"),
    "environment-vector": ("environments", "'a/B-v0', 'a:B', vector_entry_point=3", "is registered with 3"),
    "environment-setting": ("environments", "'a/B-v0', 'a:B', mood=3", "unexpected keyword argument 'mood'"),
    "environment-name": ("environments", "'a b', 'a:B'", "Malformed environment ID"),
    "drafter-name": ("drafters", "3, 'a:b'", "3 can't name a drafter; give a text without a colon"),
    "drafter-colon": ("drafters", "'a:b', 'a:b'", "'a:b' can't name a drafter"),
    "cost-model-name": ("cost_models", "'', 'a.json'", "'' can't name a cost model"),
    "drafter-class": ("drafters", "'mine', object", "give its place as 'module:attribute'"),
    "drafter-place": ("drafters", "'mine', 'module'", "drafter 'mine' is registered with 'module'"),
    "importer": ("importers", "Name", "is not an Importer subclass with a name"),
    "importer-nameless": ("importers", "type('Mine', (Importer,), {})", "is not an Importer subclass with a name"),
    "exporter": ("exporters", "Name", "is not an Exporter subclass with a name"),
    "command": ("commands", "print", "is not a click command with a name"),
    "arguments": ("drafters", "'mine'", "TypeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_skipped_and_listed(name, tmp_path, monkeypatch):
    kind, arguments, reason = REFUSED[name]
    install(tmp_path, "wrong", HOOK.format(kind=kind, arguments=arguments))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning, match=r"plugin plugin-wrong 1\.2 is skipped"):
        registry()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (skipped,) = json.loads(speckv("plugins", "--json").stdout)["skipped"]
    assert skipped["origin"] == "plugin-wrong 1.2" and reason in skipped["reason"]
    assert "skipped: plugin-wrong 1.2: " in speckv("plugins").stdout


TAKEN = {
    "environments": ("'speckv/Replay-v0', 'a:B'", "environment 'speckv/Replay-v0'", "speckv (speckv_envs)"),
    "drafters": ("'early-exit', 'a:b'", "drafter 'early-exit'", "speckv (speckv.builtin)"),
    "cost_models": ("'rtx3090', 'a.json'", "cost model 'rtx3090'", "speckv (speckv.builtin)"),
    "importers": ("type('I', (Importer,), {'name': 'speckv'})", "importer 'speckv'", "speckv (speckv.builtin)"),
    "exporters": ("type('E', (Exporter,), {'name': 'speckv'})", "exporter 'speckv'", "speckv (speckv.builtin)"),
    "commands": ("click.Command('compare')", "command 'compare'", "speckv (speckv.builtin)"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_name_that_is_taken_is_refused_with_both_origins(kind, tmp_path, monkeypatch):
    arguments, what, owner = TAKEN[kind]
    install(tmp_path, "second", HOOK.format(kind=kind, arguments=arguments))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning):
        ((plugin, reason),) = registry().skipped
    assert str(plugin) == "plugin-second 1.2"
    assert f"the {what} of plugin-second 1.2 is registered by {owner} already" in reason


def test_of_two_plugins_the_first_by_name_keeps_a_name(tmp_path, monkeypatch):
    for name in ("b", "a"):
        install(tmp_path, name, HOOK.format(kind="drafters", arguments="'mine', 'a:b'"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning):
        found = registry()
    assert found.drafters["mine"].origin == "plugin-a 1.2"
    assert "of plugin-b 1.2 is registered by plugin-a 1.2 already" in found.skipped[0][1]


def test_a_plugin_is_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    """Its drafter is fine, its command is not."""
    source = (
        HOOK.format(kind="drafters", arguments="'mine', 'a:b'")
        + """
    @speckv.hookimpl
    def speckv_register_commands(register):
        register(3)
    """
    )
    install(tmp_path, "half", source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(SpecKVWarning):
        assert "mine" not in registry().drafters


@pytest.mark.parametrize("place", ["a_module_that_nobody_has:make", "speckv.errors:make"])
def test_a_drafter_that_is_not_where_it_was_said_to_be(place, tmp_path, monkeypatch):
    install(tmp_path, "gone", HOOK.format(kind="drafters", arguments=f"'mine', {place!r}"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecKVError, match=r"drafter 'mine' of plugin-gone 1\.2 can't be imported"):
        drafter_factory("mine")


def test_a_drafter_that_makes_something_else(tmp_path, monkeypatch, small_pair_paths):
    source = HOOK.format(kind="drafters", arguments="'mine', 'plugin_other:make'") + "\n    make = lambda target: 3\n"
    install(tmp_path, "other", source)
    monkeypatch.syspath_prepend(tmp_path)
    done = speckv("decode", "--target", small_pair_paths.target, "--compression", "fp32", "--prompt", "Hello",
                  "--drafter", "mine", code=2)  # fmt: skip
    assert "drafter 'mine' made a int, neither a Drafter nor a LanguageModel" in done.stderr


def test_a_cost_model_under_another_name(plugin):
    make_costs(name="another").save(plugin / "toy.json")
    done = speckv("costs", "show", "toy", code=2)
    assert "registered as 'toy' calls itself 'another'" in done.stderr
