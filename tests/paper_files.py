"""Files in the form of those that the SpecKV paper published, with made-up numbers."""

import csv
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from speckv.machine import machine
from speckv.paper import honest
from speckv.paper.data import BUDGET, COMPRESSIONS, CORRELATION, GAMMAS, SIGNALS, TASKS, PaperData
from speckv.paper.honest import BEST_FIXED, Candidate, Evidence
from speckv.paper.report import FORMAT, SCHEMA_VERSION

POLICIES = ("Fixed-4", "Fixed-best", "Task-oracle", "SpecKV-fast", "SpecKV-accurate")


def find_published() -> pathlib.Path:
    """The folder with the published files, which lies beside some checkouts; elsewhere the test is skipped."""
    folder = pathlib.Path(__file__).parents[2] / "shared" / "paper_data"
    if not folder.is_dir():
        pytest.skip(f"the paper's published data is not at {folder}")
    return folder


def write_paper(folder: pathlib.Path, prompts: int = 5, seed: int = 0) -> pathlib.Path:
    """A whole folder: every compression, task and gamma on so many prompts a task; acceptance follows the signals."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    steps, runs = [], []
    for compression in COMPRESSIONS:
        for gamma in GAMMAS:
            for task in TASKS:
                for prompt in range(prompts):
                    run = _make_run(compression, gamma, task, random)
                    steps += run
                    tokens = sum(row["tokens_produced"] for row in run)
                    seconds = round(len(run) * (0.02 + 0.01 * gamma), 3)
                    runs.append({"compression": compression, "gamma": gamma, "task": task,
                                 "prompt": f"{task} {prompt}", "num_tokens": tokens, "elapsed_sec": seconds,
                                 "tokens_per_sec": round(tokens / seconds, 1), "num_steps": len(run)})  # fmt: skip
    cells = [{"compression": c, "task": t} for c in COMPRESSIONS for t in TASKS]
    _write(folder / "phase2_step_results.csv", steps)
    _write(folder / "phase2_experiment_results.csv", runs)
    _write(folder / "phase2_optimal_gamma.csv", [cell | {"optimal_gamma": 4, "best_tps": 50.0} for cell in cells])
    means = dict.fromkeys(POLICIES, 4.0)
    table1 = [{"compression": name} | means for name in (*COMPRESSIONS, "Overall")]
    _write(folder / "paper_table1_policy_comparison.csv", table1)
    table2 = [cell | {"Fixed-4": 3.0, "SpecKV": 4.5, "improvement_pct": 50.0} for cell in cells]
    _write(folder / "paper_table2_detailed_breakdown.csv", table2)
    intervals = [{"policy": name, "mean": 4.0, "ci_lower": 3.9, "ci_upper": 4.1} for name in POLICIES]
    _write(folder / "paper_confidence_intervals.csv", intervals)
    names = ("Ridge", "MLP-small", "MLP-medium", "RandomForest")
    _write(folder / "phase3_predictor_comparison.csv", [{"model": n, "val_mse": 0.1, "val_corr": 0.5} for n in names])
    earlier = [{"policy": policy} | cell for policy in (*POLICIES[:3], "SpecKV") for cell in cells]
    _write(folder / "phase3_policy_comparison.csv", [row | {"mean_expected_tokens": 4.0} for row in earlier])
    importance = ("min_draft_confidence", "max_draft_entropy", "mean_draft_confidence", "mean_draft_entropy", "gamma",
                  "compression")  # fmt: skip
    numbers = {
        "dataset": {"total_step_records": len(steps), "train_records": 1, "test_records": 1},
        "predictor": {"fast_test_corr": 0.5, "fast_test_mse": 0.1, "fast_overhead_ms": 0.3, "reference_corr": 0.8,
                      "reference_overhead_ms": 20.0},
        "results": {"overall_improvement_pct": 50.0},
        "statistical_test": {"p_value": 0.0, "mean_diff": 2.0},
        "feature_importance": dict.fromkeys(importance, 0.2),
    }  # fmt: skip
    (folder / "paper_numbers.json").write_text(json.dumps(numbers))
    return folder


def _make_run(compression: str, gamma: int, task: str, random: np.random.Generator) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    committed = 0
    while committed < BUDGET:
        drafted = min(gamma, BUDGET - committed)
        confidence = random.uniform(0.2, 1.0, drafted)
        right = random.random(drafted) < confidence
        accepted = drafted if right.all() else int(right.argmin())
        entropy = -3 * np.log2(confidence)
        rows.append({
            "compression": compression, "gamma": gamma, "task": task, "step": len(rows), "accepted": accepted,
            "acceptance_rate": accepted / drafted, "tokens_produced": accepted + 1,
            "mean_draft_entropy": round(entropy.mean(), 4), "mean_draft_confidence": round(confidence.mean(), 4),
            "max_draft_entropy": round(entropy.max(), 4), "min_draft_confidence": round(confidence.min(), 4),
        })  # fmt: skip
        committed += accepted + 1
    return rows


def _write(path: pathlib.Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def rewrite(path: pathlib.Path, row: int, column: str, value: object) -> None:
    """Change one value of a CSV file; `row` is the line of the file, the header being 1."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows[row - 2][column] = str(value)
    _write(path, rows)


