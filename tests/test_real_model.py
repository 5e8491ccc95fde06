"""A real pair: live decoding against its recording, where the rounding of the arithmetic may flip near ties.

    SPECKV_MODELS=/folder/of/models pytest -m real_model -s

`SPECKV_PAIR` names the target and the draft in that folder, each with its compression; the default is
`qwen-coder-1.5b@bf16,qwen-coder-0.5b@nf4`.
"""

import math
import os
import pathlib

import numpy as np
import pytest
import torch

from speckv.live.decoder import SpeculativeDecoder, _Decoding
from speckv.live.models import CachedModel, ModelPair
from speckv.live.recorder import record
from speckv.policy import Policy
from speckv.prompts import load_prompts
from speckv.replaying import replay
from speckv.traces import Manifest, TraceDataset

pytestmark = pytest.mark.real_model

BUDGET, GAMMA_MAX = 24, 8
PROMPTS = pathlib.Path(__file__).parent.parent / "speckv" / "data" / "prompts.jsonl"
#: Rounding errors of a logit, in units of the dtype's epsilon times the largest logit. 16-bit kernels add up in
#: float32 and round once a layer; in float32 the sums round as well.
UNITS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 64}


class Four(Policy):
    name = "fixed-4"

    def choose_gamma(self, features, state):
        return 4


class Running(Policy):
    name = "running"
    features = ("running_acceptance",)

    def choose_gamma(self, features, state):
        return (1 + features["running_acceptance"] * 6).astype(np.int64)


class Confident(Policy):
    name = "confident"
    features = ("draft_top1",)
    threshold = 0.5

    def keep_drafting(self, features, state):
        return features["draft_top1"] > self.threshold


@pytest.fixture(scope="module", params=["native", "float32"])
def recorded(request, tmp_path_factory):
    """The pair, its recording of two prompts, and the largest error that rounding explains, in logits."""
    if not (folder := os.environ.get("SPECKV_MODELS")):
        pytest.skip("SPECKV_MODELS is not set: name a folder with the models of the pair")
    names = os.environ.get("SPECKV_PAIR", "qwen-coder-1.5b@bf16,qwen-coder-0.5b@nf4").split(",")
    (target, compression), (draft, draft_compression) = (name.split("@") for name in names)
    compute = request.param
    pair = ModelPair.load(
        f"{folder}/{target}", f"{folder}/{draft}", compression, draft_compression, compute, draft_compute=compute
    )
    dataset = TraceDataset.create(tmp_path_factory.mktemp("real") / "traces", Manifest(GAMMA_MAX, BUDGET, {}))
    rollouts = list(record(pair, load_prompts(PROMPTS)[:2], dataset))
    rounding = {}
    for which, model in (("target", pair.target), ("draft", pair.draft)):
        logits = CachedModel(model, pair.vocabulary_size).forward(rollouts[0].prompt_tokens.tolist())
        rounding[which] = UNITS[model.dtype] * torch.finfo(model.dtype).eps * logits.abs().max().item()
    return compute, pair, dataset, rollouts, rounding


def recorded_draft(rollout, position):
    """What the recording says the draft proposes from `position` on: tokens, top-1 and top-2 probabilities."""
    right = rollout.tokens[position:] == rollout.draft_tokens[position:]
    wrong = position + (int(np.argmin(right)) if not right.all() else len(right) - 1)
    off = slice(rollout.off_lengths[:wrong].sum(), rollout.off_lengths[: wrong + 1].sum())
    columns = (
        (rollout.draft_tokens, rollout.off_tokens),
        (rollout.signals["draft_top1"], rollout.off_signals["draft_top1"]),
        (rollout.signals["draft_top2"], rollout.off_signals["draft_top2"]),
    )
    return [np.concatenate([path[position : wrong + 1], behind[off]]) for path, behind in columns]


def decode(pair, policy, prompt_tokens):
    """A live decode: its tokens, its steps, and the draft of each step."""
    decoding = _Decoding(SpeculativeDecoder(pair, policy, GAMMA_MAX), prompt_tokens, BUDGET)
    drafts, inner = [], decoding._draft

    def noted(clock):
        drafts.append(inner(clock))
        return drafts[-1]

    decoding._draft = noted
    steps = list(decoding.steps())
    return decoding.tokens, steps, drafts


@pytest.mark.parametrize("policy", [Four(), Running(), Confident()], ids=lambda policy: policy.name)
def test_flips_are_near_ties(policy, recorded, small_costs, capsys):
    compute, pair, dataset, rollouts, rounding = recorded
    costs = type(small_costs)("any", small_costs.draft, {pair.compression: small_costs.verify["fp32"]})
    traces = dataset.load()
    replayed = replay(policy, traces, costs)
    compared, flips = 0, []  # flips: (which, margin, the largest that rounding explains)
    for rollout in rollouts:
        tokens, steps, drafts = decode(pair, policy, rollout.prompt_tokens.tolist())
        path = rollout.tokens.tolist()
        flip = next((at for at, (a, b) in enumerate(zip(tokens, path, strict=False)) if a != b), None)
        if flip is None:
            assert tokens == path
        else:
            flips.append(("target", float(rollout.signals["target_margin"][flip]), 2 * rounding["target"]))
        compared += len(path) if flip is None else flip + 1
        rows = np.flatnonzero(replayed.sequence == list(traces.ids).index(rollout.id))
        for step, draft, row in zip(steps, drafts, rows, strict=False):
            if flip is not None and step.position + step.gamma >= flip:
                break
            expected = (replayed.gamma[row], replayed.accepted[row], replayed.forwards[row])
            if (step.gamma, step.accepted, step.forwards) == expected:
                continue
            # Steps are compared up to the first that differs; it must differ for a reason that rounding explains.
            known, top1, top2 = recorded_draft(rollout, step.position)
            differing = [at for at, (a, b) in enumerate(zip(draft.tokens, known, strict=False)) if a != b]
            if differing:
                at = differing[0]
                flips.append(("draft", math.log(top1[at] / top2[at]), 2 * rounding["draft"]))
            else:
                assert isinstance(policy, Confident), "the same draft, the same policy, another step"
                at = min(len(draft.tokens), int(replayed.gamma[row])) - 1
                p = float(top1[at])
                # The log-odds of the threshold move no more than the logits do.
                margin = abs(math.log(p / (1 - p)) - math.log(policy.threshold / (1 - policy.threshold)))
                flips.append(("decision", margin, 2 * rounding["draft"]))
            break
    with capsys.disabled():
        listed = ", ".join(f"{which} at margin {margin:.3g} of {bound:.3g}" for which, margin, bound in flips) or "none"
        rate = 1000 * len(flips) / compared
        print(f"\n{compute} {policy.name}: {rate:.0f} flips per 1,000 of {compared} tokens ({listed})")
    for which, margin, bound in flips:
        assert margin <= bound, f"a {which} flip at a margin of {margin}, where rounding explains {bound}"
