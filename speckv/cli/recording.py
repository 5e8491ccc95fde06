"""`speckv record` and `speckv profile`: what is measured with real models."""

import json
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import FOLDER, must_be_new, showing_progress
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.traces import TraceDataset


def _pair_options(command: Any) -> Any:
    from speckv.compression import COMPRESSIONS

    names = click.Choice(list(COMPRESSIONS))
    compute = click.Choice(["native", "float32"])
    for option in reversed(
        [
            click.option("--target", required=True, help="Target model: a folder or a name on the hub."),
            click.option("--draft", required=True, help="Draft model with the target's tokenizer."),
            click.option("--draft-compression", type=names, default="bf16", show_default=True),
            click.option(
                "--compute",
                type=compute,
                default="native",
                show_default=True,
                help="Arithmetic of the target: its compression's own kernels, or float32.",
            ),
            click.option("--draft-compute", type=compute, default="native", show_default=True),
            click.option("--device", default="cpu", show_default=True, help="A torch device, such as cuda."),
        ]
    ):
        command = option(command)
    return command


@click.command()
@_pair_options
@click.option("--compression", required=True, help="How the target's weights are stored.")
@click.option("--prompts", "prompts_path", required=True, type=click.Path(path_type=pathlib.Path), help="JSON Lines.")
@click.option("--gamma-max", default=16, show_default=True, type=click.IntRange(1))
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option(
    "--batch-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Sequences recorded side by side; a killed recording loses at most so many.",
)
@click.option(
    "--explore",
    type=click.FloatRange(0, 1, min_open=True),
    help="Write the step log of a decoder, too, that draws gamma by lot in this share of its steps: OUT.steps.parquet.",
)
@click.option("--policy", "policy_spec", default="heuristic", show_default=True, help="What it plays in the others.")
@click.option(
    "--costs",
    "costs_name",
    help="Cost model: a file or a name, for the seconds of that log, and for policies that go by those.  [default: the "
    "log has none]",
)
@click.option("--out", required=True, type=FOLDER, help="Trace folder; an unfinished one is continued.")
def record(
    target: str,
    draft: str,
    draft_compression: str,
    compute: str,
    draft_compute: str,
    device: str,
    compression: str,
    prompts_path: pathlib.Path,
    gamma_max: int,
    max_new_tokens: int,
    batch_size: int,
    explore: float | None,
    policy_spec: str,
    costs_name: str | None,
    out: pathlib.Path,
) -> None:
    """Record a rollout trace: greedy, resumable, one compression of the target at a time.

    It holds what would have come of every gamma, so that it needs no exploration. With --explore it is replayed at the
    end, to leave the poorer log that production would have, with propensities: for `speckv evaluate`.
    """
    from speckv.compression import check_compression
    from speckv.prompts import load_prompts

    check_compression(compression)
    if ("int8", "native") in {(compression, compute), (draft_compression, draft_compute)}:
        raise SpecKVError(
            "LLM.int8() rounds a token by what else is in the forward, so that its recording does not hold for live "
            "decoding; record int8 with --compute float32 (for the draft: --draft-compute float32)"
        )
    prompts = load_prompts(prompts_path)
    exploring = None if explore is None else _Exploring(explore, policy_spec, costs_name, compression, gamma_max, out)

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from speckv.live.models import ModelPair, model_name
    from speckv.live.recorder import record as record_prompts
    from speckv.live.vocabulary import keep_texts
    from speckv.machine import machine
    from speckv.traces import Manifest, TraceDataset

    pair = ModelPair.load(target, draft, compression, draft_compression, compute, draft_compute, device)
    settings = {
        "target": model_name(target),
        "draft": model_name(draft),
        "draft_compression": draft_compression,
        "compute": compute,
        "draft_compute": draft_compute,
        "decoding": "greedy",
        "chat_template": pair.target.tokenizer.chat_template is not None,
    }
    run = {"command": shlex.join(["speckv", *sys.argv[1:]]), "machine": machine()}
    dataset = TraceDataset.create(out, Manifest(gamma_max, max_new_tokens, settings, [run]))
    with Progress(
        TextColumn("recording {task.fields[compression]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as progress:
        done = len({(prompt.id, compression) for prompt in prompts} & dataset.keys())
        bar = progress.add_task("", total=len(prompts), completed=done, compression=compression)
        for _ in record_prompts(pair, prompts, dataset, batch_size=batch_size):
            progress.advance(bar)
    keep_texts(dataset, pair.target.tokenizer)
    click.echo(f"{out}: {len(prompts)} sequences at {compression}")
    if exploring is not None:
        click.echo(exploring.write(dataset, {prompt.id for prompt in prompts}))


class _Exploring:
    """Writes the step log of a decoder that draws lots. What can't be played is said before anything is recorded."""

    def __init__(
        self, epsilon: float, policy: str, costs: str | None, compression: str, gamma_max: int, out: pathlib.Path
    ) -> None:
        from speckv.costs import CostModel
        from speckv.plugins import load_costs, make_policy
        from speckv.policy import Policy, check_playable
        from speckv.shipped import shipped_costs

        self.path, self.epsilon = out.with_name(f"{out.name}.steps.parquet"), epsilon
        must_be_new(self.path)
        self.compression, self.timed = compression, costs is not None
        inside = make_policy(policy)
        learns = type(inside).fit is not Policy.fit
        if inside.kind != "before":
            raise SpecKVError(f"policy {inside.label!r} stops inside the draft, so that its lots have no known chance")
        if not learns:
            check_playable(inside, gamma_max)
        if costs is not None:
            self.costs = load_costs(costs)
            self.costs.cost_ratio(compression)  # a compression that is not in it is refused
        elif learns or "cost_ratio" in inside.features:
            raise SpecKVError(f"policy {inside.label!r} goes by what forwards cost; say it with --costs")
        else:  # seconds that neither the log nor the policy's features tell
            any_seconds = shipped_costs()[0].draft
            self.costs = CostModel("none", any_seconds, {compression: any_seconds})
        self.policy = make_policy(f"explore:policy={json.dumps(policy)},epsilon={epsilon},largest={min(8, gamma_max)}")

    def write(self, dataset: "TraceDataset", prompts: set[str]) -> str:
        """Replay what was recorded of these prompts; returns what to tell the user."""
        import numpy as np

        from speckv.evaluation.recording import to_held_out_steps
        from speckv.steplogs import StepLog

        traces = dataset.load()
        traces = traces.take(np.isin(traces.ids, list(prompts)) & (traces.compressions == self.compression))
        log = to_held_out_steps(self.policy, traces, self.costs)
        if not self.timed:
            untimed = {name: column for name, column in log.columns.items() if name != "seconds"}
            log = StepLog.from_columns(untimed, log.provenance)
        log.save(self.path)
        return f"{self.path}: {len(log)} steps, gamma by lot in {self.epsilon:.0%} of them"


def _integers(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of integers such as 128,384") from None


@click.command()
@_pair_options
@click.option(
    "--compression",
    "compressions",
    required=True,
    multiple=True,
    help="How the target's weights are stored; give it several times to measure several.",
)
@click.option("--contexts", default="128,384", show_default=True, callback=_integers, help="Tokens in the cache.")
@click.option(
    "--batch-sizes", default="1", show_default=True, callback=_integers, help="Sequences that share a forward: 1,2,4,8."
)
@click.option("--gamma-max", default=16, show_default=True, type=click.IntRange(1))
@click.option(
    "--tokens",
    "verify_tokens",
    callback=_integers,
    help="Of the target's forwards.  [default: every number up to gamma_max + 1]",
)
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(1), help="Forwards timed of each kind.")
@click.option(
    "--prompts",
    "prompts_path",
    type=click.Path(path_type=pathlib.Path),
    help="JSON Lines to decode for the held-out check.  [default: the shipped prompts]",
)
@click.option("--held-out", default=3, show_default=True, type=click.IntRange(2), help="How many of these prompts.")
@click.option("--max-new-tokens", default=32, show_default=True, type=click.IntRange(1), help="Of each of them.")
@click.option("--name", help="Of the cost model.  [default: the file's name]")
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path, dir_okay=False), help="JSON.")
def profile(
    target: str,
    draft: str,
    draft_compression: str,
    compute: str,
    draft_compute: str,
    device: str,
    compressions: tuple[str, ...],
    contexts: list[int],
    batch_sizes: list[int],
    gamma_max: int,
    verify_tokens: list[int] | None,
    repeats: int,
    prompts_path: pathlib.Path | None,
    held_out: int,
    max_new_tokens: int,
    name: str | None,
    out: pathlib.Path,
) -> None:
    """Measure a cost model: how long forwards take on this machine, and how well that predicts real steps."""
    from speckv.compression import check_compression
    from speckv.prompts import load_prompts
    from speckv.shipped import PROMPTS

    must_be_new(out)
    for compression in compressions:
        check_compression(compression)
    prompts = load_prompts(prompts_path or PROMPTS)[:held_out]

    from speckv.live.models import ModelPair, model_name
    from speckv.live.profiler import profile as measure

    def load(compression: str) -> ModelPair:
        return ModelPair.load(target, draft, compression, draft_compression, compute, draft_compute, device)

    provenance = {
        "command": shlex.join(["speckv", *sys.argv[1:]]),
        "target": model_name(target),
        "draft": model_name(draft),
        "draft_compression": draft_compression,
        "compute": compute,
        "draft_compute": draft_compute,
        "device": device,
    }
    wanted = list(dict.fromkeys(compressions))
    with showing_progress("profiling") as progress:
        costs = measure(
            load,
            wanted,
            prompts,
            name=name or out.stem,
            gamma_max=gamma_max,
            verify_tokens=verify_tokens,
            contexts=contexts,
            batch_sizes=batch_sizes,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            provenance=provenance,
            progress=lambda at, done, total: progress(wanted.index(at) * total + done, len(wanted) * total),
        )
    costs.save(out)
    of_sizes = {str(batch_sizes[0]): costs.provenance["held_out"]} | costs.provenance.get("held_out_batches", {})
    for size, checks in of_sizes.items():
        for compression, check in checks.items():
            name = compression if len(of_sizes) == 1 else f"{compression}, batch {size}"
            click.echo(
                f"{name}: {check['steps']} held-out steps, median error {check['median_relative_error']:.1%}, "
                f"predicted / measured {check['total_ratio']:.3f}"
            )
    click.echo(f"{out}: {', '.join(wanted)}")
