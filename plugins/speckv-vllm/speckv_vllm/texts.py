"""The requests of an engine, each with its own policy. Nothing here knows of vLLM or torch."""

import itertools
from collections.abc import Mapping
from typing import Any

from speckv.evaluation.recording import CHOSEN
from speckv.features import FEATURES, signal_of
from speckv.runtime import Bundle
from speckv.steplog_writer import StepLogWriter
from speckv.traces import TARGET_SIGNALS


class Host:
    """Plays a bundle for the requests of one engine.

    Args:
        bundle: the policy.
        start: what each sequence is started with, by the names of `Bundle.start`.
        log: takes every step; None for no log.

    Attributes:
        looks_inside: whether it has to be told of each drafted token.
        stops: whether it may end a draft.
        target_signals: names of the signals of the target that it reads.
        numbers: of texts, one after the other.
        known: names of the features that are logged.
    """

    def __init__(self, bundle: Bundle, start: Mapping[str, Any], log: StepLogWriter | None = None) -> None:
        self.bundle, self.start, self.log, self.numbers = bundle, dict(start), log, itertools.count()
        self.stops = bundle.asks is not None
        self.looks_inside = self.stops or bool(bundle.signals)
        read = bundle.program.features
        self.target_signals = tuple(name for name in TARGET_SIGNALS if name in read)
        # What a sequence keeps of the moment before a step: signals are only measured where the policy reads them.
        self.known = tuple(
            name
            for name, feature in FEATURES.items()
            if feature.when == "before"
            and name not in {"compression", "cost_ratio"}
            and (name in read or not (signal_of(name) or name in TARGET_SIGNALS))
        )


class Text:
    """One request while it is decoded.

    Args:
        host: of its engine.
        request: its name.
        tokens: in front of the first step.

    Attributes:
        tokens: in front of the next step.
        gamma: what the policy chose, bounded by what vLLM allows.
        drafted: tokens of the draft so far that are to be verified.
        going: whether it takes another token.
    """

    def __init__(self, host: Host, request: str, tokens: int) -> None:
        # A request that is begun anew, for whatever reason, is another sequence in the log.
        self.host, self.name, self.step = host, f"{next(host.numbers)} {request}", 0
        self.sequence = host.bundle.start(context_length=tokens, **host.start)
        self.tokens, self.gamma, self.drafted, self.going = tokens, 0, 0, False
        self._chosen = 0
        self._known: dict[str, float] = {}

    def choose(self, most: int, batch_size: int) -> int:
        """Begin a step: how many tokens to draft at most.

        Args:
            most: that vLLM allows.
            batch_size: requests that are decoded together.
        """
        self._chosen = self.sequence.choose_gamma(batch_size)
        if self.host.log:
            values = self.sequence.values
            self._known = {name: values[name] for name in self.host.known}
        self.gamma = min(self._chosen, most)
        self.drafted = 0 if self.host.looks_inside else self.gamma
        self.going = self.gamma > 0
        return self.gamma

    def see(self, signals: Mapping[str, float], probability: float | None) -> None:
        """Take in the draft's next token, while it is `going`.

        Args:
            signals: of its distribution, those in `Bundle.signals`.
            probability: of the token itself; None if it is the likeliest.
        """
        drawn = self.sequence.draw_token(**signals)
        self.drafted += drawn
        self.going = drawn and self.drafted < self.gamma and self.sequence.keep_drafting(probability)

    def observe(self, drafted: int, accepted: int, target: Mapping[str, float], seconds: float | None) -> None:
        """End the step.

        Args:
            drafted: tokens that vLLM verified, at most `self.drafted`.
            accepted: of them.
            target: signals of the target at the last committed token, those in `Host.target_signals`.
            seconds: duration of the step, None if something else was done in it.
        """
        self.sequence.observe(drafted, accepted, **target)
        if log := self.host.log:
            row: dict[str, Any] = dict(self._known)
            if not self.host.stops:
                row |= {"propensity": 1.0, CHOSEN: self._chosen}
            log.write(
                sequence=self.name,
                step=self.step,
                gamma=drafted,
                accepted=accepted,
                seconds=seconds,
                compression=self.host.start["compression"],
                **row,
            )
        self.step += 1
        self.tokens += accepted + 1
