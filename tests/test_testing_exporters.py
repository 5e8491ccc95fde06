"""The kit finds nothing wrong with the exporters, and what is wrong with each of these bad ones."""

import json
import pickle

import pytest

from speckv.errors import SpecKVError
from speckv.exporting import SpecKVExporter
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.testing import CheckFailed, check_exporter, exporter_checks, report
from speckv_policies.fixed import Fixed

POLICIES = [make_policy("fixed:gamma=3"), make_policy("confidence:threshold=0.4,cap=4"), make_policy("heuristic")]


class Constant(SpecKVExporter):
    """A constant gamma in a text file."""

    name = "constant"
    decoder = "a decoder that can do no more"
    observes = frozenset()
    kinds = frozenset({"before"})
    outcomes = False

    def check(self, policy):
        super().check(policy)
        if not isinstance(policy, Fixed):
            raise SpecKVError(f"policy {policy.label!r} is not a constant gamma, all that {self.decoder} can hold")

    def export(self, policy, out):
        (out / "gamma.json").write_text(json.dumps({"gamma": policy.gamma}))

    def load(self, out):
        try:
            return Fixed(**json.loads((out / "gamma.json").read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise SpecKVError(f"{out / 'gamma.json'}: is no exported gamma ({error})") from None


class Dreaming(SpecKVExporter):
    """Observes what does not exist."""

    observes = SpecKVExporter.observes | {"mood"}


class Undescribed(Constant):
    decoder = ""


class Credulous(Constant):
    """Lets everything pass that decides before the step."""

    def check(self, policy):
        if policy.kind != "before":
            raise SpecKVError("no")
        if isinstance(policy, Fixed) or policy.name.startswith(("decides", "unfitted", "observes")):
            return
        super().check(policy)


class Verbose(Constant):
    """Explains at length."""

    def check(self, policy):
        try:
            super().check(policy)
        except SpecKVError as error:
            raise SpecKVError(f"{error}\nand that is that") from None


class Littering(SpecKVExporter):
    """Leaves something beside its folder."""

    def export(self, policy, out):
        super().export(policy, out)
        (out.parent / f"{out.name}.log").write_text("done")


class Idle(Constant):
    """Writes nothing, and knows nothing else."""

    def export(self, policy, out):
        pass

    def load(self, out):
        return Fixed(3)


class Tuning(SpecKVExporter):
    """Rounds the policy before it is written."""

    def export(self, policy, out):
        if "gamma" in policy.get_params():
            policy.gamma = 4
        super().export(policy, out)


class Lossy(Constant):
    """Has room for a gamma up to 2."""

    def export(self, policy, out):
        (out / "gamma.json").write_text(json.dumps({"gamma": min(policy.gamma, 2)}))


class Pickling(SpecKVExporter):
    """Writes a pickle, too."""

    def export(self, policy, out):
        super().export(policy, out)
        (out / "policy.bin").write_bytes(pickle.dumps(policy.get_params()))


class Forgiving(Constant):
    """Reads whatever it is given."""

    def load(self, out):
        try:
            return super().load(out)
        except SpecKVError:
            return Fixed(4)


#: Check -> bad exporters, each with the other checks that find fault with it as well.
SPECIMENS = {
    "describes_what_it_writes": [(Dreaming, set()), (Undescribed, set())],
    "refuses_what_it_cannot_show": [(Credulous, set()), (Verbose, set())],
    "writes_only_into_its_folder": [(Littering, set()), (Idle, {"refuses_what_is_no_export"})],
    "leaves_the_policy_alone": [(Tuning, set())],
    "decides_as_the_original": [(Lossy, set())],
    "writes_no_pickle": [(Pickling, set())],
    "refuses_what_is_no_export": [(Forgiving, set())],
}


@pytest.mark.parametrize("exporter", [SpecKVExporter(), Constant()], ids=lambda exporter: exporter.name)
def test_nothing_is_wrong_with_a_good_exporter(exporter):
    made = check_exporter(exporter, policies=POLICIES)
    assert len(made.results) == 7 and {result.status for result in made.results} == {"passed"}


@pytest.mark.parametrize(
    ("name", "exporter", "also"),
    [(name, exporter, also) for name, of_check in SPECIMENS.items() for exporter, also in of_check],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_exporter_is_caught(name, exporter, also):
    made = report(exporter_checks(exporter(), policies=POLICIES))
    assert {result.check.name for result in made.failures} == {name} | also, str(made)
    assert all(result.message and "\n" not in result.message for result in made.failures)


def test_every_check_has_a_bad_exporter():
    assert {check.name for check in exporter_checks(Constant())} == set(SPECIMENS), "add an exporter that it catches"


def test_an_exporter_may_be_told_to_be_less_exact():
    with pytest.raises(CheckFailed, match=r"'fixed-3' takes only [\d.]+% of its decisions"):
        check_exporter(Lossy(), policies=POLICIES)
    check_exporter(Lossy(), policies=POLICIES, least_equal=0.01)


def test_an_exporter_that_takes_none_of_the_policies():
    made = report(exporter_checks(Constant(), policies=[make_policy("heuristic")]))
    skipped = [result for result in made.results if result.status == "skipped"]
    assert len(skipped) == 5 and all("give it some: policies=" in result.message for result in skipped)


def test_it_is_tried_with_every_policy_that_it_can_hold():
    from speckv.testing.exporters import _Case

    labels = {policy.name for policy in _Case(Constant(), None, 1.0).policies}
    assert labels == {"none", "fixed"} or labels == {"fixed"}
    assert all(isinstance(policy, Policy) for policy in _Case(SpecKVExporter(), None, 1.0).policies)
