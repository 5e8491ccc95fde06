"""What a policy may look at: nothing of the future, and nothing that it changes."""

import numpy as np
import numpy.typing as npt

from speckv.features import Features
from speckv.policy import Policy, State
from speckv.replaying import replay
from speckv.testing.checks import require
from speckv.testing.futures import change_future, copy_of, overwrite
from speckv.testing.policies.cases import Case, Watched, fit_quietly
from speckv.traces import arrays_of


class _Logged(Watched):
    """Notes every answer, and when it was given.

    Attributes:
        answers: row -> answers in their order.
        moments: row -> tokens committed and drafted at each.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, ("position", "draft_index"))
        self.answers: dict[int, list[int]] = {}
        self.moments: dict[int, list[tuple[int, int]]] = {}

    def answered(self, method: str, answer: npt.ArrayLike, features: Features, state: State) -> None:
        answers = np.broadcast_to(answer, (features.rows,)).tolist()
        position = features["position"].astype(int).tolist()
        drafted = [0] * features.rows if method == "choose_gamma" else features["draft_index"].astype(int).tolist()
        for row, said, *moment in zip(state[self._ROW].tolist(), answers, position, drafted, strict=True):
            self.answers.setdefault(row, []).append(said)
            self.moments.setdefault(row, []).append((moment[0], moment[1]))


def sees_no_future(case: Case) -> None:
    """No decision changes when everything that is recorded behind its moment is changed.

    What is changed is the recording that it was fitted on, in place: a policy that kept it would see the change.
    """
    rng = np.random.default_rng(0)
    recorded = copy_of(case.traces)
    first = _Logged(case.fitted())
    replay(first, case.traces, case.costs)
    try:
        for number in range(8):
            # What an online policy learns from one sequence it rightly takes to the next.
            changed = [number % len(recorded)] if case.policy.online else range(len(recorded))
            calls = {row: int(rng.integers(len(first.answers[row]))) for row in changed if row in first.answers}
            story = recorded
            for row, call in calls.items():
                story = change_future(story, row, *first.moments[row][call], rng)
            overwrite(case.traces, story)
            second = _Logged(case.fitted())
            replay(second, case.traces, case.costs)
            for row, call in calls.items():
                _require_same_answers(first, second, row, call)
    finally:
        overwrite(case.traces, recorded)


def _require_same_answers(first: _Logged, second: _Logged, row: int, call: int) -> None:
    """Raise CheckFailed unless a sequence got the same answers up to this one."""
    pairs = zip(first.answers[row][: call + 1], second.answers[row], strict=False)
    for index, (one, other) in enumerate(pairs):
        position, drafted = first.moments[row][index]
        require(
            one == other,
            f"in sequence {row}, behind {position} committed and {drafted} drafted tokens, it answers {one}, and "
            f"{other} once the recorded future is changed",
        )


def leaves_the_recording_alone(case: Case) -> None:
    """Neither fitting nor playing changes the recording."""
    traces = copy_of(case.others)
    replay(fit_quietly(case.clone(), traces, case.costs), traces, case.costs)
    for (name, one), (_, other) in zip(arrays_of(case.others), arrays_of(traces), strict=True):
        require(np.array_equal(one, other), f"it changes {name} of the recording that it is given")
