"""The live decoder against others: one pair, one set of prompts, one run.

    python benchmarks/live.py --pair tiny                                  # overheads: models of next to no size
    python benchmarks/live.py --target FOLDER@bf16 --draft FOLDER@nf4      # a real pair
    python benchmarks/live.py --pair llama-8b-1b --device cuda --costs-out costs.json    # a GPU, random weights

Every method decodes every prompt once a round, in an order drawn anew for each prompt; a figure is a ratio of tokens
per second within a round, given as the median of the rounds and their range. All methods are counted by the same clock
and the same tokens, prompts included. Policies that learn are fitted to the shipped recording without the prompts
decoded here, at the target's compression if it was recorded, and start each round with a new memory. Pairs named with
`--pair` have random weights and a chosen acceptance (`random_pairs.py`). `flashspec` joins if it is installed
(`pip install flashspec`).
"""

import argparse
import ctypes
import gc
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from random_pairs import PAIRS, random_pair
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from speckv import Policy
from speckv.costs import CostModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import LanguageModel, ModelPair, chat_tokens, check_same_tokenizer
from speckv.live.profiler import profile
from speckv.machine import machine
from speckv.plugins import make_policy
from speckv.policy import check_playable
from speckv.prompts import Prompt, load_prompts
from speckv.shipped import PROMPTS, shipped_costs, shipped_traces

#: Decodes one prompt of token ids, and returns the new ones.
Method = Callable[[list[int]], list[int]]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its tables, and return what they say."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    before = _memory_in_use(options.device)
    pair = _load(options)
    prompts = _prompts(pair, options)
    memory = _memory(pair, prompts, options, before)
    step_seconds: dict[str, list[float]] = {}
    methods, policies = _methods(pair, options, step_seconds)
    seconds, texts = _measure(methods, policies, prompts, options.rounds)
    # The first decode of each was the warm-up.
    with_signals = np.array(step_seconds["with signals"][1:]) / np.array(step_seconds["without"][1:])
    result = {
        "command": " ".join(["benchmarks/live.py", *map(str, arguments or _argv())]),
        "machine": machine() | {"threads": torch.get_num_threads()},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "tokens": {name: sum(map(len, of_prompts)) for name, of_prompts in texts.items()},
        "throughput": {name: _throughput(seconds[name], texts[name]).tolist() for name in methods},
        "same_text_as_plain": {name: _share_equal(texts[name], texts["plain generate"]) for name in methods},
        "first_divergences": _divergences(pair, prompts, texts, options.max_new_tokens),
        "ratios": _ratios(seconds, texts, options),
        "signals_cost": _spread(with_signals.reshape(options.rounds, -1).mean(axis=1) - 1),
        "memory": memory,
    }
    _show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.costs_out:
        _profile(pair, options).save(options.costs_out)
        print(f"{options.costs_out}: written")
    return result


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=PAIRS, help="random weights of this shape")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a random pair")
    parser.add_argument("--dtype", default="", help="of a random pair; float32 on the CPU, else bfloat16")
    parser.add_argument("--target", help="FOLDER@COMPRESSION")
    parser.add_argument("--draft", help="FOLDER@COMPRESSION; dynamic-int8 is torch's, for the CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gammas", type=_integers, default=[2, 4, 8])
    parser.add_argument("--fixed", type=_integers, default=[1, 2, 3, 4, 6, 8], help="gammas that may be the best fixed")
    parser.add_argument("--policy", action="append", default=[], help="a policy of the zoo, may be repeated")
    parser.add_argument("--costs", type=pathlib.Path, help="cost model for policies that learn")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--costs-out", type=pathlib.Path, help="measure a cost model as well, and write it here")
    options = parser.parse_args(arguments)
    if bool(options.pair) == bool(options.target and options.draft):
        parser.error("give --pair, or --target and --draft")
    options.signals_gamma = 4 if 4 in options.gammas else options.gammas[0]
    return options


def _argv() -> list[str]:
    import sys

    # Folders of this machine are nobody's business.
    return [re.sub(r"\S*/(?=[^/\s]+)", "", argument) for argument in sys.argv[1:]]


