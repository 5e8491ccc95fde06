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

from speckv.live.caching import CachedModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import ModelPair
from speckv.live.recorder import record
from speckv.policy import Policy
from speckv.prompts import load_prompts
from speckv.replaying import replay
from speckv.traces import Manifest, TraceDataset
from tests.live import decoding_of

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


class Choosy(Policy):
    """Decides the same before the token is drawn."""

    name = "choosy"
    features = ("draft_top1",)
    threshold = 0.5

    def draw_token(self, features, state):
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
    for which, model in pair._asdict().items():
        prompt = torch.from_numpy(rollouts[0].prompt_tokens.astype(np.int64))[None]
        logits = CachedModel(model).forward(prompt)
        dtype = model.model.dtype
        rounding[which] = UNITS[dtype] * torch.finfo(dtype).eps * logits.abs().max().item()
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
    """A live decode: its tokens, its steps, and the tokens of each step's draft.

    The last token of a draft counts even if the policy saw it and declined to draw it.
    """
    decoding = decoding_of(SpeculativeDecoder(*pair, policy, gamma_max=GAMMA_MAX), prompt_tokens, budget=BUDGET)
    drafts, draw = [], decoding._draw

    def noted(logits, before, rows):
        drafts[-1].append(draw(logits, before, rows))
        return drafts[-1][-1]

    decoding._draw = noted
    while decoding.going:
        drafts.append([])
        decoding.step()
    (sequence,) = decoding.sequences
    return sequence.tokens, sequence.steps, [[int(drawn) for drawn, _ in draft] for draft in drafts]


@pytest.mark.parametrize("policy", [Four(), Running(), Confident(), Choosy()], ids=lambda policy: policy.name)
def test_flips_are_near_ties(policy, recorded, small_costs, capsys):
    compute, pair, dataset, rollouts, rounding = recorded
    costs = type(small_costs)("any", small_costs.draft, {pair.target.compression: small_costs.verify["fp32"]})
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
            differing = [at for at, (a, b) in enumerate(zip(draft, known, strict=False)) if a != b]
            if differing:
                at = differing[0]
                flips.append(("draft", math.log(top1[at] / top2[at]), 2 * rounding["draft"]))
            else:
                assert isinstance(policy, Confident | Choosy), "the same draft, the same policy, another step"
                # The last distribution that both looked at.
                at = min(step.forwards, int(replayed.forwards[row])) - 1
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
