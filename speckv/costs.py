"""Cost models: measured seconds of draft and verify forwards (rule R4)."""

import pathlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS, check_compression
from speckv.errors import SpecKVError
from speckv.files import check_version, read_json, write_json

if TYPE_CHECKING:
    from speckv.steplogs import StepLog

#: Steps that a gamma is counted besides as lying on the line: few tell little of what it takes.
_ON_THE_LINE = 5
#: No number of a timed run is as large: least squares could not square it.
_MOST = 1e15
FORMAT = "speckv-costs"
#: Version 2 adds batches. A model of single sequences is written as version 1, which older readers know.
SCHEMA_VERSION = 2


@dataclass(frozen=True, eq=False)
class Timings:
    """Seconds of a forward, measured on a grid.

    Between grid points the seconds are interpolated linearly, beyond the last number of tokens they go on at
    the slope of the last two (never falling), and outside the measured context lengths the nearest one holds.
    A staircase in the number of tokens stays as it was measured.

    Attributes:
        tokens: (n,) tokens of the forward, increasing.
        contexts: (c,) tokens in the cache, increasing.
        seconds: (n, c) medians.
        spread: (n, c) interquartile range in seconds, or None where it was not measured.
    """

    tokens: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64] | None = None

    def table(self, max_tokens: int, max_context: int) -> npt.NDArray[np.float64]:
        """Seconds for 0..max_tokens tokens (0 costs nothing) at 0..max_context, (max_tokens + 1, max_context + 1)."""
        counts = np.arange(1, max_tokens + 1)
        by_tokens = np.stack([np.interp(counts, self.tokens, column) for column in self.seconds.T], axis=1)
        if len(self.tokens) > 1:
            slope = np.maximum((self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2]), 0.0)
            beyond = np.maximum(counts - self.tokens[-1], 0)
            by_tokens = by_tokens + beyond[:, None] * slope
        contexts = np.arange(max_context + 1)
        rows = [np.interp(contexts, self.contexts, row) for row in by_tokens]
        return np.vstack([np.zeros((1, max_context + 1)), *rows])

    def at(self, tokens: int, context: int) -> float:
        """Seconds of one forward of `tokens` tokens behind `context` cached ones."""
        return float(self.table(tokens, context)[tokens, context])

    def between(self, other: Self, share: float) -> Self:
        """Timings whose seconds are (1 - share) of these and share of the other's, on the points of both grids."""
        tokens, contexts = np.union1d(self.tokens, other.tokens), np.union1d(self.contexts, other.contexts)
        points = np.ix_(tokens, contexts)
        one, two = (timings.table(tokens[-1], contexts[-1])[points] for timings in (self, other))
        return type(self)(tokens, contexts, (1 - share) * one + share * two)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "tokens": self.tokens.tolist(),
            "contexts": self.contexts.tolist(),
            "seconds": self.seconds.tolist(),
        }
        if self.spread is not None:
            value["spread"] = self.spread.tolist()
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str) -> Self:
        try:
            tokens, contexts = (_numbers(value[name], "i") for name in ("tokens", "contexts"))
            seconds = _numbers(value["seconds"]).astype(float)
            spread = _numbers(value["spread"]).astype(float) if "spread" in value else None
        except (KeyError, TypeError, ValueError) as error:
            raise SpecKVError(f"{where}: not a table of timings ({error}); profile again") from None
        if seconds.shape != (len(tokens), len(contexts)) or not seconds.size:
            raise SpecKVError(f"{where}: seconds must be a table of tokens by contexts; profile again")
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise SpecKVError(f"{where}: seconds must be positive numbers; profile again")
        if spread is not None and not (
            spread.shape == seconds.shape and np.isfinite(spread).all() and spread.min() >= 0
        ):
            raise SpecKVError(f"{where}: spread must be a table like seconds, of 0 or more; profile again")
        if (np.diff(tokens) <= 0).any() or (np.diff(contexts) <= 0).any() or tokens[0] != 1 or contexts[0] < 0:
            raise SpecKVError(f"{where}: tokens must increase from 1, and contexts from 0 or more; profile again")
        return cls(tokens, contexts, seconds, spread)


