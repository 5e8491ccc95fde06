"""Decoders that run no policy but have settings: at most so many tokens in a draft, and a threshold that ends it."""

import json
import pathlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS, check_compression
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporters.portable import BundlePolicy, PortableExporter
from speckv.features import BoolArray, Features, FloatArray, IntArray
from speckv.files import check_version, read_json, write_json
from speckv.policy import Policy, State
from speckv.runtime import Bundle
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import Program, Score, Table, Threshold
from speckv.traces import Rollouts
from speckv.tuning import seconds_by_compression

FORMAT = "speckv-settings"
SCHEMA_VERSION = 1
FILE = "settings.json"
#: No speculation, of decoders that speculate wherever they have a draft model.
WITHOUT_DRAFT: dict[str, Any] = {"draft_model": None}


@dataclass(frozen=True)
class Setting:
    """How long the drafts of a decoder get.

    Attributes:
        cap: most tokens in a draft, from 0, which is no speculation.
        threshold: a draft goes on while the decoder's token signal is at least this; in [0, 1], 0 never stops.
    """

    cap: int
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if type(self.cap) is not int or self.cap < 0:
            raise SpecKVError(f"cap is {self.cap!r}; it must be a whole number from 0")
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise SpecKVError(f"threshold is {self.threshold!r}; it must be a number from 0 to 1")
        if not 0 <= self.threshold <= 1:
            raise SpecKVError(f"threshold is {self.threshold!r}; it must be from 0 to 1")

    def plain(self, drawn: bool) -> "Setting":
        """The same setting without what can't matter.

        Args:
            drawn: whether the decoder asks behind a drawn token, or before it draws one.
        """
        # Behind the last token that the cap allows nothing is asked.
        return Setting(self.cap, float(self.threshold) if self.cap > drawn else 0.0)


