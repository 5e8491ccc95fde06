"""The pictures of a report as files: what `speckv plot NAME` draws."""

import io
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from speckv.comparison import BASELINE, Comparison
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.files import write_atomically
from speckv.report.evidence import Evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
#: Left edge of pictures of gains: what is beyond, as plain decoding can be, is shown at the edge.
_LEFT = -0.3
#: Of series that lie in one picture: colours that the colour-blind can tell apart, and a mark each.
_SERIES = (("#0a6ab0", "o"), ("#b45309", "s"), ("#7b3f98", "^"), ("#00735c", "D"), ("#8a1c4a", "v"))


def check_picture(path: pathlib.Path) -> pathlib.Path:
    """Return `path`. Raises SpecKVError if its ending is not that of a picture."""
    if path.suffix not in KINDS:
        raise SpecKVError(f"{path}: pictures are written as .png, .svg or .pdf; choose one of these endings")
    return path


def save_figure(figure: "Figure", path: pathlib.Path) -> None:
    """Write a picture in the form that its ending says, whole or not at all."""
    kind = check_picture(path).suffix.lstrip(".")
    write_atomically(path, lambda partial: partial.write_bytes(render_figure(figure, kind)))


def render_figure(figure: "Figure", kind: str) -> bytes:
    """A picture as `png`, `svg` or `pdf`; the same one gives the same bytes."""
    import matplotlib

    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "speckv"}):
        figure.savefig(file, dpi=150, format=kind, metadata=undated)
    return file.getvalue()


def leaderboard(comparison: Comparison) -> "Figure":
    """The gain of each policy with its interval: one panel a compression and cost model, on one common scale."""
    cells = [cell for cell in comparison.cells if cell.compression != "all"]
    costs, compressions = _machines(comparison), comparison.compressions
    total = {policy: sum(c.gain for c in cells if c.policy == policy) for policy in {c.policy for c in cells}}
    order = sorted(total, key=lambda policy: total[policy])
    figure, axes = _panels(len(costs), len(compressions), 3.4, 0.16 * len(order) + 0.8, sharey=True, sharex=True)
    for row, cost in enumerate(costs):
        for column, compression in enumerate(compressions):
            axis = axes[row][column]
            here = {c.policy: c for c in cells if (c.costs, c.compression) == (cost, compression)}
            axis.set_xlim(100 * _LEFT, 100 * max(cell.gain for cell in cells) + 6)
            for y, policy in enumerate(order):
                cell, bound = here[policy], policy in comparison.bounds
                tested = "tab:green" if cell.gain > 0 else "tab:red"
                color = "0.6" if bound else "black" if policy == comparison.against else tested
                _gain(axis, y, cell.gain, cell.gain_ci, color, "D" if bound else "o")
            _policy_axis(axis, order)
            base = f"{_called(comparison)}: {here[comparison.against].throughput:.3g} tok/s"
            axis.set_title(f"{compression} · {cost} ({base})", fontsize=8)
    figure.supxlabel(f"{_gain_label(comparison)}\n(held-out prompts; bars: 95 % interval)", fontsize=9)
    return figure


def _gain(axis: "Axes", y: float, gain: float, interval: tuple[float, float] | None, color: str, marker: str) -> None:
    """One gain with its interval, as percent; at the left edge if it is beyond."""
    if gain < _LEFT:
        axis.plot(100 * _LEFT, y, "<", color=color, markersize=5, clip_on=False)
        axis.text(100 * _LEFT + 2, y, f"{100 * gain:.0f} %", color=color, fontsize=7, va="center")
        return
    if interval is not None:
        ends = [100 * max(_LEFT, end) for end in interval]
        axis.plot(ends, [y, y], color=color, linewidth=2, solid_capstyle="butt")
    axis.plot(100 * gain, y, marker, color=color, markersize=3.5)


def _policy_axis(axis: "Axes", policies: Sequence[str]) -> None:
    """One policy a line, from below, around the line of no gain."""
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(policies)), policies, fontsize=7)
    axis.set_ylim(-0.7, len(policies) - 0.3)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="0.9")
    axis.set_axisbelow(True)


