"""Engines that follow each other in the user's own process."""

import gc

from engines import engine, generate, speculative
from pair import MOST, prompts

from speckv.exporters.vllm import VllmExporter
from speckv.plugins import make_policy
from speckv.runtime import Bundle
from speckv.steplogs import StepLog


def test_each_plays_its_policy_and_leaves_its_log(pair, plain, tmp_path):
    played = {}
    for gamma in (2, 3):
        bundle = tmp_path / str(gamma)
        VllmExporter().write(Bundle("fixed", make_policy(f"fixed:gamma={gamma}").program()), bundle)
        settings = {"bundle": str(bundle), "log": str(tmp_path / "log")}
        options = speculative(pair, [[1, 1, MOST]])
        with engine(pair, speculative_config=options, additional_config={"speckv": settings}) as llm:
            assert generate(llm, prompts(2)) == plain["short"][:2]
        del llm
        gc.collect()
        log = StepLog.load(tmp_path / "log")  # whole, though the process goes on
        played[gamma] = set(log.gamma.tolist())
    assert played == {2: {2}, 3: {2, 3}} and len(set(log.sequence)) == 4
