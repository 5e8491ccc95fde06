"""What a step log costs a live decoder, beside a step of the pair of no size (and of a real one), in one run.

The time of a row is that of taking it in and of the thread that writes the files, without and with the making of its
features. With SPECKV_MODELS, a folder with qwen-coder-0.5b and qwen-coder-1.5b, steps of that pair are timed as well.
The figures are printed beside pytest-benchmark's table.
"""

import itertools
import os
import pathlib
import statistics

import pytest

from speckv.live.decoder import SpeculativeDecoder
from speckv.live.logging import StepRows, known_features
from speckv.live.models import LanguageModel, ModelPair
from speckv.live.results import Step
from speckv.plugins import make_policy
from speckv.steplog_writer import StepLogWriter
from speckv.testing.pairs import add_noise, byte_tokenizer, tiny_model

#: What the project promises: the share of a step.
PROMISED = 0.01
ROWS = 20_000
PROMPT = "Write a short story about a mouse that crosses the sea."


def steps_of(pair: ModelPair, tokens: int) -> list[Step]:
    decoder = SpeculativeDecoder(*pair, make_policy("fixed:gamma=4"), record_signals=True)
    decoder.generate(PROMPT, 16)  # the first forwards set up their kernels
    return decoder.generate(PROMPT, tokens).steps


@pytest.fixture(scope="module")
def tiny() -> list[Step]:
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    add_noise(draft, amount=0.04, seed=2)
    return steps_of(ModelPair(*(LanguageModel(model, byte_tokenizer()) for model in (target, draft))), 120)


@pytest.mark.parametrize("what", ["written", "made and written"])
def test_row(benchmark, capsys, tiny: list[Step], tmp_path: pathlib.Path, what: str) -> None:
    """Rows of a sequence that never ends, with all files that they fill; the features in them are made, or there."""
    folders = itertools.count()
    features = known_features(frozenset(tiny[0].signals))
    made = StepRows("a", 60, "fp32", features, "before").row(tiny[0])

    def log() -> None:
        of_text = StepRows("a", 60, "fp32", features, "before")
        with StepLogWriter(tmp_path / str(next(folders))) as writer:
            for number, step in zip(range(ROWS), itertools.cycle(tiny), strict=False):
                if what == "written":
                    writer.write(**made | {"step": number})
                else:
                    of_text.write(step, [writer])

    benchmark.pedantic(log, rounds=3, warmup_rounds=1)
    row = benchmark.stats.stats.min / ROWS
    pairs = {"the pair of no size": tiny}
    if (folder := os.environ.get("SPECKV_MODELS")) and what != "written":
        names = [f"{folder}/qwen-coder-{size}" for size in ("1.5b", "0.5b")]
        pairs["Qwen 1.5B and 0.5B"] = steps_of(ModelPair.load(*names, "bf16", "bf16"), 24)
    with capsys.disabled():
        print(f"\na row {what} takes {row * 1e6:.0f} microseconds, files and all")
        for name, steps in pairs.items():
            step = statistics.median(step.seconds for step in steps)
            print(f"that is {row / step:.2%} of the median step of {name}, {step * 1e3:.1f} ms at gamma 4")
            # Features are dearer than the promise where a step takes less than models of any use do.
            assert row <= PROMISED * step or (name == "the pair of no size" and what != "written")


def test_write(benchmark, tmp_path: pathlib.Path) -> None:
    """Taking in a finished row, the files written meanwhile."""
    numbers = itertools.count()
    with StepLogWriter(tmp_path) as writer:

        def write() -> None:
            writer.write(sequence="a", step=next(numbers), gamma=4, accepted=2, seconds=0.01, propensity=1.0,
                         compression="fp32", last_mean_entropy=0.4, running_acceptance=0.6, chosen=4.0)  # fmt: skip

        benchmark.pedantic(write, rounds=ROWS, warmup_rounds=100)
