"""Policies inside `model.generate` of transformers, in two forms.

`Speculate` is a decoding method of its own, which `generate` calls where it would decode: speckv's decoder with
`generate`'s processors and stopping criteria. `candidates` leaves the decoding to transformers' assisted generation and
only drafts for it; that is a private interface of transformers, which may move.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FeatureTracker, When
from speckv.live.decoder import SpeculativeDecoder, check_decodable
from speckv.live.drafting import ModelDrafter
from speckv.live.logging import StepRows, StepSink, known_features, name_sequence, want_features
from speckv.live.models import LanguageModel
from speckv.live.results import Decoded, Step
from speckv.live.sampling import Greedy, Rejection
from speckv.live.signals import DRAWN_SIGNALS, drawn_signals, target_signals
from speckv.policy import Outcome, Policy, as_integers, ask
from speckv.traces import TARGET_SIGNALS

_ONE = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class _Hosted(LanguageModel):
    """A model as `generate` sees it: all of its logits stand for tokens, and the text ends where its settings say."""

    width: int = 0
    ends: frozenset[int] = frozenset()

    @property
    def vocabulary_size(self) -> int:
        return self.width

    @property
    def impossible_ids(self) -> list[int]:
        return []

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.ends


def _hosted(models: Sequence[Any], tokenizer: Any, generation_config: Any) -> list[LanguageModel]:
    width = min(model.config.get_text_config().vocab_size for model in models)
    ends = generation_config.eos_token_id
    ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return [_Hosted(model, tokenizer, width=width, ends=ids) for model in models]


class Speculate:
    """Speculative decoding as a `custom_generate` of transformers.

        speculate = Speculate(draft, tokenizer, policy)
        model.generate(**inputs, max_new_tokens=128, custom_generate=speculate)

    Greedy text is that of the model alone; with `do_sample=True` text has the model's distribution. Logits processors
    and stopping criteria work as always. `generate` keeps a streamer and stop strings from decoding methods that are
    not its own: give the streamer as `stream=…`, and stop strings as `stopping_criteria=[StopStringCriteria(…)]`.

    Args:
        draft: a causal language model of transformers that shares the model's vocabulary.
        tokenizer: of both.
        policy: decides how many tokens to draft.
        gamma_max: no step drafts more.
        costs: only needed by policies that read the feature `cost_ratio`.
        record_signals: keep all signals in the steps.
        logs: where each step is written as it happens: `StepLogWriter`s, `SpeculationMetrics`.

    Attributes:
        decoded: the last text, with its steps. Threads that decode at the same time each need a `Speculate`.
    """

    decoded: Decoded

    def __init__(
        self,
        draft: Any,
        tokenizer: Any,
        policy: Policy,
        *,
        gamma_max: int = 16,
        costs: CostModel | None = None,
        record_signals: bool = False,
        logs: Sequence[StepSink] = (),
    ) -> None:
        self.draft, self.tokenizer, self.policy = draft, tokenizer, policy
        self.options: dict[str, Any] = {"gamma_max": gamma_max, "costs": costs, "record_signals": record_signals}
        self.options["logs"] = logs

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = None,
        generation_config: Any = None,
        stream: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls, with all that it has prepared. Returns the ids of prompt and text, (1, length).

        Raises:
            SpecKVError: several texts or scores were asked for.
        """
        if len(input_ids) > 1:
            raise SpecKVError("speckv decodes one text in a call of generate; call it for each, or use generate_batch")
        if generation_config.return_dict_in_generate and any(
            getattr(generation_config, f"output_{what}") for what in ("scores", "logits", "attentions", "hidden_states")
        ):
            raise SpecKVError(
                "speckv keeps no scores, attentions or hidden states; call generate without asking for them"
            )
        target, draft = _hosted([model, self.draft], self.tokenizer, generation_config)
        sampler = Rejection() if generation_config.do_sample else Greedy()
        decoder = SpeculativeDecoder(target, draft, self.policy, sampler=sampler, **self.options)
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids[0] if mask is None else input_ids[0][mask[0, : input_ids.shape[1]].bool()]
        decoding = decoder.start(
            [prompt.tolist()],
            generation_config.max_length - input_ids.shape[1],
            processors=[logits_processor] if len(logits_processor) else [],
            seed=int(torch.randint(2**62, ())) if generation_config.do_sample else 0,
        )
        (sequence,) = decoding.sequences
        text, stopped = input_ids, False
        if stream is not None:
            stream.put(input_ids.cpu())
        while decoding.going and not stopped:
            known = sequence.position
            decoding.step()
            before = text.shape[1]
            for token in sequence.tokens[known:]:  # the text may end at any of them, and does not go on behind
                text = torch.cat([text, text.new_tensor([[token]])], dim=1)
                if stopped := bool(stopping_criteria(text, None).all()):
                    break
            if stream is not None:
                stream.put(text[:, before:].cpu())
        if stream is not None:
            stream.end()
        tokens = text[0, input_ids.shape[1] :].tolist()
        self.decoded = Decoded(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            drafted=sequence.drafted[: len(tokens)],
            log_probabilities=[],
            finish_reason=sequence.finish_reason or "stop",
            steps=sequence.steps,
            seconds=sum(step.seconds for step in sequence.steps),
            prefill_seconds=decoding.prefill_seconds,
        )
        return GenerateDecoderOnlyOutput(sequences=text) if generation_config.return_dict_in_generate else text


