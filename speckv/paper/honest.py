"""What the paper's protocol hides, asked of the same data.

Splits are by prompt, a policy knows only what was known before the step, and what it is worth is what happened: its
tokens on the steps whose logged gamma is the one that it chooses, and the seconds of the published runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from speckv.features import BoolArray, FloatArray, IntArray
from speckv.paper import protocol
from speckv.paper.data import GAMMAS, PaperData, Steps, StrArray, find_oddities
from speckv.paper.protocol import ACCURATE, FAST

FOLDS = 5
RESAMPLES = 9_999
BEST_FIXED = "Best fixed by speed"
#: Policies of the paper that are chosen on all steps, those that they are valued on among them; the others are not.
IN_SAMPLE = ("Fixed-best", "Task-oracle")
_GAMMAS = np.array(GAMMAS)


def find_lagged_signals(steps: Steps) -> FloatArray:
    """(n, 4) signals of the previous step of the run, 0 in its first: what a decoder knows before it drafts."""
    lagged = np.roll(steps.signals, 1, axis=0)
    lagged[steps.number == 0] = 0.0
    return lagged


def deal_prompts(prompts: StrArray, tasks: StrArray, seed: int = 0) -> IntArray:
    """(n,) the fold of each row: all rows of a prompt in one, the prompts of each task dealt out in turn."""
    random = np.random.default_rng(seed)
    fold = np.zeros(len(prompts), dtype=np.int64)
    for task in np.unique(tasks):
        for turn, prompt in enumerate(random.permutation(np.unique(prompts[tasks == task]))):
            fold[(prompts == prompt) & (tasks == task)] = turn % FOLDS
    return fold


def deal_rows(steps: Steps) -> IntArray:
    """(n,) the fold of each row, single steps dealt out as the paper splits them."""
    from sklearn.model_selection import StratifiedKFold

    cells = np.char.add(steps.compression, steps.task)
    fold = np.zeros(len(steps), dtype=np.int64)
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=protocol.SEED)
    for number, (_, held_out) in enumerate(splitter.split(cells, cells)):
        fold[held_out] = number
    return fold


@dataclass(frozen=True)
class HeldOut:
    """Predictions of acceptance for steps that the predictor was not fitted on.

    Attributes:
        rates: (n,) at the logged gamma.
        by_gamma: (n, 4) at each of `GAMMAS`.
    """

    rates: FloatArray
    by_gamma: FloatArray

    @property
    def choices(self) -> IntArray:
        """(n,) the gamma with the most expected tokens."""
        return np.asarray(_GAMMAS[(self.by_gamma * _GAMMAS + 1).argmax(axis=1)])


def predict_by_fold(
    model: Any, steps: Steps, signals: FloatArray, fold: IntArray
) -> Iterator[tuple[BoolArray, BoolArray, FloatArray, FloatArray]]:
    """For each fold, what a model that was fitted on the others predicts of all steps.

    Yields:
        (n,) the training rows, (n,) the held-out rows, (n,) acceptance at the logged gamma, (n, 4) at each of `GAMMAS`.
    """
    from sklearn.base import clone

    logged = protocol.stack_inputs(steps, signals)
    inputs = [protocol.stack_inputs(steps, signals, gamma) for gamma in GAMMAS]
    for number in np.unique(fold):
        train, test = fold != number, fold == number
        fitted = clone(model).fit(logged[train], steps.acceptance[train])
        by_gamma = np.stack([protocol.predict(fitted, values) for values in inputs], axis=1)
        yield train, test, protocol.predict(fitted, logged), by_gamma


def hold_out(model: Any, steps: Steps, signals: FloatArray, fold: IntArray) -> HeldOut:
    """Predict each fold with a model fitted on the others."""
    rates, by_gamma = np.zeros(len(steps)), np.zeros((len(steps), len(GAMMAS)))
    for _, test, predicted, predicted_by_gamma in predict_by_fold(model, steps, signals, fold):
        rates[test], by_gamma[test] = predicted[test], predicted_by_gamma[test]
    return HeldOut(rates, by_gamma)


def draw_prompts(tasks: StrArray, times: int = RESAMPLES, seed: int = 0) -> FloatArray:
    """(times, p) how often each of p prompts is drawn when those of each task are resampled among themselves."""
    random = np.random.default_rng(seed)
    weights = np.zeros((times, len(tasks)))
    for task in np.unique(tasks):
        mask = tasks == task
        weights[:, mask] = random.multinomial(mask.sum(), np.full(mask.sum(), 1 / mask.sum()), times)
    return weights


class Evidence:
    """What happened in the published runs, by compression (c), gamma (g) and prompt (p).

    A policy is valued by replay-match: its mean over the steps where it chooses the gamma that was logged, each
    compression and gamma weighted by how often the policy chooses that gamma there. Seconds are those of the mean step
    of the runs at that compression and gamma.

    Args:
        paper: steps and timed runs.

    Attributes:
        compressions, prompts, tasks: (c,), (p,), and (p,) the task of each prompt.
        compression_of_step: (n,) index into `compressions`.
        rows, elapsed: (c, g, p) steps, and their seconds.
    """

    def __init__(self, paper: PaperData) -> None:
        self.steps = steps = paper.steps
        self.compressions, self.compression_of_step = np.unique(steps.compression, return_inverse=True)
        self.prompts, first, self._p = np.unique(steps.prompt, return_index=True, return_inverse=True)
        self.tasks = steps.task[first]
        self._g = np.searchsorted(_GAMMAS, steps.gamma)
        self.rows = self._sum(np.ones(len(steps)))
        self.elapsed = self._sum((paper.runs.seconds / paper.runs.steps)[steps.run])

    def _sum(self, values: FloatArray) -> FloatArray:
        """(c, g, p) sums of (n,) values."""
        shape = len(self.compressions), len(GAMMAS), len(self.prompts)
        flat = np.ravel_multi_index((self.compression_of_step, self._g, self._p), shape)
        return np.bincount(flat, weights=values, minlength=int(np.prod(shape))).reshape(shape).astype(float)

    @property
    def step_seconds(self) -> FloatArray:
        """(c, g) mean seconds of a step."""
        return np.asarray(self.elapsed.sum(axis=2) / self.rows.sum(axis=2))

    def weigh(self, rows: BoolArray) -> FloatArray:
        """(1, p) weights: 1 for the prompts of these rows, 0 for the others."""
        return np.isin(np.arange(len(self.prompts)), self._p[rows])[None].astype(float)

    def value(self, choices: IntArray, decision: float = 0.0, weights: FloatArray | None = None) -> "Value":
        """What a policy is worth.

        Args:
            choices: (n,) the gamma that it plays in each step.
            decision: seconds of one of its decisions.
            weights: (b, p) how often each prompt counts; by default once.
        """
        weights = np.ones((1, len(self.prompts))) if weights is None else weights
        matched = (choices == self.steps.gamma).astype(float)
        rows, hits, tokens, elapsed = (
            np.einsum("cgp,bp->bcg", table, weights)
            for table in (self.rows, self._sum(matched), self._sum(matched * self.steps.tokens), self.elapsed)
        )
        share = hits / rows
        return Value(
            steps=share.sum(axis=2),
            tokens=(tokens / rows).sum(axis=2),
            seconds=(share * elapsed / rows).sum(axis=2) + decision * share.sum(axis=2),
            matched=int(matched.sum()),
        )

    def value_of_complete_rows(
        self, choices: IntArray, decision: float = 0.0, weights: FloatArray | None = None
    ) -> "Value":
        """The same from the steps in which the largest gamma was played: they tell the outcome at every gamma.

        Fit for policies that know nothing of the block itself; the others would know what the larger draft showed.
        """
        weights = np.ones((1, len(self.prompts))) if weights is None else weights
        complete = (self.steps.gamma == max(GAMMAS)).astype(float)
        seconds = self.step_seconds[self.compression_of_step, np.searchsorted(_GAMMAS, choices)] + decision
        outcome = np.minimum(self.steps.accepted, choices) + 1
        count, tokens, elapsed = (
            np.einsum("cgp,bp->bc", self._sum(complete * values), weights)
            for values in (np.ones(len(choices)), outcome, seconds)
        )
        return Value(count, tokens, elapsed, int(complete.sum()))


@dataclass(frozen=True)
class Value:
    """What a policy is worth: b resamples of the prompts, c compressions, sums in proportion to each other.

    Where the policy never chose the gamma that was logged, nothing is known of it: the ratios are NaN there.

    Attributes:
        steps, tokens, seconds: (b, c).
        matched: steps that this rests on.
    """

    steps: FloatArray
    tokens: FloatArray
    seconds: FloatArray
    matched: int

    @property
    def tokens_per_step(self) -> FloatArray:
        """(b, c)."""
        return _divide(self.tokens, self.steps)

    @property
    def overall(self) -> FloatArray:
        """(b,) tokens a step over all compressions."""
        return _divide(self.tokens.sum(axis=1), self.steps.sum(axis=1))

    @property
    def throughput(self) -> FloatArray:
        """(b, c) tokens per second."""
        return _divide(self.tokens, self.seconds)


def _divide(sums: FloatArray, by: FloatArray) -> FloatArray:
    """NaN where there is nothing to divide by."""
    return np.asarray(np.divide(sums, by, out=np.full(sums.shape, np.nan), where=by > 0))


def tune_fixed(evidence: Evidence, fold: IntArray) -> IntArray:
    """(n,) the fixed gamma with the most tokens per second on the other folds, for each compression."""
    choices = np.zeros(len(fold), dtype=np.int64)
    for number in np.unique(fold):
        weights = evidence.weigh(fold != number)
        values = [evidence.value(np.full(len(fold), gamma), weights=weights) for gamma in GAMMAS]
        best = _GAMMAS[np.argmax([value.throughput[0] for value in values], axis=0)]
        choices[fold == number] = best[evidence.compression_of_step[fold == number]]
    return choices


def weigh_cost(model: Any, evidence: Evidence, signals: FloatArray, fold: IntArray) -> IntArray:
    """(n,) the gamma that is worth most in each step: expected tokens - rate * seconds of the step.

    The rate is the tokens per second that these very decisions are expected to reach at that compression, found by
    Dinkelbach's method; it, the mean seconds of a step and the predictor come from the other folds.
    """
    choices = np.zeros(len(fold), dtype=np.int64)
    for train, test, _, by_gamma in predict_by_fold(model, evidence.steps, signals, fold):
        weights = evidence.weigh(train)[0]
        expected, step_seconds = by_gamma * _GAMMAS + 1, (evidence.elapsed @ weights) / (evidence.rows @ weights)
        for code, seconds in enumerate(step_seconds):
            here, rate = evidence.compression_of_step == code, 0.0
            for _ in range(20):
                known = expected[train & here]
                best = (known - rate * seconds).argmax(axis=1)
                rate = float(known[np.arange(len(known)), best].sum() / seconds[best].sum())
            choices[test & here] = _GAMMAS[(expected[test & here] - rate * seconds).argmax(axis=1)]
    return choices


@dataclass(frozen=True)
class Candidate:
    """A policy to be valued: what it plays in each step, (n,), and the seconds of one of its decisions.

    `complete` says that it knows nothing of the block itself, so that a step that played more than it chose tells what
    would have come of it.
    """

    choices: IntArray
    decision: float = 0.0
    complete: bool = True


def examine(paper: PaperData, reproduction: protocol.Reproduction) -> dict[str, Any]:
    """The numbers that the protocol hides, in the form of `PaperData.published` where that has them.

    Decision times are the published ones: the seconds are from that machine, too. What can't be known, as the policy
    never chose the gamma that was logged, is None.
    """
    steps, evidence = paper.steps, Evidence(paper)
    fold, lagged = deal_prompts(steps.prompt, steps.task), find_lagged_signals(steps)
    models = {name: protocol.make_predictors()[name] for name in (FAST, ACCURATE)}
    splits = {"rows": deal_rows(steps), "prompts": fold}
    held_out = {
        (name, signals, by): hold_out(model, steps, values, splits[by])
        for name, model in models.items()
        for signals, values in {"own block": steps.signals, "previous block": lagged}.items()
        for by in splits
    }
    judge = {"SpecKV-fast": reproduction.judges[FAST]}
    everywhere = protocol.simulate(steps, paper.best_gamma, np.arange(len(steps)), judge).choices
    decision = {name: ms / 1000 for name, ms in paper.published["decision_ms"].items()}
    candidates = {
        **{f"Fixed-{gamma}": Candidate(np.full(len(steps), gamma)) for gamma in GAMMAS},
        BEST_FIXED: Candidate(tune_fixed(evidence, fold)),
        "Fixed-best": Candidate(everywhere["Fixed-best"]),
        "Task-oracle": Candidate(everywhere["Task-oracle"]),
        "SpecKV-fast, as published": Candidate(everywhere["SpecKV-fast"], decision[FAST], complete=False),
        "SpecKV-fast": Candidate(held_out[FAST, "previous block", "prompts"].choices, decision[FAST]),
        "SpecKV-accurate": Candidate(held_out[ACCURATE, "previous block", "prompts"].choices, decision[ACCURATE]),
        "Cost-aware": Candidate(weigh_cost(models[FAST], evidence, lagged, fold), decision[FAST]),
    }
    chosen = reproduction.simulation.choices
    return {
        "in_sample": list(IN_SAMPLE),
        "gamma_8_share": {
            name: _digits(np.mean(chosen[name] == max(GAMMAS)), 3) for name in ("SpecKV-fast", "SpecKV-accurate")
        },
        "judges": _compare_judges(steps, reproduction, evidence, candidates),
        "predictors": [
            {"model": name, "signals": signals, "split_by": by, **protocol.score(steps.acceptance, predicted.rates)}
            for (name, signals, by), predicted in held_out.items()
        ],
        "refitted_correlation": {
            name: protocol.score(
                steps.acceptance[reproduction.simulation.test],
                protocol.predict(model, protocol.anticipating_inputs(steps)[reproduction.simulation.test]),
            )["correlation"]
            for name, model in reproduction.judges.items()
        },
        **_make_tables(evidence, candidates),
        "throughput": _compare_throughput(evidence, candidates),
        "step_ms": {
            str(name): dict(zip(map(str, GAMMAS), (1000 * row).round(1).tolist(), strict=True))
            for name, row in zip(evidence.compressions, evidence.step_seconds, strict=True)
        },
        "uncut": _value_uncut(steps),
        "oddities": {name: int(rows.sum()) for name, rows in find_oddities(steps).items()},
    }


def _value_uncut(steps: Steps) -> dict[str, float | None]:
    """Tokens a step of gamma 4 and of the largest in the steps that the budget did not cut short."""
    uncut = steps.drafted == steps.gamma
    four, eight = (steps.tokens[uncut & (steps.gamma == gamma)].mean() for gamma in (4, max(GAMMAS)))
    return {
        "fixed_4": _digits(four, 2),
        "fixed_8": _digits(eight, 2),
        "improvement_pct": _digits(100 * (eight / four - 1), 1),
    }


def _compare_judges(
    steps: Steps, reproduction: protocol.Reproduction, evidence: Evidence, candidates: dict[str, Candidate]
) -> list[dict[str, Any]]:
    """The same three policies under different judges: gamma 4, the largest gamma, and SpecKV-fast as published."""
    simulation = reproduction.simulation
    names = {"fixed_4": "Fixed-4", "fixed_8": "Fixed-8", "speckv": "SpecKV-fast, as published"}
    choices = {key: candidates[name].choices[simulation.test] for key, name in names.items()}
    rows = []
    for where, models in {"all rows": reproduction.judges, "the training rows": reproduction.trained}.items():
        for name in (FAST, ACCURATE):
            expected = protocol.expect_tokens(models[name], steps, simulation.test)
            at = np.arange(len(expected))
            means = {key: expected[at, np.searchsorted(_GAMMAS, g)].mean() for key, g in choices.items()}
            rows.append({"judge": name, "fitted_on": where, **means})
    happened = {key: evidence.value(candidates[name].choices).overall[0] for key, name in names.items()}
    rows.append({"judge": "what happened", "fitted_on": "", **happened})
    for row in rows:
        gains = {f"gain_over_{key}_pct": 100 * (row["speckv"] / row[key] - 1) for key in ("fixed_4", "fixed_8")}
        row.update({key: _digits(row[key], 2) for key in names} | {key: _digits(g, 1) for key, g in gains.items()})
    return rows


def _make_tables(evidence: Evidence, candidates: dict[str, Candidate]) -> dict[str, Any]:
    """The paper's tables of tokens a step, from what happened, and intervals that resample prompts."""
    names = ("Fixed-4", "Fixed-best", "Task-oracle", "SpecKV-fast", "SpecKV-accurate")
    values = {name: evidence.value(candidates[name].choices) for name in names}
    table1 = {
        str(compression): {name: _digits(value.tokens_per_step[0, code], 2) for name, value in values.items()}
        for code, compression in enumerate(evidence.compressions)
    } | {"overall": {name: _digits(value.overall[0], 2) for name, value in values.items()}}
    table2 = []
    for code, compression in enumerate(evidence.compressions):
        for task in dict.fromkeys(evidence.steps.task.tolist()):
            weights = evidence.weigh(evidence.steps.task == task)
            four, fast = (
                evidence.value(candidates[name].choices, weights=weights).tokens_per_step[0, code]
                for name in ("Fixed-4", "SpecKV-fast")
            )
            row = {"fixed_4": _digits(four, 2), "speckv": _digits(fast, 2)}
            gain = {"improvement_pct": _digits(100 * (fast / four - 1), 1)}
            table2.append({"compression": str(compression), "task": task, **row, **gain})
    drawn = draw_prompts(evidence.tasks)
    intervals = {}
    for name, value in values.items():
        low, high = np.percentile(evidence.value(candidates[name].choices, weights=drawn).overall, [2.5, 97.5])
        mean = value.overall[0]
        intervals[name] = {"mean": _digits(mean, 3), "low": _digits(low, 3), "high": _digits(high, 3)}
    gain = 100 * (values["SpecKV-fast"].overall[0] / values["Fixed-4"].overall[0] - 1)
    return {"table1": table1, "table2": table2, "intervals": intervals, "improvement_pct": _digits(gain, 1)}


