"""Policies inside `generate` of transformers: its text, its options, our gammas."""

import functools
import os

import numpy as np
import pytest
import torch
from transformers import StopStringCriteria, TextIteratorStreamer

from speckv import SpecKVError, SpeculativeDecoder
from speckv.exporters.bundle import BundleExporter
from speckv.live.generation import Speculate, _hosted, candidates
from speckv.live.models import load_model, load_tokenizer
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog

from .live import KINDS, Fixed, Ids, pair_with
from .portable import fitted

TEXTS = ["def area(w, h):", "What is 2 + 3?"]
BUDGET = 24
#: Enough to see that likely tokens are drawn anew once.
SAMPLES = 100


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([pair_with("full").target.tokenizer(text)["input_ids"]])


@functools.cache
def plain(text: str = TEXTS[0]) -> torch.Tensor:
    """Ids of prompt and text, by the model alone."""
    return generate("plain", None, text)[0]


def generate(form: str, policy: Policy | None, text: str = TEXTS[0], **options):
    """Ids of prompt and text, and the steps; `plain` is the model alone."""
    target, draft = pair_with("full")
    ids = ids_of(text)
    usual = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": BUDGET, "do_sample": False}
    options = usual | options
    if form == "plain":
        return target.model.generate(**options), []
    if form == "custom":
        speculate = Speculate(draft.model, target.tokenizer, policy)
        return target.model.generate(**options, custom_generate=speculate), speculate.decoded.steps
    with candidates(target.model, policy) as texts:
        out = target.model.generate(**options, assistant_model=draft.model)
    return out, texts[0]


both_forms = pytest.mark.parametrize("form", ["custom", "candidates"])


@both_forms
@pytest.mark.parametrize("policy", [*KINDS, Ids()], ids=lambda policy: policy.name)
def test_greedy_text_is_the_models_own_and_the_policys_gammas_are_played(policy, form):
    target, draft = pair_with("full")
    for text in TEXTS:
        expected = plain(text)
        found, steps = generate(form, policy, text)
        assert torch.equal(found, expected)
        # The decoder alone, with the spare logits of the tiny models standing for tokens as they do in `generate`.
        hosted = _hosted([target.model, draft.model], target.tokenizer, target.model.generation_config)
        alone = SpeculativeDecoder(*hosted, policy).generate(ids_of(text)[0].tolist(), BUDGET)
        assert alone.tokens == expected[0, len(text) :].tolist()
        names = ("position", "chosen", "propensity", "gamma", "accepted", "committed", "forwards", "lag")
        decided, expected_steps = (
            [tuple(getattr(step, name) for name in names) for step in some] for some in (steps, alone.steps)
        )
        assert decided == expected_steps


@both_forms
def test_an_exported_policy_plays_as_the_policy_itself(form, tmp_path):
    """What a bundle was made of, against the bundle."""
    policy = fitted("hazard")
    BundleExporter().export(policy, tmp_path)
    loaded = BundleExporter().load(tmp_path)
    (text, steps), (same, others) = generate(form, policy), generate(form, loaded)
    assert torch.equal(text, same) and [step.gamma for step in steps] == [step.gamma for step in others]
    assert len({step.gamma for step in steps}) > 1


@both_forms
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 20, "eos_token_id": 59},
        {"bad_words_ids": [[255], [59]], "no_repeat_ngram_size": 2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 7},
    ],
    ids=lambda options: ", ".join(options),
)
def test_processors_and_limits_work_as_always(options, form):
    expected, _ = generate("plain", None, **options)
    found, _ = generate(form, Fixed(4), **options)
    assert torch.equal(found, expected)


def test_these_options_make_a_difference():
    for options in ({"repetition_penalty": 1.3}, {"bad_words_ids": [[255], [59]]}, {"eos_token_id": 59}):
        assert not torch.equal(generate("plain", None, **options)[0], plain())


@both_forms
def test_end_tokens_of_the_call_end_the_text(form):
    """`generate` takes other ones than the model's."""
    agreed = []
    for end in set(plain()[0, -BUDGET::4].tolist()):
        expected, _ = generate("plain", None, eos_token_id=[256, end])
        found, steps = generate(form, Fixed(5), eos_token_id=[256, end])
        assert torch.equal(found, expected)
        _, others = generate("custom", Fixed(5), eos_token_id=[256, end])
        assert steps[-1].accepted == others[-1].accepted  # before the text is cut off at its end
        agreed.append(steps[-1].accepted >= steps[-1].committed)
    assert any(agreed), "no text ended inside a draft"


