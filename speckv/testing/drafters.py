"""What every drafter must keep to. Its checks run on the tiny pair, and need the extra `live`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speckv.testing.checks import Check, expecting, make_checks, require, require_package
from speckv.testing.constant import Constant
from speckv.testing.pairs import BUDGET, PROMPTS, plain_tokens, tiny_pair
from speckv.traces import DRAFT_SIGNALS

if TYPE_CHECKING:
    import torch

    from speckv.live import Drafter, Drafting, LanguageModel

_LIMIT = 4


def drafter_checks(
    factory: "Callable[..., Drafter | LanguageModel]",
    *,
    subject: str | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
    **parameters: Any,
) -> list[Check]:
    """The checks of a drafter.

    Args:
        factory: as it is registered: called with the target, and with `parameters`.
        subject: what reports call it; the factory's name by default.
        expected_failed_checks: name of a check -> why it fails.

    Raises:
        SpecKVError: no check has such a name.
    """
    functions: list[Callable[[_Case], None]] = [
        names_known_signals,
        keeps_to_its_limits,
        answers_in_shape,
        gives_the_signals_it_names,
        drafts_the_same_again,
        leaves_contexts_alone,
        rolls_back,
        sits_out_a_step,
        drafts_each_row_alone,
        goes_on_with_some_rows,
        goes_on_with_a_kept_cache,
        decodes_losslessly,
    ]
    case = _Case(factory, parameters)
    return expecting(make_checks(subject or factory.__name__, functions, case), expected_failed_checks)


class _Case:
    """A drafter to be checked: how to make it, and texts to be drafted."""

    def __init__(self, factory: "Callable[..., Drafter | LanguageModel]", parameters: dict[str, Any]) -> None:
        self.factory, self.parameters = factory, parameters

    @property
    def target(self) -> "LanguageModel":
        require_package("transformers", "live")
        require_package("torch", "live")
        return tiny_pair().target

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """Of different lengths; they repeat themselves, so that something can be looked up in them."""
        from speckv.live.models import chat_tokens

        return [chat_tokens(self.target.tokenizer, f"{text} {text}") for text in PROMPTS]

    @functools.cached_property
    def texts(self) -> list[list[int]]:
        """What the target alone says to each prompt."""
        return [plain_tokens(self.target, prompt, BUDGET) for prompt in self.prompts]

    def make(self) -> "Drafter":
        from speckv.live import Drafter, ModelDrafter

        made = self.factory(self.target, **self.parameters)
        return made if isinstance(made, Drafter) else ModelDrafter(made)

    def start(self, contexts: Sequence[Sequence[int]]) -> "Drafting":
        drafting = self.make().start(_copies(contexts))
        drafting.prefill(_copies(contexts))
        return drafting


def _copies(contexts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a drafter may do to its arguments must not disturb the other checks."""
    return [list(context) for context in contexts]


def _draft(
    drafting: "Drafting", contexts: Sequence[Sequence[int]], limits: Sequence[int]
) -> "tuple[list[list[int]], list[torch.Tensor]]":
    """The greedy drafts of one step, which is left open, and what `next` answered."""
    import torch

    most, _ = drafting.begin(_copies(contexts), list(limits))
    answers: list[torch.Tensor] = []
    drafts: list[list[int]] = [[] for _ in contexts]
    tokens = None
    with torch.inference_mode():
        while rows := [row for row, draft in enumerate(drafts) if len(draft) < most[row]]:
            answers.append(drafting.next(tokens, rows))
            tokens = answers[-1] if answers[-1].dim() == 1 else answers[-1].argmax(dim=-1)
            for row in rows:
                drafts[row].append(int(tokens[row]))
    return drafts, answers


