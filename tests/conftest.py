"""A model pair that is real in everything but size, and a recording of it."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING

import pytest

from speckv.costs import CostModel, Timings
from speckv.prompts import Prompt
from speckv.traces import Manifest, Rollouts, TraceDataset

if TYPE_CHECKING:
    from speckv.live.models import ModelPair

END = 256  # behind the 256 bytes
PADDED_VOCABULARY = 272  # like real models, the pair has more logits than its tokenizer has tokens


@dataclasses.dataclass(frozen=True)
class PairPaths:
    """Folders of a target and a draft."""

    target: str
    draft: str


def byte_tokenizer(end: str = "<|endoftext|>"):
    """A byte-level tokenizer: 256 bytes and an end token. Qwen2's tokenizer class would add the default one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, end])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def tiny_model(seed: int, **settings):
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


def add_noise(model, amount: float, seed: int) -> None:
    """Add normal noise to every matrix, `amount` times its standard deviation."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * amount)


@pytest.fixture(scope="session")
def small_prompts() -> list[Prompt]:
    """Twelve prompts of four tasks; lengths differ."""
    texts = {
        "code": ["def area(w, h):", "Write a loop.", "class Stack: # push and pop, in Python"],
        "math": ["What is 2 + 3?", "7 * 8 =", "Solve 3x + 4 = 19 for x, step by step."],
        "chat": ["Hello there", "I feel tired today.", "What should I read next? I like the sea."],
        "summarization": ["Summarize: the cat sat.", "In short: rain came, rivers rose.", "Sum up: a mouse ran."],
    }
    return [Prompt(f"{task}-{n}", task, text) for task, of_task in texts.items() for n, text in enumerate(of_task)]


@pytest.fixture(scope="session")
def small_prompts_file(small_prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = ({"id": prompt.id, "task": prompt.task, "prompt": prompt.text} for prompt in small_prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_pair_paths(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A float32 pair in folders: the draft is the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("pair")
    paths = PairPaths(str(folder / "tiny-target"), str(folder / "tiny-draft"))
    model = tiny_model(seed=1)
    model.save_pretrained(paths.target)
    add_noise(model, amount=0.04, seed=2)
    model.save_pretrained(paths.draft)
    for path in (paths.target, paths.draft):
        byte_tokenizer().save_pretrained(path)
    return paths


@pytest.fixture(scope="session")
def small_pair(small_pair_paths: PairPaths) -> "ModelPair":
    """The pair, loaded in float32."""
    from speckv.live.models import ModelPair

    return ModelPair.load(small_pair_paths.target, small_pair_paths.draft, "fp32", "fp32")


@pytest.fixture(scope="session")
def small_dataset(
    small_pair: "ModelPair", small_prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    """The recording of the small pair, on disk."""
    from speckv.live.recorder import record

    manifest = Manifest(gamma_max=8, max_new_tokens=48, settings={"target": "tiny-target", "draft": "tiny-draft"})
    dataset = TraceDataset.create(tmp_path_factory.mktemp("small") / "traces", manifest)
    rollouts = list(record(small_pair, small_prompts, dataset, batch_size=4))
    # Acceptance near 0 or 1, or text that never ends, would test nothing.
    right = sum(int((rollout.tokens == rollout.draft_tokens).sum()) for rollout in rollouts)
    assert 0.4 < right / sum(len(rollout.tokens) for rollout in rollouts) < 0.9
    assert 0 < sum(rollout.ended for rollout in rollouts) < len(rollouts)
    return dataset


@pytest.fixture(scope="session")
def small_traces(small_dataset: TraceDataset) -> Rollouts:
    """The recording of the small pair, in memory: 12 prompts, 4 tasks, gamma_max 8, up to 48 tokens."""
    return small_dataset.load()


@pytest.fixture(scope="session")
def small_costs() -> CostModel:
    """Made-up seconds with a staircase in the target: a draft forward costs about a fifth of the target's."""
    import numpy as np

    tokens = np.arange(1, 18)
    verify = 0.05 + 0.01 * ((tokens - 1) // 4)
    draft = 0.01 + 0.0005 * (tokens - 1)
    contexts = np.array([32, 256])
    growth = np.array([1.0, 1.1])
    return CostModel(
        name="made-up",
        draft=Timings(tokens, contexts, draft[:, None] * growth),
        verify={"fp32": Timings(tokens, contexts, verify[:, None] * growth)},
        overhead=0.001,
    )