def _compare_throughput(evidence: Evidence, candidates: dict[str, Candidate]) -> list[dict[str, Any]]:
    """Tokens per second of each policy at each compression, against gamma 4 and the best fixed gamma."""
    drawn = draw_prompts(evidence.tasks)
    once = np.ones((1, len(evidence.prompts)))

    def rates(candidate: Candidate, complete: bool) -> tuple[FloatArray, FloatArray]:
        value = evidence.value_of_complete_rows if complete else evidence.value
        arguments = candidate.choices, candidate.decision
        return value(*arguments, once).throughput[0], value(*arguments, drawn).throughput

    def gains(candidate: Candidate, base: str, complete: bool = False) -> dict[str, Any]:
        (rate, resampled), (base_rate, base_resampled) = rates(candidate, complete), rates(candidates[base], complete)
        low, high = np.percentile(resampled / base_resampled, [2.5, 97.5], axis=0)
        ends = {"gain_pct": rate / base_rate, "low": low, "high": high}
        return {
            str(name): {key: _digits(100 * (ratios[code] - 1), 1) for key, ratios in ends.items()}
            for code, name in enumerate(evidence.compressions)
        }

    rows = []
    for name, candidate in candidates.items():
        if name == "Fixed-best":  # by tokens a step: one of the fixed gammas above
            continue
        value = evidence.value(candidate.choices, candidate.decision)
        row: dict[str, Any] = {
            "policy": name,
            "matched_steps": value.matched,
            "gamma_share": {str(g): _digits(np.mean(candidate.choices == g), 3) for g in GAMMAS},
            "tokens_per_second": {
                str(c): _digits(rate, 2) for c, rate in zip(evidence.compressions, value.throughput[0], strict=True)
            },
            "over_fixed_4": gains(candidate, "Fixed-4"),
            "over_best_fixed": gains(candidate, BEST_FIXED),
        }
        if candidate.complete:
            row["over_best_fixed_on_complete_steps"] = gains(candidate, BEST_FIXED, complete=True)
        rows.append(row)
    return rows


def _digits(value: Any, digits: int) -> float | None:
    """A number for JSON; None for what nothing is known of."""
    return round(float(value), digits) + 0.0 if np.isfinite(value) else None  # + 0.0: no negative zero
