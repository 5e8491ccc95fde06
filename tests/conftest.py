"""A model pair that is real in everything but size, and a recording of it."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from speckv.costs import CostModel, Timings
from speckv.prompts import Prompt
from speckv.testing.pairs import add_noise, byte_tokenizer, tiny_model
from speckv.traces import Manifest, Rollouts, TraceDataset

from .pages import open_browser, open_page

if TYPE_CHECKING:
    from speckv.live.models import ModelPair


@dataclasses.dataclass(frozen=True)
class PairPaths:
    """Folders of a target and a draft."""

    target: str
    draft: str


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, report: pathlib.Path) -> Iterator[Any]:
    """The page that a module's fixture `report` has written."""
    with open_page(browser, report) as page:
        yield page