def _load(options: argparse.Namespace) -> ModelPair:
    if options.pair:
        dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
        return random_pair(options.pair, options.acceptance, getattr(torch, dtype), options.device)
    (target, compression), (draft, draft_compression) = (
        name.rsplit("@", 1) for name in (options.target, options.draft)
    )
    loaded = LanguageModel.load(target, compression, device=options.device)
    if draft_compression == "dynamic-int8":
        drafting = LanguageModel.load(draft, "fp32")
        from torch.ao.quantization import quantize_dynamic

        quantised = quantize_dynamic(drafting.model, {torch.nn.Linear}, dtype=torch.qint8)
        drafting = LanguageModel(quantised, drafting.tokenizer, "fp32")
    else:
        drafting = LanguageModel.load(draft, draft_compression, device=options.device)
    check_same_tokenizer(loaded.tokenizer, drafting.tokenizer, target, draft)
    gc.collect()
    return ModelPair(loaded, drafting)


def _prompts(pair: ModelPair, options: argparse.Namespace) -> list[list[int]]:
    if options.pair:
        generator = torch.Generator().manual_seed(1)
        size = (options.prompts, 128)
        return torch.randint(pair.target.vocabulary_size, size, generator=generator).tolist()
    return [chat_tokens(pair.target.tokenizer, prompt.text) for prompt in _shipped_prompts(options)]


def _shipped_prompts(options: argparse.Namespace) -> list[Prompt]:
    """As many as asked for, spread over the tasks."""
    shipped = load_prompts(PROMPTS)
    return [shipped[index * len(shipped) // options.prompts] for index in range(options.prompts)]


def _methods(
    pair: ModelPair, options: argparse.Namespace, step_seconds: dict[str, list[float]]
) -> tuple[dict[str, Method], list[Policy]]:
    """Ways to decode the same text, by the name that the tables give them, and the policies among them.

    `step_seconds` will hold the seconds of each decode's steps behind the first, which holds the prompt, with signals
    recorded and without.
    """
    budget = options.max_new_tokens
    policies: list[Policy] = []

    def ours(policy: Policy, noted: str = "", **settings: Any) -> Method:
        # As assisted generation does: its first verification takes in the prompt.
        decoder = SpeculativeDecoder(*pair, policy, merge_prefill=not policy.online, **settings)
        policies.append(policy)

        def decode(tokens: list[int]) -> list[int]:
            decoded = decoder.generate(tokens, budget)
            if noted:
                step_seconds.setdefault(noted, []).append(sum(step.seconds for step in decoded.steps[1:]))
            return decoded.tokens

        return decode

    methods: dict[str, Method] = {"plain generate": _transformers(pair, budget, None)}
    for gamma in options.gammas:
        methods[f"assisted gamma {gamma}"] = _transformers(pair, budget, gamma)
    for gamma in sorted({*options.gammas, *options.fixed}):
        noted = "without" if gamma == options.signals_gamma else ""
        methods[f"speckv gamma {gamma}"] = ours(make_policy(f"fixed:gamma={gamma}"), noted)
    fixed = make_policy(f"fixed:gamma={options.signals_gamma}")
    methods[f"speckv gamma {options.signals_gamma} with signals"] = ours(fixed, "with signals", record_signals=True)
    methods["speckv gamma 0"] = ours(make_policy("none"), gamma_max=0)
    costs = CostModel.load(options.costs) if options.costs else shipped_costs()[0]
    for name in options.policy:
        recorded = shipped_traces().load()
        held_out = np.isin(recorded.ids, [prompt.id for prompt in _shipped_prompts(options)])
        alike = recorded.compressions == pair.target.compression
        learned_from = recorded.take(~held_out & (alike if alike.any() else True))
        policy = make_policy(name).fit(learned_from, costs)
        check_playable(policy, 16)
        methods[f"speckv {name}"] = ours(policy, costs=costs)
    if flashspec := _flashspec(pair, budget, options.signals_gamma):
        methods[f"flashspec gamma {options.signals_gamma}"] = flashspec
    return methods, policies


def _transformers(pair: ModelPair, budget: int, gamma: int | None) -> Method:
    """transformers' own decoding, greedy: plain, or assisted with a constant gamma."""
    target, draft = pair.target, pair.draft
    ends = sorted(target.eos_ids) or None
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=budget,
        eos_token_id=ends,
        pad_token_id=0,
        repetition_penalty=1.0,  # some models bring another along
    )
    if gamma is not None:
        settings = draft.model.generation_config
        settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold = "constant", 0.0

    @torch.inference_mode()
    def decode(tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens], device=target.device)
        extra: dict[str, Any] = {}
        if gamma is not None:
            draft.model.generation_config.num_assistant_tokens = gamma
            extra["assistant_model"] = draft.model
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **extra)
        return out[0, len(tokens) :].tolist()

    return decode


