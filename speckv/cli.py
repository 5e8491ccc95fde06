"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click

from speckv.errors import SpecKVError

_FOLDER = click.Path(path_type=pathlib.Path, file_okay=False)


class _Commands(click.Group):
    """A group whose commands end with one line and exit code 2 on every error that a user can cause."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise  # a group without a command: click shows its help
    except click.UsageError as error:
        click.echo(f"speckv: error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except SpecKVError as error:
        click.echo(f"speckv: error: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            raise
        click.echo("speckv: error: the device has not enough memory; decode less at once, or compress more", err=True)
        sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="speckv")
def main() -> None:
    """Adaptive control of speculative decoding: record a model pair, replay any policy, compare, ship."""


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


@main.command()
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
@click.option("--out", required=True, type=_FOLDER, help="Trace folder; an unfinished one is continued.")
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
    click.echo(f"{out}: {len(prompts)} sequences at {compression}")


def _contexts(_ctx: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of integers such as 128,384") from None


@main.command()
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

    if out.exists():
        raise SpecKVError(f"{out}: exists already; choose another file")
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


_TRACES = click.option(
    "--traces", "traces_path", type=_FOLDER, help="Trace folder.  [default: the recording that ships with speckv]"
)


@main.command()
@click.option("--target", required=True, help="Target model: a folder or a name on the hub.")
@click.option("--compression", default="bf16", show_default=True, help="How the target's weights are stored.")
@click.option("--draft", help="Draft model with the target's tokenizer: a folder or a name on the hub.")
@click.option("--draft-compression", help="How the draft's weights are stored.  [default: bf16]")
@click.option("--early-exit", "exit_layers", type=click.IntRange(1), help="Draft with so many layers of the target.")
@click.option("--prompt-lookup", is_flag=True, help="Draft what followed the same tokens earlier in the text.")
@click.option("--compute", type=click.Choice(["native", "float32"]), default="native", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="A torch device, such as cuda.")
@click.option(
    "--policy",
    "policy_spec",
    default="fixed:gamma=4",
    show_default=True,
    help="NAME, NAME:PARAMETER=VALUE,… or the folder of a saved policy. One that learns is fitted first.",
)
@click.option("--prompt", required=True, help="A user's text; - reads it from standard input.")
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--min-new-tokens", default=0, show_default=True, type=click.IntRange(0))
@click.option("--stop", multiple=True, help="A string that ends the text, may be repeated.")
@click.option(
    "--sampling",
    type=click.Choice(["greedy", "rejection", "gumbel"]),
    default="greedy",
    show_default=True,
    help="Gumbel-coupled text depends on the seed alone, not on what is drafted.",
)
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--gamma-max", default=16, show_default=True, type=click.IntRange(0))
@_TRACES
@click.option(
    "--costs",
    "costs_path",
    type=click.Path(path_type=pathlib.Path),
    help="Cost model that a policy is fitted to.  [default: the first that ships with speckv]",
)
@click.option("--save-policy", "save_policy_to", type=_FOLDER, help="Keep the policy with what it has learned online.")
@click.option("--no-speculation", is_flag=True, help="Decode without drafting as well, for the speed-up.")
def decode(
    target: str,
    compression: str,
    draft: str | None,
    draft_compression: str | None,
    exit_layers: int | None,
    prompt_lookup: bool,
    compute: str,
    device: str,
    policy_spec: str,
    prompt: str,
    max_new_tokens: int,
    min_new_tokens: int,
    stop: tuple[str, ...],
    sampling: str,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    gamma_max: int,
    traces_path: pathlib.Path | None,
    costs_path: pathlib.Path | None,
    save_policy_to: pathlib.Path | None,
    no_speculation: bool,
) -> None:
    """Decode a prompt: the text as it grows, drafted tokens in green, and what the speculation was worth."""
    if sum(map(bool, (draft, exit_layers, prompt_lookup))) != 1:
        raise SpecKVError("tokens have to be drafted somehow: give one of --draft, --early-exit and --prompt-lookup")
    if sampling == "greedy" and (temperature, top_k, top_p, min_p) != (1.0, 0, 1.0, 0.0):
        raise SpecKVError("greedy decoding takes no temperature, top-k, top-p or min-p; add --sampling gumbel")
    if draft_compression and not draft:
        raise SpecKVError("--draft-compression is of a draft model; give one with --draft, or leave it out")
    if save_policy_to and save_policy_to.exists():
        raise SpecKVError(f"{save_policy_to}: exists already; choose another folder")
    text = _standard_input() if prompt == "-" else prompt
    policy, costs = _playable_policy(policy_spec, compression, traces_path, costs_path)

    from speckv.live.decoder import SpeculativeDecoder
    from speckv.live.drafting import PromptLookup
    from speckv.live.models import LanguageModel, ModelPair, early_exit
    from speckv.live.sampling import Greedy, Gumbel, Rejection
    from speckv.plugins import make_policy
    from speckv.saving import save_policy

    warping = (temperature, top_k, top_p, min_p)
    sampler = Greedy() if sampling == "greedy" else {"rejection": Rejection, "gumbel": Gumbel}[sampling](*warping)
    drafter: LanguageModel | PromptLookup
    if draft is not None:
        stored = draft_compression or "bf16"
        loaded, drafter = ModelPair.load(target, draft, compression, stored, compute, compute, device)
    else:
        loaded = LanguageModel.load(target, compression, compute, device)
        drafter = early_exit(loaded, exit_layers) if exit_layers else PromptLookup()
    decoder = SpeculativeDecoder(loaded, drafter, policy, sampler=sampler, gamma_max=gamma_max, costs=costs)
    plain = SpeculativeDecoder(
        loaded, PromptLookup(), make_policy("none"), sampler=sampler, gamma_max=0, record_signals=True
    )
    options: Any = {"min_new_tokens": min_new_tokens, "stop": stop, "seed": seed}
    if no_speculation:  # the first forwards set up their kernels: neither of the two that are compared has to
        unknowing = SpeculativeDecoder(loaded, drafter, make_policy("heuristic"), sampler=sampler, gamma_max=gamma_max)
        for warming in (unknowing, plain):
            warming.generate(text, min(4, max_new_tokens))
    stream = decoder.stream(text, max_new_tokens, **options)
    for pieces in stream:
        for piece in pieces:
            click.secho(piece.text, fg="green" if piece.drafted else None, nl=False)
    click.echo()
    speculative = stream.decoded
    click.secho(_summary(speculative, policy.label), dim=True)
    if save_policy_to:
        save_policy(policy, save_policy_to)
    if no_speculation:
        alone = plain.generate(text, max_new_tokens, **options)
        seconds, alone_seconds = (run.prefill_seconds + run.seconds for run in (speculative, alone))
        speed_up = (len(speculative.tokens) / seconds) / (len(alone.tokens) / alone_seconds)
        click.secho(
            f"without speculation: {alone.throughput:.3g} tokens/s, {_compared(alone, speculative, sampling)}; "
            f"speed-up {speed_up:.2f}, prompt included",
            dim=True,
        )


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SpecKVError(f"standard input is not text ({error}); send UTF-8") from None


def _playable_policy(
    spec: str, compression: str, traces_path: pathlib.Path | None, costs_path: pathlib.Path | None
) -> tuple[Any, Any]:
    """A policy that can decode a target at a compression, fitted if it has to be, and the cost model for it."""
    from speckv.costs import CostModel
    from speckv.plugins import make_policy
    from speckv.policy import Policy
    from speckv.saving import load_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    saved = (pathlib.Path(spec) / "policy.json").exists()
    policy = load_policy(spec) if saved else make_policy(spec)
    costs = CostModel.load(costs_path) if costs_path else shipped_costs()[0]
    if type(policy).fit is not Policy.fit and not policy.fitted:
        recorded = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
        if compression not in recorded.compressions:
            raise SpecKVError(
                f"policy {spec!r} learns from a recording, which has no target in {compression}, only in "
                f"{', '.join(sorted(set(recorded.compressions.tolist())))}; name another with --traces"
            )
        policy.fit(recorded, costs)
    return policy, costs


def _compared(alone: Any, speculative: Any, sampling: str) -> str:
    """Whether two texts are the same, and why they may not be."""
    tokens, others = alone.tokens, speculative.tokens
    if tokens == others:
        return "the same text"
    if sampling == "rejection":
        return "another text, as rejection sampling draws other tokens when it drafts"
    pairs = enumerate(zip(tokens, others, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(others)) - 1)
    margin = alone.steps[at].signals["target_margin"][0]
    return f"another text from token {at + 1} on, where the target's two likeliest were {margin:.2g} logits apart"


def _summary(decoded: Any, label: str) -> str:
    """One line: speed, acceptance, and how often each gamma was played."""
    from collections import Counter

    counts = Counter(step.gamma for step in decoded.steps)
    histogram = " ".join(f"{gamma}x{counts[gamma]}" for gamma in sorted(counts))
    return (
        f"{label}: {len(decoded.tokens)} tokens in {decoded.seconds:.2f} s, {decoded.throughput:.3g} tokens/s; "
        f"accepted {decoded.acceptance_rate:.0%} of drafted, {decoded.mean_acceptance_length:.2f} tokens a step; "
        f"gamma x steps: {histogram}; ended by {decoded.finish_reason}"
    )


@main.command()
@_TRACES
@click.option(
    "--costs",
    "cost_paths",
    multiple=True,
    type=click.Path(path_type=pathlib.Path),
    help="Cost model, may be repeated.  [default: those that ship with speckv]",
)
@click.option(
    "--policy",
    "policy_specs",
    multiple=True,
    help="NAME or NAME:PARAMETER=VALUE,…, may be repeated.  [default: all]  Baselines and bounds always join.",
)
@click.option("--folds", default=5, show_default=True, type=click.IntRange(2))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "json_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write all cells.")
@click.option("--plot", "plot_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="PNG, SVG or PDF.")
def compare(
    traces_path: pathlib.Path | None,
    cost_paths: tuple[pathlib.Path, ...],
    policy_specs: tuple[str, ...],
    folds: int,
    seed: int,
    json_path: pathlib.Path | None,
    plot_path: pathlib.Path | None,
) -> None:
    """Replay policies on held-out prompts and rank them in tokens per second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from speckv import tables
    from speckv.comparison import compare as compare_policies
    from speckv.costs import CostModel
    from speckv.files import write_json
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    if plot_path is not None and plot_path.suffix not in {".png", ".svg", ".pdf"}:
        raise SpecKVError(f"{plot_path}: pictures are written as .png, .svg or .pdf; choose one of these endings")
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    policies = _policies(policy_specs, traces.gamma_max)
    costs = [CostModel.load(path) for path in cost_paths] or shipped_costs()
    if twice := [model.name for model in costs if [m.name for m in costs].count(model.name) > 1]:
        raise SpecKVError(f"two of the cost models are called {twice[0]!r}; rename one")
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Progress(
        TextColumn("comparing"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        bar = progress.add_task("")
        result = compare_policies(
            policies, traces, costs, folds, seed, os.cpu_count() or 1,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )  # fmt: skip
    for model in costs:
        compressions = sorted(set(traces.compressions.tolist()))
        for compression in compressions if len(compressions) == 1 else [*compressions, "all"]:
            console.print(tables.leaderboard(result, model.name, compression))
    console.print(tables.LEGEND, style="dim")
    for model in costs:
        console.print(
            f"costs of {model.name}: {model.provenance.get('source', 'unknown')}", style="dim", highlight=False
        )
    if timed := result.settings["decision_times_measured_here"]:
        console.print(f"decision times measured in this run: {', '.join(timed)}", style="dim", highlight=False)
    if json_path is not None:
        write_json(json_path, result.to_json())
    if plot_path is not None:
        tables.plot(result, plot_path)


def _policies(specs: tuple[str, ...], gamma_max: int) -> list[Any]:
    """The policies that a user asked for (by default all that can play), and the baselines and bounds of every
    comparison."""
    from speckv.comparison import REQUIRED
    from speckv.plugins import make_policy, registry

    if gamma_max < 4:
        raise SpecKVError(f"the recording goes up to gamma {gamma_max}; a comparison needs 4, for its baseline fixed-4")
    wanted = [make_policy(spec) for spec in (specs or registry().policies)]
    if not specs:
        for policy in [policy for policy in wanted if policy.required_gamma > gamma_max]:
            wanted.remove(policy)
            click.echo(
                f"speckv: {policy.label} is left out: it needs a recording up to gamma {policy.required_gamma}",
                err=True,
            )
    labels = {policy.label for policy in wanted}
    required = [make_policy("fixed:gamma=4" if name == "fixed-4" else name) for name in REQUIRED]
    return wanted + [policy for policy in required if policy.label not in labels]


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def policies(as_json: bool) -> None:
    """List the policies of the zoo and of all installed plugins."""
    from speckv.plugins import registry
    from speckv.policy import Clairvoyant, Policy

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": "bound" if issubclass(entry.policy, Clairvoyant) else entry.policy().kind,
            "learns": entry.policy.fit is not Policy.fit,
            "summary": (entry.policy.__doc__ or "").strip().splitlines()[0] if entry.policy.__doc__ else "",
            "source": entry.policy.source,
            "origin": entry.origin,
        }
        for name, entry in sorted(registry().policies.items())
    ]
    if as_json:
        import json

        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "decides", "learns", "what it does", "origin")
    for row in rows:
        table.add_row(row["name"], row["kind"], "yes" if row["learns"] else "", row["summary"], row["origin"])
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@main.command()
def check() -> None:
    """Check this installation: plugins, shipped data, and every policy on a few recorded sequences."""
    import warnings

    import numpy as np

    from speckv.errors import SpecKVWarning
    from speckv.plugins import registry
    from speckv.replaying import replay
    from speckv.shipped import shipped_costs, shipped_traces

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)  # failures are reported below
        found = registry()
    faults = [f"plugin {origin} is broken: {reason}" for origin, reason in found.failures]
    traces, costs = shipped_traces().load(), shipped_costs()
    click.echo(
        f"recording: {len(traces)} sequences, {traces.lengths.sum()} tokens; cost models: "
        f"{', '.join(model.name for model in costs)}"
    )
    few = traces.take(np.arange(0, len(traces), max(1, len(traces) // 24)))
    for name, entry in sorted(found.policies.items()):
        try:
            rates = [replay(entry.policy().fit(few, model), few, model).throughput for model in costs]
        except Exception as error:  # whatever a policy raises is what this command is there to report
            faults.append(f"policy {name} of {entry.origin}: {type(error).__name__}: {error}")
        else:
            click.echo(f"policy {name}: ok ({', '.join(f'{rate:.3g}' for rate in rates)} tokens/s)")
    if faults:
        raise SpecKVError("; ".join(faults))
    click.echo("all is well")


@main.group()
def traces() -> None:
    """Look at recordings, and merge them."""


@traces.command("show")
@click.argument("path", type=_FOLDER, required=False)
def traces_show(path: pathlib.Path | None) -> None:
    """Summarise a trace folder (by default the recording that ships with speckv) and read it to its end."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from speckv.shipped import shipped_traces
    from speckv.traces import TraceDataset

    dataset = shipped_traces() if path is None else TraceDataset(path)
    data = dataset.load()
    table = Table("compression", "task", "sequences", "tokens", "draft right", "mean run of right tokens",
                  title=f"{dataset.path}: gamma up to {data.gamma_max}, {dataset.manifest.settings}")  # fmt: skip
    inside = np.arange(data.tokens.shape[1]) < data.lengths[:, None]
    right = (data.tokens == data.draft_tokens) & inside
    for compression in np.unique(data.compressions):
        for task in np.unique(data.tasks):
            mask = (data.compressions == compression) & (data.tasks == task)
            if mask.any():
                table.add_row(str(compression), str(task), str(mask.sum()), str(data.lengths[mask].sum()),
                              f"{100 * right[mask].sum() / inside[mask].sum():.1f} %",
                              f"{data.run[mask][:, :-1][inside[mask]].mean():.2f}")  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@traces.command("merge")
@click.argument("sources", nargs=-1, required=True, type=_FOLDER)
@click.option("--out", required=True, type=_FOLDER)
def traces_merge(sources: tuple[pathlib.Path, ...], out: pathlib.Path) -> None:
    """Write the sequences of one or several trace folders to a new one, with one file a compression."""
    from speckv.traces import TraceDataset

    TraceDataset.merge([TraceDataset(source) for source in sources], out)
    click.echo(f"{out}: written")


@main.group("costs")
def costs_group() -> None:
    """Look at cost models, and fit one to published timings."""


@costs_group.command("fit")
@click.argument("path", type=click.Path(path_type=pathlib.Path))
@click.option("--name", required=True, help="Short name for tables.")
@click.option("--source", required=True, help="Where the timings were published.")
@click.option(
    "--stand-in",
    "stand_ins",
    multiple=True,
    metavar="OTHER=TIMED",
    help="Use the timings of one compression for another that was not timed.",
)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path, dir_okay=False))
def costs_fit(path: pathlib.Path, name: str, source: str, stand_ins: tuple[str, ...], out: pathlib.Path) -> None:
    """Fit a cost model to a CSV of timed runs: compression, gamma, num_steps, elapsed_sec."""
    from speckv.compression import check_compression
    from speckv.costs import fit_costs

    alias = {}
    for text in stand_ins:
        other, _, timed = text.partition("=")
        alias[check_compression(other)] = check_compression(timed)
    if out.exists():
        raise SpecKVError(f"{out}: exists already; choose another file")
    model = fit_costs(path, name, source, alias)
    model.save(out)
    click.echo(f"{out}: written; held-out {model.provenance['held_out']}")


@costs_group.command("time-policies")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@_TRACES
def costs_time_policies(paths: tuple[pathlib.Path, ...], traces_path: pathlib.Path | None) -> None:
    """Measure on this machine how long each policy's decisions take, and keep it in the cost models at PATHS.

    With it, the same comparison gives the same result to the last digit.
    """
    import dataclasses

    from speckv.costs import CostModel
    from speckv.machine import machine
    from speckv.plugins import registry
    from speckv.policy import Clairvoyant
    from speckv.replaying import measure_controller
    from speckv.shipped import shipped_traces
    from speckv.traces import TraceDataset

    models = [CostModel.load(path) for path in paths]
    data = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    times = {}
    for name, entry in sorted(registry().policies.items()):
        if not issubclass(entry.policy, Clairvoyant):
            before, inside = measure_controller(entry.policy().fit(data, models[0]), data, models[0])
            times[name] = (round(before, 7), round(inside, 7))
            click.echo(f"{name}: {1e6 * before:.1f} µs before the step, {1e6 * inside:.1f} µs a drafted token")
    for path, model in zip(paths, models, strict=True):
        provenance = model.provenance | {"controller": {"source": "measured by speckv costs time-policies"} | machine()}
        dataclasses.replace(model, controller=times, provenance=provenance).save(path)


@costs_group.command("show")
@click.argument("paths", nargs=-1, type=click.Path(path_type=pathlib.Path))
def costs_show(paths: tuple[pathlib.Path, ...]) -> None:
    """Show cost models (by default those that ship with speckv) as tables of milliseconds."""
    from rich.console import Console
    from rich.table import Table

    from speckv.costs import CostModel
    from speckv.shipped import shipped_costs

    console = Console(width=None if sys.stdout.isatty() else 120)
    for model in [CostModel.load(path) for path in paths] or shipped_costs():
        tokens = (1, 2, 3, 4, 5, 7, 9, 13, 17)
        table = Table("forward", *(str(n) for n in tokens), title=f"{model.name}: ms by tokens, context 256")
        for name, timings in {"draft": model.draft, **{f"verify {c}": t for c, t in model.verify.items()}}.items():
            table.add_row(name, *(f"{1000 * timings.at(n, 256):.1f}" for n in tokens))
        console.print(table)
        for key, value in model.provenance.items():
            console.print(f"{key}: {value}", style="dim", highlight=False)
