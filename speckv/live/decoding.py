"""The engine of the live decoder: sequences that are drafted, verified and committed side by side."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import FeatureTracker, When
from speckv.live.caching import CachedModel
from speckv.live.drafting import Drafting, PromptLookup
from speckv.live.logging import StepRows, known_features, name_sequence, want_features
from speckv.live.models import LanguageModel, to_device
from speckv.live.results import Decoded, FinishReason, KeptCache, Piece, Signals, Step
from speckv.live.signals import DRAWN_SIGNALS, drawn_signals, target_signals
from speckv.live.text import Detokenizer, decoded_text
from speckv.policy import Outcome, as_integers, ask, select_rows
from speckv.traces import TARGET_SIGNALS

if TYPE_CHECKING:
    from speckv.live.decoder import Options, SpeculativeDecoder

#: A logits processor of transformers, or a function like one: (1, length) ids, (1, vocabulary) logits -> logits.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


#: What a step reads from the device, by name.
Read = dict[str, npt.NDArray[Any]]


class _Clock:
    """Seconds spent in the parts of one step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.parts = {"draft": 0.0, "verify": 0.0, "controller": 0.0}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start


class _Sequence:
    """One text being decoded.

    Attributes:
        context: the prompt and what was committed.
        processors: the user's, and what holds back the end of the text.
        detokenizer: if the text has to be known while it grows.
        pieces: new text that was not fetched yet.
        seconds: duration of all steps, once the text has ended.
        rows: makes the rows of its steps, if they are logged.
    """

    def __init__(self, tokens: list[int], processors: list[Processor], detokenizer: Detokenizer | None) -> None:
        self.context, self.prompt_length = tokens, len(tokens)
        self.processors, self.detokenizer = processors, detokenizer
        self.steps: list[Step] = []
        self.drafted: list[bool] = []
        self.log_probabilities: list[float] = []
        self.pieces: list[Piece] = []
        self.finish_reason: FinishReason | None = None
        self.seconds = 0.0
        self.rows: StepRows | None = None

    @property
    def tokens(self) -> list[int]:
        """Committed so far."""
        return self.context[self.prompt_length :]

    @property
    def position(self) -> int:
        """How many tokens are committed."""
        return len(self.context) - self.prompt_length

    def commit(self, tokens: Sequence[int], accepted: int, eos_ids: frozenset[int], max_new_tokens: int) -> int:
        """Add tokens up to the end of the text, if it is among them. Returns how many were added."""
        for index, token in enumerate(tokens):
            self.context.append(token)
            self.drafted.append(index < accepted)
            if self.detokenizer:
                self._show(self.detokenizer.push(token), index < accepted)
            if token in eos_ids:
                self.finish_reason = "eos"
            elif self.detokenizer and self.detokenizer.stopped:
                self.finish_reason = "stop"
            elif self.position == max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                if self.detokenizer:
                    self._show(self.detokenizer.finish(), index < accepted)
                return index + 1
        return len(tokens)

    def _show(self, text: str, drafted: bool) -> None:
        if text:
            self.pieces.append(Piece(text, drafted))


@dataclass(frozen=True)
class _Draft:
    """What the drafts of n sequences came to.

    Attributes:
        chosen, propensities: as in `Step`.
        gammas: tokens to verify of each sequence.
        forwards, lags: as in `Step`.
        tokens: (n, most) on the target's device; a sequence's own are the first of its row.
        probabilities: (n, most, vocabulary) that they were drawn from, None for point masses.
        logits: (n, vocabulary) of each token in turn, before processors; empty if the drafter has none.
        signals: of each token in turn by name, (n,) each, as far as the policy has read them.
    """

    chosen: list[int]
    propensities: list[float]
    gammas: list[int]
    forwards: list[int]
    lags: list[int]
    tokens: torch.Tensor
    probabilities: torch.Tensor | None
    logits: list[torch.Tensor]
    signals: list[Signals]


