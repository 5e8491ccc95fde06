"""`speckv evaluate`: what policies would be worth, from a step log."""

import pathlib
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import AGREE, TRACES, make_console, must_be_new, print_table
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.costs import CostModel
    from speckv.evaluation import Evaluation
    from speckv.policy import Policy
    from speckv.steplogs import StepLog


@click.command()
@click.argument("paths", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@click.option(
    "--policy",
    "policy_specs",
    multiple=True,
    required=True,
    help="NAME, NAME:PARAMETER=VALUE,… or the folder of a saved policy, may be repeated. It must decide before the "
    "step. One that learns is fitted to --traces first.",
)
@click.option(
    "--costs", "costs_name", help="Cost model: a file or a name.  [default: the log's own seconds, if it has them]"
)
@TRACES
@click.option("--gamma-max", type=click.IntRange(1, 128), help="No step drafts more.  [default: the most in the log]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "json_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write all numbers.")
def evaluate(
    paths: tuple[pathlib.Path, ...],
    policy_specs: tuple[str, ...],
    costs_name: str | None,
    traces_path: pathlib.Path | None,
    gamma_max: int | None,
    seed: int,
    json_path: pathlib.Path | None,
) -> None:
    """Estimate from step logs what policies that they did not play would be worth, each estimate with an interval.

    Several files are taken together, as one log. Their propensities count if all of them were played by lot.

    docs/step-logs.md says what each estimator assumes, and how far it was off where the truth is known.
    """
    import warnings

    from speckv.errors import SpecKVWarning
    from speckv.evaluation import evaluate as evaluate_policy
    from speckv.evaluation.recording import join
    from speckv.files import write_json
    from speckv.plugins import load_costs
    from speckv.steplogs import StepLog

    must_be_new(json_path)
    log = join({str(path): StepLog.load(path) for path in paths})
    costs = load_costs(costs_name) if costs_name else None
    if costs is None and log.seconds is None:
        raise SpecKVError(f"{paths[0]}: holds no seconds; say with --costs how long forwards take")
    found: list[Evaluation] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecKVWarning)
        for policy in _policies(policy_specs, traces_path, costs, log):
            found += evaluate_policy(policy, log, costs, gamma_max, seed)
    for warning in caught:
        click.echo(f"speckv: {warning.message}", err=True)
    if json_path is not None:
        write_json(json_path, {"log": log.provenance, "evaluations": [evaluation.to_json() for evaluation in found]})
    console = make_console()
    for stored in dict.fromkeys(evaluation.compression for evaluation in found):
        print_table(console, _table([evaluation for evaluation in found if evaluation.compression == stored]))
    console.print(
        f"intervals: 95 %, bootstrap by sequence; {AGREE}; ESS: what the weighted steps are worth", style="dim"
    )


def _table(found: "list[Evaluation]") -> Any:
    from rich.table import Table

    first = found[0]
    title = (
        f"{first.compression} · costs of {first.costs} · {first.steps} steps of {first.sequences} sequences, "
        f"{first.logged:.3g} tokens/s as logged"
    )
    table = Table("policy", title=title, title_justify="left", title_style="bold")
    table.add_column("estimator", no_wrap=True)
    for name in ("tok/s", "95 % interval", "tok/step", "95 % interval", "agree", "ESS"):
        table.add_column(name, justify="right")
    for evaluation in found:
        for number, estimate in enumerate(evaluation.estimates):
            head = number == 0
            effective = "" if evaluation.effective_steps is None else f"{evaluation.effective_steps:.0f}"
            table.add_row(
                evaluation.policy if head else "",
                estimate.estimator,
                f"{estimate.throughput:.3g}",
                _range(estimate.interval),
                f"{estimate.tokens_per_step:.2f}",
                _range(estimate.tokens_interval),
                f"{evaluation.agreement:.0%}" if head else "",
                effective if head else "",
                end_section=number == len(evaluation.estimates) - 1,
            )
    return table


def _range(interval: tuple[float, float] | None) -> str:
    return "not known" if interval is None else f"{interval[0]:.3g} … {interval[1]:.3g}"


def _policies(
    specs: tuple[str, ...], traces_path: pathlib.Path | None, costs: "CostModel | None", log: "StepLog"
) -> "list[Policy]":
    """The policies that a user named, fitted if they have to be; a warning if that was on the prompts of the log."""
    import warnings

    from speckv.errors import SpecKVWarning
    from speckv.evaluation.situations import check_evaluable
    from speckv.policy import Policy
    from speckv.provenance import prompts_of, seen_in
    from speckv.saving import named_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    policies = []
    for spec in specs:
        policy = named_policy(spec)
        check_evaluable(policy)
        known = seen_in(policy, log)
        if type(policy).fit is not Policy.fit and not policy.fitted:
            traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
            policy.fit(traces, costs or shipped_costs()[0])
            known |= set(traces.ids.tolist()) & set(prompts_of(log).tolist())
        if known:
            warnings.warn(
                f"{policy.label} was fitted to prompts of the log, so that it looks better than it is: fit it to "
                "others, with `speckv train` or --traces",
                SpecKVWarning,
                stacklevel=2,
            )
        policies.append(policy)
    return policies
