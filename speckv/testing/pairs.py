"""A model pair that is real in everything but size. Its functions import torch (extra `live`)."""

import functools
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

from speckv.traces import Manifest, Rollouts, TraceDataset

if TYPE_CHECKING:
    from speckv.live.models import LanguageModel, ModelPair

END = 256  # behind the 256 bytes
PADDED_VOCABULARY = 272  # like real models, the pair has more logits than its tokenizer has tokens

#: What the kit lets the pair say something to; their lengths differ.
PROMPTS = ("def area(w, h):", "What is 2 + 3?", "I feel tired today. What should I read?")
GAMMA_MAX, BUDGET = 16, 32


def byte_tokenizer(end: str = "<|endoftext|>") -> Any:
    """A byte-level tokenizer: 256 bytes and an end token. Qwen2's tokenizer class would add the default one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, end])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def tiny_model(seed: int, **settings: Any) -> Any:
    """A random Qwen2 of two layers, weights scaled up so that its greedy text is varied, unsure here and there,
    and sometimes ends. `settings` change its configuration."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    usual = {
        "vocab_size": PADDED_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**usual | settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(7.0)
        model.lm_head.weight.mul_(4.0)
        model.lm_head.weight[END].mul_(1.2)
    return model


def add_noise(model: Any, amount: float, seed: int) -> None:
    """Add normal noise to every matrix, `amount` times its standard deviation."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * amount)


@functools.cache
def tiny_pair() -> "ModelPair":
    """A float32 pair; the draft is the target with noise on its weights."""
    from speckv.live.models import LanguageModel, ModelPair

    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    add_noise(draft, amount=0.04, seed=2)
    return ModelPair(*(LanguageModel(model, byte_tokenizer()) for model in (target, draft)))


@functools.cache
def tiny_recording() -> Rollouts:
    """What the tiny pair says to `PROMPTS`."""
    from speckv.live.recorder import record
    from speckv.prompts import Prompt

    manifest = Manifest(gamma_max=GAMMA_MAX, max_new_tokens=BUDGET, settings={"target": "tiny", "draft": "tiny"})
    prompts = [Prompt(f"p{number}", "chat", text) for number, text in enumerate(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        dataset = TraceDataset.create(pathlib.Path(folder) / "traces", manifest)
        for _ in record(tiny_pair(), prompts, dataset, batch_size=len(prompts)):
            pass
        return dataset.load()


def plain_tokens(model: "LanguageModel", prompt: list[int], budget: int) -> list[int]:
    """The model's greedy text with neither cache nor draft: every token from a forward over all before it."""
    import torch

    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + budget and not (tokens[len(prompt) :] and tokens[-1] in model.eos_ids):
            logits = model.model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
            tokens.append(int(logits[0, -1, : model.vocabulary_size].argmax()))
    return tokens[len(prompt) :]


@functools.cache
def tiny_texts() -> list[tuple[list[int], list[int]]]:
    """Token ids of each of `PROMPTS`, and what the tiny target alone says to it."""
    from speckv.live.models import chat_tokens

    target = tiny_pair().target
    prompts = [chat_tokens(target.tokenizer, text) for text in PROMPTS]
    return [(prompt, plain_tokens(target, prompt, BUDGET)) for prompt in prompts]
