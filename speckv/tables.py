"""Comparisons as tables for people."""

from typing import TYPE_CHECKING

from speckv.comparison import BASELINE, Cell, Comparison

if TYPE_CHECKING:
    from rich.table import Table

_BARS = " ▁▂▃▄▅▆▇█"


def leaderboard(comparison: Comparison, costs: str, compression: str) -> "Table":
    """One table: the policies under one cost model at one compression, fastest first."""
    from rich.table import Table

    table = Table(title=f"{compression} · costs of {costs}", title_justify="left", title_style="bold")
    table.add_column("policy")
    for name in ("tok/s", "gain", "95 % interval", "p", "judge", "oracle", "tok/step"):
        table.add_column(name, justify="right")
    table.add_column("gamma 0 …", no_wrap=True)
    table.add_column("µs", justify="right")
    for cell in comparison.cells:
        if (cell.costs, cell.compression) == (costs, compression):
            table.add_row(*_row(cell), style=_style(cell))
    return table


def _style(cell: Cell) -> str:
    if cell.policy in {"oracle", "perfect-judge"}:
        return "dim"
    if cell.policy == BASELINE:
        return "bold"
    return "green" if cell.gain > 0 and cell.p is not None and cell.p < 0.05 else ""


def _row(cell: Cell) -> list[str]:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    low_high = "" if cell.gain_ci is None else f"{100 * cell.gain_ci[0]:+.1f} … {100 * cell.gain_ci[1]:+.1f}"
    return [
        cell.policy,
        f"{cell.throughput:.3g}",
        f"{100 * cell.gain:+.1f} %",
        low_high,
        "" if cell.p is None else f"{cell.p:.2g}",
        percent(cell.judge_gap_closed),
        percent(cell.gap_closed),
        f"{cell.tokens_per_step:.2f}",
        "".join(_bar(share) for share in cell.gamma_share),
        f"{cell.decision_us:.0f}",
    ]  # fmt: skip


def _bar(share: float) -> str:
    """One character for a share in [0, 1]; only what is below 1 % is blank."""
    return _BARS[0] if share < 0.01 else _BARS[max(1, round((len(_BARS) - 1) * share))]


def what_if(comparison: Comparison) -> "Table":
    """One table: each policy's rank and throughput on each machine, and how much its decisions differ from those on
    the first one. All compressions together; the bounds have no rank."""
    from rich.table import Table

    machines: list[str] = comparison.settings["costs"]
    table = Table(title="from one machine to another", title_justify="left", title_style="bold")
    table.add_column("policy")
    for machine in machines:
        table.add_column(f"{machine}:\nrank, tok/s", justify="right")
    for machine in machines[1:]:
        table.add_column(f"other gammas\nthan on {machines[0]}" if len(machines) == 2 else machine, justify="right")
    changed = {(change.policy, change.costs, change.other_costs): change.share for change in comparison.changes}
    ranks = {machine: ranking(comparison, machine) for machine in machines}
    for policy in ranks[machines[0]]:
        shares = [changed[policy, machines[0], machine] for machine in machines[1:]]
        table.add_row(
            policy,
            *(f"{list(ranks[machine]).index(policy) + 1}, {ranks[machine][policy]:.3g}" for machine in machines),
            *("same" if share == 0 else f"{max(share, 0.001):.1%} of steps" for share in shares),
            style="bold" if policy == BASELINE else "",
        )
    return table


def ranking(comparison: Comparison, costs: str) -> dict[str, float]:
    """Throughput of each policy under one cost model, all compressions together, fastest first, without the bounds."""
    against = comparison.settings.get("against", BASELINE)
    cells = [cell for cell in comparison.cells if (cell.costs, cell.compression) == (costs, "all")]
    policies = [cell for cell in cells if cell.p is not None or cell.policy == against]
    return {cell.policy: cell.throughput for cell in sorted(policies, key=lambda cell: -cell.throughput)}


WHAT_IF = (
    "same: wherever it starts a step on both machines the policy drafts as much, because it looks at acceptance alone "
    "or because the other costs do not change its choice; tok/s over all compressions."
)
LEGEND = (
    "gain: throughput over that of the best fixed gamma (or of --against), every prompt held out; p: paired "
    "permutation over prompts, Holm-corrected; judge, oracle: share of the way to the perfect judge and to the "
    "clairvoyant oracle; "
    "gamma: share of steps by gamma, from 0; µs: the policy's own time in a step."
)