class SettingsExporter(PortableExporter):
    """Writes the settings of a decoder that runs no policy, for each compression of the target.

    A policy fits exactly if its portable form is a constant number of tokens for each compression, with or without the
    decoder's own threshold behind it.

    Attributes:
        signal: what the decoder compares with its threshold, `draft_top1` or `draft_probability`; None if it has none.
        of: what that signal is divided by before, if anything.
        drawn: whether it asks behind a drawn token, which is verified in any case, or before it draws one.
        caps, thresholds: what to try where a setting is searched for.
        default: how the decoder is set if nobody does; None if it does not speculate then.
        family: what `speckv recommend` calls the decoder; by default the exporter's name.
        host: name of the exporter that brings policies to where this decoder is hosted by something that plays them;
            None if there is no such host.
        note: what has to be so for a setting to be kept, in a sentence for users; empty if nothing has.
    """

    signal: ClassVar[str | None] = None
    of: ClassVar[str | None] = None
    drawn: ClassVar[bool] = True
    caps: ClassVar[tuple[int, ...]] = (*range(9), 10, 12, 16)
    thresholds: ClassVar[tuple[float, ...]] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    default: ClassVar[Setting | None] = None
    family: ClassVar[str] = ""
    host: ClassVar[str | None] = None
    note: ClassVar[str] = ""
    outcomes = False
    by_itself = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        cls.family = own.get("family") or own.get("name", cls.family)
        if "observes" not in own:
            cls.observes = frozenset({"compression", *(["draft_index"] if cls.signal else []), *cls.signals()})
        if "kinds" not in own:
            cls.kinds = frozenset({"before", "draft", "both"} if cls.signal else {"before"})

    @classmethod
    def signals(cls) -> tuple[str, ...]:
        """The features of a token that its threshold looks at."""
        return tuple(filter(None, (cls.signal, cls.of)))

    @abstractmethod
    def to_native(self, setting: Setting) -> dict[str, Any]:
        """A setting in the decoder's own names, as JSON can hold it.

        Raises:
            SpecKVError: the decoder can't be set so; the reason.
        """

    @abstractmethod
    def from_native(self, native: dict[str, Any]) -> Setting:
        """The setting that `to_native` wrote.

        Raises:
            SpecKVError, KeyError, TypeError or ValueError: it is none.
        """

    def paste(self, native: dict[str, Any]) -> str:
        """What users give to the decoder, in its own words; by default JSON."""
        return json.dumps(native)

    def candidates(self, gamma_max: int) -> list[Setting]:
        """The settings that a search tries, those first that draft less, each once and none that can't be had."""
        signals = self.thresholds if self.signal else (0.0,)
        grid = [
            Setting(cap, threshold).plain(self.drawn) for cap in self.caps if cap <= gamma_max for threshold in signals
        ]
        return [setting for setting in dict.fromkeys(grid) if self.unfit(setting) is None]

    def unfit(self, setting: Setting) -> str | None:
        """Why the decoder can't have this very setting, None if it can."""
        if setting.threshold and self.signal is None:
            return f"{self.decoder} has no threshold"
        try:
            held = self.from_native(self.to_native(setting)).plain(self.drawn)
        except SpecKVError as error:
            return str(error)
        return None if held == setting.plain(self.drawn) else f"{self.decoder} can't be set to {setting}"

    def settings_of(self, program: Program) -> dict[str, Setting]:
        """The settings, by compression, that decide exactly as a portable policy does.

        Raises:
            SpecKVError: none do; the reason.
        """
        if not isinstance(program.gamma, Table):
            raise SpecKVError(f"its number of tokens changes from step to step, and {self.decoder} keeps one")
        found = {}
        for code, name in enumerate(COMPRESSIONS):
            setting = self._setting(int(program.gamma.gamma[code]), program, code).plain(self.drawn)
            if reason := self.unfit(setting):
                raise SpecKVError(f"{reason} ({name})")
            found[name] = setting
        return found

    def _setting(self, cap: int, program: Program, code: int) -> Setting:
        stop = program.stop
        if stop is None or cap == 0:
            return Setting(cap)
        if isinstance(stop, Threshold | Score) and cap <= max(stop.least, stop.drawn):  # it never has a say
            return Setting(cap)
        if isinstance(stop, Threshold):
            threshold = float(stop.threshold[code])
            if threshold <= 0 if stop.above else threshold == np.inf:  # no signal is below 0
                return Setting(cap)
            own = (stop.signal, self.of, stop.above, stop.drawn) == (self.signal, None, True, self.drawn)
            if own and stop.least <= stop.drawn:
                return Setting(cap, threshold)
        if isinstance(stop, Score) and self._is_own(stop):
            return Setting(cap, round(float(np.exp(stop.threshold[code])), 12))
        raise SpecKVError(f"its rule that stops a draft is not that of {self.decoder}, which {self._rule}")

    def _is_own(self, stop: Score) -> bool:
        """Whether a rule is what `program_of` makes of a threshold on a share."""
        if self.of is None or not isinstance(stop.model, Network) or stop.least > stop.drawn:
            return False
        own, model = _log_share(str(self.signal), self.of), stop.model
        same = (model.inputs, model.output) == (own.inputs, own.output) and len(model.weights) == 1
        same &= np.array_equal(model.weights[0], own.weights[0]) and np.array_equal(model.biases[0], own.biases[0])
        return same and (stop.strict, stop.cumulative, stop.drawn) == (False, False, self.drawn)

    @property
    def _rule(self) -> str:
        if self.signal is None:
            return "has none"
        place = "behind a drawn token" if self.drawn else "before it draws a token"
        return f"compares {' / '.join(self.signals())} with a threshold {place}"

    def program_of(self, settings: Mapping[str, Setting]) -> Program:
        """The portable policy that decides as the decoder does with these settings, by compression.

        Compressions without a setting don't speculate.

        Raises:
            SpecKVError: a compression is unknown.
        """
        plain = {check_compression(name): setting.plain(self.drawn) for name, setting in settings.items()}
        held = [plain.get(name, Setting(0)) for name in COMPRESSIONS]
        caps = Table(np.array([setting.cap for setting in held]))
        threshold = np.array([setting.threshold for setting in held])
        if self.signal is None or not threshold.any():
            return Program(caps)
        if self.of is None:
            return Program(caps, Threshold(self.signal, threshold, drawn=self.drawn))
        logs = np.log(np.maximum(threshold, np.finfo(float).tiny))
        return Program(caps, Score(_log_share(self.signal, self.of), logs, drawn=self.drawn))

    def reason(self, policy: Policy) -> str | None:
        if type(policy).fit is not Policy.fit and not policy.fitted:
            return super().reason(policy)
        try:
            self.settings_of(policy.program())
        except SpecKVError as error:
            return super().reason(policy) or str(error)
        return None

    def check(self, policy: Policy) -> None:
        # Not that of portable exporters: a policy may read what its settings do without.
        super(PortableExporter, self).check(policy)

    def approximate(self, policy: Policy, traces: Rollouts, costs: CostModel) -> Policy:
        """The fastest settings on `traces`, for each compression: those that lose least of what the policy gains.

        Settings with most decisions in common with it are slower: they keep its frequent decisions, not its good ones.
        Compressions that the traces lack get what is fastest over all sequences, as with every exporter that searches.
        """
        candidates = self.candidates(traces.gamma_max)
        seconds = seconds_by_compression([self.played(setting) for setting in candidates], traces, costs)
        best = dict(zip(COMPRESSIONS, (candidates[number] for number in fastest(seconds)), strict=True))
        program = self.program_of(best)
        return BundlePolicy(Bundle(f"{policy.label}, approximated", program))

    def untouched(self) -> Policy | None:
        """What the decoder does if nobody sets anything; None if it does not speculate then."""
        return None if self.default is None else self.played(self.default)

    def played(self, settings: Setting | Mapping[str, Setting]) -> "SettingsPolicy":
        """The decoder with these settings, the same for all compressions or by compression, as a policy."""
        if isinstance(settings, Setting):
            settings = dict.fromkeys(COMPRESSIONS, settings)
        return SettingsPolicy(self, settings)

    def write(self, bundle: Bundle, out: pathlib.Path) -> None:
        settings = {name: self.to_native(setting) for name, setting in self.settings_of(bundle.program).items()}
        header = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "decoder": self.name}
        write_json(out / FILE, header | {"settings": settings})

    def load(self, out: pathlib.Path) -> Policy:
        return BundlePolicy(Bundle(self.name, self.program_of(self.read(out))))

    def read(self, out: pathlib.Path) -> dict[str, Setting]:
        """The settings, by compression, that `write` wrote.

        Raises:
            SpecKVError: the folder does not hold them.
        """
        path = out / FILE
        value = read_json(path, f"the settings of {self.decoder}")
        if value.get("format") != FORMAT or value.get("decoder") != self.name:
            raise SpecKVError(f"{path}: holds no settings of {self.decoder}")
        check_version(value.get("schema_version"), SCHEMA_VERSION, path)
        try:
            found = {check_compression(name): self.from_native(native) for name, native in value["settings"].items()}
            for setting in found.values():
                if (unfit := self.unfit(setting)) is not None:
                    raise SpecKVError(unfit)
            return found
        except (KeyError, TypeError, ValueError, AttributeError, SpecKVError) as error:
            reason = error if isinstance(error, SpecKVError) else repr(error)
            raise SpecKVError(f"{path}: not whole settings of {self.decoder} ({reason}); export them again") from None