def make_result(folder: pathlib.Path, matching: bool = True) -> dict[str, Any]:
    """A report on the made-up folder without its slow parts: what forests and the recording would say is made up.

    Args:
        folder: of `write_paper`.
        matching: else the policies choose the logged gamma in none of the steps.
    """
    paper = PaperData.read(folder)
    steps, published = paper.steps, paper.published | {"correlation": CORRELATION}
    eight = np.full(len(steps), 8)
    chosen = eight if matching else np.where(steps.gamma == 8, 2, 8)
    candidates = {f"Fixed-{gamma}": Candidate(np.full(len(steps), gamma)) for gamma in GAMMAS}
    candidates |= {BEST_FIXED: Candidate(np.full(len(steps), 4)), "Fixed-best": Candidate(eight),
                   "Task-oracle": Candidate(np.full(len(steps), 4)),
                   "SpecKV-fast, as published": Candidate(chosen, complete=False), "SpecKV-fast": Candidate(chosen),
                   "SpecKV-accurate": Candidate(chosen), "Cost-aware": Candidate(chosen)}  # fmt: skip
    evidence, score = Evidence(paper), {"mse": 0.1, "correlation": 0.5}
    reproduced = {name: value for name, value in published.items() if name not in ("decision_ms", "correlation")}
    reproduced |= {"predictors": dict.fromkeys(("Ridge", "MLP-16", "RF-100"), score),
                   "correlations": dict.fromkeys(SIGNALS, 0.5)}  # fmt: skip
    judge = {"fixed_4": 4.0, "fixed_8": 5.0, "speckv": 5.0, "gain_over_fixed_4_pct": 25.0, "gain_over_fixed_8_pct": 0.0}
    table = {"improvement_pct": 20.0, "table1": {"overall": dict.fromkeys(POLICIES[:4], 4.0)}}
    gain, difference = {"gain_pct": -9.0, "low": -12.0, "high": -6.0}, {"mean": 1.0, "low": 0.5, "high": 1.5}
    rates = dict.fromkeys(("none", "fixed-4", "best-fixed", "mlp"), 30.0)
    replayed = {"tokens_per_second": rates, "tokens_per_step": rates, "tokens_per_step_over_fixed_4_pct": 26.0,
                "over_fixed_4_pct": -8.0, "over_best_fixed": gain, "gamma_8_share": 0.9}  # fmt: skip
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "machine": machine(),
        "software": {"numpy": np.__version__, "scikit-learn": "1"},
        **reproduced,
        "decision_ms": {"MLP-16": 0.3, "RF-100": 20.0, "mlp": 0.02},
        "published": published,
        "differences": [{"what": "predictors RF-100 correlation", "published": 0.8, "reproduced": 0.801}],
        "honest": {
            "in_sample": list(honest.IN_SAMPLE),
            "gamma_8_share": {"SpecKV-fast": 0.9, "SpecKV-accurate": 0.9},
            "judges": [{"judge": "MLP-16", "fitted_on": where} | judge for where in ("all rows", "")],
            "predictors": [{"model": model, "signals": signals, "split_by": by} | score
                           for model in ("MLP-16", "RF-100")
                           for signals in ("own block", "previous block") for by in ("rows", "prompts")],
            "refitted_correlation": {"MLP-16": 0.6, "RF-100": 0.9},
            **honest._make_tables(evidence, candidates),
            "throughput": honest._compare_throughput(evidence, candidates),
            "step_ms": {name: {str(gamma): 20.0 + gamma for gamma in GAMMAS} for name in COMPRESSIONS},
            "uncut": honest._value_uncut(steps),
            "oddities": {"cut_short": 3, "overrun": 4},
        },
        "study": {
            "pair": {"target": "<b>target</b>", "draft": "draft"},
            "prompts": 8,
            "records": 900,
            "correlations": dict.fromkeys(SIGNALS, 0.5),
            "optimal_gamma": [{"compression": "bf16", "task": task, "by_tokens": 8, "by_seconds": {"one": 4, "two": 2}}
                              for task in TASKS],
            "gamma_8_share": 0.8,
            "judged": table,
            "happened": table,
            "difference": {name: difference for name in ("judged, steps resampled", "happened, steps resampled",
                                                         "happened, prompts resampled")},
            "replayed": [{"costs": costs, "compression": name} | replayed for costs in ("one", "two")
                         for name in ("bf16", "nf4")],
        },
    }  # fmt: skip
