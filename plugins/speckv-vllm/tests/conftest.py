"""Engines of vLLM in this process, one at a time."""

import os

# Before anything imports vLLM: no second process, no network, and what it says of itself is not for a test's output.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}

import pytest
from engines import engine, generate
from pair import Pair, prompts


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def plain(pair) -> dict[str, list[list[int]]]:
    """What the target writes without speculation."""
    with engine(pair) as llm:
        return {
            "short": generate(llm, prompts(5)),
            "long": generate(llm, prompts(2, length=230), tokens=26),
            "many": generate(llm, prompts(8, length=40), tokens=120),
        }
