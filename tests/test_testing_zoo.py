"""Everything that is registered here, and every plugin of this repository, passes the kit."""

import pathlib
import sys
import tomllib

import gymnasium
import pytest

from speckv.plugins import make_exporter, register_environments, registry
from speckv.policy import Clairvoyant
from speckv.testing import env_checks, exporter_checks, parametrize, plugin_checks, policy_checks, report
from speckv.training import TrainedPolicy

from .zoo import quick

ROOT = pathlib.Path(__file__).parents[1]
BUILT_IN = ("speckv.builtin", "speckv_policies", "speckv_envs")
LIVE = {"decodes_live_as_replayed", "decodes_losslessly"}
#: Checks that fit once more, or not at all.
FITS = {"fits_by_seed", "fits_anew", "fits_without_changing_parameters", "fits_step_logs", "leaves_the_recording_alone",
        "copes_with_gamma_max_1", "copes_with_unknown_costs"}  # fmt: skip
STATIC = {
    "stores_parameters",
    "describes_itself",
    "asks_for_known_features",
    "refuses_in_one_line",
    "decides_something",
}
#: They take a while to be fitted.
PATIENT = {"forest", "mlp", "mlp-throughput"}
MORE_PATIENT = {"boosted-hazard", "neural-hazard"}

register_environments()
POLICIES = sorted(name for name, entry in registry().policies.items() if entry.plugin.built_in)


def is_slow(name, check):
    if name in MORE_PATIENT or issubclass(registry().policies[name].value, TrainedPolicy):
        return check.name not in STATIC
    if name == "best-fixed":  # it has every gamma of a log evaluated
        return check.name in {*LIVE, "fits_step_logs", "refuses_useless_logs"}
    return check.name in LIVE or (name in PATIENT and check.name in FITS)


QUICK, SLOW = [], []
for name in POLICIES:
    for check in policy_checks(quick(name)):
        (SLOW if is_slow(name, check) else QUICK).append(check)
#: Tested with other arguments, or with a model pair, in test_testing_environments.py.
ENVIRONMENTS = [name for name in gymnasium.registry if name.startswith("speckv/") and "ModelPair" not in name]


def test_the_zoo_is_not_empty():
    assert len(POLICIES) > 35 and len(QUICK + SLOW) > 1000 and len(ENVIRONMENTS) == 3
    assert sum(issubclass(registry().policies[name].value, Clairvoyant) for name in POLICIES) >= 3


@parametrize(QUICK)
def test_a_policy(check):
    check()


@pytest.mark.slow
@parametrize(SLOW)
def test_a_policy_slowly(check):
    check()


@parametrize(check for name in ENVIRONMENTS for check in env_checks(name))
def test_an_environment(check):
    check()


@parametrize(
    check
    for name, entry in registry().exporters.items()
    if entry.plugin.built_in
    for check in exporter_checks(make_exporter(name), policies=[quick(spec) for spec in ("fixed", "svip", "heuristic")])
)
def test_an_exporter(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry().exporters))
def test_an_exporter_with_every_policy(name):
    made = report(exporter_checks(make_exporter(name)))
    assert not made.failures, str(made)


@parametrize(check for module in BUILT_IN for check in plugin_checks(module, everything=False))
def test_a_built_in_plugin(check):
    check()


# Those of speckv; what plugs into another program has an environment, and tests, of its own.
PLUGINS = sorted(
    path.parent
    for path in (ROOT / "plugins").glob("*/pyproject.toml")
    if "speckv" in tomllib.loads(path.read_text(encoding="utf-8"))["project"]["entry-points"]
)


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_of_this_repository(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    known = set(sys.modules)
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = list(project["entry-points"]["speckv"].values())
    try:
        for module in modules:
            checks = [check for check in plugin_checks(module) if check.name not in LIVE]
            made = report(checks)
            assert not made.failures, str(made)
            assert len(made.results) > 20
    finally:
        for name in set(sys.modules) - known:
            if name.startswith(tuple(modules)):
                del sys.modules[name]
    assert modules
