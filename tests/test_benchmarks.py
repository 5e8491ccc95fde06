"""The benchmark of the live decoder, on models of next to no size."""

import json
import pathlib
import subprocess
import sys

import pytest

from speckv.costs import CostModel

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "live.py"


@pytest.mark.slow
def test_the_benchmark_runs_and_writes_a_cost_model(tmp_path):
    arguments = ["--pair", "tiny", "--rounds", "2", "--prompts", "3", "--max-new-tokens", "16", "--threads", "1",
                 "--gammas", "2,4", "--policy", "heuristic"]  # fmt: skip
    out, costs = tmp_path / "live.json", tmp_path / "tiny.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json", str(out), "--costs-out", str(costs)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result["same_text_as_plain"].values()) == {1.0}, "in float32 every method gives the same text"
    assert set(result["tokens"].values()) == {48}
    for name in (
        "speckv gamma 2 / assisted gamma 2",
        "speckv gamma 4 / plain generate",
        "speckv heuristic / speckv gamma",
    ):
        spread = next(spread for ratio, spread in result["ratios"].items() if ratio.startswith(name))
        assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]
    assert result["memory"]["peak"] > 0
    model = CostModel.load(costs)
    assert model.verify["fp32"].at(5, 128) > 0 and model.provenance["weights"] == "random"