@dataclass(frozen=True, eq=False)
class CostModel:
    """How long a step takes on one machine with one draft, for each compression of the target.

    A step is that of `batch_size` sequences which draft, verify and commit together: the seconds are those of the whole
    batch, and every sequence in it waits for all of them. Hence a replay under a model of a batch gives the tokens a
    second of one of its sequences, and `batch_size` times as many are the machine's.

    Attributes:
        name: short, for tables.
        draft: of one forward of the draft model.
        verify: compression -> of one forward of the target.
        overhead: seconds a step takes besides the forwards and the policy's own decisions.
        controller: policy name -> (seconds of its work once a step, seconds of one decision inside the draft). One
            decision is for all sequences of a batch: a policy is asked in one call with arrays.
        provenance: source, machine, command, and how well the model predicts held-out steps.
        batch_size: sequences that share each forward.
        batches: batch size, above `batch_size` -> the model of steps of so many sequences, at the same compressions;
            its draft, verify and overhead count.
    """

    name: str
    draft: Timings
    verify: dict[str, Timings]
    overhead: float = 0.0
    controller: dict[str, tuple[float, float]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    batches: dict[int, Self] = field(default_factory=dict)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sequences that share a forward, as far as that was measured, increasing."""
        return (self.batch_size, *sorted(self.batches))

    def at_batch(self, size: int) -> Self:
        """The model of steps of `size` sequences: measured, or on the straight line between two sizes that were.

        Its name says so, as those of two machines must differ. Raises SpecKVError if `size` is outside of the measured.
        """
        sizes = self.batch_sizes
        if not sizes[0] <= size <= sizes[-1]:
            measured = f"batches of {sizes[0]} to {sizes[-1]} sequences" if self.batches else f"batches of {sizes[0]}"
            raise SpecKVError(
                f"cost model {self.name!r} was measured for {measured}, not of {size}; profile them with --batch-sizes"
            )
        above = next(n for n in sizes if n >= size)
        found = self.batches.get(above, self)
        if above > size:
            below = max(n for n in sizes if n < size)
            found = self.batches.get(below, self)._between(found, (size - below) / (above - below))
        name = self.name if size == self.batch_size else f"{self.name}, batch {size}"
        return replace(
            self,
            name=name,
            draft=found.draft,
            verify=dict(found.verify),
            overhead=found.overhead,
            controller=dict(self.controller),
            provenance=dict(self.provenance),
            batch_size=size,
            batches={},
        )

    def _between(self, other: Self, share: float) -> Self:
        """Between two batch sizes, as far from this one as `share` says."""
        verify = {name: timings.between(other.verify[name], share) for name, timings in self.verify.items()}
        overhead = (1 - share) * self.overhead + share * other.overhead
        return replace(self, draft=self.draft.between(other.draft, share), verify=verify, overhead=overhead)

    def plain_rate(self, compression: str, context: int) -> float:
        """Tokens a second of a sequence that is decoded without speculation.

        Raises SpecKVError if `compression` was not measured.
        """
        return float(1 / (self.verify_of(compression).at(1, context) + self.overhead))

    def verify_of(self, compression: str) -> Timings:
        """Timings of the target at `compression`. Raises SpecKVError if they were not measured."""
        if compression not in self.verify:
            raise SpecKVError(
                f"cost model {self.name!r} has no timings for {compression!r}, only for {', '.join(self.verify)}; "
                "profile that compression, or compare others"
            )
        return self.verify[compression]

    def cost_ratio(self, compression: str, context: int = 256) -> float:
        """Seconds of a draft forward of one token to those of the target's, at one context length."""
        return self.draft.at(1, context) / self.verify_of(compression).at(1, context)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the model as JSON."""
        value = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "unit": "seconds",
            "provenance": self.provenance,
            **self._tables(),
            "controller": {name: list(seconds) for name, seconds in self.controller.items()},
        }
        if self.batch_sizes == (1,):
            value["schema_version"] = 1
        else:
            value["batch_size"] = self.batch_size
            value["batches"] = {str(size): self.batches[size]._tables() for size in sorted(self.batches)}
        write_json(pathlib.Path(path), value)

    def _tables(self) -> dict[str, Any]:
        """What a file holds of each batch size."""
        verify = {compression: timings.to_json() for compression, timings in self.verify.items()}
        return {"overhead": self.overhead, "draft": self.draft.to_json(), "verify": verify}

    @classmethod
    def _from_tables(cls, value: dict[str, Any], where: str, **attributes: Any) -> Self:
        model = cls(
            draft=Timings.from_json(value["draft"], f"{where}: draft"),
            verify={name: Timings.from_json(t, f"{where}: verify {name}") for name, t in value["verify"].items()},
            overhead=float(_numbers(value["overhead"])),
            **attributes,
        )
        if not model.verify:
            raise ValueError("verify holds no compression")
        if unknown := sorted(model.verify.keys() - COMPRESSIONS):
            raise ValueError(f"verify: compression {unknown[0]!r} is unknown")
        durations = [model.overhead, *(seconds for pair in model.controller.values() for seconds in pair)]
        if not all(np.isfinite(seconds) and seconds >= 0 for seconds in durations):
            raise ValueError("overhead and controller seconds must be 0 or more")
        return model

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Read a model. Raises SpecKVError if the file is not one, or is of a newer schema version."""
        path = pathlib.Path(path)
        value = read_json(path, "a cost model")
        if value.get("format") != FORMAT:
            raise SpecKVError(f"{path}: is not a cost model; make one with `speckv profile`")
        check_version(value.get("schema_version"), SCHEMA_VERSION, path)
        try:
            if value["unit"] != "seconds":
                raise ValueError(f"its unit is {value['unit']!r}, not seconds")
            batches = {
                int(size): cls._from_tables(of_size, f"{path}: batch {size}", name=str(value["name"]))
                for size, of_size in value.get("batches", {}).items()
            }
            controller = {name: _numbers(seconds) for name, seconds in value["controller"].items()}
            if any(seconds.shape != (2,) for seconds in controller.values()):
                raise ValueError("controller must hold two numbers for each policy")
            model = cls._from_tables(
                value,
                str(path),
                name=str(value["name"]),
                controller={name: (float(s[0]), float(s[1])) for name, s in controller.items()},
                provenance=value["provenance"],
                batch_size=int(_numbers(value.get("batch_size", 1), "i")),
                batches=batches,
            )
            if not 0 < model.batch_size < min(batches, default=model.batch_size + 1):
                raise ValueError("batches must be of more sequences than batch_size, which is 1 or more")
            if any(model.verify.keys() != other.verify.keys() for other in batches.values()):
                raise ValueError("every batch size must hold the same compressions")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise SpecKVError(f"{path}: not a whole cost model ({error!r}); profile again") from None
        return model


def _numbers(value: Any, kinds: str = "if") -> npt.NDArray[Any]:
    """Numbers of a JSON file, integers (`i`) and others (`f`). Raises ValueError if it holds truth values or texts."""
    array = np.array(value)
    if array.dtype.kind not in kinds:
        raise ValueError(f"{value!r:.40} are not {'numbers' if 'f' in kinds else 'whole numbers'}")
    return array


class StepCosts:
    """A cost model laid out for many steps at once, as tables to index.

    Args:
        costs: the model.
        compressions: (S,) compression of each sequence.
        max_tokens: the largest number of tokens in a forward that will be asked for.
        max_context: the longest context that will be asked for.
    """

    def __init__(self, costs: CostModel, compressions: npt.NDArray[np.str_], max_tokens: int, max_context: int) -> None:
        names, self._code = np.unique(compressions, return_inverse=True)
        self._draft = costs.draft.table(max_tokens, max_context)
        self._verify = np.stack([costs.verify_of(str(name)).table(max_tokens, max_context) for name in names])
        self._overhead = costs.overhead

    def seconds(
        self,
        rows: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        lags: npt.NDArray[np.int64],
        forwards: npt.ArrayLike,
        gammas: npt.ArrayLike,
    ) -> npt.NDArray[np.float64]:
        """Seconds of steps, the policy's own time not included; all arguments broadcast.

        Args:
            rows: sequence of each step.
            contexts: tokens in front of the step.
            lags: committed tokens that the draft has not seen; its first forward takes them in.
            forwards: draft forwards of the step.
            gammas: tokens verified; the target's forward has one more.
        """
        forwards, gammas = np.asarray(forwards), np.asarray(gammas)
        verify = self._verify[self._code[rows], gammas + 1, contexts]
        first = self._draft[lags, contexts]
        drafting = np.where(forwards > 0, first + (forwards - 1) * self._draft[1, contexts], 0.0)
        return np.asarray(verify + drafting + self._overhead)


def fit_costs(path: str | pathlib.Path, name: str, source: str, alias: dict[str, str] | None = None) -> CostModel:
    """Fit a cost model to the total times of runs that each played one gamma throughout.

    Least squares on seconds = steps * (gamma * draft + verify of the compression). Such totals can't tell a
    dependence on context length, nor one of verify on the number of tokens: both are taken to be flat.

    Args:
        path: CSV with the columns `compression, gamma, num_steps, elapsed_sec`, one row a run.
        name: of the cost model.
        source: where the timings were published.
        alias: compressions that were not timed -> those whose timings stand in for them.

    Raises:
        SpecKVError: a column is missing, a row is none, or the fit gives a time that is not positive.
    """
    import csv

    path = pathlib.Path(path)
    names = ("compression", "gamma", "num_steps", "elapsed_sec")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise SpecKVError(f"{path}: no such file; expected a CSV file of timed runs") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecKVError(f"{path}: not a readable CSV file ({error})") from None
    if missing := [name for name in names if name not in columns]:
        raise SpecKVError(f"{path}: the column {missing[0]} is missing; expected one row a timed run")
    if not rows:
        raise SpecKVError(f"{path}: holds no runs; expected one row a timed run")
    runs = np.zeros((len(rows), 3))
    for run, (line, row) in zip(runs, rows, strict=True):
        try:
            if missing := [name for name in names if not row[name]]:
                raise ValueError(f"{missing[0]} is missing")
            check_compression(row["compression"])
            run[:] = [float(row[name]) for name in names[1:]]
            if not (np.abs(run).max() < _MOST and run[1:].min() > 0):
                raise ValueError(f"its numbers must be below {_MOST:.0e}, and steps and seconds above 0")
        except (SpecKVError, ValueError) as error:
            raise SpecKVError(f"{path}: row {line}: {error}; mend or remove that row") from None
    gamma, steps, seconds = runs.T
    compression = np.array([row["compression"] for _, row in rows])
    timed = _Timed(compression, gamma, steps, seconds, np.zeros(len(rows)), np.ones(len(rows)), np.arange(len(rows)))
    return timed.fit(path, name, source, "runs", alias)


def fit_costs_to_log(
    log: "StepLog", name: str, source: str, alias: dict[str, str] | None = None, where: object = "the step log"
) -> CostModel:
    """Fit a cost model to the seconds of logged steps.

    Least squares on seconds = gamma * draft + verify of the compression, each linear in the context length if the log
    has the signal `context_length` and tells so much, and a model a batch size if it has `batch_size` (of many sizes
    those nearest to 1, 2, 4, 8, … and the largest; the others lie on straight lines between them; a longer context
    takes as much more for each sequence at all of them); then verify takes what is left on average at each gamma, so
    that a staircase stays. What verify takes for each further token can't be told from what a draft forward takes: the
    straight part of it is counted with the draft. The policy's own time is in verify.

    A step of a batch stands in the log once for each of its sequences, with the same seconds and with the gamma of that
    sequence alone. Where they play different gammas, only the held-out error says how far a sequence's own gamma tells
    what the batch took.

    Args:
        log: with `seconds` and `compression`; steps that lack one of them, or a signal that is used, are left aside.
        name, source, alias: as of `fit_costs`.
        where: what to call the log in messages.

    Raises:
        SpecKVError: no step has seconds and compression, or the fit gives a time that is not positive.
    """
    if log.seconds is None or log.compression is None:
        raise SpecKVError(f"{where}: has no {'seconds' if log.seconds is None else 'compression'}; log it as well")
    context = log.signals.get("context_length", np.zeros(len(log)))
    batch = log.signals.get("batch_size", np.ones(len(log)))
    used = ~np.isnan(log.seconds + context + batch) & (log.compression != "")
    if not used.any():
        raise SpecKVError(
            f"{where}: no step has its seconds, its compression, its context and its batch size; log them as well"
        )
    if (batch[used] < 1).any() or (batch[used] % 1).any():
        raise SpecKVError(f"{where}: the signal batch_size must be whole numbers from 1; mend it")
    _, sequence = np.unique(log.sequence[used], return_inverse=True)
    timed = _Timed(
        log.compression[used], log.gamma[used].astype(float), np.ones(int(used.sum())), log.seconds[used],
        context[used], batch[used], sequence,
    )  # fmt: skip
    return timed.fit(where, name, source, "steps", alias, stairs=True)


@dataclass(frozen=True, eq=False)
class _Timed:
    """Timed runs of one gamma each.

    Attributes:
        compression, gamma, steps, seconds: (n,) of each run.
        context: (n,) tokens in front of its only step, 0 for runs of many.
        batch: (n,) sequences that share its steps.
        group: (n,) codes; what is held out together. Rows of a single group are held out one by one.
    """

    compression: npt.NDArray[np.str_]
    gamma: npt.NDArray[np.float64]
    steps: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    context: npt.NDArray[np.float64]
    batch: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]

    def fit(
        self, where: object, name: str, source: str, unit: str, alias: dict[str, str] | None, stairs: bool = False
    ) -> CostModel:
        names = np.unique(self.compression)
        ends = np.unique([self.context.min(), self.context.max()])
        sizes = _sizes(self.batch)
        in_batch = _shares(self.batch, sizes)
        kinds = np.column_stack([self.gamma, self.compression[:, None] == names]) * self.steps[:, None]
        # (n, (1 + compressions) * (sizes + 1)): what takes the time. The coefficients are seconds at each size in the
        # shortest context, and what the longest one adds for each sequence, which brings a cache of its own.
        longer = (self.context - ends[0]) / max(np.ptp(ends), 1) * self.batch
        shares = np.column_stack([in_batch, longer])[:, : len(sizes) + len(ends) - 1]
        inputs = np.einsum("nk,ns->nks", kinds, shares).reshape(len(kinds), -1)
        gammas, stair = np.unique(self.gamma if stairs else np.zeros(len(inputs)), return_inverse=True)
        cell = np.searchsorted(names, self.compression) * len(gammas) + stair
        nearest = in_batch.argmax(axis=1)

        def solve(rows: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
            """Seconds of the forwards, and what a step takes besides in each cell of compression and gamma, by size."""
            straight = np.asarray(np.linalg.lstsq(inputs[rows], self.seconds[rows], rcond=None)[0])
            left = self.seconds[rows] - inputs[rows] @ straight
            at, size = (cell * len(sizes) + nearest)[rows], len(names) * len(gammas) * len(sizes)
            sums, counts = (np.bincount(at, weights, size) for weights in (left, self.steps[rows]))
            return straight, (sums / (counts + _ON_THE_LINE) * stairs).reshape(-1, len(sizes))

        straight, steps = solve(np.ones(len(inputs), dtype=bool))
        found = straight.reshape(kinds.shape[1], -1)
        added = found[:, len(sizes) :].sum(axis=1)  # nothing if there is one context alone
        at_ends = np.einsum("k,c,b->kcb", added, np.arange(len(ends)), sizes)
        draft, *level = found[:, None, : len(sizes)] + at_ends
        tables = np.array(level)[:, None] + steps.reshape(len(names), len(gammas), 1, len(sizes))
        unknown = np.linalg.matrix_rank(inputs) < inputs.shape[1]
        if unknown or min(draft.min(), tables.min()) <= 0:
            if len(ends) > 1:  # the log is too small or too noisy to tell what a longer context takes
                return replace(self, context=np.zeros(len(inputs))).fit(where, name, source, unit, alias, stairs)
            each = "compression and batch size" if len(sizes) > 1 else "compression"
            raise SpecKVError(
                f"{where}: the fit can't tell what a draft and a verify take; play several gammas at each {each}"
                if unknown
                else f"{where}: the fit gives a draft or a verify no time, as the seconds are too noisy or do not grow "
                f"with gamma; log more steps at each {each}"
            )
        predicted = np.zeros(len(inputs))
        group = self.group if len(np.unique(self.group)) > 1 else np.arange(len(inputs))
        for fold in range(5):
            held_out = group % 5 == fold
            straight, steps = solve(~held_out)
            predicted[held_out] = (inputs @ straight + self.steps * (steps[cell] * in_batch).sum(axis=1))[held_out]
        contexts = ends.astype(np.int64)
        models = []
        for number, size in enumerate(sizes.astype(int).tolist()):
            timings = {
                str(name): _from_one(gammas.astype(np.int64) + 1, contexts, table[:, :, number])
                for name, table in zip(names, tables, strict=True)
            }
            for other, timed in (alias or {}).items():
                if timed not in timings:
                    raise SpecKVError(f"{where}: {timed} was not timed, so it can't stand in for {other}")
                timings[other] = timings[timed]
            of_draft = _from_one(np.array([1]), contexts, draft[None, :, number])
            models.append(CostModel(name, of_draft, timings, batch_size=size))
        tokens, context = "as logged" if stairs else "flat", "flat" if len(ends) == 1 else "linear"
        linear = "flat in tokens and context" if tokens == context else f"{tokens} in tokens, {context} in context"
        provenance = {
            "source": source,
            "fit": f"least squares on seconds = steps * (gamma * draft + verify), {linear}",
            "stand_ins": alias or {},
            "held_out": self._errors(predicted, np.ones(len(inputs), dtype=bool), unit),
        }
        if len(sizes) > 1:
            provenance["held_out_batches"] = {
                str(model.batch_size): self._errors(predicted, nearest == n, unit) for n, model in enumerate(models)
            }
        return replace(models[0], provenance=provenance, batches={m.batch_size: m for m in models[1:]})

    def _errors(
        self, predicted: npt.NDArray[np.float64], rows: npt.NDArray[np.bool_], unit: str
    ) -> dict[str, int | float]:
        """How far the `predicted` seconds (n,) are off where `rows` (n,) is True."""
        guess, truth = predicted[rows], self.seconds[rows]
        return {
            unit: len(truth),
            "median_relative_error": float(np.median(np.abs(guess - truth) / truth)),
            "total_ratio": float(guess.sum() / truth.sum()),
        }


def _sizes(batch: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of the batch sizes that occur, those nearest to powers of two, and the largest."""
    known = np.unique(batch)
    powers = 2.0 ** np.arange(np.log2(known[-1]) + 1)
    return np.unique([*known[np.abs(known - powers[:, None]).argmin(axis=1)], known[-1]])


def _shares(values: npt.NDArray[np.float64], knots: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(n, knots) how much each knot counts at each value, on straight lines between them."""
    return np.column_stack([np.interp(values, knots, knot) for knot in np.eye(len(knots))])


def _from_one(
    tokens: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64]
) -> Timings:
    """Timings from one token on: below the least that was timed its seconds hold."""
    if tokens[0] > 1:
        tokens, seconds = np.append(1, tokens), np.vstack([seconds[:1], seconds])
    return Timings(tokens, contexts, seconds)
