"""The kit finds nothing wrong with good policies, and what is wrong with each of these bad ones."""

import copy
import pickle
import sys
import time

import numpy as np
import pytest

import speckv
from speckv.errors import SpecKVError
from speckv.replaying import Session
from speckv.testing import CheckFailed, check_policy, policy_checks, report
from speckv.testing.checks import raise_first

LIVE = {"decodes_live_as_replayed", "decodes_losslessly"}


class Good(speckv.Policy):
    """Drafts one more than stood in the previous step."""

    name = "good"
    features = ("last_accepted",)
    source = "a test"

    def choose_gamma(self, features, state):
        return features["last_accepted"].astype(np.int64) + 1


class Inside(Good):
    """Draws while the draft is sure, and remembers how often it was asked."""

    name = "inside"
    features = ("draft_top1", "draft_probability")
    choose_gamma = speckv.Policy.choose_gamma

    def new_state(self, rows):
        return {"asked": np.zeros(rows)}

    def draw_token(self, features, state):
        state["asked"] = state["asked"] + 1
        return (features["draft_top1"] > 0.2) | (state["asked"] % 7 == 0)

    def keep_drafting(self, features, state):
        return features["draft_probability"] > 0.4


class Online(Good):
    """Drafts as many as stood lately, over all sequences."""

    name = "online"

    def new_memory(self):
        return {"stood": np.full(1, 3.0)}

    def choose_gamma(self, features, state):
        return np.where(features["last_accepted"] > 0, int(self.memory["stood"][0]) + 1, 2)

    def observe(self, outcome, state):
        for accepted in outcome.accepted:
            self.memory["stood"] = 0.8 * self.memory["stood"] + 0.2 * accepted


class Warmed(Online):
    """Has a first guess from its training."""

    name = "warmed"

    def fit(self, traces, costs, seed=0):
        self.fitted = {"stood": np.full(1, 5.0 + traces.run.mean())}
        self.memory = {"stood": self.fitted["stood"].copy()}
        return self


class Trained(Good):
    """Drafts as many as are right on average."""

    name = "trained"
    features = ()

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": np.array([1 + int(traces.run.mean()) + seed])}
        return self.forget()

    def choose_gamma(self, features, state):
        return int(self.fitted["gamma"][0])


class Logged(Trained):
    """Learns from step logs as well: drafts as many as stood on average."""

    name = "logged"

    def fit_steps(self, log, costs, seed=0):
        if not len(log):
            raise SpecKVError("the log is empty")
        self.fitted = {"gamma": np.array([1 + int(log.accepted.mean()) + seed])}
        return self.forget()


class Bound(speckv.Clairvoyant):
    """Knows what is right."""

    name = "bound"
    source = "a test"

    def foresee(self, traces, costs):
        gammas = np.minimum(traces.run, traces.limit)[:, :-1]
        return gammas, gammas


class Doubling(Good):
    """Changes its parameter."""

    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma * 2


class Undocumented(Good):
    source = ""


class Moody(Good):
    """Asks for what nobody knows."""

    features = ("last_accepted", "mood")


class Verbose(Good):
    """Explains at length why it refuses."""

    def __init__(self, gamma=2):
        super().__init__()
        if gamma == -1:
            raise ValueError("gamma must not be\nbelow 0")
        self.gamma = gamma


class Crashing(Good):
    """Refuses with an error that says nothing."""

    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma
        {2: None}[gamma]


class Floating(Good):
    """Answers with numbers that are not whole."""

    def choose_gamma(self, features, state):
        return features["last_accepted"] + 1


class Negative(Good):
    """Answers with less than nothing."""

    def choose_gamma(self, features, state):
        return features["last_accepted"].astype(int) - 1


class Impossible(Good):
    """Says that what it did could not be."""

    def propensity(self, state):
        return 0.0


