"""The report as pictures."""

import textwrap
from typing import TYPE_CHECKING, Any

from speckv.paper.data import COMPRESSIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PUBLISHED, _HONEST, _BASE = "tab:blue", "tab:orange", "0.35"
#: Inches of a picture with its panels side by side, and with them below each other.
_WIDTH, _NARROW = 9.0, 4.0


def draw_all(result: dict[str, Any], narrow: bool = False) -> "dict[str, Figure]":
    """Every picture of a report by name.

    Args:
        result: the report.
        narrow: for small screens, with the panels below each other.
    """
    return {
        "paper-tokens": draw_tokens(result, narrow),
        "paper-throughput": draw_throughput(result["honest"], narrow),
        "paper-predictors": draw_predictors(result["honest"], narrow),
        "paper-study": draw_study(result["study"], narrow),
    }


def _make_figure(height: float, panels: int, narrow: bool, width: float = _WIDTH) -> "tuple[Figure, list[Axes]]":
    """Panels on common scales; `height` is that of one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (_NARROW, 0.8 * panels * height) if narrow else (width, height)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(*((panels, 1) if narrow else (1, panels)), squeeze=False, sharex=True, sharey=True).flatten()
    for axis in axes:
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, list(axes)


def _label(figure: "Figure", text: str, narrow: bool) -> None:
    figure.supxlabel(textwrap.fill(text, 50) if narrow else text, fontsize=9)


def _star(policy: str, honest: dict[str, Any]) -> str:
    """A policy's name, with a star if it was chosen on the very steps that it is valued on."""
    return f"{policy} *" if policy in honest["in_sample"] else policy


def _number(value: float | None) -> float:
    """What is not known is not drawn."""
    return float("nan") if value is None else value


def draw_tokens(result: dict[str, Any], narrow: bool = False) -> "Figure":
    """Tokens a step of each policy: what the paper's judge expects, and what happened."""
    figure, axes = _make_figure(3.2, len(COMPRESSIONS), narrow)
    policies = list(result["published"]["table1"]["overall"])
    for axis, compression in zip(axes, COMPRESSIONS, strict=True):
        for y, policy in enumerate(reversed(policies)):
            expected = _number(result["table1"][compression][policy])
            happened = _number(result["honest"]["table1"][compression][policy])
            axis.plot([expected, happened], [y, y], color="0.8", linewidth=2, zorder=1)
            axis.plot(expected, y, "o", color=_PUBLISHED, label="expected by the policy's own predictor")
            axis.plot(
                happened, y, "D", color=_HONEST, markersize=5, label="what happened (held-out prompts; * in-sample)"
            )
        axis.set_yticks(range(len(policies)), [_star(policy, result["honest"]) for policy in reversed(policies)])
        axis.set_title(compression.upper(), fontsize=9)
        axis.set_ylim(-0.5, len(policies) - 0.5)
        axis.grid(axis="x", color="0.92")
    _share_legend(figure, axes[0], "committed tokens a step", narrow)
    return figure


def draw_throughput(honest: dict[str, Any], narrow: bool = False) -> "Figure":
    """Tokens per second of each policy against gamma 4, with intervals."""
    figure, axes = _make_figure(3.4, len(COMPRESSIONS), narrow)
    rows = list(reversed(honest["throughput"]))
    for axis, compression in zip(axes, COMPRESSIONS, strict=True):
        for y, row in enumerate(rows):
            gain = {end: _number(value) for end, value in row["over_fixed_4"][compression].items()}
            color = (
                _PUBLISHED
                if row["policy"].startswith("SpecKV")
                else _HONEST
                if row["policy"] == "Cost-aware"
                else _BASE
            )
            axis.plot([gain["low"], gain["high"]], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            axis.plot(gain["gain_pct"], y, "o", color=color, markersize=4.5)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [_star(row["policy"], honest) for row in rows])
        four = next(row for row in rows if row["policy"] == "Fixed-4")["tokens_per_second"][compression]
        axis.set_title(f"{compression.upper()} (gamma 4: {four:.1f} tok/s)", fontsize=9)
        axis.grid(axis="x", color="0.92")
    _label(figure, "tokens per second against gamma 4, % (bars: 95 % interval, prompts resampled; * in-sample)", narrow)
    return figure


def draw_predictors(honest: dict[str, Any], narrow: bool = False) -> "Figure":
    """How well acceptance is predicted, by split and by what the predictor sees."""
    figure, (axis,) = _make_figure(3.0, 1, narrow, width=6.4)
    cases = list(dict.fromkeys((row["signals"], row["split_by"]) for row in honest["predictors"]))
    models = list(dict.fromkeys(row["model"] for row in honest["predictors"]))
    for index, (model, color) in enumerate(zip(models, (_PUBLISHED, _HONEST), strict=True)):
        values = [row["correlation"] for row in honest["predictors"] if row["model"] == model]
        bars = axis.bar([x + 0.38 * (index - 0.5) for x in range(len(cases))], values, 0.36, color=color, label=model)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    words = "{0}\n{1},\nsplit by\n{2}" if narrow else "{0} {1},\nsplit by {2}"
    axis.set_xticks(range(len(cases)), [words.format(*signals.split(), by) for signals, by in cases])
    axis.set_ylabel("correlation with true acceptance", fontsize=8)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=8, frameon=False)
    return figure


def draw_study(study: dict[str, Any], narrow: bool = False) -> "Figure":
    """Our recording: the MLP against gamma 4 in tokens a step and in tokens per second."""
    models = list(dict.fromkeys(row["costs"] for row in study["replayed"]))
    figure, axes = _make_figure(2.8, len(models), narrow)
    for axis, model in zip(axes, models, strict=True):
        rows = [row for row in reversed(study["replayed"]) if row["costs"] == model]
        for y, row in enumerate(rows):
            for offset, key, color, label in (
                (0.18, "tokens_per_step_over_fixed_4_pct", _PUBLISHED, "tokens a step"),
                (-0.18, "over_fixed_4_pct", _HONEST, "tokens per second"),
            ):
                bar = axis.barh(y + offset, row[key], 0.34, color=color, label=label)
                axis.bar_label(bar, fmt="%+.0f %%", fontsize=8, padding=2)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [row["compression"] for row in rows])
        axis.set_title(f"costs of {model}", fontsize=9)
        axis.margins(x=0.18)
        axis.grid(axis="x", color="0.92")
    _share_legend(figure, axes[0], "the paper's MLP on held-out prompts, against gamma 4, %", narrow)
    return figure


def _share_legend(figure: "Figure", axis: "Axes", label: str, narrow: bool) -> None:
    """One legend above all panels, and one label below them."""
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    _label(figure, label, narrow)
    columns = 1 if narrow else 2
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=columns, fontsize=8, frameon=False)
