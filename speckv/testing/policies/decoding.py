"""How a policy decodes live: as replayed, losslessly, in time."""

import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.features import Features
from speckv.policy import Outcome, Policy, State
from speckv.replaying import replay
from speckv.testing.checks import require, require_package
from speckv.testing.futures import copy_of
from speckv.testing.policies.cases import Case, Watched, fit_quietly
from speckv.testing.recordings import make_costs
from speckv.traces import Rollouts


class _WithSeconds(Watched):
    """Is told, step by step, that the step took as long as this."""

    def __init__(self, policy: Policy, seconds: npt.NDArray[np.float64]) -> None:
        super().__init__(policy)
        self.seconds = iter(seconds)

    def observe(self, outcome: Outcome, state: State) -> None:
        super().observe(replace(outcome, seconds=np.array([next(self.seconds)])), state)


def _live_case(case: Case) -> tuple[Policy, Rollouts, CostModel]:
    """A policy that was fitted on the recording of the tiny pair; the recording, and costs of it."""
    require_package("transformers", "live")
    require_package("torch", "live")
    from speckv.testing.pairs import tiny_recording

    traces, costs = copy_of(tiny_recording()), make_costs(draft=0.02, compressions=["fp32"])
    return fit_quietly(case.clone(), traces, costs), traces, costs


def decodes_live_as_replayed(case: Case) -> None:
    """The live decoder and the replay take the same steps, on a tiny pair of models with random weights."""
    policy, traces, costs = _live_case(case)
    from speckv.live import SpeculativeDecoder
    from speckv.testing.pairs import tiny_pair, tiny_texts

    decoding = copy.deepcopy(policy)
    run = replay(policy, traces, costs)
    target, draft = tiny_pair()
    for row, identifier in enumerate(traces.ids):
        prompt, _ = tiny_texts()[int(identifier[1:])]
        mine = run.sequence == row
        told = _WithSeconds(decoding, run.seconds[mine])
        decoder = SpeculativeDecoder(target, draft, told, gamma_max=traces.gamma_max, costs=costs)
        steps = decoder.generate(prompt, traces.manifest.max_new_tokens).steps
        live = [(step.position, step.gamma, step.accepted, step.forwards) for step in steps]
        columns = (run.position, run.gamma, run.accepted, run.forwards)
        replayed = list(zip(*(column[mine].tolist() for column in columns), strict=True))
        require(
            live == replayed,
            f"sequence {row} is decoded in the steps {live}, and replayed in {replayed}, each (position, gamma, "
            "accepted, forwards)",
        )


class _Nothing(Policy):
    """Drafts nothing."""

    name = "nothing"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 0


def decodes_losslessly(case: Case) -> None:
    """Live text is the target's own, greedy, and sampled with Gumbel noise that the policy must have no part in."""
    policy, traces, costs = _live_case(case)
    from speckv.live import Gumbel, SpeculativeDecoder
    from speckv.testing.pairs import tiny_pair, tiny_texts

    target, draft = tiny_pair()
    alone = SpeculativeDecoder(target, draft, _Nothing(), sampler=Gumbel(0.8))
    for prompt, own in tiny_texts():
        decoder = SpeculativeDecoder(target, draft, copy.deepcopy(policy), gamma_max=traces.gamma_max, costs=costs)
        said = decoder.generate(prompt, traces.manifest.max_new_tokens).tokens
        require(said == own, f"the target alone says {own}, and with the policy {said}")
        decoder.sampler = Gumbel(0.8)
        said, own = (host.generate(prompt, len(own), seed=3).tokens for host in (decoder, alone))
        require(said == own, f"sampling with the same noise, the target alone says {own}, and with the policy {said}")
