"""vLLM's draft-model proposer, with a policy that says how long each request's draft gets."""

import contextlib
import multiprocessing.util
import time
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from speckv import runtime
from speckv.steplog_writer import StepLogWriter
from speckv_vllm.settings import Settings
from speckv_vllm.texts import Host, Text

#: Where a request of vLLM keeps its text: it then lasts as long as the request, through preemption, and no longer.
_TEXT = "_speckv_text"


class _Ended(Exception):
    """No request takes another token: leaves the loop in which vLLM drafts, between two forwards."""


class PolicyProposer(DraftModelProposer):
    """Drafts for a batch until its longest draft ends, and hands each request its own part of that.

    The policy of a request is told what came of its last step, says how many tokens to draft at most, sees the signals
    of each token that is drafted, and may end its draft there. Tokens behind a draft's end, which were drafted for
    others in the batch, are forgotten before anything has looked at them: what was drafted is verified.

    Without settings for speckv it is vLLM's own proposer.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        settings = Settings.of(vllm_config)
        self.host = None if settings is None else _host(settings, vllm_config)
        if self.host and (log := self.host.log):
            # A worker of vLLM ends as processes of multiprocessing do, which run no exit handlers but these. In the
            # user's own process an engine may end long before that.
            multiprocessing.util.Finalize(self, log.close, exitpriority=0)
        # Of the engine's step that was verified last: its requests, tokens committed and verified by each, and signals
        # of the target at each row of its logits.
        self._requests: list[Any] = []
        self._counts = self._target = torch.empty(0)
        self._verified: list[int] = []
        # Of the draft: texts by row, those that take another token, and of each token (rows, ...).
        self._texts: list[Text | None] = []
        self._going: list[tuple[int, Text]] = []
        self._tokens: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] = []
        self._signals: list[torch.Tensor] = []
        self._log_p = torch.empty(0)
        self._began, self._mixed = 0.0, True
        if self.host:
            self._listen(runner)

    def _listen(self, runner: Any) -> None:
        """Measure the target's signals before a grammar forbids tokens and vLLM samples, which change the logits."""
        sample_tokens = runner.sample_tokens

        @torch.inference_mode()
        def listening(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            if state is not None and self.host and self.host.target_signals:
                self._target = _target_signals(self.host.target_signals, state.logits)
            return sample_tokens(grammar_output)

        runner.sample_tokens = listening

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: torch.Tensor, requests: dict[str, Any], gpu_input_batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, *args, **kwargs)
        self._requests = [requests[name] for name in gpu_input_batch.req_ids]
        self._counts, self._verified = found[1], [0] * len(self._requests)
        return found

    def prepare_inputs_padded(self, common_attn_metadata: Any, spec_decode_metadata: Any, *args: Any) -> Any:
        self._verified = spec_decode_metadata.num_draft_tokens
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, *args)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor | list[list[int]]:
        if self.host is None:
            return super().propose(num_speculative_tokens, *args, **kwargs)
        self._observe()
        here = [(row, text) for row, text in enumerate(self._texts) if text]
        longest = max([text.choose(num_speculative_tokens, len(here)) for _, text in here], default=0)
        self._going = [(row, text) for row, text in here if text.going]
        self._tokens, self._probabilities, self._signals = [], [], []
        with contextlib.suppress(_Ended):
            super().propose(longest, *args, **kwargs)
        if self._signals and not self.host.stops:
            self._see(self._signals)
        self._last_draft_probs = torch.stack(self._probabilities, dim=1) if self._probabilities else None
        tokens = torch.stack(self._tokens, dim=1).tolist() if self._tokens else [[]] * len(self._texts)
        return [row[: text.drafted] if text else [] for row, text in zip(tokens, self._texts, strict=True)]

    def _observe(self) -> None:
        """Tell the policies what came of the step that ends here, and find the texts of the one that begins."""
        assert self.host is not None
        now, mixed = time.perf_counter(), False
        ended: list[tuple[Text, int, int, int]] = []
        texts: list[Text | None] = []
        end = 0
        for request, count, verified in zip(self._requests, self._counts.tolist(), self._verified, strict=True):
            end += verified + 1
            if not count:  # a part of a prompt, whose end is still to come
                texts.append(None)
                mixed = True
                continue
            text: Text | None = getattr(request, _TEXT, None)
            if text and text.tokens == request.num_tokens and verified <= text.drafted:
                ended.append((text, verified, count - 1, end - 1 - verified + count - 1))
                # One that had been put aside took in tokens anew, besides its last.
                mixed |= request.num_computed_tokens + 1 < text.tokens
            else:
                # It is new; or it has come so close to the longest text there may be that vLLM drafts zeros by itself.
                tokens = request.num_tokens + count  # vLLM has not added those of this step yet
                text = Text(self.host, request.req_id, tokens)
                setattr(request, _TEXT, text)
                mixed = True
            texts.append(text)
        names = self.host.target_signals
        target = self._target[[at for *_, at in ended]].tolist() if names else [()] * len(ended)
        # Where a prompt was taken in as well, by the draft at the beginning of the step or by the target, the time is
        # not the step's own.
        for (text, verified, accepted, _), signals in zip(ended, target, strict=True):
            seconds = None if mixed or self._mixed else now - self._began
            text.observe(verified, accepted, dict(zip(names, signals, strict=True)), seconds)
        self._texts, self._mixed, self._began = texts, mixed, now

    def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> Any:
        tokens, probabilities = super()._sample_draft_tokens(hidden_states, sampling_metadata)
        if self.host is None:
            return tokens, probabilities
        self._tokens.append(tokens)
        if probabilities is not None:
            self._probabilities.append(probabilities)
        if self.host.looks_inside:
            signals = _draft_signals(self.host.bundle.signals, self._log_p)
            if probabilities is not None:  # where the likeliest is drawn, it need not be told
                signals.append(self._log_p.gather(-1, tokens[:, None])[:, 0].exp())
            self._signals.append(torch.stack(signals, dim=-1) if signals else self._log_p.new_empty(len(tokens), 0))
            if self.host.stops and not self._see(self._signals[-1:]):
                raise _Ended
        return tokens, probabilities

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.host is None or not self.host.looks_inside:
            return super()._greedy_sample(hidden_states)
        logits = self.model.compute_logits(hidden_states)
        self._log_p = torch.log_softmax(logits.float(), dim=-1)
        return logits.argmax(dim=-1)

    def _sample_from_logits(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if self.host and self.host.looks_inside:  # before the temperature changes them in place
            self._log_p = torch.log_softmax(logits.float(), dim=-1)
        return super()._sample_from_logits(logits, sampling_metadata)

    def _see(self, signals: list[torch.Tensor]) -> bool:
        """Show the policies one token or more; whether any of them takes another."""
        assert self.host is not None
        names = self.host.bundle.signals
        for of_token in torch.stack(signals).tolist():
            for row, text in self._going:
                values = of_token[row]
                probability = values[len(names)] if len(values) > len(names) else None
                text.see(dict(zip(names, values, strict=False)), probability)
            self._going = [(row, text) for row, text in self._going if text.going]
        return bool(self._going)


def _host(settings: Settings, config: VllmConfig) -> Host:
    bundle, log = runtime.load(settings.bundle), None
    if settings.log is not None and get_tensor_model_parallel_rank() == 0:
        log = StepLogWriter(settings.log, provenance={"source": f"vLLM {vllm.__version__}", "policy": bundle.policy})
    return Host(bundle, settings.start(config), log)


def _draft_signals(names: tuple[str, ...], log_p: torch.Tensor) -> list[torch.Tensor]:
    """Signals of distributions (rows, vocabulary), (rows,) each; see `speckv.features.FEATURES`."""
    top = log_p.topk(min(10, log_p.shape[-1]), dim=-1).values.exp()
    measures = {
        "draft_entropy": lambda: _entropy(log_p),
        "draft_top1": lambda: top[:, 0],
        "draft_top2": lambda: top[:, 1],
        "draft_top10": lambda: top.sum(-1).clamp(max=1),
    }
    return [measures[name]() for name in names]


def _target_signals(names: tuple[str, ...], logits: torch.Tensor) -> torch.Tensor:
    """Signals at each row of the target's logits (rows, vocabulary), (rows, names)."""
    logits = logits.float()
    top = logits.topk(2, dim=-1).values
    measures = {
        "target_entropy": lambda: _entropy(torch.log_softmax(logits, dim=-1)),
        "target_margin": lambda: top[:, 0] - top[:, 1],
    }
    return torch.stack([measures[name]() for name in names], dim=-1)


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    """In nats, of the last dimension, with 0 log 0 = 0."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1).clamp(max=0.0)
