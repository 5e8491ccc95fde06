"""From chances of acceptance to a stop rule, by measured cost: what all hazards share."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State, replay
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.runtime.models import Inputs, Model
from speckv.runtime.programs import Gate, Program, Worth
from speckv.tuning import settle_rate, step_seconds
from speckv_policies.estimators import logit, share_of
from speckv_policies.fixed import Fixed

BEFORE = ("running_acceptance", "target_entropy", "target_margin")
TOKEN = ("draft_top1", "draft_top2", "draft_entropy")

#: `before_inputs` and `token_inputs` in portable form.
BEFORE_INPUTS = Inputs(BEFORE, ("logit", "none", "log1p"))
TOKEN_INPUTS = Inputs(
    ("draft_top1", "draft_top2", "draft_entropy", "draft_entropy", *BEFORE),
    ("logit", "logit", "none", "sqrt", *BEFORE_INPUTS.transforms),
)

#: Which chance: of the first token, from what is known before the draft; of a token, from its own distribution; of
#: the one behind it.
Kind = Literal["first", "here", "ahead"]
KINDS: tuple[Kind, ...] = ("first", "here", "ahead")


@dataclass(frozen=True)
class Examples:
    """Drafted tokens that a model learns from, or is judged by.

    Attributes:
        inputs: (n, k), of `before_inputs` for the first token and of `token_inputs` for the others.
        right: (n,) whether the token that they are to foretell is the target's.
        tokens: (n,) id of the drafted token that is known last, and `previous`, (n,), of the one in front of it in the
            draft; -1 where there is none.
        prompts: (n,) the prompt that it belongs to, as a number.
    """

    inputs: FloatArray
    right: BoolArray
    tokens: IntArray
    previous: IntArray
    prompts: IntArray

    def where(self, keep: BoolArray) -> Self:
        return replace(self, **{name: array[keep] for name, array in vars(self).items()})


class SurvivalStop(Policy):
    """Drafts on while the next tokens are worth their time.

    Three models give the chance that a token is right if all before it are: of the first token from what is known
    before the draft (`first`), of a token from the draft's own distribution there (`here`), and of the one behind it
    (`ahead`). A draft says nothing of the tokens behind its first wrong one, so that they are censored: the models
    learn from the tokens up to it. Tokens further ahead are taken at their average chance in training. The product of
    the chances so far is the survival. Another k tokens are worth

        survival * chance * (1 + persistence + ... + persistence^(k - 1)) - rate * (their draft and verify seconds)

    tokens, where rate is the throughput that the policy itself reaches. The draft goes on while some k has a
    positive worth; looking at all k lets it cross a flat piece in a staircase of verify times. A token whose own
    chance does not pay for its place in the verify forward is not drawn.
    """

    features: tuple[str, ...] = ("compression", "draft_index", *BEFORE, *TOKEN)

    def learn(self, kind: Kind, examples: Examples, seed: int) -> dict[str, npt.NDArray[Any]]:
        """Fit one of the models; it as arrays, by names that begin with `kind`."""
        raise NotImplementedError

    def chance(self, kind: Kind, inputs: FloatArray) -> FloatArray:
        """What a fitted model says of inputs (n, k), (n,)."""
        raise NotImplementedError

    def parameters(self, traces: Rollouts, costs: CostModel, seed: int) -> dict[str, npt.NDArray[Any]]:
        """What else is chosen on the training prompts, as arrays by name."""
        return {}

    def foretell(self, kind: Kind, examples: Examples) -> FloatArray:
        """The chance that the policy sees in each of the examples, (n,), from all that it knows there."""
        return self.chance(kind, examples.inputs)

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        examples = drafted_tokens(traces, costs)
        draft, verify = step_seconds(costs, traces)
        persistence = share_of(examples["ahead"].right)
        self.fitted = {
            "persistence": persistence,
            "draft_seconds": np.array(draft),
            "verify_seconds": verify,
            "price": prices(float(persistence), draft, verify),
            **self.parameters(traces, costs, seed),
        }
        for kind in KINDS:
            self.fitted |= self.learn(kind, examples[kind], seed)
        settle_rate(self, traces, costs)
        return self

    def new_state(self, rows: int) -> State:
        return {"survival": np.ones(rows), "go_on": np.ones(rows, dtype=bool)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        state["survival"] = np.ones(features.rows)
        code, price = features["compression"].astype(np.int64), self.fitted["price"]
        worth_it = self.chance("first", before_inputs(features)) > self.fitted["rate"][code] * price[code, 0]
        return np.where(worth_it, price.shape[1] - 1, 0)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        fitted, inputs = self.fitted, token_inputs(features)
        code, index = features["compression"].astype(np.int64), features["draft_index"].astype(np.int64)
        state["survival"] = survival = state["survival"] * self.chance("here", inputs)
        chance, rate, verify = survival * self.chance("ahead", inputs), fitted["rate"][code], fitted["verify_seconds"]
        state["go_on"] = chance > rate * fitted["price"][code, index]
        place = rate * (verify[code, index + 1] - verify[code, index])
        pays = survival > place
        if (undecided := state["go_on"] & ~pays).any():  # it may pay by what comes behind it
            pays |= undecided & (self._worth_of_more(code, index, chance) + survival > place)
        return np.asarray(pays)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return state["go_on"]

    def acceptance(self, features: Features) -> npt.ArrayLike:
        return self.chance("here", token_inputs(features))

    def model(self, kind: Kind, inputs: Inputs) -> Model:
        """`chance` in portable form."""
        raise NotImplementedError

    def program(self) -> Program:
        persistence, draft, verify = (self.fitted[key] for key in ("persistence", "draft_seconds", "verify_seconds"))
        rate, most = self.fitted["rate"], verify.shape[1] - 2
        index, more = np.arange(most + 1)[:, None], np.arange(1, most + 1)
        seconds = more * draft + verify[:, np.minimum(index + 1 + more, most + 1)] - verify[:, 1:, None]
        price = np.where(index + more <= most, rate[:, None, None] * seconds, np.inf)
        gate = Gate(self.model("first", BEFORE_INPUTS), rate * self.fitted["price"][:, 0], cap=most)
        here, ahead = self.model("here", TOKEN_INPUTS), self.model("ahead", TOKEN_INPUTS)
        gain = np.cumsum(persistence ** (more - 1))
        return Program(gate, Worth(here, ahead, gain, price, place=rate[:, None] * np.diff(verify, axis=1)))

    def _worth_of_more(self, code: IntArray, index: IntArray, chance: FloatArray) -> FloatArray:
        """The most that drafting on is worth, tokens, (n,).

        Args:
            code: (n,) of the compression.
            index: (n,) tokens in the draft so far.
            chance: (n,) that all of them and the next one are right.
        """
        verify, rate = self.fitted["verify_seconds"][code], self.fitted["rate"][code]
        most = verify.shape[1] - 2
        more = np.arange(1, most + 1)
        row, place = np.arange(len(index))[:, None], np.minimum(index[:, None] + 1 + more, most + 1)
        seconds = more * self.fitted["draft_seconds"] + verify[row, place] - verify[row, index[:, None] + 1]
        worth = chance[:, None] * np.cumsum(self.fitted["persistence"] ** (more - 1)) - rate[:, None] * seconds
        return np.asarray(np.where(index[:, None] + more <= most, worth, -np.inf).max(axis=1))


def drafted_tokens(traces: Rollouts, costs: CostModel) -> dict[Kind, Examples]:
    """What each model learns from: drafts of two tokens and of as many as were recorded, up to the first wrong one."""
    _, prompt_of = np.unique(traces.ids, return_inverse=True)
    parts: dict[Kind, list[Examples]] = {kind: [] for kind in KINDS}
    for gamma in (min(2, traces.gamma_max), traces.gamma_max):
        run = replay(Fixed(gamma), traces, costs, features=BEFORE)
        length, limit = traces.run[run.sequence, run.position], traces.limit[run.sequence, run.position]
        token = np.full(len(run.position), -1)
        for index in range(traces.gamma_max):
            step = np.flatnonzero((length >= index) & (limit > index))
            sequence, position = run.sequence[step], run.position[step]
            values = {name: run.features[name][step] for name in BEFORE}
            for name in TOKEN:
                values[name] = traces.drafted_signal(name, sequence, position, index).astype(float)
            previous, token = token, np.full(len(run.position), -1)
            token[step] = traces.drafted_signal("draft_token", sequence, position, index)
            prompts, right = prompt_of[sequence], length[step] > index
            if index == 0:
                parts["first"].append(Examples(before_inputs(values), right, previous[step], previous[step], prompts))
            here = Examples(token_inputs(values), right, token[step], previous[step], prompts)
            parts["here"].append(here)
            followed = right & (limit[step] > index + 1)
            parts["ahead"].append(replace(here, right=length[step] > index + 1).where(followed))
    return {kind: _joined(examples) for kind, examples in parts.items()}


def _joined(parts: list[Examples]) -> Examples:
    return Examples(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def prices(persistence: float, draft: float, verify: FloatArray) -> FloatArray:
    """The least that survival * chance must be for some number of further tokens to be worth their time, at a
    throughput of 1: times the real one, a threshold.

    Args:
        persistence: as in `SurvivalStop`.
        draft: seconds of a draft forward.
        verify: (compressions, G + 2) seconds of a target forward of 0..G + 1 tokens.

    Returns:
        (compressions, G + 1), by tokens in the draft so far; infinite where the draft can't go on, and 0 at
        compressions without timings, whose throughput is 0 as well.
    """
    most = verify.shape[1] - 2
    least = np.full((len(verify), most + 1), np.inf)
    for index in range(most):
        more = np.arange(1, most - index + 1)
        seconds = more * draft + verify[:, index + 2 :] - verify[:, [index + 1]]
        least[:, index] = (seconds / np.cumsum(persistence ** (more - 1))).min(axis=1)
    least[~verify.any(axis=1)] = 0.0
    return least


def before_inputs(features: Features | dict[str, FloatArray]) -> FloatArray:
    """(n, 3) inputs from what is known before the draft."""
    acceptance, entropy, margin = (features[name] for name in BEFORE)
    return np.column_stack([logit(acceptance), entropy, np.log1p(margin)])


def token_inputs(features: Features | dict[str, FloatArray]) -> FloatArray:
    """(n, 7) inputs from a drafted token's distribution and what was known before the draft."""
    top1, top2, entropy = (features[name] for name in TOKEN)
    acceptance, target_entropy, margin = (features[name] for name in BEFORE)
    odds = logit(np.stack([top1, top2, acceptance]))  # in one go, since a decision takes microseconds
    columns = [odds[0], odds[1], entropy, np.sqrt(entropy), odds[2], target_entropy, np.log1p(margin)]
    return np.stack(columns, axis=1)
