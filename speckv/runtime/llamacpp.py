"""A policy bundle that drafts for llama-cpp-python (tried: 0.3.36).

It needs NumPy and safetensors; a log needs pyarrow.
"""

import secrets
import time
from typing import TYPE_CHECKING, Any

import llama_cpp  # type: ignore[import-not-found, import-untyped, unused-ignore]
import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.runtime.bundle import Bundle

if TYPE_CHECKING:
    from speckv.steplog_writer import StepLogWriter

_HIDDEN = ("target_entropy", "target_margin")


class BundleDraftModel(llama_cpp.llama_speculative.LlamaDraftModel):  # type: ignore[misc, unused-ignore]
    """Drafts greedily with a second model, as many tokens as a bundle says; `Llama` takes it as its `draft_model`.

    The target tells it nothing of what came of a draft: that is read off the tokens that it hands over next. It asks
    for the first time behind the first token of a text, which counts as the prompt's last here, and what came of a
    text's last draft it never says. It knows no limit of a text either, so that a last draft may be too long.

    Args:
        bundle: what decides.
        draft: a `Llama` with the target's vocabulary, which nobody else may use meanwhile.
        compression: of the target, one of `speckv.compression.COMPRESSIONS`.
        cost_ratio: as of `Bundle.start`.
        log: takes every step.

    Attributes:
        steps: tokens drafted and accepted, of each step of the current text that is known.

    Raises:
        SpecKVError: the bundle reads what the target's distributions say.
    """

    def __init__(
        self,
        bundle: Bundle,
        draft: llama_cpp.Llama,
        compression: str = "bf16",
        cost_ratio: float | None = None,
        log: "StepLogWriter | None" = None,
    ) -> None:
        if hidden := [name for name in _HIDDEN if name in bundle.program.features]:
            raise SpecKVError(f"policy {bundle.policy!r} reads {', '.join(hidden)}, which llama-cpp-python can't show")
        self._bundle, self._compression, self._cost_ratio = bundle, compression, cost_ratio
        self._draft, self._log = draft, log
        self._sequence = bundle.start(0, compression, cost_ratio)
        self._context: list[int] = []
        self._drafted: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self._text, self._since = "", 0.0

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """The tokens of the next draft, (k,), behind `input_ids`, (n,): the prompt and all tokens so far."""
        context = input_ids.tolist()
        if not self._observe(context):
            self._sequence = self._bundle.start(len(context), self._compression, self._cost_ratio)
            self._text, self.steps = secrets.token_hex(8), []  # others may write to the same log
        self._context, self._drafted, self._since = context, [], time.perf_counter()
        self._drafted = self._make_draft(input_ids)
        return np.array(self._drafted, dtype=np.intc)

    def _observe(self, context: list[int]) -> bool:
        """Take in what came of the last draft, if these tokens go on behind it."""
        length = len(self._context)
        committed = context[length:]
        accepted = len(committed) - 1  # the last one is the target's own
        if not self._context or context[:length] != self._context:
            return False
        if not 0 <= accepted <= len(self._drafted) or committed[:-1] != self._drafted[:accepted]:
            return False
        self._sequence.observe(len(self._drafted), accepted)
        if self._log is not None:
            self._log.write(
                sequence=self._text,
                step=len(self.steps),
                gamma=len(self._drafted),
                accepted=accepted,
                seconds=time.perf_counter() - self._since,
                compression=self._compression,
            )
        self.steps.append((len(self._drafted), accepted))
        return True

    def _make_draft(self, context: npt.NDArray[np.intc]) -> list[int]:
        sequence, draft = self._sequence, self._draft
        most = min(sequence.choose_gamma(), draft.n_ctx() - len(context))
        if most <= 0:
            return []
        # What the draft has seen of this very text need not be seen again, but for one token that gives logits.
        seen = min(draft.n_tokens, len(context) - 1)
        same = draft.input_ids[:seen] == context[:seen]
        draft.n_tokens = seen if same.all() else int(same.argmin())
        unseen, drafted = context[draft.n_tokens :].tolist(), list[int]()
        while True:
            draft.eval(unseen)
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(draft.ctx, -1), shape=(draft.n_vocab(),))
            if not sequence.draw_token(**signals_of(logits, self._bundle.signals)):
                return drafted
            unseen = [int(logits.argmax())]
            drafted += unseen
            if len(drafted) >= most or unseen[0] == draft.token_eos() or not sequence.keep_drafting():
                return drafted


def signals_of(logits: npt.NDArray[np.float32], names: tuple[str, ...]) -> dict[str, float]:
    """Signals of a distribution, by name.

    Args:
        logits: (vocabulary,).
        names: of those that are wanted, as a bundle names them in `signals`.
    """
    below = logits - logits.max()
    odds = np.exp(below)
    total = float(odds.sum(dtype=float))
    found = {}
    if "draft_entropy" in names:
        found["draft_entropy"] = float(np.log(total) - odds.dot(below) / total)
    if "draft_top1" in names:
        found["draft_top1"] = 1 / total
    if {"draft_top2", "draft_top10"} & set(names):
        top = np.sort(np.partition(odds, -10)[-10:])
        found |= {"draft_top2": float(top[-2]) / total, "draft_top10": float(top.sum()) / total}
    return {name: found[name] for name in names}
