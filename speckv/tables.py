"""Comparisons as tables and pictures for people."""

import pathlib
from typing import TYPE_CHECKING, Any

from speckv.comparison import BASELINE, Cell, Comparison
from speckv.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

_BARS = " ▁▂▃▄▅▆▇█"


def leaderboard(comparison: Comparison, costs: str, compression: str) -> "Table":
    """One table: the policies under one cost model at one compression, fastest first."""
    from rich.table import Table

    table = Table(title=f"{compression} · costs of {costs}", title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    for name in ("tok/s", "gain", "95 % interval", "p", "judge", "oracle", "tok/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gamma 0 …", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
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


LEGEND = (
    "gain: throughput over that of the best fixed gamma, every prompt held out; p: paired permutation over prompts, "
    "Holm-corrected; judge, oracle: share of the way to the perfect judge and to the clairvoyant oracle; "
    "gamma: share of steps by gamma, from 0; µs: the policy's own time in a step."
)


#: Left edge of the pictures, as a gain.
_LEFT = -0.3


def plot(comparison: Comparison, path: pathlib.Path) -> None:
    """Draw the gain of each policy over the best fixed gamma, with its interval: one panel a compression and cost
    model, on one common scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in comparison.cells if cell.compression != "all"]
    costs = list(dict.fromkeys(cell.costs for cell in cells))
    compressions = sorted({cell.compression for cell in cells})
    mean = {p: sum(c.gain for c in cells if c.policy == p) for p in {c.policy for c in cells}}
    order = sorted(mean, key=lambda policy: mean[policy])
    figure = Figure(
        figsize=(3.4 * len(compressions) + 1.2, (0.16 * len(order) + 0.8) * len(costs)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(costs), len(compressions), sharey=True, sharex=True, squeeze=False)
    for row, cost in enumerate(costs):
        for column, compression in enumerate(compressions):
            axis = axes[row][column]
            here = {c.policy: c for c in cells if (c.costs, c.compression) == (cost, compression)}
            axis.set_xlim(100 * _LEFT, 100 * max(cell.gain for cell in cells) + 6)
            _panel(axis, [here[policy] for policy in order])
            axis.set_title(f"{compression} · {cost} (best fixed: {here[BASELINE].throughput:.3g} tok/s)", fontsize=8)
    figure.supxlabel(
        "gain in tokens per second over the best fixed gamma, %\n(held-out prompts; bars: 95 % interval)", fontsize=9
    )
    kind = path.suffix.lstrip(".") or "png"
    write_atomically(path, lambda partial: figure.savefig(partial, dpi=150, format=kind))


def _panel(axis: Any, cells: list[Cell]) -> None:
    for y, cell in enumerate(cells):
        bound = cell.policy in {"oracle", "perfect-judge", "task-oracle"}
        color = "0.6" if bound else "black" if cell.policy == BASELINE else "tab:green" if cell.gain > 0 else "tab:red"
        if cell.gain < _LEFT:  # beyond the edge, as plain decoding can be
            axis.plot(100 * _LEFT, y, "<", color=color, markersize=5, clip_on=False)
            axis.text(100 * _LEFT + 2, y, f"{100 * cell.gain:.0f} %", color=color, fontsize=7, va="center")
            continue
        if cell.gain_ci is not None:
            axis.plot([100 * end for end in cell.gain_ci], [y, y], color=color, linewidth=2, solid_capstyle="butt")
        axis.plot(100 * cell.gain, y, "D" if bound else "o", color=color, markersize=3.5)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(cells)), [cell.policy for cell in cells], fontsize=7)
    axis.set_ylim(-0.7, len(cells) - 0.3)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="0.9")
    axis.set_axisbelow(True)
