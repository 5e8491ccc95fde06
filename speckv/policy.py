"""The contract between a policy and everything that runs one."""

import importlib.util
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.features import BoolArray, Features, FloatArray, IntArray

if TYPE_CHECKING:
    from speckv.costs import CostModel
    from speckv.runtime import Program
    from speckv.steplogs import StepLog
    from speckv.traces import Rollouts

#: What a policy remembers of each sequence: arrays by name, each with one row a sequence.
State = dict[str, npt.NDArray[Any]]
#: What a policy has learned while running, over all sequences so far: arrays by name.
Memory = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of one step in each of n sequences, before anything is cut off at the end of a text.

    Attributes:
        drafted: (n,) tokens that were verified.
        accepted: (n,) of them, how many the target agreed with; the step commits one more.
        seconds: (n,) duration of the step.
    """

    drafted: IntArray
    accepted: IntArray
    seconds: FloatArray


class Policy:
    """Chooses how many tokens to draft. Subclass it and override at least one of the three decisions.

    Every method decides for n sequences at once: a feature is an array (n,), and so is the answer (a plain
    number holds for all of them). A live decoder calls with n = 1, a replay with thousands.

    The three decisions of a step, in order:

    - `choose_gamma`, before the draft: at most how many tokens.
    - `draw_token`, when the draft's next distribution is known: whether to draw a token from it at all. This
      must not depend on which token would be drawn; then the text is lossless under sampling too.
    - `keep_drafting`, once the token is drawn (it will be verified in any case): whether to draft another.

    The constructor only stores its parameters under their own names, as in scikit-learn. What `fit` learns goes
    into `self.fitted`, arrays by name; parameters, fitted arrays and memory together are the saved policy.

    What a policy remembers while it runs is of two kinds, and nothing else may be kept:

    - `state`, of one sequence: made by `new_state` when the sequence starts, handed to every call, gone when it ends.
    - `self.memory`, of all sequences so far: made by `new_memory`, saved and loaded with the policy. A policy that
      has one is `online`: what it decides depends on what it decoded before.

    Attributes:
        name: how users call the policy.
        features: names of the features that it reads, from `speckv.features.FEATURES`.
        source: where the rule comes from, and how sure its constants are.
        requires: modules that only `fit` needs; what it learned decides without them.
        extra: of speckv, which installs them.
        explores: whether it draws lots for the sake of the log; a comparison leaves it out unless it is asked for.
        fitted: what `fit` learned, by name.
        memory: what it has learned while running, by name; empty unless it is online.
        training: what a loaded policy was trained on, as far as its folder says; None unless it was loaded.
    """

    name: ClassVar[str]
    features: tuple[str, ...] = ()
    source: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    explores: ClassVar[bool] = False

    def __init__(self) -> None:
        self.fitted: dict[str, npt.NDArray[Any]] = {}
        self._memory: Memory | None = None
        self.training: dict[str, Any] | None = None

    def fit(self, traces: "Rollouts", costs: "CostModel", seed: int = 0) -> Self:
        """Learn from recorded sequences and measured costs. Policies that learn nothing from them keep this one.

        It leaves a new memory, or one that it warmed up on these sequences alone: fitting twice is fitting once.
        """
        return self.forget()

    def fit_steps(self, log: "StepLog", costs: "CostModel", seed: int = 0) -> Self:
        """Learn from a step log and measured costs, where `fit` learns from recorded sequences.

        A step tells what would have come of every gamma up to the one that was played; of larger ones only if not all
        was accepted. A policy that can learn from that without being misled overrides this.

        Raises:
            SpecKVError: it can't, or the log lacks what it needs.
        """
        raise SpecKVError(
            f"policy {self.label!r} learns from recordings, not from step logs; train it on one, and name its folder"
        )

    def new_state(self, rows: int) -> State:
        """What the policy remembers of each of `rows` sequences that are about to start.

        Inside the draft names, shapes of rows and kinds of dtypes stay as they are here.
        """
        return {}

    def new_memory(self) -> Memory:
        """What the policy knows before it has decoded anything. To override this is to be `online`.

        Names, shapes and dtypes stay as they are here, so that no memory grows with what has been decoded. The
        decisions and `observe` change `self.memory`, in place or by setting an array anew. It is all that lasts: a
        generator of random numbers, for instance, is a seed among the parameters and a counter in here.
        """
        return {}

    @property
    def memory(self) -> Memory:
        # Made on first use: the constructor of a subclass sets its parameters after that of this class has run.
        if self._memory is None:
            self._memory = self.new_memory()
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory = memory

    def forget(self) -> Self:
        """Start with a new memory; parameters and fitted arrays stay."""
        self._memory = None
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        """How many tokens to draft at most, (n,) integers from 0. The host's own limit applies as well."""
        return np.iinfo(np.int64).max

    def propensity(self, state: State) -> npt.ArrayLike:
        """The chance with which the last `choose_gamma` chose what it did, (n,); NaN where it is not known.

        It is 1 for a policy that draws no lots. Hosts log it, so that the log can tell what another policy would have
        been worth: a wrong one makes that wrong, too.
        """
        return 1.0

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        """Whether to draw the next token from the distribution that the features describe, (n,) booleans."""
        return True

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        """Whether to draft another token behind the one just drawn, (n,) booleans."""
        return True

    def acceptance(self, features: Features) -> npt.ArrayLike:
        """The chance that the draft's next token is right if all before it are, (n,), from its distribution.

        A policy with a model of that overrides this and may decide by it; reports show how well it holds on prompts
        that the policy has not seen. No host needs it.
        """
        raise NotImplementedError

    def observe(self, outcome: Outcome, state: State) -> None:
        """Take in what came of the step, by changing `state` and, if the policy is online, `self.memory`."""

    def program(self) -> "Program":
        """This policy in the portable form of `speckv.runtime`, which decoders can play that don't run its code.

        A policy that decides exactly as one of the forms does overrides this; it has to be fitted.

        Raises:
            SpecKVError: no form does; the reason.
        """
        raise SpecKVError(f"policy {self.label!r} runs in speckv only: {self.unportable}")

    @property
    def label(self) -> str:
        """How tables and the command line call this instance: its name, and the parameters that are not the default."""
        changed = ",".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in self.changed_params.items()
        )
        return ":".join(filter(None, [self.name, changed]))

    @property
    def required_gamma(self) -> int:
        """The gamma that this instance was told to play, if it was; hosts with a smaller gamma_max refuse it."""
        return 0

    @property
    def inner_policies(self) -> "tuple[Policy, ...]":
        """The policies that it passes questions on to; it has seen what they were trained on."""
        return ()

    @property
    def online(self) -> bool:
        """Whether it learns while it runs, and takes that from one sequence to the next."""
        return self.overrides("new_memory")

    @property
    def untrainable(self) -> str | None:
        """Why it can't be fitted in this installation, and what to do; None if it can."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if not missing:
            return None
        return f"is trained with {' and '.join(missing)}, which is not installed; pip install 'speckv[{self.extra}]'"

    @property
    def unportable(self) -> str | None:
        """Why no portable form decides as it does; None if one does."""
        if type(self).program is not Policy.program:  # a wrapper has none, whatever is inside
            return None
        if self.online:
            return "it learns while it runs"
        if self.overrides("new_state"):
            return "it remembers more of a sequence than the portable forms do"
        return "its rule is none of the portable forms"

    @property
    def kind(self) -> str:
        """`before` the step, inside the `draft`, or `both`."""
        before, inside = self.overrides("choose_gamma"), self.overrides("draw_token") or self.overrides("keep_drafting")
        return "both" if before and inside else "draft" if inside else "before"

    def overrides(self, method: str) -> bool:
        """Whether this class decides `method` itself; hosts skip the calls that nobody overrides."""
        return getattr(type(self), method) is not getattr(Policy, method)

    def get_params(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @property
    def changed_params(self) -> dict[str, Any]:
        """Those of the constructor's arguments that are not the default."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        return {name: value for name, value in self.get_params().items() if value != defaults[name]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.get_params().items())})"