def _flashspec(pair: ModelPair, budget: int, gamma: int) -> Method | None:
    """flashspec with one draft and one gamma, if it is installed."""
    try:
        import flashspec
        from flashspec.engine.hf_drafter import HuggingFaceDrafter
        from flashspec.engine.verifier import TargetModel
    except ModuleNotFoundError:
        return None
    device = pair.target.device
    sampling = flashspec.SamplingConfig(gamma=gamma, temperature=0.0, variant="greedy")
    config = flashspec.FlashSpecConfig(
        sampling=sampling,
        drafter_strategy="bandit",
        bandit=flashspec.BanditConfig(n_arms=1),
        device=str(device),
    )
    engine = flashspec.SpeculativeEngine(
        config,
        [HuggingFaceDrafter("draft", device, temperature=0.0, model=pair.draft.model)],
        TargetModel("target", device, model=pair.target.model),
    )
    ends = sorted(pair.target.eos_ids)

    @torch.inference_mode()
    def decode(tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens], device=device)
        return engine.generate(ids, max_new_tokens=budget, eos_token_ids=ends or None).output_ids[0].tolist()

    return decode


def _measure(
    methods: dict[str, Method], policies: list[Policy], prompts: list[list[int]], rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, list[list[int]]]]:
    """Seconds, (rounds, prompts), and the texts of each method."""
    names = list(methods)
    seconds = {name: np.zeros((rounds, len(prompts))) for name in names}
    texts: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in names}
    for name in names:
        methods[name](prompts[0])  # the first forward of a shape sets up its kernels
    rng = np.random.default_rng(0)
    for round_ in range(rounds):
        for policy in policies:
            policy.forget()
        for number, prompt in enumerate(prompts):
            for name in rng.permutation(names):
                start = time.perf_counter()
                texts[name][number] = methods[name](prompt)
                seconds[name][round_, number] = time.perf_counter() - start
        rates = (f"{name} {_throughput(seconds[name], texts[name])[round_]:.4g}" for name in names)
        print(f"round {round_ + 1} of {rounds}: {', '.join(rates)} tokens/s", flush=True)
    return seconds, texts


def _sums(seconds: np.ndarray) -> np.ndarray:
    return seconds.sum(axis=1)


def _throughput(seconds: np.ndarray, texts: list[list[int]]) -> np.ndarray:
    """Tokens per second of each round."""
    with np.errstate(divide="ignore"):  # rounds that are still to come have taken no time
        return sum(map(len, texts)) / _sums(seconds)


def _share_equal(texts: list[list[int]], others: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(texts, others, strict=True)) / len(texts)


def _divergences(
    pair: ModelPair, prompts: list[list[int]], texts: dict[str, list[list[int]]], budget: int
) -> list[dict[str, Any]]:
    """Where a method's text first differs from transformers' plain one, and by how many logits the target preferred
    the token it says there over the next likeliest: rounding explains small ones."""
    plain = SpeculativeDecoder(*pair, make_policy("none"), gamma_max=0, record_signals=True)
    found = []
    for number, prompt in enumerate(prompts):
        steps = plain.generate(prompt, budget).steps
        for name, of_prompts in texts.items():
            both = zip(of_prompts[number], texts["plain generate"][number], strict=False)
            at = next((index for index, (a, b) in enumerate(both) if a != b), None)
            if at is not None and at < len(steps):
                margin = float(steps[at].signals["target_margin"][0])
                found.append({"method": name, "prompt": number, "token": at, "margin": margin})
    return found


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "lowest": float(values.min()), "highest": float(values.max())}


