"""The plugin is installed, no policy is named: vLLM is left alone, and obeys the table that `vllm-schedule` writes."""

import json

from engines import counted, engine, generate
from pair import prompts

from speckv.exporters.schedule import Schedule
from speckv.exporters.vllm import VllmScheduleExporter


def test_the_static_table_without_a_policy(pair, plain, tmp_path):
    exporter = VllmScheduleExporter(draft=str(pair.folder / "draft"))
    exporter.export(Schedule({"fp32": {1: 4, 2: 1, 4: 0}}), tmp_path)
    options = json.loads((tmp_path / "fp32.yaml").read_text())["speculative-config"]
    with engine(pair, max_num_seqs=4, speculative_config=options) as llm:
        for size in (1, 2, 4):
            before = counted(llm)
            assert generate(llm, prompts(5)[:size]) == plain["short"][:size]
            drafted, drafts = ((counted(llm) - before)[name] for name in ("num_draft_tokens", "num_drafts"))
            if size == 1:
                assert drafted == 4 * drafts > 0
            elif size == 2:  # when one text has ended, the other goes on alone
                assert 0 < drafts <= drafted < 4 * drafts
        assert drafted == 0
