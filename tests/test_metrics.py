"""Counters under vLLM's names, as Prometheus scrapes them while a decoder runs."""

import sys
import threading
import urllib.request

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from speckv import SpecKVError, SpeculativeDecoder
from speckv.live.generation import Speculate, candidates
from speckv.metrics import SpeculationMetrics
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog

from .live import Drawn, pair_with


def scrape(port: int) -> dict[str, float]:
    """Samples by name, and by position where they have one; all of one model and engine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples if sample.name.endswith("_total")):
        assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
        place = sample.labels.get("position")
        found[sample.name if place is None else f"{sample.name} {place}"] = sample.value
    return found


def expected(log: StepLog) -> dict[str, float]:
    """What the steps of a log come to."""
    drafted = log.gamma > 0
    counts = {"drafts": drafted.sum(), "draft_tokens": log.gamma.sum(), "accepted_tokens": log.accepted.sum()}
    counts |= {f"accepted_tokens_per_pos_total {j}": (log.accepted > j).sum() for j in range(log.gamma.max())}
    return {f"vllm:spec_decode_num_{name}{'' if '_total' in name else '_total'}": n for name, n in counts.items()}


def test_a_scraped_decoder_counts_what_it_logs(tmp_path):
    target, draft = pair_with("full")
    registry = prometheus_client.CollectorRegistry()
    metrics = SpeculationMetrics("tiny", registry=registry)
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        port = server.server_port
        with StepLogWriter(tmp_path) as log:
            policy = Drawn([3, 0, 5, 1])
            stream = SpeculativeDecoder(target, draft, policy, logs=[log, metrics]).stream("Hello there", 40)
            for number, _ in enumerate(stream):
                if number == 3:
                    log.flush()
                    assert scrape(port) == expected(StepLog.load(tmp_path)), "in the midst of a decode"
            speculate = Speculate(draft.model, target.tokenizer, policy, logs=[log, metrics])
            ids = target.tokenizer("What is 2 + 3?", return_tensors="pt")["input_ids"]
            target.model.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=speculate)
        steps = StepLog.load(tmp_path)
        assert len(set(steps.sequence.tolist())) == 2 and len(steps) == len(stream.decoded.steps) + len(
            speculate.decoded.steps
        )
        assert scrape(port) == expected(steps) and (steps.gamma == 0).any()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_threads_count_in_the_same_places():
    """A place that two threads see for the first time at once is one place."""
    registry, interval = prometheus_client.CollectorRegistry(), sys.getswitchinterval()
    metrics, together = SpeculationMetrics("tiny", registry=registry), threading.Barrier(8)

    def count():
        together.wait()
        metrics.write(gamma=500, accepted=500)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    name, labels = "vllm:spec_decode_num_accepted_tokens_per_pos_total", {"model_name": "tiny", "engine": "0"}
    counts = [registry.get_sample_value(name, labels | {"position": str(place)}) for place in range(500)]
    assert counts == [8] * 500


def test_metrics_alone_take_no_signals():
    """They count tokens; what a step log holds beside those has its price."""
    target, draft = pair_with("full")
    metrics = SpeculationMetrics("tiny", registry=prometheus_client.CollectorRegistry())
    decoder = SpeculativeDecoder(target, draft, Drawn([3, 0, 5, 1]), logs=[metrics])
    assert not any(step.signals for step in decoder.generate("Hello there", 20).steps)
    ids = target.tokenizer("What is 2 + 3?", return_tensors="pt")["input_ids"]
    with candidates(target.model, Drawn([3]), logs=[metrics]) as texts:
        target.model.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft.model)
    assert texts[0] and not any(step.signals for step in texts[0])


def test_a_registry_has_each_name_once():
    registry = prometheus_client.CollectorRegistry()
    SpeculationMetrics("tiny", registry=registry)
    with pytest.raises(SpecKVError, match=r"Duplicated timeseries .*; share one SpeculationMetrics"):
        SpeculationMetrics("other", registry=registry)