def _ratios(
    seconds: dict[str, np.ndarray], texts: dict[str, list[list[int]]], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Tokens per second of one method to another's, round by round."""
    rates = {name: _throughput(seconds[name], texts[name]) for name in seconds}
    ours = [name for name in rates if name.startswith("speckv")]
    gammas = sorted({*options.gammas, *options.fixed})
    fixed = max((f"speckv gamma {gamma}" for gamma in gammas), key=lambda name: np.median(rates[name]))
    pairs = [(f"speckv gamma {gamma}", f"assisted gamma {gamma}") for gamma in options.gammas]
    pairs += [(name, "plain generate") for name in ours]
    pairs += [(f"speckv {name}", fixed) for name in options.policy]
    pairs += [(f"speckv gamma {options.signals_gamma}", name) for name in rates if name.startswith("flashspec")]
    return {f"{one} / {other}": _spread(rates[one] / rates[other]) for one, other in pairs}


def _memory_in_use(device: str) -> int:
    """Bytes that this process holds, without those that its allocator keeps for later."""
    gc.collect()
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def _memory(pair: ModelPair, prompts: list[list[int]], options: argparse.Namespace, before: int) -> dict[str, float]:
    """Peak memory of a decode to that of the models' weights and their caches, in bytes."""
    decoder = SpeculativeDecoder(*pair, make_policy(f"fixed:gamma={options.signals_gamma}"))
    decoder.generate(prompts[0], 2)  # weights are mapped files, which come into memory when they are first used
    loaded = _memory_in_use(options.device) - before
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(options.device)
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is in use
    decoding = decoder.start([max(prompts, key=len)], options.max_new_tokens)
    while decoding.going:
        decoding.step()
    on_gpu = options.device.startswith("cuda")
    peak = torch.cuda.max_memory_allocated(options.device) if on_gpu else _status("VmHWM")
    models = sum(_bytes(model.model) for model in pair)
    caches = sum(
        states.nbytes
        for cached in (decoding.target, decoding.drafting.cached)  # type: ignore[attr-defined]
        for layer in cached.cache.layers
        for states in (layer.keys, layer.values)
    )
    return {
        "peak": peak - before,
        "models": models,
        "loaded": loaded,
        "caches": caches,
        "ratio": (peak - before) / (models + caches),
    }


def _bytes(model: Any) -> int:
    """Of a model's weights, quantised ones with their scales, shared ones once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name in ("quant_state", "SCB", "CB"):
            part = getattr(getattr(module, "weight", None), name, None)
            part = getattr(part, "absmax", part)
            if isinstance(part, torch.Tensor):
                tensors[part.data_ptr()] = part.nbytes
        if hasattr(type(module), "_weight_bias"):  # torch's dynamic INT8
            weight, bias = module._weight_bias()
            tensors[id(module)] = weight.nbytes + (bias.nbytes if bias is not None else 0)
    return sum(tensors.values())


def _profile(pair: ModelPair, options: argparse.Namespace) -> CostModel:
    """The cost model of this pair on this device."""
    name = options.costs_out.stem
    tokens = [" ".join(f"t{token}" for token in prompt) for prompt in _prompts(pair, options)]
    prompts = [Prompt(str(number), "random", text) for number, text in enumerate(tokens)] if options.pair else None
    provenance = {
        "source": "measured by benchmarks/live.py",
        "pair": options.pair or [pair.target.name, pair.draft.name],
        "weights": "random" if options.pair else "trained",
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "draft_compression": pair.draft.compression,
    }
    return profile(
        lambda compression: pair,
        [pair.target.compression],
        (prompts or load_prompts(PROMPTS))[:3],
        name=name,
        max_new_tokens=options.max_new_tokens,
        provenance=provenance,
    )


def _show(result: dict[str, Any]) -> None:
    console = Console(width=110)
    title = f"{result['device']}: tokens per second, prompt included"
    table = Table("method", "tokens/s", "same text as plain", title=title)
    for name, rates in result["throughput"].items():
        table.add_row(name, f"{np.median(rates):.4g}", f"{result['same_text_as_plain'][name]:.0%}")
    console.print(table)
    table = Table("ratio of tokens per second", "median", "lowest", "highest")
    for name, spread in result["ratios"].items():
        table.add_row(name, *(f"{spread[key]:.3f}" for key in ("median", "lowest", "highest")))
    console.print(table)
    for name in {divergence["method"] for divergence in result["first_divergences"]}:
        margins = [d["margin"] for d in result["first_divergences"] if d["method"] == name]
        console.print(f"{name}: {len(margins)} texts diverge, at margins of at most {max(margins):.2g} logits")
    cost, memory = result["signals_cost"], result["memory"]
    console.print(
        f"recording all signals costs {cost['median']:+.2%} of the time ({cost['lowest']:+.2%} to "
        f"{cost['highest']:+.2%}); peak memory is {memory['ratio']:.3f} times the models' weights and "
        f"their caches"
    )


if __name__ == "__main__":
    main()