class Clairvoyant(Policy):
    """A bound, not a policy: it looks at the recorded future. It can be replayed, never decoded live."""

    def foresee(self, traces: "Rollouts", costs: "CostModel") -> tuple[IntArray, IntArray]:
        """The gamma to play at each position, (S, T) integers, and the draft forwards to spend: as many, or one
        more for a distribution that nothing is drawn from."""
        raise TypeError(f"{type(self).__name__} must define foresee")


def check_playable(policy: Policy, gamma_max: int) -> None:
    """Raise SpecKVError if the policy is not fitted, or was told to play a larger gamma than its host can."""
    if type(policy).fit is not Policy.fit and not policy.fitted:
        raise SpecKVError(f"policy {policy.label!r} is not fitted; call its fit(traces, costs), or load a saved one")
    if isinstance(policy.required_gamma, int) and policy.required_gamma > gamma_max:
        raise SpecKVError(
            f"policy {policy.label!r} plays gamma {policy.required_gamma}, above the gamma_max of {gamma_max} here; "
            "lower it, or record with a larger --gamma-max"
        )


def as_integers(values: npt.ArrayLike, rows: int, where: str) -> IntArray:
    """A policy's answer as (rows,) integers, or a SpecKVError that names the policy and what it said."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise SpecKVError(f"{where} must return integers and returned {array.dtype}")
    if array.shape not in {(), (rows,)}:
        raise SpecKVError(f"{where} must return one value a sequence, ({rows},), and returned shape {array.shape}")
    if array.size and array.min() < 0:
        raise SpecKVError(f"{where} returned {array.min()}; gamma is 0 or more")
    return np.broadcast_to(array.astype(np.int64), (rows,))


def as_booleans(values: npt.ArrayLike, rows: int, where: str) -> BoolArray:
    """A policy's answer as (rows,) booleans, or a SpecKVError that names the policy and what it said."""
    array = np.asarray(values)
    if array.dtype.kind != "b":
        raise SpecKVError(f"{where} must return booleans and returned {array.dtype}")
    if array.shape not in {(), (rows,)}:
        raise SpecKVError(f"{where} must return one value a sequence, ({rows},), and returned shape {array.shape}")
    return np.broadcast_to(array, (rows,))


