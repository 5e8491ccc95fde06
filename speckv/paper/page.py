"""The story of the check, for the documentation: `page.md` with this report's numbers, tables and pictures."""

import pathlib
from typing import Any

from speckv.files import write_atomically
from speckv.paper.data import COMPRESSIONS, GAMMAS
from speckv.paper.honest import BEST_FIXED
from speckv.paper.plots import draw_all
from speckv.paper.tables import format_gain, format_number, format_percent, make_tables
from speckv.report.plots import save_figure

TEMPLATE = pathlib.Path(__file__).with_name("page.md")


def write(result: dict[str, Any], folder: pathlib.Path) -> None:
    """Write `paper.md` and its pictures into a folder."""
    text = render(result)
    for name, figure in draw_all(result).items():
        save_figure(figure, folder / f"{name}.png")
    write_atomically(folder / "paper.md", lambda partial: partial.write_text(text, encoding="utf-8"))


def render(result: dict[str, Any]) -> str:
    """The page as Markdown."""
    return fill_in(result, {name: table.to_markdown() for name, table in make_tables(result).items()})


def fill_in(result: dict[str, Any], tables: dict[str, str]) -> str:
    """The text of the page: every number in it is taken from the report.

    Args:
        result: the report.
        tables: what to put where each table of `make_tables` belongs.
    """
    return TEMPLATE.read_text(encoding="utf-8").format(r=result, tables=tables, **_excerpts(result))


def _excerpts(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers that the text names one by one."""
    honest, study = result["honest"], result["study"]
    throughput = {row["policy"]: row for row in honest["throughput"]}
    predictors = {(row["model"], row["signals"], row["split_by"]): row["correlation"] for row in honest["predictors"]}

    def over(policy: str, base: str, intervals: bool = False) -> str:
        gains = [throughput[policy][base][compression] for compression in COMPRESSIONS]
        return ", ".join(format_gain(gain) if intervals else format_percent(gain["gain_pct"]) for gain in gains)

    milliseconds = [ms for row in honest["step_ms"].values() for ms in row.values()]
    replayed = study["replayed"]
    return {
        "share": 100 * honest["gamma_8_share"]["SpecKV-fast"],
        "published_judge": honest["judges"][0],
        "honest_gain": format_percent(honest["improvement_pct"]),
        "honest_8": format_number(honest["table1"]["overall"]["Fixed-best"]),
        "honest_speckv": format_number(honest["table1"]["overall"]["SpecKV-fast"]),
        "uncut_4": format_number(honest["uncut"]["fixed_4"]),
        "uncut_8": format_number(honest["uncut"]["fixed_8"]),
        "uncut_gain": format_percent(honest["uncut"]["improvement_pct"]),
        "forest_rows": predictors["RF-100", "own block", "rows"],
        "forest_prompts": predictors["RF-100", "own block", "prompts"],
        "mlp_rows": predictors["MLP-16", "own block", "rows"],
        "mlp_prompts": predictors["MLP-16", "own block", "prompts"],
        "mlp_lagged": predictors["MLP-16", "previous block", "prompts"],
        "forest_lagged": predictors["RF-100", "previous block", "prompts"],
        "always_8_over_4": over("Fixed-8", "over_fixed_4"),
        "published_over_4": over("SpecKV-fast, as published", "over_fixed_4"),
        "lagged_over_4": over("SpecKV-fast", "over_fixed_4"),
        "best_over_4": over(BEST_FIXED, "over_fixed_4"),
        "cost_aware_over_4": over("Cost-aware", "over_fixed_4"),
        "cost_aware_over_best": over("Cost-aware", "over_best_fixed", intervals=True),
        "cost_aware_complete": over("Cost-aware", "over_best_fixed_on_complete_steps", intervals=True),
        "shortest_step": min(milliseconds),
        "longest_step": max(milliseconds),
        "shortest_share": 100 * result["published"]["decision_ms"]["MLP-16"] / min(milliseconds),
        "cut_short": honest["oddities"]["cut_short"],
        "overrun": honest["oddities"]["overrun"],
        "study_lowest": min(row["over_best_fixed"]["gain_pct"] for row in replayed),
        "study_highest": max(row["over_best_fixed"]["gain_pct"] for row in replayed),
        "study_step_lowest": min(row["tokens_per_step_over_fixed_4_pct"] for row in replayed),
        "study_step_highest": max(row["tokens_per_step_over_fixed_4_pct"] for row in replayed),
        "study_by_step": study["difference"]["happened, steps resampled"],
        "study_by_prompt": study["difference"]["happened, prompts resampled"],
        "study_judged": study["difference"]["judged, steps resampled"],
        "study_8": study["happened"]["table1"]["overall"]["Fixed-best"],
        "study_speckv": study["happened"]["table1"]["overall"]["SpecKV-fast"],
        "study_share": 100 * study["gamma_8_share"],
        "cells_of_8": sum(row["by_tokens"] == max(GAMMAS) for row in study["optimal_gamma"]),
        "studied_cells": len(study["optimal_gamma"]),
        "moved_cells": sum(row["by_tokens"] not in row["by_seconds"].values() for row in study["optimal_gamma"]),
    }