class Gambling(Good):
    """Draws lots, and says that it is certain."""

    features = ()

    def new_memory(self):
        return {"draws": np.zeros((), dtype=np.int64)}

    def choose_gamma(self, features, state):
        self.memory["draws"] = self.memory["draws"] + 1
        lots = np.random.default_rng(int(self.memory["draws"]))
        return np.where(lots.random(features.rows) < 0.9, 4, 2)


class Timid(Good):
    """Is certain, and says that it draws lots."""

    def propensity(self, state):
        return 0.5


class Idle(speckv.Policy):
    """Watches."""

    name = "idle"
    source = "a test"

    def observe(self, outcome, state):
        pass


class Curious(Good):
    """Asks for more than it reads."""

    features = ("last_accepted", "draft_entropy")


class Secretive(Good):
    """Reads what it did not ask for."""

    def choose_gamma(self, features, state):
        return features["last_accepted"].astype(int) + (features["position"] > 3)


class Growing(Good):
    """Starts to remember something on the way."""

    def observe(self, outcome, state):
        state["seen"] = outcome.accepted


class Averaging(Good):
    """Decides for all rows what their mean suggests."""

    def choose_gamma(self, features, state):
        return np.full(features.rows, 2 + int(features["last_accepted"].sum() // max(features.rows, 1)))


class Impatient(Good):
    """Takes the first call behind `new_state` for the first step of every sequence."""

    features = ()

    def new_state(self, rows):
        self.fresh = True
        return {}

    def choose_gamma(self, features, state):
        gamma, self.fresh = (2 if self.fresh else 5), False
        return gamma


class Lonely(Online):
    """Is confused by several sequences at once."""

    def observe(self, outcome, state):
        if len(outcome.accepted) > 1:
            self.memory["stood"] = self.memory["stood"] * np.nan


class Hoarding(Online):
    """Remembers more and more."""

    def observe(self, outcome, state):
        self.memory["stood"] = np.append(outcome.accepted[:1] + 0.0, self.memory["stood"])


class Ageing(Good):
    """Counts, in an attribute, how often it was played."""

    features = ()
    replays = 0
    played = False

    def new_state(self, rows):
        self.replays, self.played = self.replays + self.played, False
        return {}

    def choose_gamma(self, features, state):
        return 2 + self.replays

    def observe(self, outcome, state):
        self.played = True


class Grasping(Inside):
    """Takes whatever it is shown into account, if it is shown it: the drawn token, too."""

    def draw_token(self, features, state):
        return np.min(list(features.values()), axis=0) > 0.3


def run_of(traces, features):
    """What will stand: the sequence is known by the length of its prompt."""
    position = features["position"].astype(int)
    prompts = features["context_length"].astype(int) - position
    known = [np.flatnonzero(traces.prompt_lengths == prompt) for prompt in prompts]
    places = [(rows[0], min(place, traces.run.shape[1] - 1)) if len(rows) else None
              for rows, place in zip(known, position, strict=True)]  # fmt: skip
    return np.array([1 if place is None else traces.run[place] for place in places], dtype=np.int64)


class Peeking(Good):
    """Keeps the recording that it was fitted on, and looks up what will be accepted."""

    name = "peeking"
    features = ("position", "context_length")
    kept = None

    def fit(self, traces, costs, seed=0):
        type(self).kept = traces
        self.fitted = {"sequences": np.array([len(traces)])}
        return self.forget()

    def choose_gamma(self, features, state):
        return run_of(self.kept, features)


class Prying(Good):
    """Looks for the recording in whoever calls it."""

    name = "prying"
    features = ("position", "context_length")

    def choose_gamma(self, features, state):
        frame = sys._getframe()
        while frame is not None:
            session = getattr(frame.f_locals.get("self"), "session", None)
            if isinstance(session, Session):
                return run_of(session.traces, features)
            frame = frame.f_back
        return 1


class Crowded(Good):
    """Can't do without a row."""

    def choose_gamma(self, features, state):
        largest = features["last_accepted"].max() + 1
        return np.minimum(features["last_accepted"] + 1, largest).astype(int)


class Sleepy(Good):
    """Takes its time."""

    def choose_gamma(self, features, state):
        time.sleep(0.003)
        return super().choose_gamma(features, state)


class Lucky(Trained):
    """Is fitted by chance."""

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": np.array([3]), "luck": np.random.default_rng().random(4)}
        return self.forget()


class Accumulating(Trained):
    """Goes on from the fit before."""

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": self.fitted.get("gamma", np.array([0])) + 1}
        return self.forget()


class Tuning(Trained):
    """Keeps what it learned among its parameters."""

    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma

    def fit(self, traces, costs, seed=0):
        self.gamma = 3
        return super().fit(traces, costs, seed)


class Careless(Trained):
    """Scales the recording that it learns from, in place."""

    def fit(self, traces, costs, seed=0):
        traces.signals["draft_top2"][:] /= 2
        self.fitted = {"gamma": np.array([3])}
        return self.forget()


class Forgetful(Trained):
    """Keeps what it learned where nobody saves it."""

    gamma = 2

    def fit(self, traces, costs, seed=0):
        self.gamma = 5
        return super().fit(traces, costs, seed)

    def choose_gamma(self, features, state):
        return self.gamma


class Pickled(Trained):
    """Saves a pickle among its numbers."""

    def fit(self, traces, costs, seed=0):
        super().fit(traces, costs, seed)
        self.fitted["model"] = np.frombuffer(pickle.dumps({"gamma": 3}), dtype=np.uint8)
        return self


class Choosy(Logged):
    """Can't use any log."""

    def fit_steps(self, log, costs, seed=0):
        raise SpecKVError("the log is of no use")


class Ungrateful(Logged):
    """Gives another policy back."""

    def fit_steps(self, log, costs, seed=0):
        super().fit_steps(log, costs, seed)
        return copy.deepcopy(self)


class Empty(Logged):
    """Has learned nothing from the log."""

    def fit_steps(self, log, costs, seed=0):
        return self.forget()


class Reckless(Logged):
    """Is fitted to a log by chance."""

    def fit_steps(self, log, costs, seed=0):
        super().fit_steps(log, costs, seed).fitted["luck"] = np.random.default_rng().random(4)
        return self


class Resuming(Logged):
    """Goes on from the log before."""

    def fit_steps(self, log, costs, seed=0):
        before = self.fitted.get("gamma", np.array([0]))
        super().fit_steps(log, costs, seed).fitted["gamma"] += before
        return self


class Adjusting(Logged):
    """Keeps what a log taught it among its parameters."""

    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma

    def fit_steps(self, log, costs, seed=0):
        self.gamma = 3
        return super().fit_steps(log, costs, seed)


class Scribbling(Logged):
    """Counts what stood in the log itself."""

    def fit_steps(self, log, costs, seed=0):
        log.accepted[:] += 1
        return super().fit_steps(log, costs, seed)


class Losing(Logged):
    """Keeps what a log taught it where nobody saves it."""

    gamma = 2

    def fit_steps(self, log, costs, seed=0):
        self.gamma = 5
        return super().fit_steps(log, costs, seed)

    def choose_gamma(self, features, state):
        return self.gamma


class Spoilt(Logged):
    """Takes it for granted that a log says the compression of its steps."""

    def fit_steps(self, log, costs, seed=0):
        assert (log.compression != "").all()
        return super().fit_steps(log, costs, seed)


class Demanding(Logged):
    """Takes it for granted that there are steps in a log."""

    def fit_steps(self, log, costs, seed=0):
        self.fitted = {"gamma": np.array([log.accepted.max()])}
        return self.forget()


class Rambling(Logged):
    """Complains at length of a log without signals."""

    def fit_steps(self, log, costs, seed=0):
        if not log.signals:
            raise SpecKVError("there are no signals\nin the log")
        return super().fit_steps(log, costs, seed)


class Logarithmic(Good):
    """Takes a logarithm of what may be 0."""

    features = ("draft_top1",)
    choose_gamma = speckv.Policy.choose_gamma

    def draw_token(self, features, state):
        return np.log(features["draft_top1"]) > -2


class Roomy(Good):
    """Relies on something being drafted in the first step."""

    def new_state(self, rows):
        return {"steps": np.zeros(rows)}

    def observe(self, outcome, state):
        first = state["steps"] == 0
        assert outcome.drafted[first].all()
        state["steps"] = state["steps"] + 1


class Broad(Trained):
    """Learns from the second token off the path, whether there may be one or not."""

    def fit(self, traces, costs, seed=0):
        second = traces.off_signals["draft_top1"][:, :, 1]
        self.fitted = {"gamma": np.array([2 + int(second.max())])}
        return self.forget()


class Provincial(Good):
    """Knows no compression but two."""

    features = ("compression",)

    def choose_gamma(self, features, state):
        return np.array([{1: 2, 4: 3}[int(code)] for code in features["compression"]], dtype=int)


class Trusting(Trained):
    """Takes it for granted that the costs of bf16 are known."""

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": np.array([2 + int(costs.verify["bf16"].seconds[0, 0] > 1)])}
        return self.forget()


class Wasteful(Bound):
    """Plans forwards that nothing comes of."""

    def foresee(self, traces, costs):
        gammas, _ = super().foresee(traces, costs)
        return gammas, gammas + 2


class Numbered(Good):
    """Takes the number of its row for something that lasts."""

    features = ()

    def new_state(self, rows):
        return {"row": np.arange(rows)}

    def choose_gamma(self, features, state):
        return 1 + 3 * state["row"]


class Forging(Good):
    """Overwrites the text of whoever calls it."""

    def observe(self, outcome, state):
        frame = sys._getframe()
        while frame is not None:
            for sequence in getattr(frame.f_locals.get("self"), "going", ()):
                sequence.context[-1] = 65
            frame = frame.f_back


#: Check -> bad policies, each with the other checks that find fault with it as well.
SPECIMENS = {
    "stores_parameters": [(Doubling, {"survives_saving"})],
    "describes_itself": [(Undocumented, set())],
    "asks_for_known_features": [(Moody, {"answers_in_range", "keeps_state_by_sequence"})],
    "refuses_in_one_line": [(Verbose, set()), (Crashing, set())],
    "answers_in_range": [
        (Floating, set()),
        (Negative, set()),
        (Impossible, {"states_its_propensity"}),
        (Secretive, {"keeps_state_by_sequence"}),
    ],
    "decides_something": [(Idle, set())],
    "reads_its_features": [(Curious, set())],
    "keeps_state_by_sequence": [(Growing, set())],
    "states_its_propensity": [(Gambling, set()), (Timid, set())],
    "decides_each_row_alone": [(Averaging, {"can_be_interleaved", "sees_no_future"})],
    "can_be_interleaved": [(Impatient, set())],
    "serves_a_batch": [(Lonely, set())],
    "keeps_its_memory_layout": [(Hoarding, {"survives_saving"})],
    "keeps_nothing_hidden": [(Ageing, {"survives_saving"})],
    "draws_blindly": [(Grasping, set())],
    "sees_no_future": [(Peeking, set()), (Prying, {"decides_each_row_alone"})],
    "copes_with_no_rows": [(Crowded, set())],
    "fits_by_seed": [(Lucky, {"fits_anew"})],
    "fits_anew": [(Accumulating, set())],
    "fits_without_changing_parameters": [(Tuning, set())],
    "fits_step_logs": [
        (Choosy, set()),
        (Ungrateful, set()),
        (Empty, set()),
        (Reckless, set()),
        (Resuming, set()),
        (Adjusting, set()),
        (Scribbling, set()),
        (Losing, set()),
    ],
    "refuses_useless_logs": [(Spoilt, set()), (Demanding, set()), (Rambling, set())],
    "leaves_the_recording_alone": [(Careless, set())],
    "survives_saving": [(Forgetful, set())],
    "saves_no_pickle": [(Pickled, set())],
    "copes_with_extreme_signals": [(Logarithmic, set())],
    "copes_with_short_texts": [(Roomy, set())],
    "copes_with_gamma_max_1": [(Broad, set())],
    "copes_with_every_compression": [(Provincial, set())],
    "copes_with_unknown_costs": [(Trusting, set())],
    "foresees_in_range": [(Wasteful, set())],
    "decodes_live_as_replayed": [(Numbered, set())],
    "decodes_losslessly": [(Forging, {"decodes_live_as_replayed"})],
}
GOOD = [Good(), Inside(), Online(), Warmed(), Trained(), Logged(), Bound()]
BAD = [(name, policy, also) for name, of_check in SPECIMENS.items() for policy, also in of_check]


@pytest.mark.parametrize("policy", GOOD, ids=lambda policy: policy.name)
def test_nothing_is_wrong_with_a_good_policy(policy):
    made = report(policy_checks(policy))
    assert not made.failures, made
    assert all(not result.message for result in made.results if result.status == "passed"), made


def checks_of(policy, name):
    """Those of a bad policy; the live ones only if it is one of them that it is made for."""
    return [check for check in policy_checks(policy()) if (check.name in LIVE) == (name in LIVE)]


each_bad_policy = pytest.mark.parametrize(
    ("name", "policy", "also"), BAD, ids=[f"{policy.__name__}-{name}" for name, policy, _ in BAD]
)


@each_bad_policy
def test_a_bad_policy_is_caught(name, policy, also):
    (check,) = (check for check in policy_checks(policy()) if check.name == name)
    (result,) = report([check]).results
    assert result.status == "failed" and result.message and "\n" not in result.message
    with pytest.raises(CheckFailed, match=f"{name}: "):
        raise_first([check])


@pytest.mark.slow
@each_bad_policy
def test_no_other_check_catches_it(name, policy, also):
    made = report(checks_of(policy, name))
    assert {result.check.name for result in made.failures} == {name} | also, str(made)


def test_every_check_has_a_bad_policy():
    names = {check.name for policy in GOOD for check in policy_checks(policy)}
    assert names == set(SPECIMENS) | {"decides_in_time"}, "add a policy that the new check catches"


def test_a_slow_policy_is_told_of_and_does_not_fail():
    (check,) = (check for check in policy_checks(Sleepy()) if check.name == "decides_in_time")
    with pytest.warns(speckv.SpecKVWarning, match="slow: it decides in"):
        check()
    (result,) = report([check]).results
    assert result.status == "passed" and "of a target forward" in result.message


def test_a_policy_that_cannot_be_replayed_is_told_of_once():
    made = report(policy_checks(Floating()))
    (failed,) = made.failures
    assert "must return integers and returned float64" in failed.message
    skipped = [result for result in made.results if result.status == "skipped"]
    assert len(skipped) > 15 and all("answers_in_range" in result.message for result in skipped)


def test_the_policy_is_left_as_it_is():
    policy = Online()
    report(check for check in policy_checks(policy) if check.name not in LIVE)
    assert policy.memory["stood"].tolist() == [3.0] and not policy.fitted


def test_a_recording_of_ones_own():
    from speckv.testing.recordings import make_costs, make_rollouts

    traces, costs = make_rollouts(prompts=2, compressions=["int8"]), make_costs(compressions=["int8"])
    with pytest.raises(CheckFailed, match="KeyError"):
        check_policy(Provincial(), traces=traces, costs=costs)
    made = report(check for check in policy_checks(Good(), traces=traces, costs=costs) if check.name not in LIVE)
    assert not made.failures, made
    with pytest.raises(SpecKVError, match="there is no check 'sees_nothing' to fail; the checks are stores_parameters"):
        policy_checks(Good(), expected_failed_checks={"sees_nothing": "a typo"})
