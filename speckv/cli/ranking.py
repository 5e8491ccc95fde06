"""`speckv compare --traces LOG`: the leaderboard of a step log."""

import os
import pathlib
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from speckv.cli.common import AGREE, make_console, print_table
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.costs import CostModel
    from speckv.evaluation.ranking import Ranking

#: Options of `speckv compare` that a step log takes, too.
_TAKES = {"traces_path", "cost_names", "policy_specs", "seed", "json_path"}


def rank_on_log(
    path: pathlib.Path,
    cost_names: tuple[str, ...],
    policy_specs: tuple[str, ...],
    seed: int,
    json_path: pathlib.Path | None,
) -> None:
    """Rank policies on a step log, with the reasons why it can't judge the others.

    Raises:
        SpecKVError: an option was given that means nothing there, or as of `rank`.
    """
    from speckv.evaluation.ranking import RANKED_BY, rank
    from speckv.files import write_json
    from speckv.plugins import load_costs, make_policy, registry
    from speckv.provenance import is_untold, seen_in
    from speckv.saving import named_policy
    from speckv.steplogs import StepLog

    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) != ParameterSource.DEFAULT
        if given and option.name not in _TAKES:
            raise SpecKVError(f"{path}: is a step log, which is ranked without {option.opts[0]}; leave it out")
    log = StepLog.load(path)
    if not cost_names and log.seconds is None:
        raise SpecKVError(f"{path}: holds no seconds; say with --costs how long forwards take")
    wanted = [named_policy(spec) for spec in (policy_specs or registry().policies)]
    if not policy_specs:
        wanted = [policy for policy in wanted if not policy.explores]
    required = [make_policy(spec) for spec in ("none", "fixed:gamma=4", "best-fixed")]
    labels = {policy.label for policy in wanted}
    policies = [*wanted, *(policy for policy in required if policy.label not in labels)]
    seen = set[str]().union(*(seen_in(policy, log) for policy in wanted))
    untold = [spec for spec, policy in zip(policy_specs, wanted, strict=False) if is_untold(policy)]
    models: list[CostModel | None] = [load_costs(name) for name in cost_names]
    rankings = []
    for costs in models or [None]:
        ranked, left_out = rank(policies, log, costs, seed, os.cpu_count() or 1, seen)
        rankings += [(ranking, left_out) for ranking in ranked]
    if json_path is not None:
        found = [
            {
                "compression": ranking.compression,
                "costs": ranking.costs,
                "held_out": ranking.held_out,
                "ranked_by": RANKED_BY,
                "evaluations": [evaluation.to_json() for evaluation in ranking.evaluations],
                "left_out": reasons,
            }
            for ranking, reasons in rankings
        ]
        write_json(json_path, {"log": log.provenance, "rankings": found})
    console = make_console()
    for ranking, _ in rankings:
        print_table(console, _table(ranking))
    console.print(
        f"tok/s: estimated by {RANKED_BY}, with its 95 % interval by sequence; {AGREE}; "
        "warn: how many reasons to doubt speckv evaluate would print",
        style="dim",
    )
    for reason, names in left_out.items():
        console.print(f"left out: {', '.join(names)}: {reason}", style="dim", highlight=False)
    if untold:
        console.print(
            f"{', '.join(untold)}: does not say what it was fitted to; if to this log, it looks better than it is",
            style="dim",
            highlight=False,
        )


def _table(ranking: "Ranking") -> Any:
    from rich.table import Table

    from speckv.evaluation.ranking import RANKED_BY

    first = ranking.evaluations[0]
    title = (
        f"{ranking.compression} · costs of {ranking.costs} · {first.steps} steps of {first.sequences} sequences"
        f"{', held out from fitting' if ranking.held_out else ''} · {first.logged:.3g} tokens/s as logged"
    )
    table = Table("policy", title=title, title_justify="left", title_style="bold")
    for name in ("tok/s", "95 % interval", "against logged", "tok/step", "agree", "warn"):
        table.add_column(name, justify="right")
    for evaluation in ranking.evaluations:
        estimate = evaluation.of(RANKED_BY)
        interval = "not known" if estimate.interval is None else "{:.3g} … {:.3g}".format(*estimate.interval)
        table.add_row(
            evaluation.policy,
            f"{estimate.throughput:.3g}",
            interval,
            f"{estimate.throughput / evaluation.logged - 1:+.1%}",
            f"{estimate.tokens_per_step:.2f}",
            f"{evaluation.agreement:.0%}",
            str(len(evaluation.warnings) or ""),
        )
    return table
