"""How good the estimates from step logs are, where the truth is known: the tables of docs/step-logs.md.

    python benchmarks/step_logs.py --docs docs/step-logs.md

The population is the shipped recording at one compression. `speckv.evaluation.coverage` says what is done.
"""

import argparse
import pathlib
import re
import warnings

from speckv.errors import SpecKVWarning
from speckv.evaluation.coverage import Coverage, study
from speckv.files import write_atomically
from speckv.plugins import load_costs, make_policy
from speckv.shipped import shipped_traces

LOGS = {
    "lots": ('explore:policy="fixed:gamma=4",epsilon=1', "A log that draws every gamma from 0 to 8 by lot"),
    "heuristic": (
        'explore:policy="heuristic",epsilon=0.3',
        "A log of `heuristic`, lots in 30 % of its steps",
    ),
}
POLICIES = ("fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "heuristic", "hysteresis", "mlp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="logs to evaluate of each kind")
    parser.add_argument("--compression", default="nf4")
    parser.add_argument("--costs", default="epyc-float32")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--docs", type=pathlib.Path, help="write the tables between the page's markers")
    args = parser.parse_args()
    warnings.simplefilter("ignore", SpecKVWarning)  # that some logs tell little is what is looked at
    traces, costs = shipped_traces().load(), load_costs(args.costs)
    traces = traces.take(traces.compressions == args.compression)
    policies = [make_policy(spec).fit(traces, costs) for spec in POLICIES]
    parts = []
    for logging, title in LOGS.values():
        rows = study(traces, costs, logging, policies, args.seeds, jobs=args.jobs)
        parts.append(f"**{title}** (`{logging}`), {args.seeds} logs:\n\n{table(rows)}")
    text = "\n\n".join(parts)
    print(text)
    if args.docs:
        page = args.docs.read_text(encoding="utf-8")
        page = re.sub(r"(<!-- tables -->\n).*(\n<!-- end -->)", lambda m: f"{m[1]}\n{text}\n{m[2]}", page, flags=re.S)
        write_atomically(args.docs, lambda partial: partial.write_text(page, encoding="utf-8"))


def table(rows: list[Coverage]) -> str:
    """Markdown, in percent."""
    lines = ["| policy | estimator | off | spread | half-width | covers |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        shown = (
            f"{100 * row.bias:+.1f}",
            f"{100 * row.spread:.1f}",
            f"{100 * row.half_width:.1f}",
            f"{100 * row.covers:.0f}",
        )
        lines.append(f"| {row.policy} | {row.estimator} | {' | '.join(f'{value} %' for value in shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
