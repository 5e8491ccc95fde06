"""The live decoder against others: one pair, one set of prompts, one run.

    python benchmarks/live.py --pair tiny                                  # overheads: models of next to no size
    python benchmarks/live.py --target FOLDER@bf16 --draft FOLDER@nf4      # a real pair
    python benchmarks/live.py --pair llama-8b-1b --device cuda --costs-out costs.json    # a GPU, random weights

Every method decodes every prompt once a round, in an order that rotates; a figure is a ratio of tokens per second
within a round, given as the median of the rounds and their range. All methods are counted by the same clock and the
same tokens, prompts included. Pairs named with `--pair` have random weights and a chosen acceptance
(`random_pairs.py`). `flashspec` joins if it is installed.
"""

import argparse
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
from speckv.prompts import load_prompts
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
    methods = _methods(pair, options)
    seconds, texts = _measure(methods, prompts, options.rounds)
    result = {
        "command": " ".join(["benchmarks/live.py", *map(str, arguments or _argv())]),
        "machine": machine() | {"threads": torch.get_num_threads()},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "tokens": {name: sum(map(len, of_prompts)) for name, of_prompts in texts.items()},
        "throughput": {name: _throughput(seconds[name], texts[name]).tolist() for name in methods},
        "same_text_as_plain": {name: _share_equal(texts[name], texts["plain generate"]) for name in methods},
        "ratios": _ratios(seconds, texts, options),
        "signals_cost": _spread(
            _sums(seconds[f"speckv gamma {options.signals_gamma} with signals"])
            / _sums(seconds[f"speckv gamma {options.signals_gamma}"])
            - 1
        ),
        "memory": _memory(pair, prompts, options, before),
    }
    _show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.costs_out:
        _profile(pair, options).save(options.costs_out)
        print(f"{options.costs_out}: written")
    return result


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
    parser.add_argument("--gammas", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 8])
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
    shipped = load_prompts(PROMPTS)
    spread = [shipped[index * len(shipped) // options.prompts] for index in range(options.prompts)]
    return [chat_tokens(pair.target.tokenizer, prompt.text) for prompt in spread]


def _methods(pair: ModelPair, options: argparse.Namespace) -> dict[str, Method]:
    """Ways to decode the same text, by the name that the tables give them."""
    budget = options.max_new_tokens

    def ours(policy: Policy, **settings: Any) -> Method:
        decoder = SpeculativeDecoder(*pair, policy, **settings)
        return lambda tokens: decoder.generate(tokens, budget).tokens

    methods: dict[str, Method] = {"plain generate": _transformers(pair, budget, None)}
    for gamma in options.gammas:
        methods[f"assisted gamma {gamma}"] = _transformers(pair, budget, gamma)
        methods[f"speckv gamma {gamma}"] = ours(make_policy(f"fixed:gamma={gamma}"))
    fixed = make_policy(f"fixed:gamma={options.signals_gamma}")
    methods[f"speckv gamma {options.signals_gamma} with signals"] = ours(fixed, record_signals=True)
    methods["speckv gamma 0"] = ours(make_policy("none"))
    costs = CostModel.load(options.costs) if options.costs else shipped_costs()[0]
    for name in options.policy:
        policy = make_policy(name).fit(shipped_traces().load(), costs)
        check_playable(policy, 16)
        methods[f"speckv {name}"] = ours(policy, costs=costs)
    if flashspec := _flashspec(pair, budget, options.signals_gamma):
        methods[f"flashspec gamma {options.signals_gamma}"] = flashspec
    return methods


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
    methods: dict[str, Method], prompts: list[list[int]], rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, list[list[int]]]]:
    """Seconds, (rounds, prompts), and the texts of each method."""
    names = list(methods)
    seconds = {name: np.zeros((rounds, len(prompts))) for name in names}
    texts: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in names}
    for name in names:
        methods[name](prompts[0])  # the first forward of a shape sets up its kernels
    for round_ in range(rounds):
        for number, prompt in enumerate(prompts):
            first = (round_ + number) % len(names)
            for name in names[first:] + names[:first]:
                start = time.perf_counter()
                texts[name][number] = methods[name](prompt)
                seconds[name][round_, number] = time.perf_counter() - start
    return seconds, texts


def _sums(seconds: np.ndarray) -> np.ndarray:
    return seconds.sum(axis=1)


def _throughput(seconds: np.ndarray, texts: list[list[int]]) -> np.ndarray:
    """Tokens per second of each round."""
    return sum(map(len, texts)) / _sums(seconds)


def _share_equal(texts: list[list[int]], others: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(texts, others, strict=True)) / len(texts)


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "lowest": float(values.min()), "highest": float(values.max())}


def _ratios(
    seconds: dict[str, np.ndarray], texts: dict[str, list[list[int]]], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Tokens per second of one method to another's, round by round."""
    rates = {name: _throughput(seconds[name], texts[name]) for name in seconds}
    ours = [name for name in rates if name.startswith("speckv")]
    fixed = max((f"speckv gamma {gamma}" for gamma in options.gammas), key=lambda name: np.median(rates[name]))
    pairs = [(f"speckv gamma {gamma}", f"assisted gamma {gamma}") for gamma in options.gammas]
    pairs += [(name, "plain generate") for name in ours]
    pairs += [(f"speckv {name}", fixed) for name in options.policy]
    pairs += [(f"speckv gamma {options.signals_gamma}", name) for name in rates if name.startswith("flashspec")]
    return {f"{one} / {other}": _spread(rates[one] / rates[other]) for one, other in pairs}


def _memory_in_use(device: str) -> int:
    """Bytes that this process holds."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def _memory(pair: ModelPair, prompts: list[list[int]], options: argparse.Namespace, before: int) -> dict[str, float]:
    """Peak memory of a decode to that of both models and their caches, in bytes."""
    decoder = SpeculativeDecoder(*pair, make_policy(f"fixed:gamma={options.signals_gamma}"))
    decoding = decoder.start([max(prompts, key=len)], options.max_new_tokens)
    gc.collect()
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(options.device)
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is in use
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
    return {"peak": peak - before, "models": models, "caches": caches, "ratio": (peak - before) / (models + caches)}


def _bytes(model: Any) -> int:
    """Of a model's weights, quantised ones with their scales, shared ones once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name in ("quant_state", "SCB", "CB"):
            part = getattr(getattr(module, "weight", None), name, None)
            part = getattr(part, "absmax", part)
            if isinstance(part, torch.Tensor):
                tensors[part.data_ptr()] = part.nbytes
        if hasattr(module, "_packed_params"):
            weight, bias = module._packed_params._weight_bias()
            tensors[id(module)] = weight.nbytes + (bias.nbytes if bias is not None else 0)
    return sum(tensors.values())


def _profile(pair: ModelPair, options: argparse.Namespace) -> CostModel:
    """The cost model of this pair on this device."""
    name = options.costs_out.stem
    tokens = [" ".join(f"t{token}" for token in prompt) for prompt in _prompts(pair, options)]
    from speckv.prompts import Prompt

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
    cost, memory = result["signals_cost"], result["memory"]
    console.print(
        f"recording all signals costs {cost['median']:+.2%} of the time ({cost['lowest']:+.2%} to "
        f"{cost['highest']:+.2%}); peak memory is {memory['ratio']:.3f} times both models and their caches"
    )


if __name__ == "__main__":
    main()
