"""The presets that come with the zoo: a search for each learner, and the table of docs/presets.md.

    python benchmarks/presets.py --docs docs/presets.md

Searches are `speckv tune` on the shipped recording, under the first shipped cost model. A preset that is there is left
alone: remove the file to search anew. For the table each learner is fitted on the training prompts of the search, as it
is and with its preset, and played on the prompts that the search held out, under every shipped cost model. `--policy`
does both for some learners alone.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import joblib
import numpy as np

from speckv import CostModel, Rollouts, replay
from speckv.comparison import RESAMPLES, folds_of
from speckv.files import read_json, write_atomically
from speckv.plugins import make_policy
from speckv.replaying import measure_controller
from speckv.shipped import shipped_costs, shipped_traces

PRESETS = pathlib.Path(__file__).parents[1] / "policies" / "speckv_policies" / "presets"

_BANDIT = ("gammas=[0,1,2,3,4,6,8];[0,1,2,3,4]", "feedback=bandit;full")
#: Policy -> its grid, as `speckv tune --grid` takes it. Each holds the defaults: they win where nothing is better.
SEARCHES: dict[str, tuple[str, ...]] = {
    "tiers": ("weight=0.05;0.1;0.2", "up=0;0.5;1"),
    "goodput": ("weight=0.01;0.02;0.05", "probe_every=4;8;16"),
    "disco": ("cap=4;8;20",),
    "specdec-pp": ("threshold=0.1;0.3;0.7", "weight=1;6", "smallest=0;2"),
    "survival-budget": ("gain=0;0.01;0.03;0.1;0.2",),
    "online-estimator": ("every=25;100", "damping=10;50", "gain=0;0.01"),
    "hazard": ("regularisation=0.01;0.1;1;10",),
    "token-hazard": ("regularisation=0.1;1",),
    "boosted-hazard": ("depth=2;3",),
    "neural-hazard": ("weight_decay=0.001;0.01",),
    "mlp": ("gammas=[2,4,6,8];[1,2,3,4];[1,2]", "hidden=16;32"),
    "mlp-throughput": ("gammas=[0,2,4,6,8];[0,1,2,3,4,6,8];[0,1,2,3,4]", "hidden=16;32"),
    "forest": ("gammas=[2,4,6,8];[1,2,3,4];[1,2]", "trees=30;100"),
    "ucb1": (*_BANDIT, "exploration=1;2"),
    "exp3": (*_BANDIT, "exploration=0.1;0.2"),
    "thompson": (*_BANDIT, "exploration=1;2"),
    "linucb": (*_BANDIT, "exploration=0.1;0.3;1"),
    "nightjar": ("feedback=bandit;full", "exploration=1;2", "switching=0;0.1"),
    "tapout": ("algorithm=ucb1;thompson", "share=0;0.5;1", "cap=4;8;16"),
    "hysteresis": ("policy=heuristic;mlp-throughput", "dwell=1;2;4", "margin=1;2"),
    "off-switch": ("policy=heuristic;best-fixed", "decay=0.9;0.97", "probe_every=16;64"),
    "dqn": ("discount=0;0.5;0.9",),
    "contextual-bandit": ("learning_rate=0.0003;0.001;0.003",),
    "ppo": ("learning_rate=0.001;0.003", "discount=0.5;0.9"),
    "dqn-stop": ("learning_rate=0.0003;0.001",),
    "ppo-stop": ("learning_rate=0.0003;0.001;0.003",),
    "ltd": ("learning_rate=0.0003;0.001;0.003",),
}
#: Gains below are decision times that were measured anew, and roundings.
LEAST = 0.001


@dataclass(frozen=True)
class Row:
    """What a preset is worth on the held-out prompts of its search.

    Attributes:
        policy: its name.
        costs: name of the cost model.
        gain: throughput with the preset over that without, all compressions together, minus 1; `interval`: 95 %,
            paired bootstrap over prompts.
        over_fixed: throughput with the preset over that of the best fixed gamma, minus 1.
    """

    policy: str
    costs: str
    gain: float
    interval: tuple[float, float]
    over_fixed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=[*SEARCHES], help="may be repeated; by default all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--docs", type=pathlib.Path, help="write the table between the page's markers")
    args = parser.parse_args()
    for name in args.policy or SEARCHES:
        find(name)
    if not args.docs:
        return
    traces = shipped_traces().load()
    work = [joblib.delayed(judge)(name, traces, costs) for name in args.policy or SEARCHES for costs in shipped_costs()]
    text = table(joblib.Parallel(n_jobs=args.jobs)(work))
    print(text)
    page = args.docs.read_text(encoding="utf-8")
    page = re.sub(r"(<!-- table -->\n).*(\n<!-- end -->)", lambda m: f"{m[1]}\n{text}\n{m[2]}", page, flags=re.S)
    write_atomically(args.docs, lambda partial: partial.write_text(page, encoding="utf-8"))


def find(name: str) -> None:
    """Search, unless the preset is there."""
    out = PRESETS / f"{name}.json"
    if out.exists():
        return
    grids = [part for grid in SEARCHES[name] for part in ("--grid", grid)]
    root = PRESETS.parents[2]
    command = ["-m", "speckv", "tune", name, *grids, "--out", str(out.relative_to(root))]
    subprocess.run([sys.executable, "-W", "ignore", *command], cwd=root, check=True)


def judge(name: str, traces: Rollouts, costs: CostModel) -> Row:
    """Fit a policy without and with its preset, and play both on the prompts that the search held out."""
    warnings.filterwarnings("ignore", "Stochastic Optimizer")  # the paper's training stops before it converges
    preset = read_json(PRESETS / f"{name}.json", "a preset")
    fold_of = folds_of(traces, preset["folds"], preset["seed"])
    learned, held_out = traces.take(fold_of > 0), traces.take(fold_of == 0)
    _, prompt_of = np.unique(held_out.ids, return_inverse=True)
    few = held_out.take(np.arange(0, len(held_out), 6))
    seconds = []
    for spec in (name, f"{name}@tuned", "best-fixed"):
        policy = make_policy(spec).fit(learned, costs, preset["seed"])
        # Both decision times are measured in one run, although the cost model knows that of the default.
        run = replay(policy, held_out, costs, measure_controller(policy, few, costs))
        seconds.append(np.bincount(prompt_of, run.sequence_seconds))
    given, tuned, fixed = seconds
    drawn = np.random.default_rng(preset["seed"]).integers(len(given), size=(RESAMPLES, len(given)))
    gains = given[drawn].sum(axis=1) / tuned[drawn].sum(axis=1) - 1
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    gain, over_fixed = (float(other.sum() / tuned.sum()) - 1 for other in (given, fixed))
    return Row(name, costs.name, gain, (low, high), over_fixed)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each policy, and what became of them all."""
    names = list(dict.fromkeys(row.costs for row in rows))
    lines = [
        f"| policy | preset | tried | {' | '.join(f'{name}: gain' for name in names)} | "
        f"{' | '.join(f'{name}: over best fixed' for name in names)} |",
        "| --- | --- | ---: |" + " ---: |" * 2 * len(names),
    ]
    kinds = ("better", "worse", "no difference shown", "the same")
    verdicts: dict[str, dict[str, list[str]]] = {kind: {name: [] for name in names} for kind in kinds}
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == policy]
        tried = len(read_json(PRESETS / f"{policy}.json", "a preset")["tried"])
        gains = [f"{row.gain:+.1%} ({row.interval[0]:+.1%} to {row.interval[1]:+.1%})" for row in mine]
        fixed = [f"{row.over_fixed:+.1%}" for row in mine]
        if not changed(policy):
            gains = ["the same"] * len(mine)
        lines.append(f"| `{policy}` | {changed(policy) or 'as it is'} | {tried} | {' | '.join([*gains, *fixed])} |")
        for row in mine:
            low, high = row.interval
            verdict = "better" if low > LEAST else "worse" if high < -LEAST else "no difference shown"
            verdicts[verdict if changed(policy) else "the same"][row.costs].append(f"`{policy}`")
    lines += ["", f"| with the preset | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for verdict, found in verdicts.items():
        lines.append(f"| {verdict} | {' | '.join(', '.join(found[name]) or 'none' for name in names)} |")
    return "\n".join(lines)


def changed(name: str) -> str:
    """In words, where the preset of a policy departs from its defaults; empty if it does not."""
    params = make_policy(f"{name}@tuned").changed_params
    return ", ".join(f"{parameter} {json.dumps(value)}" for parameter, value in params.items()).replace('"', "")


if __name__ == "__main__":
    main()
