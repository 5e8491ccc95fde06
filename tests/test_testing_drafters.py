"""The kit finds nothing wrong with the drafters, and what is wrong with each of these bad ones."""

import pytest
import torch

from speckv.live import Drafter, ModelDrafter, PromptLookup, early_exit
from speckv.live.drafting import Drafting, ModelDrafting
from speckv.testing import CheckFailed, check_drafter, drafter_checks, parametrize, report
from speckv.testing.pairs import tiny_pair


def draft_model(target):
    return tiny_pair().draft


def prompt_lookup(target):
    return PromptLookup(longest=2)


GOOD = [(draft_model, {}), (prompt_lookup, {}), (early_exit, {"layers": 1})]


@parametrize(check for factory, parameters in GOOD for check in drafter_checks(factory, **parameters))
def test_nothing_is_wrong_with_a_good_drafter(check):
    check()


class _Bad(ModelDrafter):
    """A draft model, at work in a flawed way."""

    work = ModelDrafting

    def start(self, contexts, capacity=None, kept=None):
        return self.work(super().start(contexts, capacity, kept).cached)


def bad(**methods):
    """A factory of draft models with these methods at work."""

    def factory(target):
        drafter = _Bad(tiny_pair().draft)
        drafter.work = type("Flawed", (ModelDrafting,), methods)
        return drafter

    return factory


class Telepathic(ModelDrafter):
    signals = frozenset({"draft_top1", "mood"})


class Mute(PromptLookup):
    """Has no distribution, and promises what is computed from one."""

    signals = frozenset({"draft_top1"})


def begins_with_more(self, contexts, limits):
    return ModelDrafting.begin(self, contexts, [limit + (limit == 1) for limit in limits])


def next_in_doubles(self, previous, rows):
    return ModelDrafting.next(self, previous, rows).double()


def next_by_chance(self, previous, rows):
    logits = ModelDrafting.next(self, previous, rows)
    return logits + 20 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(torch.seed() % 2**31))


def begins_and_clears(self, contexts, limits):
    answer = ModelDrafting.begin(self, contexts, limits)
    limits[0] = 0
    return answer


def ends_without_rolling_back(self, lengths):
    self.cached.roll_back(self._known)
    self.cached.lengths = [min(pair) for pair in zip(self._known, lengths, strict=True)]


class Skipping(ModelDrafting):
    """Takes every step for one in which it drafts: what was committed in between it never sees."""

    def begin(self, contexts, limits):
        if max(limits) == 0:
            self.missed = True
        return super().begin(contexts, limits)

    def next(self, previous, rows):
        logits = super().next(previous, rows)
        return -logits if getattr(self, "missed", False) else logits


def next_of_the_first(self, previous, rows):
    logits = ModelDrafting.next(self, previous, rows)
    return logits[:1].expand_as(logits)


def selects_from_the_front(self, rows):
    self.cached.select(range(len(rows)))


class Clinging(ModelDrafter):
    """Goes on from a kept cache as if it held all of the text."""

    def start(self, contexts, capacity=None, kept=None):
        drafting = super().start(contexts, capacity, kept)
        if kept is not None:
            drafting.next = lambda previous, rows: -ModelDrafting.next(drafting, previous, rows)
        return drafting


class Rewriting(ModelDrafter):
    """Meddles with the target while it drafts."""

    def __init__(self, model, target):
        super().__init__(model)
        self.target = target

    def start(self, contexts, capacity=None, kept=None):
        drafting = super().start(contexts, capacity, kept)
        end, target = drafting.end, self.target

        def meddle(lengths):
            end(lengths)
            target.model.lm_head.weight.data.mul_(-1)

        drafting.end = meddle
        return drafting


#: Check -> factory of a bad drafter, and the other checks that find fault with it as well.
SPECIMENS = {
    "names_known_signals": (lambda target: Telepathic(tiny_pair().draft), set()),
    "keeps_to_its_limits": (bad(begin=begins_with_more), set()),
    "answers_in_shape": (bad(next=next_in_doubles), set()),
    "gives_the_signals_it_names": (lambda target: Mute(), set()),
    "drafts_the_same_again": (
        bad(next=next_by_chance),
        {"rolls_back", "sits_out_a_step", "drafts_each_row_alone", "goes_on_with_some_rows",
         "goes_on_with_a_kept_cache"},
    ),
    "leaves_contexts_alone": (bad(begin=begins_and_clears), set()),
    "rolls_back": (bad(end=ends_without_rolling_back), {"sits_out_a_step"}),
    "sits_out_a_step": (lambda target: _with(Skipping), set()),
    "drafts_each_row_alone": (bad(next=next_of_the_first), {"goes_on_with_some_rows"}),
    "goes_on_with_some_rows": (bad(select=selects_from_the_front), {"decodes_losslessly"}),
    "goes_on_with_a_kept_cache": (lambda target: Clinging(tiny_pair().draft), set()),
    "decodes_losslessly": (lambda target: Rewriting(tiny_pair().draft, target), set()),
}  # fmt: skip


def _with(work):
    drafter = _Bad(tiny_pair().draft)
    drafter.work = work
    return drafter


@pytest.fixture
def restored():
    """The target is afterwards what it was."""
    weights = tiny_pair().target.model.lm_head.weight.data.clone()
    yield
    tiny_pair().target.model.lm_head.weight.data.copy_(weights)


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_bad_drafter_is_caught(name, restored):
    (check,) = (check for check in drafter_checks(SPECIMENS[name][0], subject="bad") if check.name == name)
    (result,) = report([check]).results
    assert result.status == "failed" and result.message and "\n" not in result.message


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIMENS)
def test_no_other_check_catches_it(name, restored):
    factory, also = SPECIMENS[name]
    made = report(drafter_checks(factory, subject="bad"))
    assert {result.check.name for result in made.failures} == {name} | also, str(made)


def test_every_check_has_a_bad_drafter():
    assert {check.name for check in drafter_checks(draft_model)} == set(SPECIMENS), "add a drafter that it catches"


def test_the_first_failure_is_raised():
    with pytest.raises(CheckFailed, match="bad: names_known_signals: it names the signal 'mood'; the known ones are"):
        check_drafter(lambda target: Telepathic(tiny_pair().draft), subject="bad")


def test_what_is_no_drafter():
    class Nothing(Drafter):
        def start(self, contexts, capacity=None, kept=None):
            return Drafting()

    made = report(drafter_checks(lambda target: Nothing(), subject="nothing"))
    assert len(made.failures) > 8 and "TypeError" in made.failures[-1].message
