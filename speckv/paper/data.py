"""The paper's published files: read, checked, and what is odd about them said."""

import csv
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.features import FloatArray, IntArray
from speckv.files import read_json

COMPRESSIONS = ("fp16", "int8", "nf4")
TASKS = ("code", "math", "chat", "summarization")
GAMMAS = (2, 4, 6, 8)
#: Most tokens that a run of the paper was asked for.
BUDGET = 80
#: What a step log keeps of a block's drafted tokens: name -> unit. Entropies are in bits, as the author computed them.
SIGNALS = {
    "mean_draft_entropy": "bits",
    "mean_draft_confidence": "probability",
    "max_draft_entropy": "bits",
    "min_draft_confidence": "probability",
}
#: What the published log says differently than it was.
ODDITIES = {
    "cut_short": "gamma is the one asked for, and the budget left room for fewer tokens",
    "overrun": f"its last token is beyond the budget of {BUDGET}",
}
#: The correlation of draft confidence and entropy with acceptance that the paper's abstract gives.
CORRELATION = 0.56

StrArray = npt.NDArray[np.str_]


@dataclass(frozen=True)
class Steps:
    """Steps of runs that each played one gamma throughout: n rows, the steps of a run one behind the other.

    Attributes:
        compression, task, prompt: (n,) strings.
        gamma, drafted, accepted: (n,) tokens: told to draft, drafted (less at the end of the budget), accepted.
        run, number: (n,) index of the run, and of the step in it.
        signals: (n, 4) what `SIGNALS` names, of the drafted tokens of the step.
    """

    compression: StrArray
    task: StrArray
    prompt: StrArray
    gamma: IntArray
    drafted: IntArray
    accepted: IntArray
    run: IntArray
    number: IntArray
    signals: FloatArray

    def __len__(self) -> int:
        return len(self.gamma)

    @property
    def tokens(self) -> IntArray:
        """(n,) committed."""
        return self.accepted + 1

    @property
    def acceptance(self) -> FloatArray:
        """(n,) accepted to drafted."""
        return self.accepted / self.drafted


@dataclass(frozen=True)
class Runs:
    """Timed runs, one a row: r rows.

    Attributes:
        compression, task, prompt: (r,) strings.
        gamma, tokens, steps: (r,) told to draft; committed tokens; steps.
        seconds: (r,) duration.
        rates: (r,) tokens per second as published, to one digit.
    """

    compression: StrArray
    task: StrArray
    prompt: StrArray
    gamma: IntArray
    tokens: IntArray
    steps: IntArray
    seconds: FloatArray
    rates: FloatArray


@dataclass(frozen=True)
class PaperData:
    """All that was published.

    Attributes:
        steps, runs: the profiling data.
        best_gamma: (compression, task) -> the gamma that the paper's task oracle plays.
        published: the paper's results, in the form of `speckv.paper.protocol.reproduce`.
    """

    steps: Steps
    runs: Runs
    best_gamma: dict[tuple[str, str], int]
    published: dict[str, Any]

    @classmethod
    def read(cls, folder: str | pathlib.Path) -> Self:
        """Read a folder with the paper's CSV and JSON files.

        Raises:
            SpecKVError: a file or column is missing, a value is not a number or out of range, the step log and the
                runs do not belong together, or a prompt lacks runs.
        """
        folder = pathlib.Path(folder)
        if not folder.is_dir():
            raise SpecKVError(f"{folder}: no such folder; name the one that holds the paper's published CSV files")
        runs = read_runs(folder / "phase2_experiment_results.csv")
        path = folder / "phase2_step_results.csv"
        steps, reasons = read_steps(path, runs)
        for row, reason in reasons.items():
            raise SpecKVError(f"{path}: row {row + 2}: {reason}; mend or remove that row")
        best = _read(folder / "phase2_optimal_gamma.csv", ["compression", "task"], ["optimal_gamma", "best_tps"])
        keys = zip(best["compression"].tolist(), best["task"].tolist(), strict=True)
        best_gamma = dict(zip(keys, best["optimal_gamma"].astype(int).tolist(), strict=True))
        if missing := [(c, t) for c in COMPRESSIONS for t in TASKS if best_gamma.get((c, t)) not in GAMMAS]:
            raise SpecKVError(
                f"{folder / 'phase2_optimal_gamma.csv'}: {' '.join(missing[0])} has no optimal_gamma among "
                f"{', '.join(map(str, GAMMAS))}; take the published file"
            )
        _check_grid(folder / "phase2_experiment_results.csv", runs)
        published = _read_published(folder)
        published["optimal_gamma"] = [
            {"compression": c, "task": t, "gamma": int(g), "tokens_per_second": float(s)}
            for c, t, g, s in zip(*(best[name].tolist() for name in best), strict=True)
        ]
        return cls(steps, runs, best_gamma, published)


