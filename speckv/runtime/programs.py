"""The portable form of a policy: one rule for gamma, and one that stops a draft, each of a few forms.

Nothing else decides, so that a decoder that knows these forms can play every policy that has been brought into one.
All tables are by the compression code of the target, `speckv.compression.COMPRESSIONS`.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from speckv.runtime.models import Array, Model, Values

#: Tokens of the longest draft there may be: the cap of a policy that has none of its own.
LONGEST = 64


@dataclass
class Draft:
    """What a rule remembers from one token of a draft to the next.

    Attributes:
        survival: the chance that all tokens so far are right.
        goes_on: whether another token is to be drafted behind the one that `draws` was asked about last.
    """

    survival: float = 1.0
    goes_on: bool = True


@dataclass(frozen=True, eq=False)
class Table:
    """The same gamma in every step.

    Attributes:
        gamma: (compressions,) tokens.
    """

    gamma: Array

    features = ("compression",)

    @cached_property
    def _gamma(self) -> list[int]:
        return [int(gamma) for gamma in self.gamma]

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._gamma)))

    def choose(self, values: Values) -> int:
        return self._gamma[int(values["compression"])]


@dataclass(frozen=True)
class Additive:
    """`up` tokens more than in the step before if all were accepted, else `down` tokens fewer."""

    start: int
    up: int
    down: int
    smallest: int
    largest: int

    features = ("is_first", "last_gamma", "last_accepted")

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(sorted({self.start, *range(self.smallest, self.largest + 1)}))

    def choose(self, values: Values) -> int:
        if values["is_first"]:
            return self.start
        gamma = int(values["last_gamma"])
        moved = gamma + self.up if values["last_accepted"] == gamma else max(gamma - self.down, self.smallest)
        return min(moved, self.largest)


@dataclass(frozen=True, eq=False)
class Choice:
    """The gamma with the highest value, scale * what a model says of it + offset; the first of equals.

    Attributes:
        choices: (K,) gammas.
        model: says K numbers.
        scale: (K,).
        offset: (compressions, K).
    """

    choices: Array
    model: Model
    scale: Array
    offset: Array

    def __post_init__(self) -> None:
        if not len(self.choices) == len(self.scale) == self.model.outputs == self.offset.shape[1]:
            raise ValueError("a choice has arrays of unequal lengths")

    @cached_property
    def features(self) -> tuple[str, ...]:
        return _together(("compression",), self.model.inputs.features)

    @cached_property
    def _choices(self) -> list[int]:
        return [int(gamma) for gamma in self.choices]

    @cached_property
    def _line(self) -> tuple[list[float], list[list[float]]]:
        return self.scale.tolist(), self.offset.tolist()

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._choices)))

    def choose(self, values: Values) -> int:
        scale, offset = self._line
        lines = zip(scale, self.model.of(values), offset[int(values["compression"])], strict=True)
        worth = [factor * said + more for factor, said, more in lines]
        return self._choices[worth.index(max(worth))]


@dataclass(frozen=True, eq=False)
class Gate:
    """Drafts up to `cap` tokens if a model says more than a threshold, else none.

    Attributes:
        model: says one number, of what is known before the draft.
        threshold: (compressions,).
        cap: tokens.
    """

    model: Model
    threshold: Array
    cap: int

    @cached_property
    def features(self) -> tuple[str, ...]:
        return _together(("compression",), self.model.inputs.features)

    @cached_property
    def _threshold(self) -> list[float]:
        return [float(value) for value in self.threshold]

    @property
    def gammas(self) -> tuple[int, ...]:
        return (0, self.cap)

    def choose(self, values: Values) -> int:
        return self.cap if self.model.of(values)[0] > self._threshold[int(values["compression"])] else 0


@dataclass(frozen=True, eq=False)
class Threshold:
    """Goes on while one signal of the draft is on the right side of a threshold.

    Attributes:
        signal: a feature of a drafted token.
        threshold: (compressions,).
        above: whether the signal must be at least, or at most, the threshold.
        drawn: whether it is asked behind a drawn token, or before the token is drawn.
        least: the first so many tokens are drafted in any case.
    """

    signal: str
    threshold: Array
    above: bool = True
    drawn: bool = True
    least: int = 0

    @cached_property
    def features(self) -> tuple[str, ...]:
        return ("compression", *(("draft_index",) if self.least else ()), self.signal)

    @cached_property
    def _threshold(self) -> list[float]:
        return [float(value) for value in self.threshold]

    def _goes_on(self, values: Values) -> bool:
        if self.least and values["draft_index"] + self.drawn <= self.least:
            return True
        value, threshold = values[self.signal], self._threshold[int(values["compression"])]
        return value >= threshold if self.above else value <= threshold

    def draws(self, values: Values, draft: Draft) -> bool:
        return self.drawn or self._goes_on(values)

    def keeps(self, values: Values, draft: Draft) -> bool:
        return not self.drawn or self._goes_on(values)


@dataclass(frozen=True, eq=False)
class Score:
    """Goes on while what a model says of a token is above a threshold.

    Attributes:
        model: says one number of a token.
        threshold: (compressions,).
        strict: whether it must be more than the threshold, or as much will do.
        cumulative: whether the number is multiplied by those of the tokens before it.
        drawn: whether it is asked behind a drawn token, or before the token is drawn.
        least: the first so many tokens are drafted in any case.
    """

    model: Model
    threshold: Array
    strict: bool = False
    cumulative: bool = False
    drawn: bool = True
    least: int = 0

    @cached_property
    def features(self) -> tuple[str, ...]:
        return _together(("compression", "draft_index"), self.model.inputs.features)

    @cached_property
    def _threshold(self) -> list[float]:
        return [float(value) for value in self.threshold]

    def _goes_on(self, values: Values, draft: Draft) -> bool:
        said = self.model.of(values)[0]
        if self.cumulative:
            said = draft.survival = draft.survival * said
        threshold = self._threshold[int(values["compression"])]
        enough = said > threshold if self.strict else said >= threshold
        return enough or values["draft_index"] + self.drawn <= self.least

    def draws(self, values: Values, draft: Draft) -> bool:
        return self.drawn or self._goes_on(values, draft)

    def keeps(self, values: Values, draft: Draft) -> bool:
        return not self.drawn or self._goes_on(values, draft)


@dataclass(frozen=True, eq=False)
class Worth:
    """Drafts while the next tokens are worth their time, G of them at most.

    The survival of a draft is the product of what `here` says of its tokens, the chance of each to be right. Behind it,
    k more tokens are worth survival * `ahead` * gain[k - 1] - price[., drafted, k - 1] tokens, for the best k. The next
    token is drawn if that, or 0, and its own survival are more than its place in the verify forward costs.

    Attributes:
        here, ahead: say the chance of a token whose distribution is known, and of the one behind it.
        gain: (G,) tokens that k more are expected to bring if the first is right.
        price: (compressions, G + 1, G) tokens that could be had in the time of k more, by tokens drafted; infinite
            where there is no room.
        place: (compressions, G + 1) the same for the token's own place, by tokens drafted with it.
    """

    here: Model
    ahead: Model
    gain: Array
    price: Array
    place: Array

    drawn = False

    def __post_init__(self) -> None:
        most = len(self.gain)
        if self.price.shape[1:] != (most + 1, most) or self.place.shape != self.price.shape[:2]:
            raise ValueError("the tables of a worth do not fit together")

    @cached_property
    def features(self) -> tuple[str, ...]:
        return _together(("compression", "draft_index"), self.here.inputs.features, self.ahead.inputs.features)

    @cached_property
    def _tables(self) -> tuple[list[float], list[list[list[float]]], list[list[float]]]:
        possible = [[[paid for paid in row if paid < math.inf] for row in rows] for rows in self.price.tolist()]
        return self.gain.tolist(), possible, self.place.tolist()

    def draws(self, values: Values, draft: Draft) -> bool:
        gain, price, place = self._tables
        code, drafted = int(values["compression"]), min(int(values["draft_index"]), len(gain))
        draft.survival *= self.here.of(values)[0]
        chance = draft.survival * self.ahead.of(values)[0]
        lengths = zip(gain, price[code][drafted], strict=False)
        worth = max([chance * more - paid for more, paid in lengths], default=-math.inf)
        draft.goes_on = worth > 0
        return max(worth, 0.0) + draft.survival > place[code][drafted]

    def keeps(self, values: Values, draft: Draft) -> bool:
        return draft.goes_on


GammaRule = Table | Additive | Choice | Gate
StopRule = Threshold | Score | Worth


@dataclass(frozen=True)
class Program:
    """A policy in portable form: at most how many tokens, and where to stop before that, if at all."""

    gamma: GammaRule
    stop: StopRule | None = None

    @cached_property
    def features(self) -> tuple[str, ...]:
        """What it reads, names from `speckv.features.FEATURES`."""
        return _together(self.gamma.features, self.stop.features if self.stop else ())

    @property
    def gammas(self) -> tuple[int, ...]:
        """The numbers of tokens that it may draft, where nothing else ends a draft."""
        return self.gamma.gammas if self.stop is None else tuple(range(max(self.gamma.gammas) + 1))

    @property
    def form(self) -> str:
        """What its rules are called."""
        rules = [self.gamma] if self.stop is None else [self.gamma, self.stop]
        return " + ".join(type(rule).__name__.lower() for rule in rules)


def _together(*names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
