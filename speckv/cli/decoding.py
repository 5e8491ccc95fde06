"""`speckv decode`: a policy at work on a real model pair."""

import pathlib
import sys
from typing import Any

import click

from speckv.cli.common import COSTS, FOLDER, TRACES, must_be_new, must_be_text, must_be_writable
from speckv.errors import SpecKVError


@click.command()
@click.option("--target", required=True, help="Target model: a folder or a name on the hub.")
@click.option("--compression", default="bf16", show_default=True, help="How the target's weights are stored.")
@click.option("--draft", help="Draft model with the target's tokenizer: a folder or a name on the hub.")
@click.option("--draft-compression", help="How the draft's weights are stored.  [default: bf16]")
@click.option(
    "--drafter",
    "drafter_spec",
    metavar="NAME[:PARAMETER=VALUE,…]",
    help="Instead of a draft model: prompt-lookup, early-exit:layers=N, or a plugin's (see speckv plugins).",
)
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
@TRACES
@COSTS
@click.option(
    "--log", "log_folder", type=FOLDER, help="Add the steps to this step log, a folder that may hold others' already."
)
@click.option("--save-policy", "save_policy_to", type=FOLDER, help="Keep the policy with what it has learned online.")
@click.option("--no-speculation", is_flag=True, help="Decode without drafting as well, for the speed-up.")
def decode(
    target: str,
    compression: str,
    draft: str | None,
    draft_compression: str | None,
    drafter_spec: str | None,
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
    costs_name: str | None,
    log_folder: pathlib.Path | None,
    save_policy_to: pathlib.Path | None,
    no_speculation: bool,
) -> None:
    """Decode a prompt: the text as it grows, drafted tokens in green, and what the speculation was worth."""
    from speckv.plugins import drafter_factory, make_drafter, make_policy

    if (draft is None) == (drafter_spec is None):
        raise SpecKVError("tokens have to be drafted somehow: give one of --draft and --drafter")
    if sampling == "greedy" and (temperature, top_k, top_p, min_p) != (1.0, 0, 1.0, 0.0):
        raise SpecKVError("greedy decoding takes no temperature, top-k, top-p or min-p; add --sampling gumbel")
    if draft_compression and not draft:
        raise SpecKVError("--draft-compression is of a draft model; give one with --draft, or leave it out")
    must_be_new(save_policy_to)
    must_be_writable(save_policy_to, log_folder)
    if drafter_spec:
        drafter_factory(drafter_spec.partition(":")[0])  # an unknown one is refused before models are loaded
    text = _standard_input() if prompt == "-" else must_be_text(prompt, "--prompt")
    for ending in stop:
        must_be_text(ending, "--stop")
    policy, costs = _playable_policy(policy_spec, compression, traces_path, costs_name)
    if isinstance(policy.required_gamma, int) and policy.required_gamma > gamma_max:
        raise SpecKVError(
            f"policy {policy.label!r} plays gamma {policy.required_gamma}, above the --gamma-max of {gamma_max}; raise "
            "that, or choose another --policy"
        )

    from speckv.live.decoder import SpeculativeDecoder
    from speckv.live.drafting import Drafter, PromptLookup
    from speckv.live.models import LanguageModel, ModelPair
    from speckv.live.sampling import Greedy, Gumbel, Rejection
    from speckv.saving import save_policy
    from speckv.steplog_writer import StepLogWriter

    about = {"source": "speckv decode", "target": target, "draft": draft or drafter_spec, "policy": policy.label}
    logs = [StepLogWriter(log_folder, provenance=about)] if log_folder else []
    warping = (temperature, top_k, top_p, min_p)
    sampler = Greedy() if sampling == "greedy" else {"rejection": Rejection, "gumbel": Gumbel}[sampling](*warping)
    drafter: LanguageModel | Drafter
    if drafter_spec is None:
        assert draft is not None  # one of the two is given, see above
        stored = draft_compression or "bf16"
        loaded, drafter = ModelPair.load(target, draft, compression, stored, compute, compute, device)
    else:
        loaded = LanguageModel.load(target, compression, compute, device)
        drafter = make_drafter(drafter_spec, loaded)
    decoder = SpeculativeDecoder(loaded, drafter, policy, sampler=sampler, gamma_max=gamma_max, costs=costs, logs=logs)
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
    if save_policy_to:
        save_policy(policy, save_policy_to)
    for log in logs:
        log.close()
    click.secho(_summary(speculative, policy.label), dim=True)
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
        return must_be_text(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise SpecKVError(f"standard input is not text ({error}); give UTF-8") from None


def _playable_policy(
    spec: str, compression: str, traces_path: pathlib.Path | None, costs_name: str | None
) -> tuple[Any, Any]:
    """A policy that can decode a target at a compression, fitted if it has to be, and the cost model for it."""
    from speckv.plugins import load_costs
    from speckv.policy import Policy
    from speckv.saving import named_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset

    policy = named_policy(spec)
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
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