def tasks(comparison: Comparison) -> "Figure":
    """The gain of the ten fastest policies, of gamma = 4 and of the bounds, by task and compression."""
    costs, compressions = _machines(comparison), comparison.compressions
    names = sorted({cell.task for cell in comparison.by_task})
    order = [policy for policy in reversed(_ranked(comparison)) if policy != comparison.against]
    figure, axes = _panels(len(costs), len(names), 2.8, 0.3 * len(order) + 0.8, sharey=True, sharex=True)
    of = {(c.costs, c.task, c.compression, c.policy): c for c in comparison.by_task}
    for row, cost in enumerate(costs):
        for column, task in enumerate(names):
            axis = axes[row][column]
            for number, compression in enumerate(compressions):
                color, marker = _SERIES[number % len(_SERIES)]
                axis.plot([], [], marker, color=color, markersize=4, label=compression)
                for y, policy in enumerate(order):
                    if (cell := of.get((cost, task, compression, policy))) is not None:
                        _gain(axis, y + 0.25 - 0.25 * number, cell.gain, cell.gain_ci, color, marker)
            _policy_axis(axis, order)
            axis.set_title(f"{task} · {cost}", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.supxlabel(f"{_gain_label(comparison)} (bars: 95 % interval)", fontsize=9)
    return figure


def gammas(comparison: Comparison) -> "Figure":
    """How often the five fastest policies, gamma = 4 and the bounds play each gamma, over all compressions together."""
    costs, order = _machines(comparison), _ranked(comparison, 5)
    figure, axes = _panels(len(costs), len(order), 1.3, 1.3, sharey=True, sharex=True)
    of = {(c.costs, c.policy): c for c in comparison.cells if c.compression == "all"}
    for row, cost in enumerate(costs):
        for column, policy in enumerate(order):
            axis, share = axes[row][column], of[cost, policy].gamma_share
            axis.bar(range(len(share)), [100 * part for part in share], color=_SERIES[0][0], width=0.9)
            axis.set_title(policy, fontsize=7)
            axis.tick_params(labelsize=7)
            axis.set_ylim(0, 100)
        axes[row][0].set_ylabel(f"{cost}\n% of steps", fontsize=7)
    figure.supxlabel("gamma", fontsize=9)
    return figure


def gap(comparison: Comparison) -> "Figure":
    """From the best fixed gamma to the perfect judge and the oracle, and where the best policy is on the way."""
    keys = [(cost, stored) for cost in _machines(comparison) for stored in comparison.compressions]
    figure, axes = _panels(1, 1, 7.0, 0.42 * len(keys) + 1.1)
    axis = axes[0][0]
    for y, key in enumerate(reversed(keys)):
        cells = {c.policy: c for c in comparison.cells if (c.costs, c.compression) == key}
        tested = [cell for cell in cells.values() if cell.policy not in comparison.bounds | {comparison.against}]
        best = max(tested, key=lambda cell: cell.throughput)
        oracle, judge = cells["oracle"], cells["perfect-judge"]
        axis.plot([0, 100 * oracle.gain], [y, y], color="0.85", linewidth=1, zorder=0)
        _gain(axis, y, cells["none"].gain, None, "0.4", "x")
        _gain(axis, y, judge.gain, None, _SERIES[2][0], "D")
        _gain(axis, y, oracle.gain, None, _SERIES[2][0], "*")
        _gain(axis, y, best.gain, best.gain_ci, _SERIES[0][0], "o")
        text, above = f"{best.policy} {100 * best.gain:+.1f} %", {"textcoords": "offset points", "ha": "center"}
        axis.annotate(text, (100 * best.gain, y), (0, 5), fontsize=7, color=_SERIES[0][0], **above)
    _policy_axis(axis, [f"{stored} · {cost}" for cost, stored in reversed(keys)])
    for marker, color, label in (("x", "0.4", "no speculation"), ("o", _SERIES[0][0], "best policy"),
                                 ("D", _SERIES[2][0], "perfect judge"), ("*", _SERIES[2][0], "oracle")):  # fmt: skip
        axis.plot([], [], marker, color=color, markersize=4, label=label)
    axis.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axis.set_xlabel(f"{_gain_label(comparison)} (bars: 95 % interval)", fontsize=8)
    return figure


def costs(evidence: Evidence) -> "Figure":
    """`cost_staircases` at the compressions that were compared."""
    return cost_staircases(evidence.costs, evidence.comparison.compressions)


def cost_staircases(models: Sequence[CostModel], compressions: Sequence[str] = ()) -> "Figure":
    """Milliseconds of a forward by the tokens in it, one panel a machine; by default at all its compressions."""
    figure, axes = _panels(1, len(models), 4.0, 3.0)
    tokens = np.arange(1, 18)
    for axis, model in zip(axes[0], models, strict=True):
        lines = {f"target, {stored}": model.verify_of(stored) for stored in compressions or model.verify}
        for number, (label, timings) in enumerate([*lines.items(), ("draft", model.draft)]):
            color, marker = _SERIES[number % len(_SERIES)]
            style = "--" if label == "draft" else "-"
            seconds = timings.table(17, 256)[1:, 256]
            axis.plot(tokens, 1000 * seconds, style, color=color, marker=marker, markersize=3.5, label=label)
        axis.set_title(model.name, fontsize=9)
        axis.set_xlabel("tokens in the forward, behind 256", fontsize=8)
        _value_axes(axis)
    axes[0][0].set_ylabel("ms", fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def calibration(evidence: Evidence) -> "Figure":
    """Chances of acceptance against how often tokens were accepted, on held-out prompts, one panel a machine."""
    held_out = evidence.held_out
    figure, axes = _panels(1, len(evidence.costs), 3.6, 3.4, sharey=True)
    for axis, model in zip(axes[0], evidence.costs, strict=True):
        curves = {policy: curve for (cost, policy), curve in held_out.reliability.items() if cost == model.name}
        axis.plot([0, 1], [0, 1], ":", color="black", linewidth=1)
        for number, (label, curve) in enumerate([*curves.items(), ("draft's probability", held_out.draft_reliability)]):
            color, marker = _SERIES[number % len(_SERIES)]
            text = f"{label}: ECE {curve.ece:.3f}, Brier {curve.brier:.3f}"
            axis.plot(curve.predicted, curve.observed, color=color, marker=marker, markersize=4, label=text)
        axis.set_title(f"fitted under {model.name}", fontsize=9)
        axis.set_xlabel("chance of acceptance that was predicted", fontsize=8)
        _value_axes(axis)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("share accepted", fontsize=8)
    return figure


def _value_axes(axis: "Axes") -> None:
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(color="0.92")
    axis.set_axisbelow(True)


#: What a result alone shows, by the name of the picture.
OF_RESULT: dict[str, Callable[[Comparison], "Figure"]] = {
    "leaderboard": leaderboard,
    "tasks": tasks,
    "gammas": gammas,
    "gap": gap,
}
#: What needs the recording and the costs as well.
OF_EVIDENCE: dict[str, Callable[[Evidence], "Figure"]] = {"costs": costs, "calibration": calibration}


def _panels(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple["Figure", Any]:
    """A figure of rows x columns panels, inches each, and its axes (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 1.2, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def _called(comparison: Comparison) -> str:
    """What gains compare with, in words."""
    return "best fixed" if comparison.against == BASELINE else comparison.against


def _gain_label(comparison: Comparison) -> str:
    return f"gain in tokens per second over {_called(comparison).replace('best fixed', 'the best fixed gamma')}, %"


def _machines(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(cell.costs for cell in comparison.cells))


def _ranked(comparison: Comparison, count: int = 10) -> list[str]:
    """The bounds, some policies that are fastest on average, and the baselines, best first."""
    cells = [cell for cell in comparison.cells if cell.compression != "all"]
    total = {cell.policy: 0.0 for cell in cells}
    for cell in cells:
        total[cell.policy] += cell.gain
    ranked = sorted(total, key=lambda policy: -total[policy])
    always = comparison.bounds | {comparison.against, BASELINE, "fixed-4"}
    shown = always | set([policy for policy in ranked if policy not in always][:count])
    return [policy for policy in ranked if policy in shown]
