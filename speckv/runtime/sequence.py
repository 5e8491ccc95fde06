"""One sequence that a portable policy decides for: its features, kept up to date from what the host tells."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from speckv.errors import SpecKVError
from speckv.features import FEATURES
from speckv.runtime.programs import Draft

if TYPE_CHECKING:
    from speckv.runtime.bundle import Bundle

#: Features of the last draft -> the signal of its tokens that each is made of, and how.
_LAST: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "last_mean_entropy": ("draft_entropy", lambda values: sum(values) / len(values)),
    "last_max_entropy": ("draft_entropy", max),
    "last_mean_top1": ("draft_top1", lambda values: sum(values) / len(values)),
    "last_min_top1": ("draft_top1", min),
}
_TARGET = ("target_entropy", "target_margin")


class Sequence:
    """A text being decoded. The host asks and tells, step by step, in this order:

    1. `choose_gamma`, at most how many tokens to draft.
    2. For each token of the draft, once its distribution is known, `draw_token`: whether to draw it at all. Once it is
       drawn (it will be verified in any case) and if there is room for another, `keep_drafting`.
    3. `observe`, once the target has verified the draft.

    `Bundle.start` makes one. Only one thread at a time may use it.
    """

    def __init__(self, bundle: "Bundle", context_length: int, compression: int, cost_ratio: float) -> None:
        self._gamma, self._stop = bundle.program.gamma, bundle.program.stop
        self._values = {name: 0.0 for name in FEATURES}
        self._values |= {
            "context_length": float(context_length),
            "compression": float(compression),
            "cost_ratio": cost_ratio,
            "is_first": 1.0,
            "running_acceptance": 0.5,
            "batch_size": 1.0,
        }
        self._last = [(name, *_LAST[name]) for name in bundle.program.features if name in _LAST]
        self._needs, self._targets = bundle.signals, [name for name in _TARGET if name in bundle.program.features]
        self._signals: dict[str, list[float]] = {signal: [] for _, signal, _ in self._last}
        self._accepted = self._tried = self._index = 0
        self._draft = Draft()

    @property
    def values(self) -> Mapping[str, float]:
        """Features by name, as they are now."""
        return self._values

    def choose_gamma(self, batch_size: int = 1) -> int:
        """How many tokens to draft at most. The host's own limit applies as well.

        Args:
            batch_size: sequences that are decoded together.
        """
        self._values["batch_size"] = batch_size
        self._draft, self._index = Draft(), 0
        for values in self._signals.values():
            values.clear()
        return self._gamma.choose(self._values)

    def draw_token(self, **signals: float) -> bool:
        """Whether to draw the next token of the draft.

        Args:
            signals: of its distribution, as the bundle names them in `signals`: `draft_entropy` in nats, `draft_top1`,
                `draft_top2` and `draft_top10`, the probabilities of the likeliest token, the second, and the ten
                likeliest together.

        Raises:
            SpecKVError: one of them is missing.
        """
        for name in self._needs:
            if name not in signals:
                raise SpecKVError(f"{name} is missing; draw_token has to be told {', '.join(self._needs)}")
        self._index += 1
        self._values.update(signals)
        self._values["draft_index"] = self._index
        for name, values in self._signals.items():
            values.append(signals[name])
        return self._stop is None or self._stop.draws(self._values, self._draft)

    def keep_drafting(self, draft_probability: float | None = None) -> bool:
        """Whether to draft another token behind the one just drawn.

        Args:
            draft_probability: of the drawn token under the draft. By default it was the likeliest.

        Raises:
            SpecKVError: of this draft `draw_token` was told nothing yet.
        """
        if self._stop is not None and not self._index:
            raise SpecKVError("keep_drafting was called before draw_token; tell draw_token of every token first")
        self._values["draft_probability"] = (
            self._values["draft_top1"] if draft_probability is None else draft_probability
        )
        return self._stop is None or self._stop.keeps(self._values, self._draft)

    def observe(
        self, drafted: int, accepted: int, target_entropy: float | None = None, target_margin: float | None = None
    ) -> None:
        """Take in what came of the step, before anything is cut off at the end of the text.

        Args:
            drafted: tokens that were verified.
            accepted: of them, how many the target agreed with.
            target_entropy, target_margin: of the target at the last committed token, in nats and in logits; only needed
                by policies that read them.

        Raises:
            SpecKVError: no such outcome can be, one of the numbers is missing, or `draw_token` was not told of all
                tokens by a host whose policy reads signals of the last draft. Nothing was taken in then.
        """
        if not 0 <= accepted <= drafted:
            raise SpecKVError(f"{accepted} of {drafted} drafted tokens can't have been accepted; tell 0 to all of them")
        if self._last and self._index < drafted:
            raise SpecKVError(
                f"{drafted} tokens were drafted and draw_token was told of {self._index}; it has to be told of each"
            )
        values, of_target = self._values, {"target_entropy": target_entropy, "target_margin": target_margin}
        for name in self._targets:
            if (value := of_target[name]) is None:
                raise SpecKVError(f"{name} is missing; observe has to be told {', '.join(self._targets)}")
            values[name] = value
        self._accepted += accepted
        self._tried += accepted + (accepted < drafted)
        values["position"] += accepted + 1
        values["context_length"] += accepted + 1
        values["is_first"] = 0.0
        values["last_gamma"], values["last_accepted"] = drafted, accepted
        values["running_acceptance"] = (self._accepted + 1) / (self._tried + 2)
        if drafted:
            for name, signal, reduce in self._last:
                values[name] = reduce(self._signals[signal][:drafted])
