"""`speckv compare`: the leaderboard."""

import contextlib
import os
import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import make_console, must_be_new, print_table, showing_progress
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.comparison import HoldOut
    from speckv.traces import Rollouts

_IN_A_BATCH = (
    "in a batch of n a step takes what all n sequences take together: tok/s are those of one, and the machine's n "
    "times as many while the batch is full. All of it is taken to play alike at every step: that is exact for one "
    "gamma for all. A policy that decides for each sequence is judged as if the others did the same; really each step "
    "lasts as long as its longest draft, so that for it these tok/s are an upper bound."
)


@click.command()
@click.option(
    "--traces",
    "traces_path",
    type=click.Path(path_type=pathlib.Path),
    help="Trace folder, or a step log: a file or a folder of files.  [default: the recording that ships with speckv]",
)
@click.option(
    "--costs",
    "cost_names",
    multiple=True,
    help="Cost model, a file or a name, may be repeated.  [default: those that ship with speckv]",
)
@click.option(
    "--policy",
    "policy_specs",
    multiple=True,
    help="NAME or NAME:PARAMETER=VALUE,…, or on a step log the folder of a saved one, may be repeated.  "
    "[default: all]  Baselines and bounds always join.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    type=click.IntRange(1),
    help="Sequences that share every step, may be repeated; the cost models must have been profiled in batches.  "
    "[default: what their tables start with, mostly 1]",
)
@click.option("--train", is_flag=True, help="Let those join, too, that train with torch, for a while in every fold.")
@click.option("--folds", default=5, show_default=True, type=click.IntRange(2))
@click.option(
    "--hold-out",
    type=click.Choice(["prompt", "task"]),
    default="prompt",
    show_default=True,
    help="What to hold out at once: prompts, in folds that mix the tasks, or all prompts of a task.",
)
@click.option(
    "--against",
    default="best-fixed",
    show_default=True,
    help="The policy that gains are measured from: one of --policy, or its label in the table.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "json_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write all cells.")
@click.option("--plot", "plot_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="PNG, SVG or PDF.")
def compare(
    traces_path: pathlib.Path | None,
    cost_names: tuple[str, ...],
    policy_specs: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    train: bool,
    folds: int,
    hold_out: "HoldOut",
    against: str,
    seed: int,
    json_path: pathlib.Path | None,
    plot_path: pathlib.Path | None,
) -> None:
    """Replay policies on held-out prompts and rank them in tokens per second.

    If --traces is a step log, what policies would reach is estimated from it, for those that it can tell of.
    """

    from speckv import tables
    from speckv.cli.ranking import rank_on_log
    from speckv.comparison import compare as compare_policies
    from speckv.files import write_json
    from speckv.plugins import load_costs
    from speckv.report import plots
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.steplogs import is_step_log
    from speckv.traces import TraceDataset

    if plot_path is not None:
        plots.check_picture(plot_path)
    must_be_new(json_path, plot_path)
    if traces_path is not None and is_step_log(traces_path):
        return rank_on_log(traces_path, cost_names, policy_specs, seed, json_path)
    if traces_path is not None and traces_path.is_dir() and not (traces_path / "manifest.json").exists():
        raise SpecKVError(
            f"{traces_path}: holds neither a recording (manifest.json: no such file) nor a step log; name another"
        )
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    policies, left_out = _policies(policy_specs, traces.gamma_max, train)
    traces, seen = _unseen(traces, policies)
    models = [load_costs(name) for name in cost_names] or shipped_costs()
    costs = [model.at_batch(size) for model in models for size in dict.fromkeys(batch_sizes or model.batch_sizes[:1])]
    with showing_progress("comparing") as progress:
        result = compare_policies(
            policies, traces, costs, folds, seed, os.cpu_count() or 1,
            progress=progress,
            hold_out=hold_out, against=against_label(against, policies),
        )  # fmt: skip
    if json_path is not None:
        write_json(json_path, result.to_json())
    if plot_path is not None:
        plots.save_figure(plots.leaderboard(result), plot_path)
    console = make_console()
    for model in costs:
        compressions = sorted(set(traces.compressions.tolist()))
        for compression in compressions if len(compressions) == 1 else [*compressions, "all"]:
            print_table(console, tables.leaderboard(result, model.name, compression))
    console.print(tables.LEGEND, style="dim")
    if len(costs) > 1:
        print_table(console, tables.what_if(result))
        console.print(tables.WHAT_IF, style="dim")
    for model in costs:
        console.print(
            f"costs of {model.name}: {model.provenance.get('source', 'unknown')}", style="dim", highlight=False
        )
    if max(result.settings["batch_sizes"]) > 1:
        console.print(_IN_A_BATCH, style="dim")
    if seen:
        console.print(seen, style="dim", highlight=False)
    if timed := result.settings["decision_times_measured_here"]:
        console.print(f"decision times measured in this run: {', '.join(timed)}", style="dim", highlight=False)
    for reason, names in left_out.items():
        console.print(f"left out: {', '.join(names)}: {reason}", style="dim", highlight=False)


def _policies(specs: tuple[str, ...], gamma_max: int, train: bool) -> tuple[list[Any], dict[str, list[str]]]:
    """The policies that a user asked for (by default all that can play), and the baselines and bounds of every
    comparison; and by reason those that were left out."""
    from speckv.comparison import REQUIRED
    from speckv.plugins import make_policy, registry

    if gamma_max < 4:
        raise SpecKVError(f"the recording goes up to gamma {gamma_max}; a comparison needs 4, for its baseline fixed-4")
    wanted = [make_policy(spec) for spec in (specs or registry().policies)]
    left_out: dict[str, list[str]] = {}
    if not specs:
        for policy in list(wanted):
            if (reason := _unfit(policy, gamma_max, train)) is not None:
                wanted.remove(policy)
                left_out.setdefault(reason, []).append(policy.label)
    labels = {policy.label for policy in wanted}
    required = [make_policy("fixed:gamma=4" if name == "fixed-4" else name) for name in REQUIRED]
    return wanted + [policy for policy in required if policy.label not in labels], left_out


def against_label(against: str, policies: list[Any]) -> str:
    """The label of the policy to compare with, which users name by it or as any policy. Raises SpecKVError if it is
    none of these policies."""
    from speckv.plugins import make_policy

    labels = [policy.label for policy in policies]
    named = against
    if against not in labels:
        with contextlib.suppress(SpecKVError):  # it can't be made: neither is it there
            named = make_policy(against).label
    if named not in labels:
        raise SpecKVError(f"there is no {against!r} in the comparison; choose one of {', '.join(labels)}")
    return named


def _unseen(traces: "Rollouts", policies: list[Any]) -> "tuple[Rollouts, str]":
    """The sequences of prompts that no policy was trained on, nor one inside it; and what to say of the others."""
    import numpy as np

    from speckv.provenance import seen_in

    seen = set[str]().union(*(seen_in(policy, traces) for policy in policies))
    if not seen:
        return traces, ""
    prompts = len(set(traces.ids.tolist()))
    if len(seen) == prompts:
        raise SpecKVError("policies of the comparison were trained on all prompts of the traces; compare on others")
    said = f"{len(seen)} of {prompts} prompts are left out: policies of the comparison were trained on them"
    return traces.take(~np.isin(traces.ids, list(seen))), said


def _unfit(policy: Any, gamma_max: int, train: bool) -> str | None:
    """Why a policy does not join a comparison by itself, None if it does."""
    if policy.required_gamma > gamma_max:
        return f"needs a recording up to gamma {policy.required_gamma}"
    if policy.explores:
        return "draws lots for the sake of a log; ask for it by name"
    # Whether they join must not hang on what is installed: p values depend on how many do.
    if policy.requires and not train:
        return "trained for a while in every fold, with more than the core installation; --train lets them join"
    reason: str | None = policy.untrainable
    return reason