class Decoding:
    """Sequences being decoded side by side.

    Between two steps the target's cache holds each sequence but its last token, and the draft's at most so much. In
    front of the first step this holds too, unless the decoder leaves the prompt to that step (`merge_prefill`).

    Attributes:
        sequences: all of them.
        going: those that have not ended; every array of the step has a row for each.
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        prompts: list[list[int]],
        max_new_tokens: int,
        options: "Options",
        show: bool,
    ) -> None:
        if not all(prompts):
            raise SpecKVError("the prompt is empty: give at least one token")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SpecKVError(f"max_new_tokens is {max_new_tokens}; it must be a whole number from 1")
        policy, target = decoder.policy, decoder.target
        self.decoder, self.policy, self.max_new_tokens = decoder, policy, max_new_tokens
        self.eos_ids, self.device = target.eos_ids, target.device
        self.log_probabilities = options.get("log_probabilities", False)
        stop = options.get("stop", ())
        least = options.get("min_new_tokens", 0)
        if not 0 <= least <= max_new_tokens:
            raise SpecKVError(f"min_new_tokens is {least}; it must be from 0 to max_new_tokens, {max_new_tokens}")
        if not 0 <= (seed := options.get("seed", 0)) < 2**63:
            raise SpecKVError(f"seed is {seed}; it must be from 0 to 2^63 - 1")
        _check_prompts(prompts, max_new_tokens, target)
        start = time.perf_counter()
        self.sequences = []
        for tokens in prompts:
            processors = list(options.get("processors", ()))
            if least and self.eos_ids:
                ends = sorted(self.eos_ids)
                processors.append(MinNewTokensLengthLogitsProcessor(len(tokens), least, ends, device=str(self.device)))
            detokenizer = Detokenizer(target.tokenizer, stop)
            self.sequences.append(_Sequence(tokens, processors, detokenizer if show or stop else None))
        self.going = list(self.sequences)
        merged = decoder.merge_prefill and len(prompts) == 1
        if decoder.logs:
            known = known_features(decoder.drafter.signals | TARGET_SIGNALS.keys())
            features = known if want_features(decoder.logs) else []
            for sequence in self.sequences:
                name, length = name_sequence(sequence.context), sequence.prompt_length
                sequence.rows = StepRows(
                    name, length, target.compression, features, policy.kind, prompt_in_first=merged
                )
        self.keeps_cache = options.get("keep_cache", False)
        self.target, self.drafting = self._caches(options.get("cache"))
        if not merged:
            self.target.prefill([tokens[n:-1] for tokens, n in zip(prompts, self.target.lengths, strict=True)])
            self.drafting.prefill(prompts)
        self.tracker = FeatureTracker(
            policy.features,
            prompt_lengths=np.array([len(tokens) for tokens in prompts]),
            compression=np.full(len(prompts), list(COMPRESSIONS).index(target.compression)),
            cost_ratio=np.full(len(prompts), decoder.cost_ratio),
            batch_size=len(prompts),
        )
        self.state = policy.new_state(len(prompts))
        self.draws = decoder.sampler.start([seed + row for row in range(len(prompts))], self.device)
        self.chooses, self.observes = policy.overrides("choose_gamma"), policy.overrides("observe")
        self.asks_draw, self.asks_keep = policy.overrides("draw_token"), policy.overrides("keep_drafting")
        # Tokens that no decision looks at stay on the device until they are verified. The CPU has nothing to wait for.
        processed = any(sequence.processors for sequence in self.sequences)
        self.looks_inside = self.device.type == "cpu" or processed or self.asks_draw or self.asks_keep
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what the prompt takes is not the first step's
        self.prefill_seconds = time.perf_counter() - start

    def _caches(self, kept: KeptCache | None) -> tuple[CachedModel, Drafting]:
        """The target's cache and the drafter, empty or with what a kept cache knows of the prompt."""
        contexts = [sequence.context for sequence in self.sequences]
        decoder = self.decoder
        capacity = None
        if decoder.static_cache:
            if kept or self.keeps_cache:
                raise SpecKVError("a static cache is made for one text; to keep a cache, decode without static_cache")
            capacity = max(map(len, contexts)) + self.max_new_tokens + decoder.gamma_max + 1
        # Where nothing can be drafted no draft model is run, not even over the prompt.
        drafter = decoder.drafter if decoder.gamma_max else PromptLookup()
        if kept and (taken := kept.take(contexts[0], decoder.target)):
            target, draft = taken
        else:
            target, draft = CachedModel(decoder.target, len(contexts), capacity), None
        return target, drafter.start(contexts, capacity, draft)

    def decoded(self) -> list[Decoded]:
        """All texts, once they have ended."""
        results = []
        for sequence in self.sequences:
            assert sequence.finish_reason, "the text has not ended"
            detokenizer, tokenizer = sequence.detokenizer, self.decoder.target.tokenizer
            results.append(
                Decoded(
                    text=detokenizer.text if detokenizer else decoded_text(tokenizer, sequence.tokens),
                    tokens=sequence.tokens,
                    drafted=sequence.drafted,
                    log_probabilities=sequence.log_probabilities,
                    finish_reason=sequence.finish_reason,
                    steps=sequence.steps,
                    seconds=sequence.seconds,
                    prefill_seconds=self.prefill_seconds,
                    cache=KeptCache(sequence.context, self.target, self.drafting.cached) if self.keeps_cache else None,
                )
            )
        return results

    @torch.inference_mode()
    def step(self) -> None:
        """Draft, verify and commit once in every sequence that has not ended."""
        clock = _Clock()
        positions = [sequence.position for sequence in self.going]
        lengths = [len(sequence.context) for sequence in self.going]
        draft = self._draft(clock)
        with clock.measure("verify"):
            found = self._verify(draft)
            gammas, accepted = self._up_to_end(draft.gammas, found)
            self._check_logits(draft, found, accepted)
            known = [length + more for length, more in zip(lengths, accepted, strict=True)]
            self.target.roll_back(known)
        with clock.measure("draft"):
            self.drafting.end(known)
        committed = []
        for row, sequence in enumerate(self.going):
            tokens = found["tokens"][row, : accepted[row] + 1].astype(int).tolist()
            committed.append(sequence.commit(tokens, accepted[row], self.eos_ids, self.max_new_tokens))
            if self.log_probabilities:
                sequence.log_probabilities += found["log_probabilities"][row, : committed[row]].tolist()
        with clock.measure("controller"):
            of_draft = {name: found[name] for name in DRAWN_SIGNALS if name in found}
            of_target = {name: found[name] for name in TARGET_SIGNALS if name in found}
            self._learn(gammas, accepted, of_draft, of_target, clock.seconds)
        seconds = clock.seconds
        for row, sequence in enumerate(self.going):
            signals: dict[str, npt.NDArray[np.float32]] = {}
            if self.decoder.record_signals:
                signals = {name: values[row, : gammas[row]] for name, values in of_draft.items()}
                signals |= {name: values[row : row + 1] for name, values in of_target.items()}
            step = Step(
                position=positions[row],
                chosen=draft.chosen[row],
                propensity=draft.propensities[row],
                gamma=gammas[row],
                accepted=accepted[row],
                committed=committed[row],
                # Without lag there was no forward: the drafter is not a model, or nothing was asked of it.
                forwards=draft.forwards[row] if draft.lags[row] else 0,
                lag=draft.lags[row] if draft.forwards[row] else 0,
                batch_size=len(self.going),
                seconds=seconds,
                draft_seconds=clock.parts["draft"],
                verify_seconds=clock.parts["verify"],
                controller_seconds=clock.parts["controller"],
                signals=signals,
            )
            sequence.steps.append(step)
            if sequence.rows:
                sequence.rows.write(step, self.decoder.logs)
        self._drop_ended()

    def _draft(self, clock: _Clock) -> _Draft:
        """Draft in each sequence until the policy, the budget (the target's own token must fit) or an end token says
        stop."""
        size = len(self.going)
        gammas, forwards = [0] * size, [0] * size
        tokens: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        signals: list[Signals] = []
        with clock.measure("controller"):
            chosen = self._choose()
            propensities = np.broadcast_to(np.asarray(self.policy.propensity(self.state), dtype=float), size).tolist()
            room = [self.max_new_tokens - sequence.position - 1 for sequence in self.going]
            limits = [min(pair) for pair in zip(chosen, room, strict=True)]
        with clock.measure("draft"):
            limits, lags = self.drafting.begin([sequence.context for sequence in self.going], limits)
        rows = [row for row, limit in enumerate(limits) if limit]
        while rows:
            with clock.measure("draft"):
                answer = self.drafting.next(tokens[-1] if tokens else None, rows)
                if answer.dim() == 1:
                    tokens.append(answer.to(self.device))
                else:
                    logits.append(answer.to(self.device))
                    drawn, distribution = self._draw(logits[-1], tokens, rows)
                    tokens.append(drawn)
                    if distribution is not None:
                        probabilities.append(distribution)
            for row in rows:
                forwards[row] += 1
            if not self.looks_inside:
                for row in rows:
                    gammas[row] += 1
                rows = [row for row in rows if gammas[row] < limits[row]]
                continue
            with clock.measure("controller"):
                found: Signals = {}
                if (self.asks_draw or self.asks_keep) and self.tracker.token_signals:
                    found = _read(
                        (drawn_signals(logits[-1], tokens[-1]) if logits else {}) | {"draft_token": tokens[-1]}
                    )
                    signals.append(found)
                drawn_ids = found["draft_token"] if found else tokens[-1].tolist()
                ends = [int(token) in self.eos_ids for token in drawn_ids]
                rows = self._asked("draw_token", len(tokens), rows, found)
                for row in rows:
                    gammas[row] += 1
                rows = [row for row in rows if gammas[row] < limits[row] and not ends[row]]
                rows = self._asked("keep_drafting", len(tokens), rows, found)
        most = max(gammas)
        return _Draft(
            chosen,
            propensities,
            gammas,
            forwards,
            lags,
            tokens=torch.stack(tokens[:most], dim=1) if most else self._no_tokens(),
            probabilities=torch.stack(probabilities[:most], dim=1) if most and probabilities else None,
            logits=logits,
            signals=signals,
        )

    def _no_tokens(self) -> torch.Tensor:
        return torch.zeros(len(self.going), 0, dtype=torch.long, device=self.device)

    def _choose(self) -> list[int]:
        """How many tokens may be drafted in each sequence, by the policy and the host."""
        features = self.tracker.before(len(self.going))
        if not self.chooses:
            return [self.decoder.gamma_max] * len(self.going)
        chosen = self.policy.choose_gamma(features, self.state)
        chosen = as_integers(chosen, len(self.going), f"{self.policy.name}.choose_gamma")
        return [min(self.decoder.gamma_max, gamma) for gamma in chosen.tolist()]

    def _draw(
        self, logits: torch.Tensor, before: list[torch.Tensor], rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the next drafted tokens, (n,), behind those drafted `before`, and say from what."""
        if any(sequence.processors for sequence in self.going):
            logits = logits.clone()
            drafted = torch.stack(before, dim=1) if before else self._no_tokens()
            for row in rows:
                logits[row] = self._processed(row, drafted[row], logits[row])
        positions = [len(sequence.context) + len(before) for sequence in self.going]
        return self.draws.draw(logits, rows, positions)

    def _processed(self, row: int, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits (vocabulary,) of the token behind a sequence and some drafted tokens, after the processors."""
        prefix = torch.cat([to_device(self.going[row].context, self.device), drafted])[None]
        scores = logits[None]
        for processor in self.going[row].processors:
            scores = processor(prefix, scores)
        return scores[0]

    def _asked(self, decision: str, index: int, rows: list[int], signals: Signals) -> list[int]:
        """The sequences for which the policy, inside the draft, says yes to token number `index`."""
        if not rows or not self.policy.overrides(decision):
            return rows
        when: When = "distribution" if decision == "draw_token" else "drawn"
        at = np.array(rows)
        values = {name: signals[name][at] for name in self.tracker.token_signals}
        answers = ask(self.policy, decision, self.tracker.token(index, values, at, when), self.state, at)
        return [int(row) for row in at[answers]]

    def _verify(self, draft: _Draft) -> Read:
        """One forward of the target over the last committed token (and what it has not seen in front of it), and the
        drafted ones.

        Returns, from the device in one go: `accepted` (n,), `tokens` (n, most + 1), and, if they are needed, signals
        of draft (n, most) and target (n,) by name and `log_probabilities` (n, most + 1).
        """
        pairs = zip(self.going, self.target.lengths, strict=True)
        unseen = [sequence.context[length:] for sequence, length in pairs]
        tokens = torch.cat([to_device(unseen, self.device), draft.tokens], dim=1)
        counts = [len(new) + gamma for new, gamma in zip(unseen, draft.gammas, strict=True)]
        logits = self.target.forward(tokens, counts, last=draft.tokens.shape[1] + 1)
        processed = logits
        if any(sequence.processors for sequence in self.going):
            processed = logits.clone()
            for row, gamma in enumerate(draft.gammas):
                for index, token in enumerate([*draft.tokens[row, :gamma].tolist(), None]):
                    processed[row, index] = self._processed(row, draft.tokens[row, :index], logits[row, index])
                    # Behind an end token, or one that they forbid, processors need not know what to say: it is no text.
                    if token in self.eos_ids or (token is not None and processed[row, index, token] == -torch.inf):
                        break
        positions = [len(sequence.context) for sequence in self.going]
        accepted, tokens = self.draws.verify(processed, draft.tokens, draft.gammas, draft.probabilities, positions)
        reads = {"accepted": accepted, "tokens": tokens, "largest": processed.amax(-1)}
        reads |= {f"draft {index}": part.amax(-1) for index, part in enumerate(draft.logits)}
        if self.log_probabilities:
            picked = logits.gather(2, tokens[..., None])[..., 0]
            reads["log_probabilities"] = picked - logits.logsumexp(-1)
        if self.tracker.target_signals or self.decoder.record_signals:
            reads |= target_signals(logits[torch.arange(len(accepted), device=self.device), accepted])
        most = draft.tokens.shape[1]
        wants_drafted = most and (self.tracker.draft_signals or self.decoder.record_signals)
        if wants_drafted and draft.logits and not draft.signals:
            reads |= drawn_signals(torch.stack(draft.logits[:most], dim=1), draft.tokens)
        if not self.looks_inside:
            reads["drafted"] = draft.tokens
        found = _read(reads)
        if wants_drafted and draft.logits and draft.signals:
            found |= {name: np.stack([part[name] for part in draft.signals[:most]], axis=1) for name in DRAWN_SIGNALS}
        return found

    def _check_logits(self, draft: _Draft, found: Read, accepted: Sequence[int]) -> None:
        """Refuse what would go wrong silently: NaN wins every comparison, and without a token there is no choice.

        Of the target what counts is where tokens are committed. Behind them its processors may leave nothing.
        """
        for row, sequence in enumerate(self.going):
            of_draft = [found[f"draft {index}"][row] for index in range(draft.forwards[row]) if draft.logits]
            committed = found["tokens"][row, : accepted[row] + 1].astype(int).tolist()
            count = next((index + 1 for index, token in enumerate(committed) if token in self.eos_ids), len(committed))
            for model, largest in (("draft", of_draft), ("target", found["largest"][row, :count])):
                for index, value in enumerate(largest):
                    where = f"behind {sequence.position + index} tokens of the text"
                    if np.isnan(value):
                        raise SpecKVError(
                            f"the logits of the {model} hold NaN {where}; choose another compression, or compute in "
                            "float32"
                        )
                    if model == "target" and value == -np.inf:
                        raise SpecKVError(f"the logits processors leave no possible token {where}; relax them")

    def _up_to_end(self, gammas: list[int], found: Read) -> tuple[list[int], list[int]]:
        """Tokens verified and accepted in each sequence, up to a drafted end token.

        A draft that looks at its tokens stops there by itself; one that does not is cut here to the same.
        """
        accepted = found["accepted"].astype(int).tolist()
        if self.looks_inside:
            return gammas, accepted
        gammas = list(gammas)
        for row, gamma in enumerate(gammas):
            tokens = found["drafted"][row, :gamma].astype(int).tolist()
            gammas[row] = next((index + 1 for index, token in enumerate(tokens) if token in self.eos_ids), gamma)
        return gammas, [min(pair) for pair in zip(gammas, accepted, strict=True)]

    def _learn(
        self, gammas: list[int], accepted: list[int], of_draft: Signals, of_target: Signals, seconds: float
    ) -> None:
        """Let features and policy take in the outcome, before anything is cut off at the end of the text."""
        drafted, agreed = np.array(gammas), np.array(accepted)
        self.tracker.verified(drafted, agreed, of_draft, of_target)
        if self.observes:
            self.policy.observe(Outcome(drafted, agreed, np.full(len(gammas), seconds)), self.state)

    def _drop_ended(self) -> None:
        """Go on with the sequences that have not ended."""
        left = [row for row, sequence in enumerate(self.going) if not sequence.finish_reason]
        if len(left) == len(self.going):
            return
        for sequence in self.going:
            if sequence.finish_reason:
                sequence.seconds = sum(step.seconds for step in sequence.steps)
        self.going = [self.going[row] for row in left]
        if left:
            rows = np.array(left)
            self.target.select(left)
            self.drafting.select(left)
            self.draws.select(left)
            self.tracker.select(rows)
            self.tracker.batch_size = len(left)
            self.state = select_rows(self.state, rows)


def _check_prompts(prompts: list[list[int]], max_new_tokens: int, target: LanguageModel) -> None:
    """Refuse what the model would take for an index out of range."""
    most = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    for tokens in prompts:
        if not 0 <= min(tokens) <= max(tokens) < target.vocabulary_size:
            raise SpecKVError(f"the prompt holds ids beyond those of {target.name}, 0 to {target.vocabulary_size - 1}")
        if most and len(tokens) + max_new_tokens > most:
            raise SpecKVError(
                f"the prompt of {len(tokens)} tokens and {max_new_tokens} new ones are more than the {most} positions "
                f"of {target.name}; shorten one of them"
            )


def _read(tensors: Mapping[str, torch.Tensor]) -> Read:
    """Tensors by name as arrays, in one transfer from the device. float32 holds token ids up to 2^24 exactly."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return {name: tensor.numpy() for name, tensor in tensors.items()}  # there is nothing to transfer
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors.values()]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
