"""The page: all data as one JSON value, inlined with its script and style, and nothing to be loaded from anywhere."""

import itertools
import json
import pathlib
import string
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

import speckv
from speckv.comparison import Cell, Change, TaskCell
from speckv.costs import CostModel, Timings
from speckv.files import write_atomically
from speckv.policy import Clairvoyant
from speckv.replaying import Replay
from speckv.report.evidence import Evidence
from speckv.report.frame import read_asset, render_frame
from speckv.report.heldout import Reliability
from speckv.traces import Rollout
from speckv.vocabulary import Vocabulary

#: Prompts that the trace explorer shows, as many of each held-out task.
PROMPTS = 8
#: Context length of the cost staircase, tokens.
CONTEXT = 256
#: Signals of a position that the explorer shows.
_SIGNALS = ("draft_top1", "draft_entropy", "target_entropy", "target_margin")
#: What the page says of how the result was made.
_SETTINGS = ("prompts", "sequences", "tokens", "folds", "hold_out", "seed")


def write_page(evidence: Evidence, path: pathlib.Path) -> None:
    """Write the page. The same evidence gives the same bytes.

    Raises:
        SpecKVError: the recording is not the one of the result, or the file can't be written.
    """
    text = render(page_data(evidence))
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def render(data: dict[str, Any]) -> str:
    """The page as HTML."""
    # In a script element only `</script` and `<!--` mean something, and JSON can spell their first character otherwise.
    value = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = string.Template(read_asset("page.html")).substitute(data=value)
    return render_frame(data["title"], body, read_asset("page.css"), read_asset("page.js"))


def page_data(evidence: Evidence) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    settings = evidence.comparison.settings
    pair = {name: settings["traces"].get(name, "?") for name in ("target", "draft")}
    return {
        "title": f"SpecKV report: {pair['draft']} drafting for {pair['target']}",
        "speckv": speckv.__version__,
        "pair": pair,
        "settings": {name: settings[name] for name in _SETTINGS},
        "decoding": {name: value for name, value in settings["traces"].items() if name not in pair},
        "against": evidence.comparison.against,
        "bounds": sorted(evidence.comparison.bounds),
        "policies": settings["policies"],
        "compressions": evidence.comparison.compressions,
        "costs": [_costs(model, evidence.comparison.compressions) for model in evidence.costs],
        "cells": _cells(evidence.comparison.cells),
        "tasks": _task_cells(evidence.comparison.by_task),
        "changes": _changes(evidence.comparison.changes),
        "calibration": _calibration(evidence),
        "explorer": _explorer(evidence),
    }


def _short(value: float, decimals: int = 3) -> float:
    """A number with some decimals, as short as JSON can have it."""
    rounded = round(float(value), decimals)
    return int(rounded) if rounded.is_integer() else rounded


def _list(values: Iterable[float], decimals: int = 3) -> list[float]:
    return [_short(value, decimals) for value in values]


def _cells(cells: list[Cell]) -> dict[str, list[Any]]:
    """The cells by column: the names of the columns would be half of the rows."""
    return {item.name: [_plain(getattr(cell, item.name)) for cell in cells] for item in fields(Cell)}


def _task_cells(cells: list[TaskCell]) -> dict[str, Any]:
    """Costs -> compression -> task -> policy -> throughput, gain, and the ends of its interval."""
    found: dict[str, Any] = {}
    for cell in cells:
        of_task = found.setdefault(cell.costs, {}).setdefault(cell.compression, {}).setdefault(cell.task, {})
        of_task[cell.policy] = _list((cell.throughput, cell.gain, *(cell.gain_ci or ())), 4)
    return found


def _changes(changes: list[Change]) -> dict[str, Any]:
    """Costs -> other costs, either way round -> policy -> share of the steps that draft another number of tokens."""
    found: dict[str, Any] = {}
    for change in changes:
        share = change.share and max(_short(change.share, 4), 1e-4)  # 0 means none at all
        for one, other in itertools.permutations((change.costs, change.other_costs)):
            found.setdefault(one, {}).setdefault(other, {})[change.policy] = share
    return found


def _plain(value: Any) -> Any:
    """A value of a cell for JSON, numbers no longer than anybody reads them."""
    if isinstance(value, float):
        return _short(value, 5)
    return _list(value, 4) if isinstance(value, tuple) else value


def _costs(model: CostModel, compressions: list[str]) -> dict[str, Any]:
    return {
        "name": model.name,
        "source": str(model.provenance.get("source", "unknown")),
        "batch_size": model.batch_size,
        "draft": _staircase(model.draft),
        "verify": {compression: _staircase(model.verify_of(compression)) for compression in compressions},
    }


def _staircase(timings: Timings) -> list[float]:
    """Milliseconds of a forward of 1, 2, … 17 tokens."""
    return _list(1000 * timings.table(17, CONTEXT)[1:, CONTEXT])


