"""The paper's protocol, followed as published: the only anticipating code of SpecKV (rule R1).

*Anticipating*: the predictor reads the entropies and confidences of the very block whose length it chooses, which no
decoder knows at that moment. It is then refitted on all rows, the test rows among them, and what a policy is worth on
the test rows is what this same predictor expects. Split, seeds, models and resampling are those of the notebooks that
the author published with the data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.features import FloatArray, IntArray
from speckv.paper.data import GAMMAS, SIGNALS, PaperData, Runs, Steps

SEED = 42
#: Names of the predictor's inputs, in their order.
INPUTS = (*SIGNALS, "compression", "gamma")
FAST, ACCURATE = "MLP-16", "RF-100"
RESAMPLES, PAIRED_RESAMPLES = 5000, 10_000


def anticipating_inputs(steps: Steps, gamma: npt.ArrayLike | None = None) -> FloatArray:
    """(n, 6) inputs: the signals of the step's own block, compression as 0, 1, 2, and a gamma."""
    return stack_inputs(steps, steps.signals, gamma)


def stack_inputs(steps: Steps, signals: FloatArray, gamma: npt.ArrayLike | None = None) -> FloatArray:
    """(n, 6) inputs of these (n, 4) signals, the steps' compressions, and a gamma: by default the logged one."""
    _, compression = np.unique(steps.compression, return_inverse=True)  # fp16, int8, nf4 are 0, 1, 2
    chosen = np.broadcast_to(steps.gamma if gamma is None else gamma, len(steps))
    return np.column_stack([signals, compression, chosen]).astype(float)


def make_predictors() -> dict[str, Any]:
    """The regressors that the paper compares, unfitted."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor

    return {
        "Ridge": Ridge(alpha=1.0),
        FAST: MLPRegressor(hidden_layer_sizes=(16,), max_iter=500, random_state=SEED),
        "MLP-32": MLPRegressor(hidden_layer_sizes=(32,), max_iter=500, random_state=SEED),
        "RF-10": RandomForestRegressor(n_estimators=10, max_depth=8, random_state=SEED),
        ACCURATE: RandomForestRegressor(n_estimators=100, random_state=SEED),
    }


def split(steps: Steps, rows: IntArray | None = None, share: float = 0.2) -> tuple[IntArray, IntArray]:
    """Training and test rows: single steps drawn at random, each task at each compression in equal shares."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(steps)) if rows is None else rows
    cells = np.char.add(np.char.add(steps.compression, "_"), steps.task)
    train, test = train_test_split(rows, test_size=share, random_state=SEED, stratify=cells[rows])
    return train, test


def predict(model: Any, inputs: FloatArray) -> FloatArray:
    """(n,) acceptance rates that a fitted model expects, between 0 and 1."""
    if hasattr(model, "predict_proba"):
        return np.asarray(model.predict_proba(inputs)[:, 1])
    return np.asarray(np.clip(model.predict(inputs), 0, 1))


def expect_tokens(model: Any, steps: Steps, rows: IntArray) -> FloatArray:
    """(len(rows), 4) tokens of a step that a model expects of each gamma in `GAMMAS`: acceptance rate * gamma + 1."""
    rates = [predict(model, anticipating_inputs(steps, gamma)[rows]) for gamma in GAMMAS]
    return np.asarray(np.stack(rates, axis=1) * np.array(GAMMAS) + 1)


@dataclass(frozen=True)
class Simulation:
    """The paper's policies on the test rows, under the paper's judge.

    Attributes:
        test: (t,) rows of the steps.
        choices: policy -> (t,) the gamma that it plays.
        tokens: policy -> (t,) the tokens that the judge expects of it.
    """

    test: IntArray
    choices: dict[str, IntArray]
    tokens: dict[str, FloatArray]

    @property
    def improvement_pct(self) -> float:
        """Of SpecKV-fast over gamma 4, from the means to two digits, as published."""
        four, fast = (round(float(self.tokens[name].mean()), 2) for name in ("Fixed-4", "SpecKV-fast"))
        return round((fast - four) / four * 100, 1)


def simulate(
    steps: Steps, task_oracle: Mapping[tuple[str, str], int], test: IntArray, judges: Mapping[str, Any]
) -> Simulation:
    """What the policies play on the test rows, and what the judge expects of it.

    Args:
        steps: all.
        task_oracle: (compression, task) -> gamma.
        test: (t,) rows.
        judges: SpecKV policy -> the model that it asks and that judges it. That of SpecKV-fast, the first, judges the
            fixed gammas as well.
    """
    fast, *_ = judges.values()
    expected = expect_tokens(fast, steps, test)
    gammas = np.array(GAMMAS)
    compressions, of_compression = np.unique(steps.compression, return_inverse=True)
    # The best of the fixed gammas in tokens a step, which is the largest wherever drafted tokens are never a loss.
    means = [
        [steps.tokens[(of_compression == code) & (steps.gamma == gamma)].mean() for gamma in GAMMAS]
        for code in range(len(compressions))
    ]
    best = gammas[np.argmax(means, axis=1)]
    cells = zip(steps.compression[test].tolist(), steps.task[test].tolist(), strict=True)
    choices = {
        "Fixed-4": np.full(len(test), 4),
        "Fixed-best": best[of_compression[test]],
        "Task-oracle": np.array([task_oracle[cell] for cell in cells]),
    }
    tokens = {name: expected[np.arange(len(test)), np.searchsorted(gammas, choice)] for name, choice in choices.items()}
    for name, model in judges.items():
        values = expect_tokens(model, steps, test)
        choices[name], tokens[name] = gammas[values.argmax(axis=1)], values.max(axis=1)
    return Simulation(test, choices, tokens)


