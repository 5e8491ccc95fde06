"""A pair of no size that vLLM and transformers both run, and what a policy does with it, worked out without a cache."""

import json
import pathlib
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speckv.runtime import Bundle

VOCABULARY = 96
#: Most tokens that vLLM may draft.
MOST = 6
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}


@dataclass
class Pair:
    """The draft is the target's first layer; the others add little, so that it is right about two times in three."""

    folder: pathlib.Path
    target: LlamaForCausalLM = field(init=False)
    draft: LlamaForCausalLM = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.target, self.draft = (
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_SHAPE)).float().eval() for layers in (3, 1)
        )
        for layer in self.target.model.layers[1:]:
            layer.self_attn.o_proj.weight.data *= 0.2
            layer.mlp.down_proj.weight.data *= 0.2
        weights = self.target.state_dict()
        self.draft.load_state_dict({name: weights[name] for name in self.draft.state_dict()})
        for name in ("target", "draft"):
            getattr(self, name).save_pretrained(self.folder / name)
            _save_tokenizer(self.folder / name)

    @torch.inference_mode()
    def play(
        self, bundle: Bundle, prompt: list[int], tokens: int, batch_size: int = 1
    ) -> tuple[list[int], list[tuple]]:
        """The greedy text, and gamma and accepted of each step, as the policy would have it.

        The first token comes from the prompt alone, as in vLLM.
        """
        context = [*prompt, _likeliest(self.target, prompt)]
        sequence = bundle.start(context_length=len(context), compression="fp32", cost_ratio=0.3)
        steps = []
        while len(context) - len(prompt) < tokens:
            most, drafted = min(sequence.choose_gamma(), MOST), []
            while len(drafted) < most:
                log_p = torch.log_softmax(_logits(self.draft, context + drafted)[-1], -1)
                top = log_p.exp().topk(10).values.tolist()
                entropy = float(-(log_p.exp() * log_p).sum())
                signals = {
                    "draft_top1": top[0],
                    "draft_top2": top[1],
                    "draft_top10": sum(top),
                    "draft_entropy": entropy,
                }
                if not sequence.draw_token(**signals):
                    break
                drafted.append(int(log_p.argmax()))
                if len(drafted) < most and not sequence.keep_drafting():
                    break
            logits = _logits(self.target, context + drafted)[len(context) - 1 :]
            picks = logits.argmax(-1).tolist()
            accepted = next((n for n, token in enumerate(drafted) if token != picks[n]), len(drafted))
            log_p = torch.log_softmax(logits[accepted], -1)
            first, second = logits[accepted].topk(2).values.tolist()
            sequence.observe(len(drafted), accepted, float(-(log_p.exp() * log_p).sum()), first - second)
            steps.append((len(drafted), accepted))
            context += picks[: accepted + 1]
        return context[len(prompt) :][:tokens], steps


def _logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def _likeliest(model: LlamaForCausalLM, tokens: list[int]) -> int:
    with torch.inference_mode():
        return int(_logits(model, tokens)[-1].argmax())


def _save_tokenizer(folder: pathlib.Path) -> None:
    """One word a token, which is all that a server asks for."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def prompts(count: int, length: int = 16, seed: int = 0) -> list[list[int]]:
    """Tokens at random; the longest is `length` long."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length - n % 5,), generator=random).tolist() for n in range(count)]