def _calibration(evidence: Evidence) -> dict[str, Any]:
    held_out = evidence.held_out
    return {
        "draft": _reliability(held_out.draft_reliability),
        "policies": [
            {"costs": costs, "policy": policy} | _reliability(reliability)
            for (costs, policy), reliability in held_out.reliability.items()
        ],
    }


def _reliability(reliability: Reliability) -> dict[str, Any]:
    return {
        "predicted": _list(reliability.predicted),
        "observed": _list(reliability.observed),
        "tokens": reliability.tokens.tolist(),
        "ece": _short(reliability.ece),
        "brier": _short(reliability.brier),
    }


def _explorer(evidence: Evidence) -> dict[str, Any]:
    """Some sequences, and what the policies did on them."""
    vocabulary = Vocabulary.of(evidence.dataset.path)
    rollouts, held_out = evidence.rollouts, evidence.held_out
    chosen = _chosen(evidence)
    keys = {(str(rollouts.ids[held_out.rows[n]]), str(rollouts.compressions[held_out.rows[n]])): n for n in chosen}
    reach = {n: _reach(n, held_out.replays.values(), evidence) for n in chosen}
    recorded = {(sequence.id, sequence.compression): sequence for sequence in evidence.dataset}
    sequences = [_sequence(recorded[key], reach[n], vocabulary) for key, n in keys.items()]
    prompts = {key[0]: "".join(vocabulary.texts(recorded[key].prompt_tokens)) for key in keys}
    return {
        "texts": bool(vocabulary.tokens),
        "prompts": prompts,
        "sequences": sequences,
        "policies": [policy.label for policy in evidence.policies],
        "clairvoyant": [policy.label for policy in evidence.policies if isinstance(policy, Clairvoyant)],
        "runs": [
            {"costs": costs, "policy": policy, "steps": [_steps(run, n) for n in chosen]}
            for (costs, policy), run in held_out.replays.items()
        ],
    }


def _chosen(evidence: Evidence) -> list[int]:
    """The first prompts of each task, at every compression, as indices into the rows of `HeldOut`."""
    rollouts, rows = evidence.rollouts, evidence.held_out.rows
    ids, tasks = rollouts.ids[rows], rollouts.tasks[rows]
    of_each = max(1, PROMPTS // len(np.unique(tasks)))
    shown = {i for task in np.unique(tasks) for i in np.unique(ids[tasks == task])[:of_each]}
    found = [n for n in range(len(rows)) if ids[n] in shown]
    return sorted(found, key=lambda n: (str(tasks[n]), str(ids[n]), str(rollouts.compressions[rows[n]])))


def _reach(n: int, replays: Iterable[Replay], evidence: Evidence) -> dict[int, int]:
    """Position of a wrong proposal -> how far behind it some policy drafted, tokens."""
    run_of = evidence.rollouts.run[evidence.held_out.rows[n]]
    reach: dict[int, int] = {}
    for run in replays:
        mine = run.sequence == n
        for position, gamma in zip(run.position[mine].tolist(), run.gamma[mine].tolist(), strict=True):
            wrong = position + int(run_of[position])
            if (behind := position + gamma - wrong - 1) > 0:
                reach[wrong] = max(reach.get(wrong, 0), behind)
    return reach


def _sequence(sequence: Rollout, reach: dict[int, int], vocabulary: Vocabulary) -> dict[str, Any]:
    starts = np.cumsum(sequence.off_lengths) - sequence.off_lengths
    wrong = {}
    for position in np.flatnonzero(sequence.tokens != sequence.draft_tokens).tolist():
        behind = slice(starts[position], starts[position] + reach.get(position, 0))
        draft = [sequence.draft_tokens[position], *sequence.off_tokens[behind]]
        signals = [_list(sequence.off_signals[name][behind], 2) for name in ("draft_top1", "draft_entropy")]
        wrong[position] = [vocabulary.texts(draft), *signals]
    return {
        "id": sequence.id,
        "task": sequence.task,
        "compression": sequence.compression,
        "ended": sequence.ended,
        "tokens": vocabulary.texts(sequence.tokens),
        "wrong": wrong,
        "signals": {name: _list(sequence.signals[name], 2) for name in _SIGNALS},
    }


def _steps(run: Replay, n: int) -> list[list[Any]]:
    """Of the steps of one sequence: gammas, accepted tokens, milliseconds, and which of the steps looked at one more
    distribution than they drew a token from."""
    mine = run.sequence == n
    gamma, accepted, forwards = (column[mine] for column in (run.gamma, run.accepted, run.forwards))
    looked = np.flatnonzero(forwards > gamma)
    return [gamma.tolist(), accepted.tolist(), _list(1000 * run.seconds[mine], 1), looked.tolist()]