def make_table1(steps: Steps, simulation: Simulation) -> dict[str, dict[str, float]]:
    """Compression, or `overall` -> policy -> mean tokens a step."""
    of_row = steps.compression[simulation.test]
    masks = {str(name): of_row == name for name in np.unique(of_row)} | {"overall": np.ones(len(of_row), dtype=bool)}
    return {
        name: {policy: _rounded(values[mask].mean(), 2) for policy, values in simulation.tokens.items()}
        for name, mask in masks.items()
    }


def make_table2(steps: Steps, simulation: Simulation) -> list[dict[str, Any]]:
    """Gamma 4 against SpecKV-fast at each compression in each task, in the order in which they were recorded."""
    rows = []
    for compression in dict.fromkeys(steps.compression.tolist()):
        for task in dict.fromkeys(steps.task.tolist()):
            cell = (steps.compression[simulation.test] == compression) & (steps.task[simulation.test] == task)
            four, fast = (simulation.tokens[name][cell].mean() for name in ("Fixed-4", "SpecKV-fast"))
            rows.append(
                {
                    "compression": compression,
                    "task": task,
                    "fixed_4": _rounded(four, 2),
                    "speckv": _rounded(fast, 2),
                    "improvement_pct": _rounded((fast - four) / four * 100, 1),
                }
            )
    return rows


def bootstrap(simulation: Simulation) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The paper's intervals and its paired test, which resample single steps, from one stream of random numbers.

    Returns:
        policy -> mean and 95 % interval of the tokens a step; mean difference of SpecKV-fast and gamma 4, and p.
    """
    random = np.random.RandomState(SEED)  # the stream that the paper's seed gives

    def resample(values: FloatArray, times: int) -> FloatArray:
        return np.array([random.choice(values, size=len(values), replace=True).mean() for _ in range(times)])

    intervals = {}
    for policy, values in simulation.tokens.items():
        means = np.sort(resample(values, RESAMPLES))
        low, high = (means[int(share * RESAMPLES)] for share in ((1 - 0.95) / 2, (1 + 0.95) / 2))
        intervals[policy] = {"mean": _rounded(values.mean(), 3), "low": _rounded(low, 3), "high": _rounded(high, 3)}
    difference = simulation.tokens["SpecKV-fast"] - simulation.tokens["Fixed-4"]
    p = np.mean(resample(difference, PAIRED_RESAMPLES) <= 0)
    return intervals, {"mean_difference": _rounded(difference.mean(), 3), "p": float(p)}


def compare_predictors(steps: Steps, models: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Fit models on the training rows, in place, and compare their predictions of acceptance on the test rows."""
    train, test = split(steps)
    inputs, rates = anticipating_inputs(steps), steps.acceptance
    return {
        name: score(rates[test], predict(model.fit(inputs[train], rates[train]), inputs[test]))
        for name, model in models.items()
    }


def score(rates: FloatArray, predicted: FloatArray) -> dict[str, float]:
    """Mean squared error and correlation, to four digits."""
    return {
        "mse": _rounded(np.mean((predicted - rates) ** 2), 4),
        "correlation": _rounded(np.corrcoef(predicted, rates)[0, 1], 4),
    }


def make_classifier() -> Any:
    """The forest of the paper's earlier phase: whether more than half of a block is accepted."""
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(n_estimators=100, random_state=SEED)


def compare_earlier_predictors(steps: Steps, forest: bool = True) -> dict[str, dict[str, float]]:
    """The predictors of the paper's earlier phase on its own split: 70 % of the rows to train, 15 % to validate."""
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor

    train, validation, _ = _earlier_split(steps)
    inputs, rates = anticipating_inputs(steps), steps.acceptance
    models = {
        "Ridge": Ridge(alpha=1.0),
        "MLP-small": MLPRegressor(hidden_layer_sizes=(32,), max_iter=500, random_state=SEED),
        "MLP-medium": MLPRegressor(hidden_layer_sizes=(64, 32), max_iter=500, random_state=SEED),
    }
    for model in models.values():
        model.fit(inputs[train], rates[train])
    if forest:
        models["RandomForest"] = make_classifier().fit(inputs[train], rates[train] > 0.5)
    return {name: score(rates[validation], predict(model, inputs[validation])) for name, model in models.items()}