class SettingsPolicy(Policy):
    """A decoder with settings, as what plays policies sees it. Its decisions are its own and take no time of ours.

    Args:
        exporter: of that decoder.
        settings: by compression; those without one don't speculate.
    """

    name = "settings"

    def __init__(self, exporter: SettingsExporter, settings: Mapping[str, Setting]) -> None:
        super().__init__()
        self.exporter, self.settings = exporter, settings
        held = [settings.get(name, Setting(0)) for name in COMPRESSIONS]
        self.caps = np.array([setting.cap for setting in held])
        self.thresholds = np.array([setting.threshold for setting in held])
        self.features = ("compression", *exporter.signals())

    @property
    def label(self) -> str:
        return f"{self.exporter.name} as set"

    def overrides(self, method: str) -> bool:
        if method in {"draw_token", "keep_drafting"}:
            return self.exporter.signal is not None and (method == "keep_drafting") == self.exporter.drawn
        return super().overrides(method)

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.caps[features["compression"].astype(np.int64)]

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return self._goes_on(features)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self._goes_on(features)

    def _goes_on(self, features: Features) -> BoolArray:
        code = features["compression"].astype(np.int64)
        signal, *of = (features[name] for name in self.exporter.signals())
        value = signal / of[0] if of else signal
        return np.asarray(value >= self.thresholds[code])

    def program(self) -> Program:
        return self.exporter.program_of(self.settings)


def fastest(seconds: FloatArray) -> IntArray:
    """Number of the fastest candidate, for each known compression; the first of equals.

    Args:
        seconds: (candidates, known compressions); 0 for compressions that were not played, which get what is fastest
            over all.
    """
    return np.asarray(np.where(seconds.any(axis=0), seconds, seconds.sum(axis=1, keepdims=True)).argmin(axis=0))


def _log_share(signal: str, of: str) -> Network:
    """The same as a model, in logs."""
    return Network(Inputs((signal, of), ("log", "log")), (np.array([[1.0], [-1.0]]),), (np.zeros(1),))
