"""Policies of every kind, pairs of every kind of cache, and the plain decoding that live decoding must equal."""

import functools

import numpy as np
import torch

from speckv.live.decoder import SpeculativeDecoder
from speckv.live.decoding import Decoding
from speckv.live.models import LanguageModel, ModelPair
from speckv.live.sampling import Greedy, Gumbel, Rejection
from speckv.policy import Policy
from speckv.testing.pairs import END, add_noise, byte_tokenizer, tiny_model


class Fixed(Policy):
    name = "fixed"

    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features, state):
        return self.gamma


class Stateful(Policy):
    """Grows after a full acceptance, shrinks after a rejection, and remembers how surprised the draft was."""

    name = "stateful"
    features = ("last_gamma", "last_accepted", "last_mean_entropy", "last_max_entropy", "last_mean_top1",
                "last_min_top1", "is_first")  # fmt: skip

    def new_state(self, rows):
        return {"gamma": np.full(rows, 3), "drafted": np.zeros(rows)}

    def choose_gamma(self, features, state):
        unsure = (features["last_max_entropy"] > 1.5) | (features["last_min_top1"] < 0.3)
        sure = (features["last_mean_top1"] > 0.8) & (features["last_mean_entropy"] < 0.6)
        # It pauses after every ninth drafted token or so, so that the draft falls behind.
        pause = (state["drafted"] % 9 == 8) & (features["last_gamma"] > 0)
        gamma = state["gamma"] + sure - unsure + (features["last_accepted"] > 4) + (features["is_first"] > 0)
        return np.where(pause, 0, np.clip(gamma, 0, 20)).astype(np.int64)

    def observe(self, outcome, state):
        grown = np.where(outcome.accepted == outcome.drafted, state["gamma"] + 2, outcome.accepted)
        state["gamma"] = np.clip(grown, 1, 7)
        state["drafted"] = state["drafted"] + outcome.drafted


class Running(Policy):
    name = "running"
    features = ("running_acceptance", "position", "context_length")

    def choose_gamma(self, features, state):
        return (features["running_acceptance"] * 9 + (features["context_length"] - features["position"]) % 2).astype(
            int
        )


class TargetEntropy(Policy):
    name = "target-entropy"
    features = ("target_entropy", "target_margin", "compression", "cost_ratio")

    def choose_gamma(self, features, state):
        sure = (features["target_entropy"] < 0.8) & (features["target_margin"] > 1.0)
        return np.where(sure, 6, 2) + (features["cost_ratio"] < 0.5) + (features["compression"] == 0)


class Draw(Policy):
    """Looks at a distribution before anything is drawn from it."""

    name = "draw"
    features = ("draft_entropy", "draft_top2", "draft_top10", "draft_index")

    def draw_token(self, features, state):
        return (features["draft_entropy"] < 1.2) & (features["draft_top2"] < 0.4) & (features["draft_top10"] > 0.5)


class Keep(Policy):
    name = "keep"
    features = ("draft_probability", "draft_top1", "last_mean_top1")

    def new_state(self, rows):
        return {"asked": np.zeros(rows)}

    def keep_drafting(self, features, state):
        state["asked"] = state["asked"] + 1  # also behind the last token that fits
        patience = np.where(state["asked"] % 3 == 0, 0.3, 0.5) + 0.1 * (features["last_mean_top1"] > 0.7)
        return features["draft_probability"] > patience


class Both(Policy):
    """Decides before the step and at both places inside the draft."""

    name = "both"
    features = ("last_accepted", "draft_entropy", "draft_probability", "draft_index", "last_max_entropy")

    def choose_gamma(self, features, state):
        return (features["last_accepted"] + 2 - (features["last_max_entropy"] > 2.0)).astype(np.int64)

    def draw_token(self, features, state):
        return (features["draft_entropy"] < 2.0) | (features["draft_index"] == 2)

    def keep_drafting(self, features, state):
        return features["draft_probability"] > 0.4


class Ids(Policy):
    """Decides by nothing but the ids of the drafted tokens."""

    name = "ids"
    features = ("draft_token",)

    def new_state(self, rows):
        return {"sum": np.zeros(rows)}

    def keep_drafting(self, features, state):
        state["sum"] = state["sum"] + features["draft_token"]
        return state["sum"] % 5 > 0


class Unlimited(Policy):
    """Overrides a decision without reading anything."""

    name = "unlimited"

    def keep_drafting(self, features, state):
        return True


class Drawn(Policy):
    """Plays gammas from a list, each sequence from its beginning."""

    name = "drawn"

    def __init__(self, gammas):
        super().__init__()
        self.gammas = gammas

    def new_state(self, rows):
        return {"steps": np.zeros(rows, dtype=int)}

    def choose_gamma(self, features, state):
        return np.array(self.gammas)[state["steps"] % len(self.gammas)]

    def observe(self, outcome, state):
        state["steps"] = state["steps"] + 1


#: One policy of each kind, and two that pause so that the draft falls behind.
KINDS = [Fixed(4), Drawn([3, 0, 0, 5, 1]), Stateful(), Draw(), Keep(), Both()]
SAMPLERS = [
    Greedy(),
    Rejection(temperature=0.7),
    Gumbel(temperature=0.7),
    Gumbel(draft="greedy"),
    Rejection(draft="greedy"),
]

WINDOW = 10
#: Layers of the target and the draft, by what their caches forget.
LAYERS = {
    "full": ["full_attention"] * 2,
    "sliding": ["sliding_attention"] * 2,
    "mixed": ["sliding_attention", "full_attention"],
}


@functools.cache
def pair_with(layers: str) -> ModelPair:
    """A float32 pair whose layers attend to everything, to a window, or one to each."""
    types = LAYERS[layers]
    settings = {"layer_types": types, "use_sliding_window": "sliding_attention" in types, "sliding_window": WINDOW}
    target, draft = tiny_model(seed=1, **settings), tiny_model(seed=1, **settings)
    add_noise(draft, amount=0.04, seed=2)
    return ModelPair(*(LanguageModel(model, byte_tokenizer()) for model in (target, draft)))


def plain_text(model: LanguageModel, prompt: list[int], budget: int, sampler=None, seed: int = 0) -> list[int]:
    """What the model says with no cache and no draft: every token from a forward over all before it.

    A sampler draws as it does where nothing was drafted; its text must not depend on the draft.
    """
    draws = (sampler or Greedy()).start([seed], model.device)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + budget and END not in tokens[len(prompt) :]:
            logits = model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[:, -1:, : END + 1]
            _, chosen = draws.verify(logits, nothing, [0], None, [len(tokens)])
            tokens.append(int(chosen))
    return tokens[len(prompt) :]


def decoding_of(decoder: SpeculativeDecoder, *prompts: list[int], budget: int = 24, **options) -> Decoding:
    """A decoding to be stepped through."""
    return decoder.start(prompts, budget, **options)