def simulate_earlier(paper: PaperData) -> list[dict[str, Any]]:
    """The earlier phase's policies: its forest, fitted on 85 % of the rows, chooses and judges on the others."""
    steps = paper.steps
    train, validation, test = _earlier_split(steps)
    known = np.concatenate([train, validation])
    forest = make_classifier().fit(anticipating_inputs(steps)[known], steps.acceptance[known] > 0.5)
    simulation = simulate(steps, paper.best_gamma, test, {"SpecKV": forest})
    rows = []
    for policy, tokens in simulation.tokens.items():
        for compression, task in paper.best_gamma:
            cell = (steps.compression[test] == compression) & (steps.task[test] == task)
            mean = _rounded(tokens[cell].mean(), 3)
            rows.append({"policy": policy, "compression": compression, "task": task, "tokens": mean})
    return rows


def _earlier_split(steps: Steps) -> tuple[IntArray, IntArray, IntArray]:
    train, others = split(steps, share=0.3)
    return train, *split(steps, others, share=0.5)


def find_importances(steps: Steps) -> dict[str, float]:
    """Gini importance of each input in the earlier phase's forest, fitted on all rows."""
    forest = make_classifier().fit(anticipating_inputs(steps), steps.acceptance > 0.5)
    named = zip(INPUTS, forest.feature_importances_, strict=True)
    return {name: _rounded(value, 3) for name, value in named}


def correlate(steps: Steps) -> dict[str, float]:
    """Correlation of each signal of a block with its acceptance rate, to four digits."""
    return {
        name: _rounded(np.corrcoef(column, steps.acceptance)[0, 1], 4)
        for name, column in zip(SIGNALS, steps.signals.T, strict=True)
    }


def find_optimal_gammas(runs: Runs) -> list[dict[str, Any]]:
    """The gamma with the highest mean of the runs' published tokens per second, for each compression and task."""
    rows = []
    for compression in dict.fromkeys(runs.compression.tolist()):
        for task in dict.fromkeys(runs.task.tolist()):
            cell = (runs.compression == compression) & (runs.task == task)
            means = {gamma: float(runs.rates[cell & (runs.gamma == gamma)].mean()) for gamma in GAMMAS}
            best = max(means, key=lambda gamma: means[gamma])
            rows.append(
                {
                    "compression": compression,
                    "task": task,
                    "gamma": best,
                    "tokens_per_second": _rounded(means[best], 1),
                }
            )
    return rows


@dataclass(frozen=True)
class Reproduction:
    """The paper's results made anew, and what they were made with.

    Attributes:
        results: in the form of `PaperData.published`, to the digits that were published.
        simulation: the policies on the test rows.
        trained, judges: predictors by name: fitted on the training rows, and refitted on all rows as published.
    """

    results: dict[str, Any]
    simulation: Simulation
    trained: dict[str, Any]
    judges: dict[str, Any]


def reproduce(paper: PaperData) -> Reproduction:
    """Everything that the paper reports of its own data."""
    from sklearn.base import clone

    steps = paper.steps
    train, test = split(steps)
    trained = make_predictors()
    predictors = compare_predictors(steps, trained)
    judges = {name: clone(trained[name]).fit(anticipating_inputs(steps), steps.acceptance) for name in (FAST, ACCURATE)}
    simulation = simulate(
        steps, paper.best_gamma, test, {"SpecKV-fast": judges[FAST], "SpecKV-accurate": judges[ACCURATE]}
    )
    intervals, paired = bootstrap(simulation)
    results = {
        "records": {"train": len(train), "test": len(test), "total": len(steps)},
        "table1": make_table1(steps, simulation),
        "table2": make_table2(steps, simulation),
        "improvement_pct": simulation.improvement_pct,
        "intervals": intervals,
        "paired_test": paired,
        "predictors": predictors,
        "earlier_predictors": compare_earlier_predictors(steps),
        "earlier_policies": simulate_earlier(paper),
        "importances": find_importances(steps),
        "correlations": correlate(steps),
        "optimal_gamma": find_optimal_gammas(paper.runs),
    }
    return Reproduction(results, simulation, trained, judges)


def find_differences(published: Any, reproduced: Any, where: str = "") -> list[dict[str, Any]]:
    """Every published number that comes out otherwise or not at all (None): where it stands, and both.

    Rows of a list belong together by their texts, in whatever order they stand.
    """
    if isinstance(published, list):
        published, reproduced = name_rows(published), name_rows(reproduced or [])
    if not isinstance(published, dict):
        same = published == reproduced
        return [] if same else [{"what": where, "published": published, "reproduced": reproduced}]
    there = reproduced or {}
    parts = [find_differences(part, there.get(key), f"{where} {key}".strip()) for key, part in published.items()]
    return [difference for part in parts for difference in part]


def name_rows(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a table by their texts, such as compression and task."""
    return {" ".join(value for value in row.values() if isinstance(value, str)): row for row in rows}


def _rounded(value: Any, digits: int) -> float:
    return round(float(value), digits)
