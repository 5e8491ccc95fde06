"""Model pairs with random weights, real shapes, and an acceptance that is chosen.

A forward of such a model costs what a trained one of its shape costs. What it says is arranged: its layers hardly
change the residual stream, so that the next token is a function of the last one, and the functions of target and draft
agree on a chosen share of the vocabulary.
"""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speckv.live.models import LanguageModel, ModelPair


@dataclass(frozen=True)
class Shape:
    """Of a Llama: width, width of the feed-forward part, layers, attention heads, heads of keys and values."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int


#: Llama-3.2 1B and 3B and Llama-3.1 8B as their configurations give them; the tiny ones are for overheads and tests.
SHAPES = {
    "tiny-draft": Shape(64, 128, 1, 4, 2),
    "tiny": Shape(64, 128, 2, 4, 2),
    "llama-1b": Shape(2048, 8192, 16, 32, 8),
    "llama-3b": Shape(3072, 8192, 28, 24, 8),
    "llama-8b": Shape(4096, 14336, 32, 32, 8),
}
#: name -> (target, draft, vocabulary)
PAIRS = {
    "tiny": ("tiny", "tiny-draft", 1024),
    "llama-3b-1b": ("llama-3b", "llama-1b", 128_256),
    "llama-8b-1b": ("llama-8b", "llama-1b", 128_256),
}


def random_pair(name: str, acceptance: float, dtype: torch.dtype, device: str) -> ModelPair:
    """Make a pair on a device.

    Args:
        name: one of `PAIRS`.
        acceptance: chance that a drafted token is the target's.
        dtype: of the weights.
        device: a torch device.
    """
    target, draft, size = PAIRS[name]
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(size, generator=generator)
    wrong = torch.rand(size, generator=generator) >= acceptance
    other = successor.clone()
    other[wrong] = successor[wrong].roll(1)
    vocabulary = {f"t{index}": index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return ModelPair(
        LanguageModel(_random_model(SHAPES[target], successor, dtype, device), wrapped),
        LanguageModel(_random_model(SHAPES[draft], other, dtype, device), wrapped),
    )


@torch.no_grad()
def _random_model(shape: Shape, successor: torch.Tensor, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(successor),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(0)
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(old)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(1e-3)
        layer.mlp.down_proj.weight.mul_(1e-3)
    embedding = model.model.embed_tokens.weight
    # The logit of successor[i] is the product of the embedding of i with itself.
    model.lm_head.weight[successor.to(device)] = embedding / embedding.norm(dim=-1, keepdim=True)
    return model
