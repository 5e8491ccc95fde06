"""The report as tables, for the terminal and for the documentation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speckv.paper.data import COMPRESSIONS, GAMMAS, SIGNALS
from speckv.paper.protocol import INPUTS, name_rows

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_THREE = ("published", "reproduced", "honest")
#: What stands for a value that the data can't tell.
UNKNOWN = "n/a"


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of text; the first `labels` columns are left-aligned."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    labels: int = 1

    def to_rich(self) -> "RichTable":
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for index, name in enumerate(self.columns):
            table.add_column(name, justify="left" if index < self.labels else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        lines = [self.columns, ["---" if index < self.labels else "---:" for index in range(len(self.columns))]]
        return "\n".join("| " + " | ".join(row) + " |" for row in [*lines, *self.rows])


def make_tables(result: dict[str, Any]) -> dict[str, Table]:
    """All tables of a report, by name."""
    return {
        "table1": make_table1(result),
        "table2": make_table2(result),
        "intervals": make_intervals(result),
        "numbers": make_numbers(result),
        "optimal_gamma": make_optimal_gammas(result),
        "differences": make_differences(result),
        "judges": make_judges(result["honest"]),
        "predictors": make_predictors(result["honest"]),
        "throughput": make_throughput(result["honest"]),
        "gains": make_gains(result["honest"]),
        "decisions": make_decisions(result),
        "study_numbers": make_study_numbers(result),
        "study_tokens": make_study_tokens(result["study"]),
        "study_gammas": make_study_gammas(result["study"]),
        "study_replayed": make_study_replayed(result["study"]),
    }


def _parts(result: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return result["published"], result, result["honest"]


def _by_name(*tables: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], ...]]:
    """The rows of these tables that are of the same cell, in the order of the first table."""
    first, *others = map(name_rows, tables)
    return [(row, *(other[name] for other in others)) for name, row in first.items()]


def _mark(text: str, policy: str, honest: dict[str, Any]) -> str:
    """A text about a policy, marked if the policy was chosen on the very steps that it is valued on."""
    return f"{text} *" if policy in honest["in_sample"] else text


def make_table1(result: dict[str, Any]) -> Table:
    rows = [
        [compression, policy, *(format_number(part["table1"][compression][policy]) for part in _parts(result))]
        for compression, values in result["published"]["table1"].items()
        for policy in values
    ]
    for row in rows:
        row[-1] = _mark(row[-1], row[1], result["honest"])
    return Table("Table 1: tokens a step", ("compression", "policy", *_THREE), rows, labels=2)


def make_table2(result: dict[str, Any]) -> Table:
    rows = [
        [cells[0]["compression"], cells[0]["task"]]
        + [
            f"{format_number(cell['fixed_4'])} → {format_number(cell['speckv'])} "
            f"({format_percent(cell['improvement_pct'])})"
            for cell in cells
        ]
        for cells in _by_name(*(part["table2"] for part in _parts(result)))
    ]
    title = "Table 2: tokens a step of gamma 4 → of SpecKV-fast"
    return Table(title, ("compression", "task", *_THREE), rows, labels=2)


def make_intervals(result: dict[str, Any]) -> Table:
    rows = [
        [
            policy,
            *(_format_mean(part["intervals"][policy]) for part in _parts(result)),
        ]
        for policy in result["published"]["intervals"]
    ]
    for row in rows:
        row[-1] = _mark(row[-1], row[0], result["honest"])
    columns = ("policy", "published", "reproduced", "honest (prompts resampled)")
    return Table("Tokens a step over all compressions, 95 % intervals", columns, rows)


def make_numbers(result: dict[str, Any]) -> Table:
    published, honest = result["published"], result["honest"]
    held_out = {
        row["model"]: row
        for row in honest["predictors"]
        if (row["signals"], row["split_by"]) == ("previous block", "prompts")
    }
    rows = [
        [f"{name} records", str(published["records"][name]), str(result["records"][name]), ""]
        for name in ("total", "train", "test")
    ]
    rows.append(
        [
            "improvement over gamma 4, tokens a step",
            *(format_percent(part["improvement_pct"]) for part in _parts(result)),
        ]
    )
    for name, digits in (("mean_difference", 3), ("p", 4)):
        values = (part["paired_test"][name] for part in (published, result))
        rows.append([f"paired bootstrap, {name.replace('_', ' ')}", *(f"{value:.{digits}f}" for value in values), ""])
    for name, row in result["predictors"].items():
        for key in ("correlation", "mse"):
            value = published["predictors"].get(name, {}).get(key)
            honest_value = f"{held_out[name][key]:.4f}" if name in held_out else ""
            rows.append([f"{name}, {key}", "" if value is None else f"{value:.4f}", f"{row[key]:.4f}", honest_value])
    for name, row in result["earlier_predictors"].items():
        for key in ("correlation", "mse"):
            value = published["earlier_predictors"][name][key]
            rows.append([f"earlier {name}, {key}", f"{value:.4f}", f"{row[key]:.4f}", ""])
    for name in SIGNALS:
        stated = f"about {published['correlation']:.2f}" if name.startswith("mean") else ""
        rows.append([f"correlation of {name}", stated, f"{result['correlations'][name]:+.4f}", ""])
    for name in sorted(INPUTS, key=lambda name: -published["importances"][name]):
        importances = (part["importances"][name] for part in (published, result))
        rows.append([f"importance of {name}", *(f"{value:.3f}" for value in importances), ""])
    return Table("Predictors and other numbers", ("number", *_THREE), rows)


def make_optimal_gammas(result: dict[str, Any]) -> Table:
    rows = [
        [a["compression"], a["task"]] + [f"{row['gamma']} ({row['tokens_per_second']:.1f} tok/s)" for row in (a, b)]
        for a, b in _by_name(result["published"]["optimal_gamma"], result["optimal_gamma"])
    ]
    columns = ("compression", "task", "published", "reproduced")
    return Table("The fastest gamma in each cell", columns, rows, labels=2)


def make_differences(result: dict[str, Any]) -> Table:
    rows = [[row["what"], str(row["published"]), str(row["reproduced"])] for row in result["differences"]]
    title = f"What differs from the printed digit (scikit-learn {result['software']['scikit-learn']})"
    return Table(title, ("number", "published", "reproduced"), rows)


def make_judges(honest: dict[str, Any]) -> Table:
    rows = [
        [" fitted on ".join(filter(None, (row["judge"], row["fitted_on"])))]
        + [format_number(row[key]) for key in ("fixed_4", "fixed_8", "speckv")]
        + [format_percent(row[f"gain_over_fixed_{gamma}_pct"]) for gamma in (4, 8)]
        for row in honest["judges"]
    ]
    columns = ("judge", "always 4", "always 8", "SpecKV-fast", "gain over 4", "gain over 8")
    return Table("Tokens a step of the published choices, under other judges", columns, rows)


def make_predictors(honest: dict[str, Any]) -> Table:
    by_key = {(row["signals"], row["split_by"], row["model"]): row for row in honest["predictors"]}
    models = list(dict.fromkeys(row["model"] for row in honest["predictors"]))
    cases = list(dict.fromkeys((row["signals"], row["split_by"]) for row in honest["predictors"]))
    rows = [[*case, *(f"{by_key[*case, model]['correlation']:.2f}" for model in models)] for case in cases]
    title = "Correlation of predicted and true acceptance on held-out steps (five folds)"
    return Table(title, ("signals of the", "split by", *models), rows, labels=2)


def make_throughput(honest: dict[str, Any]) -> Table:
    rows = []
    for row in honest["throughput"]:
        rates, gains = row["tokens_per_second"], row["over_fixed_4"]
        cells = [f"{format_number(rates[c], 1)} ({format_percent(gains[c]['gain_pct'])})" for c in COMPRESSIONS]
        name = _mark(row["policy"], row["policy"], honest)
        rows.append([name, f"{100 * row['gamma_share'][str(max(GAMMAS))]:.0f} %", *cells])
    title = "Tokens per second from the paper's own timings (against gamma 4)"
    return Table(title, ("policy", "plays 8", *COMPRESSIONS), rows)


def make_gains(honest: dict[str, Any]) -> Table:
    rows = [
        [
            _mark(row["policy"], row["policy"], honest),
            *(format_gain(row["over_best_fixed"][c]) for c in COMPRESSIONS),
        ]
        for row in honest["throughput"]
    ]
    title = "Tokens per second against the best fixed gamma, 95 % intervals by prompt"
    return Table(title, ("policy", *COMPRESSIONS), rows)


def make_decisions(result: dict[str, Any]) -> Table:
    published, measured = result["published"]["decision_ms"], result["decision_ms"]
    rows = [
        [f"{name}, scikit-learn, one prediction a gamma", f"{published[name]} ms", f"{measured[name]} ms"]
        for name in published
    ]
    rows.append(["the same network in NumPy (policy mlp)", "", f"{measured['mlp']} ms"])
    return Table("Time of a decision", ("predictor", "published", "measured here"), rows)


def make_study_numbers(result: dict[str, Any]) -> Table:
    study, honest, differences = result["study"], result["honest"], result["study"]["difference"]
    rows = [["records", f"{result['records']['total']:,}", f"{study['records']:,}"]]
    rows += [
        [f"correlation of {name} with acceptance", *(f"{part['correlations'][name]:+.4f}" for part in (result, study))]
        for name in SIGNALS
    ]
    shares = honest["gamma_8_share"]["SpecKV-fast"], study["gamma_8_share"]
    rows.append(["share of gamma 8 among the choices", *(f"{100 * share:.0f} %" for share in shares)])
    happened = honest["judges"][-1]["gain_over_fixed_4_pct"]  # of the published choices
    gains = {
        "expected by its own judge": (result["improvement_pct"], study["judged"]["improvement_pct"]),
        "what happens": (happened, study["happened"]["improvement_pct"]),
    }
    rows += [[f"tokens a step over gamma 4, {name}", *map(format_percent, pair)] for name, pair in gains.items()]
    paired = f"{result['paired_test']['mean_difference']:+.3f}"
    for name, row in differences.items():
        interval = f"{row['mean']:+.3f} ({row['low']:+.3f} … {row['high']:+.3f})"
        rows.append([f"difference to gamma 4, {name}", paired if name.startswith("judged") else "", interval])
    return Table("Our recording beside the paper's data", ("number", "paper's data", "our recording"), rows)


def make_study_tokens(study: dict[str, Any]) -> Table:
    judged, happened = study["judged"], study["happened"]
    rows = [
        [compression, policy, f"{value:.2f}", f"{happened['table1'][compression][policy]:.2f}"]
        for compression, values in judged["table1"].items()
        for policy, value in values.items()
    ]
    columns = ("compression", "policy", "its own judge", "what happens")
    return Table("Our recording: tokens a step under the paper's protocol", columns, rows, labels=2)


def make_study_gammas(study: dict[str, Any]) -> Table:
    costs = list(study["optimal_gamma"][0]["by_seconds"])
    rows = [
        [row["compression"], row["task"], str(row["by_tokens"]), *(str(row["by_seconds"][name]) for name in costs)]
        for row in study["optimal_gamma"]
    ]
    columns = ("compression", "task", "by tokens a step", *(f"by tok/s on {name}" for name in costs))
    return Table("Our recording: the best gamma in each cell", columns, rows, labels=2)


def make_study_replayed(study: dict[str, Any]) -> Table:
    rows = []
    for row in study["replayed"]:
        rates, tokens = row["tokens_per_second"], row["tokens_per_step"]
        rows.append(
            [
                row["costs"],
                row["compression"],
                f"{tokens['mlp']:.2f} ({format_percent(row['tokens_per_step_over_fixed_4_pct'])})",
                f"{rates['mlp']:.3g} ({format_percent(row['over_fixed_4_pct'])})",
                f"{rates['best-fixed']:.3g}",
                format_gain(row["over_best_fixed"]),
            ]
        )
    columns = ("costs", "compression", "tok/step (over 4)", "tok/s (over 4)", "best fixed", "over best fixed")
    return Table("Our recording: the paper's MLP on held-out prompts", columns, rows, labels=2)


def format_number(value: float | None, digits: int = 2) -> str:
    """A number with some decimals; `UNKNOWN` for None."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def format_percent(value: float | None) -> str:
    """A signed percentage; `UNKNOWN` for None."""
    return UNKNOWN if value is None else f"{value:+.1f} %"


def format_gain(gain: dict[str, float | None]) -> str:
    """A gain in per cent with its interval, as far as they are known."""
    low, high = gain["low"], gain["high"]
    ends = UNKNOWN if low is None or high is None else f"{low:+.1f} … {high:+.1f}"
    return f"{format_percent(gain['gain_pct'])} ({ends})"


def _format_mean(row: dict[str, float | None]) -> str:
    mean, low, high = (format_number(row[name], 3) for name in ("mean", "low", "high"))
    return f"{mean} ({low} … {high})"