def _accepted(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many drafted tokens are those of the text."""
    return next((index for index, (one, two) in enumerate(zip(draft, text, strict=False)) if one != two), len(draft))


def _along(case: _Case, drafting: "Drafting", row: int, limits: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Draft one sequence along its text, one step for each limit: position and draft of each."""
    prompt, text = case.prompts[row], case.texts[row]
    steps, position = [], 0
    for limit in limits:
        if position >= len(text):
            break
        context = prompt + text[:position]
        (draft,), _ = _draft(drafting, [context], [limit])
        steps.append((position, draft))
        accepted = _accepted(draft, text[position:])
        drafting.end([len(context) + accepted])
        position += accepted + 1
    return steps


def _require_fresh(case: _Case, row: int, steps: list[tuple[int, list[int]]], limits: Sequence[int], when: str) -> None:
    """Raise CheckFailed unless each draft is that of a drafter which has just been started."""
    for (position, draft), limit in zip(steps, limits, strict=False):
        context = case.prompts[row] + case.texts[row][:position]
        (fresh,), _ = _draft(case.start([context]), [context], [limit])
        require(draft == fresh, f"{when}, behind {position} tokens it drafts {draft}, and when it starts there {fresh}")


def names_known_signals(case: _Case) -> None:
    """`signals` is a frozenset of names from `speckv.traces.DRAFT_SIGNALS`."""
    signals = case.make().signals
    require(isinstance(signals, frozenset), f"`signals` is a {type(signals).__name__}; it must be a frozenset")
    unknown = min(signals - set(DRAFT_SIGNALS), default="")
    require(not unknown, f"it names the signal {unknown!r}; the known ones are {', '.join(DRAFT_SIGNALS)}")


def keeps_to_its_limits(case: _Case) -> None:
    """`begin` answers with one number a sequence, from 0 to its limit, and with a lag that is 0 or more."""
    limits = [_LIMIT, 1, 0]
    drafting = case.start(case.prompts)
    most, lags = drafting.begin(_copies(case.prompts), list(limits))
    require(len(most) == len(lags) == len(limits), f"begin answers about {len(most)} of {len(limits)} sequences")
    for can, limit, lag in zip(most, limits, lags, strict=True):
        require(0 <= can <= limit, f"begin promises {can} tokens where {limit} may be drafted")
        require(lag >= 0, f"begin says that its first forward takes in {lag} tokens")


def answers_in_shape(case: _Case) -> None:
    """`next` answers with (n, vocabulary) float32 logits, or with (n,) tokens of the target's vocabulary."""
    import torch

    size, count = case.target.vocabulary_size, len(case.prompts)
    _, answers = _draft(case.start(case.prompts), case.prompts, [_LIMIT, 2, 1])
    for answer in answers:
        shape = tuple(answer.shape)
        if answer.dim() == 1:
            integers = not answer.is_floating_point() and answer.dtype != torch.bool
            require(integers and shape == (count,), f"its tokens are {answer.dtype} of shape {shape}")
        else:
            require(shape == (count, size), f"its logits have shape {shape}; they must have ({count}, {size})")
            require(answer.dtype == torch.float32, f"its logits are {answer.dtype}; they must be float32")
    drafts, _ = _draft(case.start(case.prompts), case.prompts, [_LIMIT] * count)
    beyond = [token for draft in drafts for token in draft if not 0 <= token < size]
    require(not beyond, f"it drafts {beyond[:1]}, beyond the {size} tokens of the target")


def gives_the_signals_it_names(case: _Case) -> None:
    """A drafter that names signals answers with logits, from which they are computed."""
    signals = case.make().signals
    _, answers = _draft(case.start(case.prompts), case.prompts, [_LIMIT] * len(case.prompts))
    missing = signals and any(answer.dim() == 1 for answer in answers)
    require(not missing, f"it names {', '.join(sorted(signals))}, and answers with tokens that have no distribution")


def drafts_the_same_again(case: _Case) -> None:
    """Started twice on the same text, it drafts the same."""
    for row, prompt in enumerate(case.prompts):
        first, second = (_draft(case.start([prompt]), [prompt], [_LIMIT])[0] for _ in range(2))
        require(first == second, f"behind prompt {row} it drafts {first}, and {second} when started once more")


def leaves_contexts_alone(case: _Case) -> None:
    """It does not change the lists that it is given: they are the host's own."""
    contexts, limits = _copies(case.prompts), [_LIMIT] * len(case.prompts)
    drafting = case.make().start(contexts)
    drafting.prefill(contexts)
    drafting.begin(contexts, limits)
    require(contexts == case.prompts, "it changes the contexts that it is given")
    require(limits == [_LIMIT] * len(limits), "it changes the limits that it is given")


def rolls_back(case: _Case) -> None:
    """Behind rejected tokens it drafts as if they had never been there."""
    limits = [_LIMIT] * 5
    for row, prompt in enumerate(case.prompts):
        _require_fresh(case, row, _along(case, case.start([prompt]), row, limits), limits, "after steps of its own")


def sits_out_a_step(case: _Case) -> None:
    """After steps in which nothing may be drafted it catches up."""
    limits = [2, 0, 0, _LIMIT, 0, _LIMIT]
    for row, prompt in enumerate(case.prompts):
        _require_fresh(
            case, row, _along(case, case.start([prompt]), row, limits), limits, "after steps without a draft"
        )


def drafts_each_row_alone(case: _Case) -> None:
    """Several sequences at once are drafted as each alone, however their drafts end."""
    drafting = case.start(case.prompts)
    limits = [_LIMIT, 1, 2]
    together, _ = _draft(drafting, case.prompts, limits)
    for row, prompt in enumerate(case.prompts):
        (alone,), _ = _draft(case.start([prompt]), [prompt], [limits[row]])
        require(together[row] == alone, f"in a batch it drafts {together[row]} in row {row}, and {alone} alone")
    _next_step(case, drafting, together, list(range(len(case.prompts))))


def _next_step(case: _Case, drafting: "Drafting", drafts: list[list[int]], rows: list[int]) -> None:
    """End a step of all sequences, go on with those at `rows`, and compare their next drafts with fresh ones."""
    accepted = [_accepted(draft, text) for draft, text in zip(drafts, case.texts, strict=True)]
    drafting.end([len(prompt) + count for prompt, count in zip(case.prompts, accepted, strict=True)])
    if len(rows) < len(case.prompts):
        drafting.select(rows)
    contexts = [case.prompts[row] + case.texts[row][: accepted[row] + 1] for row in rows]
    found, _ = _draft(drafting, contexts, [_LIMIT] * len(rows))
    for row, context, draft in zip(rows, contexts, found, strict=True):
        (alone,), _ = _draft(case.start([context]), [context], [_LIMIT])
        require(draft == alone, f"in the second step it drafts {draft} for sequence {row}, and {alone} alone")


def goes_on_with_some_rows(case: _Case) -> None:
    """When other sequences have ended, those that are left are drafted as before."""
    drafting = case.start(case.prompts)
    drafts, _ = _draft(drafting, case.prompts, [_LIMIT, 2, 1])
    _next_step(case, drafting, drafts, [0, 2])


def goes_on_with_a_kept_cache(case: _Case) -> None:
    """A chat that goes on from the kept cache is drafted as one whose text is computed anew."""
    from speckv.live import SpeculativeDecoder

    decoder = SpeculativeDecoder(case.target, case.make(), Constant(_LIMIT))
    first = decoder.generate(case.prompts[0], 8, keep_cache=True)
    longer = case.prompts[0] + first.tokens + case.prompts[1]
    found, fresh = (decoder.generate(longer, 12, cache=cache) for cache in (first.cache, None))
    steps = [[(step.gamma, step.accepted) for step in decoded.steps] for decoded in (found, fresh)]
    require(found.tokens == fresh.tokens, f"from a kept cache the text is {found.tokens}, and {fresh.tokens} without")
    require(steps[0] == steps[1], f"from a kept cache the steps (gamma, accepted) are {steps[0]}, not {steps[1]}")


def decodes_losslessly(case: _Case) -> None:
    """What is decoded with it is the target's own text: alone, in a batch, and sampled with the same noise."""
    from speckv.live import Gumbel, SpeculativeDecoder

    decoder = SpeculativeDecoder(case.target, case.make(), Constant(_LIMIT))
    batch = [decoded.tokens for decoded in decoder.generate_batch(case.prompts, BUDGET)]
    alone = SpeculativeDecoder(case.target, case.make(), Constant(0), sampler=Gumbel(0.8))
    for prompt, own, in_batch in zip(case.prompts, case.texts, batch, strict=True):
        said = decoder.generate(prompt, BUDGET).tokens
        require(said == own, f"the target alone says {own}, and with this drafter {said}")
        require(in_batch == own, f"the target alone says {own}, and with this drafter, in a batch, {in_batch}")
    sampling = SpeculativeDecoder(case.target, case.make(), Constant(_LIMIT), sampler=Gumbel(0.8))
    said, own = (host.generate(case.prompts[0], BUDGET, seed=3).tokens for host in (sampling, alone))
    require(said == own, f"sampling with the same noise, the target alone says {own}, and with this drafter {said}")