@both_forms
@pytest.mark.parametrize("stop", ["9", "\\", "I"])
def test_stop_strings_end_the_text_where_they_end_it_for_the_model_alone(stop, form):
    tokenizer = pair_with("full").target.tokenizer
    given = {"stopping_criteria": [StopStringCriteria(tokenizer, [stop])]}
    by_name = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected, _ = generate("plain", None, **by_name)
    assert 0 < expected.shape[1] - len(TEXTS[0]) < BUDGET
    found, _ = generate(form, Fixed(4), **(given if form == "custom" else by_name))
    assert torch.equal(found, expected)


class Noted:
    """A streamer that notes what it is given."""

    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        assert not self.ended
        self.parts.append(value.reshape(-1).tolist())

    def end(self):
        self.ended = True


@both_forms
def test_text_is_streamed_step_by_step(form):
    noted = Noted()
    found, steps = generate(form, Fixed(4), **{"stream" if form == "custom" else "streamer": noted})
    assert noted.ended and len(noted.parts) == 1 + len(steps)
    assert [token for part in noted.parts for token in part] == found[0].tolist()


def test_an_iterator_of_text():
    tokenizer = pair_with("full").target.tokenizer
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    found, _ = generate("custom", Fixed(4), stream=streamer)
    assert "".join(streamer) == tokenizer.decode(found[0, len(TEXTS[0]) :])


@both_forms
def test_sampling(form):
    """Of one token there is no choice; else the seed of torch decides."""
    options = {"do_sample": True, "top_k": 1}
    assert torch.equal(generate(form, Fixed(3), **options)[0], plain())
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(generate(form, Fixed(3), do_sample=True, top_k=0, temperature=1.5)[0].tolist())
    assert texts[0] == texts[1] != texts[2]


@both_forms
def test_sampled_text_has_the_models_distribution(form):
    """First tokens against the model's chances; those that complete a stop string are as likely as ever."""
    target, _ = pair_with("full")
    tokenizer, ids = target.tokenizer, ids_of("ab")
    with torch.no_grad():
        chances = target.model(ids).logits[0, -1].softmax(-1)
    ends = [token for token in chances.argsort(descending=True).tolist() if 32 < token < 127][:4]
    stops = [StopStringCriteria(tokenizer, [tokenizer.decode([token]) for token in ends])] if form == "custom" else []
    torch.manual_seed(3)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "stopping_criteria": stops}
    first = [int(generate(form, Fixed(1), "ab", **options)[0][0, ids.shape[1]]) for _ in range(SAMPLES)]
    chance, found = float(chances[ends].sum()), sum(token in ends for token in first)
    assert (found - SAMPLES * chance) ** 2 < 6.6 * SAMPLES * chance * (1 - chance)  # chi-squared, 1 %


def test_sampled_text_that_ends_at_stop_strings_is_refused_where_it_would_be_biased():
    by_name = {"stop_strings": ["a"], "tokenizer": pair_with("full").target.tokenizer, "do_sample": True}
    with pytest.raises(SpecKVError, match="can't sample text that ends at stop strings; use custom_generate"):
        generate("candidates", Fixed(2), **by_name)


@both_forms
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oracle", "knows the future"),
        ("mlp", "is not fitted"),
        ("fixed:gamma=40", "above the gamma_max of 16"),
        ("leviathan", "reads the feature 'cost_ratio': give the decoder a cost model"),
    ],
)
def test_a_policy_that_cannot_decode_live_is_refused(spec, message, form):
    with pytest.raises(SpecKVError, match=message):
        generate(form, make_policy(spec))


def test_contexts_may_be_nested():
    """The inner policy decides inside, the outer one again behind it."""
    target, draft = pair_with("full")
    options = {"max_new_tokens": BUDGET, "do_sample": False, "assistant_model": draft.model}
    with candidates(target.model, Fixed(2)) as outer:
        with candidates(target.model, Fixed(4)) as inner:
            target.model.generate(ids_of(TEXTS[0]), **options)
        target.model.generate(ids_of(TEXTS[0]), **options)
    assert [texts[0][0].gamma for texts in (outer, inner)] == [2, 4] and len(outer) == len(inner) == 1
    assert "_get_candidate_generator" not in vars(target.model)