def ask(policy: Policy, method: str, features: Features, state: State, rows: IntArray) -> BoolArray:
    """Ask a policy about some of the sequences that are being decoded.

    Args:
        method: `draw_token` or `keep_drafting`.
        features: of the sequences at `rows`.
        state: of all sequences; the policy sees, and may change, what belongs to those at `rows`.
        rows: (n,) indices into the state's arrays.

    Returns:
        (n,) its answers.

    Raises:
        SpecKVError: it does not answer with booleans, one a sequence, or sets a state to what its array can't hold.
    """
    part = select_rows(state, rows)
    answer = as_booleans(getattr(policy, method)(features, part), len(rows), f"{policy.name}.{method}")
    put_rows(state, part, rows, f"{policy.name}.{method}")
    return answer


def select_rows(state: State, keep: npt.NDArray[Any]) -> State:
    """The state of some sequences: those at `keep`, indices or a mask."""
    return {name: array[keep] for name, array in state.items()}


def put_rows(state: State, part: State, rows: npt.NDArray[Any], who: str) -> None:
    """Put the state of the sequences at `rows`, as `who` left it, back into that of all.

    Raises:
        SpecKVError: it was set to what its array can't hold.
    """
    for name, array in part.items():
        if name not in state:
            raise SpecKVError(f"{who} changed the state {name!r}, which new_state did not make")
        whole, changed = state[name], np.asarray(array)
        shape = (len(rows), *whole.shape[1:])
        # What NumPy refuses in place, such as floats to integers, would be cast without a word below.
        if changed.shape != shape or not (
            changed.dtype is whole.dtype or np.can_cast(changed.dtype, whole.dtype, "same_kind")
        ):
            raise SpecKVError(
                f"{who} changed the state {name!r}, {whole.dtype} of shape {shape}, to {changed.dtype} of shape "
                f"{changed.shape}; make it in new_state as it will be"
            )
        whole[rows] = changed