def _read(path: pathlib.Path, texts: list[str], numbers: list[str]) -> dict[str, npt.NDArray[Any]]:
    """Columns of a CSV file, in the order asked for.

    Raises:
        SpecKVError: it lacks a column, holds no row, or a value is not a finite number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise SpecKVError(f"{path}: no such file; the folder must hold all CSV files of the paper") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecKVError(f"{path}: not a readable CSV file ({error})") from None
    if not rows:
        raise SpecKVError(f"{path}: holds no row; take the published file")
    if missing := [name for name in [*texts, *numbers] if name not in rows[0]]:
        raise SpecKVError(f"{path}: the column {missing[0]} is missing; take the published file")

    def number(line: int, name: str) -> float:
        try:
            value = float(rows[line][name])
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise SpecKVError(f"{path}: row {line + 2}: {name} is not a number: {rows[line][name]!r}; mend that row")
        return value

    columns: dict[str, npt.NDArray[Any]] = {name: np.array([row[name] or "" for row in rows]) for name in texts}
    return columns | {name: np.array([number(line, name) for line in range(len(rows))]) for name in numbers}


def _read_cells(
    path: pathlib.Path, names: Mapping[str, Sequence[str]], numbers: list[str]
) -> dict[str, npt.NDArray[Any]]:
    """Columns of a published table that has one row for each combination of these names, in any order.

    Raises:
        SpecKVError: as of `_read`; or a row is missing, stands there twice, or is of something else.
    """
    columns = _read(path, list(names), numbers)
    if "compression" in names:
        columns["compression"] = np.char.lower(columns["compression"])
    for name, known in names.items():
        _check(path, np.isin(columns[name], known), f"{name} must be one of {', '.join(known)}")
    seen: set[tuple[str, ...]] = set()
    for line, cell in enumerate(zip(*(columns[name].tolist() for name in names), strict=True), start=2):
        if cell in seen:
            raise SpecKVError(f"{path}: row {line}: {' '.join(cell)} has a row already; mend or remove that row")
        seen.add(cell)
    for cell in itertools.product(*names.values()):
        if cell not in seen:
            raise SpecKVError(f"{path}: has no row for {' '.join(cell)}; take the published file")
    return columns


def _check(path: pathlib.Path, right: npt.NDArray[np.bool_], what: str) -> None:
    """Raise SpecKVError for the first row that is not right."""
    if not right.all():
        raise SpecKVError(f"{path}: row {int(np.flatnonzero(~right)[0]) + 2}: {what}; mend or remove that row")


def _check_cells(path: pathlib.Path, columns: dict[str, npt.NDArray[Any]]) -> None:
    _check(path, np.isin(columns["compression"], COMPRESSIONS), f"compression must be one of {', '.join(COMPRESSIONS)}")
    _check(path, np.isin(columns["task"], TASKS), f"task must be one of {', '.join(TASKS)}")
    _check(path, np.isin(columns["gamma"], GAMMAS), f"gamma must be one of {', '.join(map(str, GAMMAS))}")


def _check_grid(path: pathlib.Path, runs: Runs) -> None:
    """Raise SpecKVError unless every task has prompts to hold out, each run at every compression and gamma."""
    columns = runs.task, runs.prompt, runs.compression, runs.gamma
    seen = set(zip(*(column.tolist() for column in columns), strict=True))
    for task in TASKS:
        prompts = sorted({prompt for of, prompt, *_ in seen if of == task})
        if len(prompts) < 2:
            raise SpecKVError(f"{path}: {task} has fewer than the 2 prompts that it takes; take the published file")
        for prompt, compression, gamma in itertools.product(prompts, COMPRESSIONS, GAMMAS):
            if (task, prompt, compression, gamma) not in seen:
                raise SpecKVError(
                    f"{path}: {task} prompt {prompt!r} has no run at {compression} and gamma {gamma}; "
                    "take the published file"
                )


def read_runs(path: pathlib.Path) -> Runs:
    """The timed runs. Raises SpecKVError if a column is missing, or a value is not a number or out of range."""
    texts = ["compression", "task", "prompt"]
    columns = _read(path, texts, ["gamma", "num_tokens", "num_steps", "elapsed_sec", "tokens_per_sec"])
    _check_cells(path, columns)
    _check(path, columns["elapsed_sec"] > 0, "elapsed_sec must be above 0")
    _check(path, columns["num_steps"] > 0, "num_steps must be above 0")
    whole = {name: columns[name].astype(np.int64) for name in ("gamma", "num_tokens", "num_steps")}
    return Runs(
        compression=columns["compression"],
        task=columns["task"],
        prompt=columns["prompt"],
        gamma=whole["gamma"],
        tokens=whole["num_tokens"],
        steps=whole["num_steps"],
        seconds=columns["elapsed_sec"],
        rates=columns["tokens_per_sec"],
    )


def read_steps(path: pathlib.Path, runs: Runs) -> tuple[Steps, dict[int, str]]:
    """The step log, and the rows that can't be: index -> reason.

    Raises:
        SpecKVError: a column is missing, a value is not a number, or the rows are not the steps of `runs`.
    """
    numbers = ["gamma", "step", "accepted", "acceptance_rate", "tokens_produced", *SIGNALS]
    columns = _read(path, ["compression", "task"], numbers)
    _check_cells(path, columns)
    run = np.cumsum(columns["step"] == 0) - 1
    _check(path, (run >= 0) & (run < len(runs.gamma)), "belongs to no run of phase2_experiment_results.csv")
    for name in ("compression", "task", "gamma"):
        _check(path, columns[name] == getattr(runs, name)[run], f"{name} is not that of its run")
    steps = np.bincount(run, minlength=len(runs.gamma))
    _check(path, (steps == runs.steps)[run], "its run has another num_steps in phase2_experiment_results.csv")
    if len(steps) != run[-1] + 1:
        raise SpecKVError(f"{path}: holds {run[-1] + 1} runs, and phase2_experiment_results.csv {len(steps)}")
    first = np.searchsorted(run, np.arange(len(steps)))
    _check(path, columns["step"] == np.arange(len(run)) - first[run], "the steps of a run must count up from 0")
    accepted, gamma = columns["accepted"].astype(np.int64), columns["gamma"].astype(np.int64)
    committed = np.cumsum(accepted + 1) - (accepted + 1)
    committed -= committed[first][run]
    drafted = np.minimum(gamma, BUDGET - committed)
    reasons: dict[int, str] = {}
    for right, reason in (
        (drafted > 0, f"its run had committed {BUDGET} tokens already"),
        ((accepted >= 0) & (accepted <= drafted), "accepted must be between 0 and the tokens drafted"),
        (columns["tokens_produced"] == accepted + 1, "tokens_produced must be accepted + 1"),
        (
            np.abs(accepted - columns["acceptance_rate"] * drafted) < 1e-3 * gamma,
            "acceptance_rate must be accepted / drafted",
        ),
    ):
        for row in np.flatnonzero(~right).tolist():
            reasons.setdefault(row, reason)
    log = Steps(
        compression=columns["compression"],
        task=columns["task"],
        prompt=runs.prompt[run],
        gamma=gamma,
        drafted=drafted,
        accepted=accepted,
        run=run,
        number=columns["step"].astype(np.int64),
        signals=np.column_stack([columns[name] for name in SIGNALS]),
    )
    return log, dict(sorted(reasons.items()))


def find_oddities(steps: Steps) -> dict[str, npt.NDArray[np.bool_]]:
    """The rows, (n,) booleans, to which each of `ODDITIES` applies."""
    committed = np.cumsum(steps.tokens)
    committed -= (committed - steps.tokens)[steps.number == 0][steps.run]
    return {"cut_short": steps.drafted < steps.gamma, "overrun": committed > BUDGET}


def _read_published(folder: pathlib.Path) -> dict[str, Any]:
    """The published results but the optimal gammas."""
    policies = ["Fixed-4", "Fixed-best", "Task-oracle", "SpecKV-fast", "SpecKV-accurate"]
    models = ["Ridge", "MLP-small", "MLP-medium", "RandomForest"]
    cells = {"compression": COMPRESSIONS, "task": TASKS}
    table1, table2, intervals, predictors, earlier = (
        _read_cells(folder / f"{name}.csv", names, numbers)
        for name, names, numbers in (
            ("paper_table1_policy_comparison", {"compression": (*COMPRESSIONS, "overall")}, policies),
            ("paper_table2_detailed_breakdown", cells, ["Fixed-4", "SpecKV", "improvement_pct"]),
            ("paper_confidence_intervals", {"policy": policies}, ["mean", "ci_lower", "ci_upper"]),
            ("phase3_predictor_comparison", {"model": models}, ["val_mse", "val_corr"]),
            ("phase3_policy_comparison", {"policy": [*policies[:3], "SpecKV"]} | cells, ["mean_expected_tokens"]),
        )
    )
    path = folder / "paper_numbers.json"
    numbers = read_json(path, "the numbers of the paper")

    def rows(columns: dict[str, npt.NDArray[Any]], *names: str) -> list[dict[str, Any]]:
        lists = (column.tolist() for column in columns.values())
        return [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]

    try:
        return {
            "records": {name: numbers["dataset"][f"{name}_records"] for name in ("train", "test")}
            | {"total": numbers["dataset"]["total_step_records"]},
            "table1": {
                name: {policy: float(table1[policy][row]) for policy in policies}
                for row, name in enumerate(table1["compression"].tolist())
            },
            "table2": rows(table2, *cells, "fixed_4", "speckv", "improvement_pct"),
            "improvement_pct": numbers["results"]["overall_improvement_pct"],
            "intervals": {row.pop("policy"): row for row in rows(intervals, "policy", "mean", "low", "high")},
            "paired_test": {
                "mean_difference": numbers["statistical_test"]["mean_diff"],
                "p": numbers["statistical_test"]["p_value"],
            },
            "predictors": {
                "MLP-16": {
                    "mse": numbers["predictor"]["fast_test_mse"],
                    "correlation": numbers["predictor"]["fast_test_corr"],
                },
                "RF-100": {"correlation": numbers["predictor"]["reference_corr"]},
            },
            "earlier_predictors": {row.pop("model"): row for row in rows(predictors, "model", "mse", "correlation")},
            "earlier_policies": rows(earlier, "policy", *cells, "tokens"),
            "importances": {name: numbers["feature_importance"][name] for name in (*SIGNALS, "compression", "gamma")},
            "decision_ms": {
                "MLP-16": numbers["predictor"]["fast_overhead_ms"],
                "RF-100": numbers["predictor"]["reference_overhead_ms"],
            },
        }
    except (KeyError, TypeError) as error:
        raise SpecKVError(f"{path}: {error} is missing; take the published file") from None