@contextlib.contextmanager
def candidates(
    model: Any,
    policy: Policy,
    *,
    gamma_max: int = 16,
    costs: CostModel | None = None,
    logs: Sequence[StepSink] = (),
) -> Iterator[list[list[Step]]]:
    """Let a policy decide how much transformers' assisted generation drafts, as long as the context lasts.

        with candidates(model, policy) as steps:
            model.generate(**inputs, assistant_model=draft, stop_strings=["."], tokenizer=tokenizer, streamer=streamer)

    Args:
        model: whose `generate` is called, in one thread at a time.
        policy, gamma_max, costs, logs: as of `Speculate`.

    Yields:
        The steps of each text that is decoded meanwhile. The seconds of the first hold the prompt's, so that they are
        not logged and policies that learn online are refused; and the target's signals come from logits that the
        processors have changed. Of stopping criteria only stop strings end the text where they end it for the model
        alone, and greedy text only; others are asked once a step.

    Raises:
        SpecKVError: the policy can't decode live, or learns online; in `generate`, there is no assistant model, or text
            that ends at stop strings is to be sampled.
    """
    check_decodable(policy, ModelDrafter, gamma_max, costs)
    if policy.online:
        raise SpecKVError(
            f"policy {policy.name!r} learns from the seconds of its steps, which must not hold the prompt's, as those "
            "of assisted generation do; use custom_generate=Speculate(…)"
        )
    original, replaced = model._get_candidate_generator, vars(model).get("_get_candidate_generator")
    signature = inspect.signature(original)
    texts: list[list[Step]] = []

    @functools.wraps(original)  # its signature is that of what is inside, if contexts are nested
    def make(*args: Any, **kwargs: Any) -> CandidateGenerator:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("assistant_model") is None:
            raise SpecKVError("there is nothing to draft with; call generate with assistant_model=…")
        texts.append([])
        return PolicyCandidates(model, policy, gamma_max, costs, texts[-1], given, logs)

    model._get_candidate_generator = make
    try:
        yield texts
    finally:
        if replaced is None:
            del model._get_candidate_generator
        else:
            model._get_candidate_generator = replaced