def test_padding_in_front_is_no_prompt():
    ids = ids_of(TEXTS[0])
    padded = torch.cat([torch.full((1, 3), 256), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    expected = plain()
    found, _ = generate("custom", Fixed(3), input_ids=padded, attention_mask=mask)
    assert found[0, 3:].tolist() == expected[0].tolist()


def test_what_it_returns_and_refuses():
    found, _ = generate("custom", Fixed(3), return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain())
    with pytest.raises(SpecKVError, match="keeps no scores"):
        generate("custom", Fixed(3), return_dict_in_generate=True, output_scores=True)
    two = ids_of(TEXTS[0]).repeat(2, 1)
    with pytest.raises(SpecKVError, match="one text in a call of generate"):
        generate("custom", Fixed(3), input_ids=two, attention_mask=torch.ones_like(two))
    target, _ = pair_with("full")
    before = target.model._get_candidate_generator
    with candidates(target.model, Fixed(2)), pytest.raises(SpecKVError, match="there is nothing to draft with"):
        target.model.generate(ids_of(TEXTS[0]), max_new_tokens=5, prompt_lookup_num_tokens=2)
    assert target.model._get_candidate_generator == before and "_get_candidate_generator" not in vars(target.model)


def test_both_forms_log_their_steps(tmp_path):
    """The same, but for the seconds of assisted generation's first step, which hold the prompt's."""
    target, draft = pair_with("full")
    ids = ids_of(TEXTS[0])
    options = {"max_new_tokens": BUDGET, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    logs = {}
    for form in ("custom", "candidates"):
        with StepLogWriter(tmp_path / form) as log:
            if form == "custom":
                speculate = Speculate(draft.model, target.tokenizer, make_policy("heuristic"), logs=[log])
                target.model.generate(ids, **options, custom_generate=speculate)
            else:
                with candidates(target.model, make_policy("heuristic"), logs=[log]) as texts:
                    target.model.generate(ids, **options, assistant_model=draft.model)
        logs[form] = StepLog.load(tmp_path / form)
    played = [(step.gamma, step.accepted) for step in speculate.decoded.steps]
    assert played == [(step.gamma, step.accepted) for step in texts[0]] and len(set(played)) > 2
    custom, assisted = logs["custom"].columns, logs["candidates"].columns
    assert list(zip(custom["gamma"].tolist(), custom["accepted"].tolist(), strict=True)) == played
    assert custom.keys() == assisted.keys() >= {"signal_last_mean_entropy", "signal_target_margin", "propensity"}
    for name in custom.keys() - {"sequence", "seconds"}:
        if custom[name].dtype.kind == "f":
            np.testing.assert_allclose(assisted[name], custom[name], rtol=1e-3, atol=1e-5, err_msg=name)
        else:
            assert custom[name].tolist() == assisted[name].tolist(), name
    assert (custom["seconds"] > 0).all() and np.isnan(assisted["seconds"]).tolist() == [True] + [False] * (
        len(played) - 1
    )


def test_a_policy_that_learns_online_is_refused_by_assisted_generation():
    """Its first step's seconds hold the prompt's."""
    with (
        pytest.raises(SpecKVError, match="'ucb1' learns from the seconds of its steps"),
        candidates(pair_with("full")[0].model, make_policy("ucb1")),
    ):
        pass


@pytest.mark.real_model
@both_forms
@pytest.mark.parametrize("spec", ["heuristic", "confidence:threshold=0.4,cap=6"])
def test_a_real_model(spec, form):
    """SmolLM2 in float32 drafts for itself, its draft in bfloat16: nearly all is accepted, and not a token changes."""
    if not (folder := os.environ.get("SPECKV_MODELS")):
        pytest.skip("SPECKV_MODELS is not set: name a folder with smollm2-135m")
    name = f"{folder}/smollm2-135m"
    model, draft, tokenizer = load_model(name, "fp32"), load_model(name, "bf16"), load_tokenizer(name)
    inputs = tokenizer("The sea is", return_tensors="pt")
    options = {"max_new_tokens": 32, "do_sample": False}
    expected = model.generate(**inputs, **options)
    if form == "custom":
        speculate = Speculate(draft, tokenizer, make_policy(spec))
        found = model.generate(**inputs, **options, custom_generate=speculate)
        steps = speculate.decoded.steps
    else:
        with candidates(model, make_policy(spec)) as texts:
            found = model.generate(**inputs, **options, assistant_model=draft)
        steps = texts[0]
    print(tokenizer.decode(found[0]), [(step.gamma, step.accepted) for step in steps])
    assert torch.equal(found, expected) and len({step.gamma for step in steps}) > 1
    assert sum(step.accepted for step in steps) > 0.6 * sum(step.gamma for step in steps)
