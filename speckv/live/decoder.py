"""The live decoder: a draft proposes, a policy says how much, the target verifies.

What `speckv.replaying` computes from a recording is what happens here, step for step (rule R3).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict, Unpack, cast

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import check_features, signal_of
from speckv.live.decoding import Decoding, Processor
from speckv.live.drafting import Drafter, ModelDrafter
from speckv.live.logging import StepSink, want_features
from speckv.live.models import LanguageModel, chat_tokens, check_same_vocabulary
from speckv.live.results import Decoded, KeptCache, Piece
from speckv.live.sampling import Greedy, Sampler
from speckv.policy import Clairvoyant, Policy, check_playable

#: A user's text, the messages of a chat, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


class Options(TypedDict, total=False):
    """What can be asked for a single text.

    min_new_tokens: no end-of-sequence token before so many tokens.
    stop: strings that end the text; it does not contain them.
    processors: logits processors; called once a position of the target and of the draft, with that position's prefix.
    seed: of the random numbers. Sequence number r of a batch has seed + r.
    log_probabilities: whether to return the log-probability of every token.
    cache: what an earlier call with `keep_cache` left; what its text and this prompt begin with in common is not
        computed again.
    keep_cache: whether to return the cache, for a prompt that goes on where this text ends. It holds memory.
    """

    min_new_tokens: int
    stop: Sequence[str]
    processors: Sequence[Processor]
    seed: int
    log_probabilities: bool
    cache: KeptCache | None
    keep_cache: bool


def check_decodable(policy: Policy, drafter: type[Drafter], gamma_max: int, costs: CostModel | None) -> None:
    """Raise SpecKVError if a policy can't decode live: it knows the future, is not fitted, plays more than `gamma_max`,
    or reads a feature that cannot be had here."""
    if isinstance(policy, Clairvoyant):
        raise SpecKVError(f"policy {policy.name!r} knows the future: replay it, it cannot decode live")
    if gamma_max < 0:
        raise SpecKVError(f"gamma_max is {gamma_max}; it must be 0 or more")
    check_playable(policy, gamma_max)
    check_features(policy.features)
    for name in policy.features:
        if (signal := signal_of(name)) and signal not in drafter.signals:
            raise SpecKVError(
                f"policy {policy.name!r} reads the feature {name!r}, which {drafter.__name__} cannot give; choose "
                "another policy or drafter"
            )
    if costs is None and "cost_ratio" in policy.features:
        raise SpecKVError(f"policy {policy.name!r} reads the feature 'cost_ratio': give the decoder a cost model")


class SpeculativeDecoder:
    """Speculative decoding: what the target alone would say, in fewer forwards of it.

    Args:
        target: the model whose text is decoded.
        draft: a draft model with the same tokenizer, or another drafter.
        policy: decides how many tokens to draft; fitted, if it learns. What it learns online stays in its memory.
        sampler: greedy, rejection sampling or Gumbel-coupled sampling.
        gamma_max: no step drafts more, whatever the policy says.
        costs: measured on this machine; only needed by policies that read the feature `cost_ratio`.
        static_cache: allocate the caches once for each call, instead of letting them grow.
        merge_prefill: let a single text's first step take in the prompt, in the same forwards: one forward of each
            model fewer. The first step's seconds then hold the prompt's; a policy that learns online from seconds is
            refused. A batch takes in its prompts in front of the first step either way.
        record_signals: keep all signals in the steps, whether the policy needs them or not. Step logs need them.
        logs: where each step is written as it happens: `StepLogWriter`s, `SpeculationMetrics`.

    Raises:
        SpecKVError: the tokenizers differ, the policy is a bound that knows the future, or it reads a feature that
            cannot be had here.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Drafter,
        policy: Policy,
        *,
        sampler: Sampler | None = None,
        gamma_max: int = 16,
        costs: CostModel | None = None,
        static_cache: bool = False,
        merge_prefill: bool = False,
        record_signals: bool = False,
        logs: Sequence[StepSink] = (),
    ) -> None:
        self.drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
        check_decodable(policy, type(self.drafter), gamma_max, costs)
        if isinstance(self.drafter, ModelDrafter):
            check_same_vocabulary(target, self.drafter.model)
        if merge_prefill and policy.online:
            raise SpecKVError(
                f"policy {policy.name!r} learns from the seconds of its steps, which must not hold the prompt's; "
                "decode without merge_prefill"
            )
        self.target, self.policy, self.gamma_max = target, policy, gamma_max
        self.sampler = sampler or Greedy()
        self.static_cache, self.merge_prefill = static_cache, merge_prefill
        self.logs, self.record_signals = tuple(logs), record_signals or want_features(logs)
        self.cost_ratio = costs.cost_ratio(target.compression) if costs and "cost_ratio" in policy.features else 0.0

    def generate(self, prompt: Prompt, max_new_tokens: int = 128, **options: Unpack[Options]) -> Decoded:
        """Decode until an end-of-sequence token, a stop string, or `max_new_tokens` tokens.

        Args:
            prompt: a user's text or the messages of a chat, which the model's chat template wraps if it has one; or
                token ids as they are.
            max_new_tokens: budget, 1 or more.
            options: see `Options`.

        Raises:
            SpecKVError: the prompt is empty, an option is out of range, the models' logits hold NaN or allow no
                token, or the policy answers out of range.
        """
        decoding = self.start([prompt], max_new_tokens, **options)
        while decoding.going:
            decoding.step()
        return decoding.decoded()[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 128, **options: Unpack[Options]
    ) -> list[Decoded]:
        """Decode several prompts at once, each with a gamma of its own.

        The texts are those of one by one, up to near ties where the arithmetic rounds differently in a batch; under
        rejection sampling a policy that learns online drafts, and hence draws, differently.

        Args, errors: as of `generate`; caches are neither taken nor kept.
        """
        if isinstance(prompts, str):
            raise SpecKVError("prompts is a single text; give a list of prompts")
        if not prompts:
            return []
        if options.get("cache") is not None or options.get("keep_cache"):
            raise SpecKVError("a batch neither takes nor keeps a cache; decode that prompt on its own")
        decoding = self.start(prompts, max_new_tokens, **options)
        while decoding.going:
            decoding.step()
        return decoding.decoded()

    def stream(self, prompt: Prompt, max_new_tokens: int = 128, **options: Unpack[Options]) -> "Stream":
        """Decode as `generate` does, and show the text as it grows.

        The prompt is computed at once; iterating over what is returned decodes.
        """
        return Stream(self.start([prompt], max_new_tokens, show_text=True, **options))

    def start(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 128, show_text: bool = False, **options: Unpack[Options]
    ) -> Decoding:
        """Compute the prompts, for a host that decodes step by step.

        Args, errors: as of `generate`; `show_text` keeps the new pieces of text for the host to fetch.
        """
        if unknown := set(options) - set(Options.__annotations__):
            known = ", ".join(Options.__annotations__)
            raise SpecKVError(f"option {min(unknown)!r} is unknown; the options of decoding are {known}")
        return Decoding(self, [self.tokens_of(prompt) for prompt in prompts], max_new_tokens, options, show_text)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt stands for."""
        if isinstance(prompt, str):
            return chat_tokens(self.target.tokenizer, prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return chat_tokens(self.target.tokenizer, cast(Sequence[Mapping[str, str]], prompt))
        return [int(token) for token in cast(Sequence[int], prompt)]


class Stream:
    """A text as it is decoded: iterate over it for the new pieces of each step, a list that may be empty.

    Attributes:
        decoded: the whole, once the iteration is over.
    """

    decoded: Decoded

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def __iter__(self) -> Iterator[list[Piece]]:
        (sequence,) = self._decoding.sequences
        while self._decoding.going:
            self._decoding.step()
            pieces, sequence.pieces = sequence.pieces, []
            yield pieces
        (self.decoded,) = self._decoding.decoded()