class PolicyCandidates(CandidateGenerator):  # type: ignore[misc]  # transformers is typed in parts
    """A candidate generator of transformers that drafts as a policy decides; `candidates` puts it to work.

    Args:
        model: the target.
        policy, gamma_max, costs, logs: as of `Speculate`.
        steps: grows by a step each time.
        given: what transformers makes candidate generators of, by name.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        gamma_max: int,
        costs: CostModel | None,
        steps: list[Step],
        given: dict[str, Any],
        logs: Sequence[StepSink] = (),
    ) -> None:
        config, prompt = given["generation_config"], given["input_ids"]
        # One that was drawn has to be verified, and transformers would not stop at it behind the target's own token.
        if config.do_sample and config.stop_strings:
            raise SpecKVError(
                "transformers' assisted generation can't sample text that ends at stop strings; use "
                "custom_generate=Speculate(…) with stopping_criteria=[StopStringCriteria(…)]"
            )
        target, draft = _hosted([model, given["assistant_model"]], None, config)
        self.policy, self.gamma_max, self.steps = policy, gamma_max, steps
        self.processors, self.samples, self.max_length = given["logits_processor"], config.do_sample, config.max_length
        self.ends, self.prompt_length = target.eos_ids, prompt.shape[1]
        # transformers looks at the end of a step alone: a token that completes a stop string is left to the target.
        self.stops = StopStringCriteria(given["target_tokenizer"], config.stop_strings) if config.stop_strings else None
        self.drafting = ModelDrafter(draft).start(prompt.tolist())
        self.drafting.prefill(prompt.tolist())
        ratio = costs.cost_ratio(target.compression) if costs and "cost_ratio" in policy.features else 0.0
        code = list(COMPRESSIONS).index(target.compression)
        self.tracker = FeatureTracker(
            policy.features, np.array([self.prompt_length]), np.array([code]), np.array([ratio])
        )
        self.state = policy.new_state(1)
        self.logs, self.rows, self.record_signals = logs, None, want_features(logs)
        if logs:
            known = known_features(ModelDrafter.signals | TARGET_SIGNALS.keys())
            features = known if self.record_signals else []
            context = prompt[0].tolist()
            self.rows = StepRows(
                name_sequence(context), len(context), target.compression, features, policy.kind, prompt_in_first=True
            )

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The text with a draft behind it, (1, length), and the logits (1, drafted, vocabulary) it was drawn from."""
        self._start = time.perf_counter()
        self._text, self._signals = input_ids, list[dict[str, float]]()
        self._chosen = self._choose()
        self._propensity = float(np.ravel(self.policy.propensity(self.state))[0])
        (limit,), (self._lag,) = self.drafting.begin(
            input_ids.tolist(), [min(self._chosen, self.max_length - input_ids.shape[1] - 1)]
        )
        tokens: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        going, self._forwards = limit > 0, 0
        while going:
            said = self.drafting.next(tokens[-1] if tokens else None, [0]).to(input_ids.device)
            self._forwards += 1
            before = torch.cat([input_ids, *(token[None] for token in tokens)], dim=1)
            processed = self.processors(before, said.clone())
            token = processed.softmax(-1).multinomial(1)[0] if self.samples else processed.argmax(-1)
            if self.stops and self.stops(torch.cat([before, token[None]], dim=1), None).any():
                break
            signals = {name: float(value) for name, value in drawn_signals(said, token).items()}
            signals["draft_token"] = float(token)
            if not self._asked("draw_token", len(tokens) + 1, signals):
                break
            tokens.append(token)
            logits.append(processed)
            self._signals.append(signals)
            full = len(tokens) == limit or int(token) in self.ends
            going = not full and self._asked("keep_drafting", len(tokens), signals)
        self._tokens = [int(token) for token in tokens]
        self._drafted = time.perf_counter()
        if not tokens:
            return input_ids, None
        return torch.cat([input_ids, *(token[None] for token in tokens)], dim=1), torch.stack(logits, dim=1)

    def _choose(self) -> int:
        features = self.tracker.before(1)
        if not self.policy.overrides("choose_gamma"):
            return self.gamma_max
        chosen = as_integers(self.policy.choose_gamma(features, self.state), 1, f"{self.policy.name}.choose_gamma")
        return min(int(chosen[0]), self.gamma_max)

    def _asked(self, decision: str, index: int, signals: dict[str, float]) -> bool:
        if not self.policy.overrides(decision):
            return True
        when: When = "distribution" if decision == "draw_token" else "drawn"
        values = {name: np.array([signals[name]], dtype=np.float32) for name in self.tracker.token_signals}
        features = self.tracker.token(index, values, _ONE, when)
        return bool(ask(self.policy, decision, features, self.state, _ONE)[0])

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Take in what came of the draft. Transformers counts what it cut off at the end of the text as a mismatch;
        of greedy text, what the target agreed with is counted again."""
        accepted, gamma = int(num_matches), len(self._tokens)
        if not self.samples:
            agreed = scores[0, :gamma].argmax(-1).cpu().numpy() == np.array(self._tokens, dtype=np.int64)
            accepted = int(np.cumprod(agreed).sum())
        length = self._text.shape[1]
        of_target = {name: value.cpu().numpy() for name, value in target_signals(scores[:, accepted]).items()}
        of_draft = {
            name: np.array([[signals[name] for signals in self._signals]], dtype=np.float32)
            for name in (DRAWN_SIGNALS if self.record_signals else self.tracker.draft_signals)
        }
        self.drafting.end([length + accepted])
        self.tracker.verified(np.array([gamma]), np.array([accepted]), of_draft, of_target)
        seconds = time.perf_counter() - self._start
        if self.policy.overrides("observe"):
            outcome = Outcome(np.array([gamma]), np.array([accepted]), np.array([seconds]))
            self.policy.observe(outcome, self.state)
        drafting = self._drafted - self._start
        step = Step(
            position=length - self.prompt_length,
            chosen=self._chosen,
            propensity=self._propensity,
            gamma=gamma,
            accepted=accepted,
            committed=input_ids.shape[1] - length,
            forwards=self._forwards,
            lag=self._lag,
            batch_size=1,
            seconds=seconds,
            draft_seconds=drafting,
            verify_seconds=seconds - drafting,
            controller_seconds=0.0,
            signals={name: values[0] for name, values in of_draft.items()} | of_target if self.record_signals else {},
        )
        self.steps.append(step)
        if self.rows:
            self.rows.write(step, self.logs)
