"""`speckv record` and `speckv profile`: what is measured with real models."""

import pathlib
import shlex
import sys
from typing import Any

import click

from speckv.cli.common import FOLDER, must_be_new
from speckv.errors import SpecKVError


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
    out: pathlib.Path,
) -> None:
    """Record a rollout trace: greedy, resumable, one compression of the target at a time."""
    from speckv.compression import check_compression
    from speckv.prompts import load_prompts

    check_compression(compression)
    if ("int8", "native") in {(compression, compute), (draft_compression, draft_compute)}:
        raise SpecKVError(
            "LLM.int8() rounds a token by what else is in the forward, so that its recording does not hold for live "
            "decoding; record int8 with --compute float32 (for the draft: --draft-compute float32)"
        )
    prompts = load_prompts(prompts_path)

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
        done = sum(dataset.has(prompt.id, compression) for prompt in prompts)
        bar = progress.add_task("", total=len(prompts), completed=done, compression=compression)
        for _ in record_prompts(pair, prompts, dataset, batch_size=batch_size):
            progress.advance(bar)
    keep_texts(dataset, pair.target.tokenizer)
    click.echo(f"{out}: {len(prompts)} sequences at {compression}")


def _contexts(_ctx: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
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
@click.option("--contexts", default="128,384", show_default=True, callback=_contexts, help="Tokens in the cache.")
@click.option("--gamma-max", default=16, show_default=True, type=click.IntRange(1))
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
    gamma_max: int,
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

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

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
    with Progress(
        TextColumn("profiling {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as progress:
        bars = {compression: progress.add_task(compression, total=None) for compression in compressions}
        costs = measure(
            load,
            list(bars),
            prompts,
            name=name or out.stem,
            gamma_max=gamma_max,
            contexts=contexts,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            provenance=provenance,
            progress=lambda compression, done, total: progress.update(bars[compression], completed=done, total=total),
        )
    costs.save(out)
    for compression, check in costs.provenance["held_out"].items():
        click.echo(
            f"{compression}: {check['steps']} held-out steps, median error {check['median_relative_error']:.1%}, "
            f"predicted / measured {check['total_ratio']:.3f}"
        )
    click.echo(f"{out}: {', '.join(bars)}")
