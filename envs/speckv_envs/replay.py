"""speckv/Replay-v0: choosing gamma on recorded sequences."""

from collections.abc import Mapping, Sequence

from gymnasium.vector import AutoresetMode

from speckv.costs import CostModel
from speckv.traces import Rollouts, TraceDataset
from speckv_envs.games import GameEnv, GameVectorEnv
from speckv_envs.recorded import ReplayGame


class ReplayEnv(GameEnv):
    """
    ## Description
    An episode is one recorded sequence. In each step the agent chooses how many tokens the draft model proposes;
    the recording says how many of them the target accepts, and the cost model how long the step takes. The
    environment replays exactly what a live decoder would have done. The agent's own time is not counted.

    ## Action Space
    `Discrete(len(gammas))`: an index into `gammas`. A gamma beyond what the sequence still has room for is cut.

    With `probe`, one token is drafted before the action; it is paid for and verified in any case. The action then says
    how many *more* to draft.

    ## Observation Space
    `Box(0, high, (19,), float32)`: what is known before the draft, not scaled. *Largest* is the largest float32:
    there is no bound.

    | name | unit | range | meaning |
    | --- | --- | --- | --- |
    | `position` | tokens | 0 to `max_new_tokens` | committed so far |
    | `context_length` | tokens | 0 to largest | of the prompt and committed so far |
    | `compression=fp32` | 0 or 1 | 0 to 1 | whether the target is stored in 32-bit floating point |
    | `compression=bf16` | 0 or 1 | 0 to 1 | in 16-bit brain floating point |
    | `compression=fp16` | 0 or 1 | 0 to 1 | in 16-bit floating point |
    | `compression=int8` | 0 or 1 | 0 to 1 | in bitsandbytes LLM.int8() |
    | `compression=nf4` | 0 or 1 | 0 to 1 | in bitsandbytes 4-bit NormalFloat |
    | `cost_ratio` | ratio | 0 to largest | seconds of a draft forward to those of a one-token target forward |
    | `is_first` | 0 or 1 | 0 to 1 | 1 in the first step |
    | `last_gamma` | tokens | 0 to `gamma_max` | drafted in the previous step |
    | `last_accepted` | tokens | 0 to `gamma_max` | accepted in the previous step |
    | `last_mean_entropy` | nats | 0 to 24 ln 2 | mean draft entropy over the most recent step that drafted |
    | `last_max_entropy` | nats | 0 to 24 ln 2 | maximum of it |
    | `last_mean_top1` | probability | 0 to 1 | mean probability of the draft's likeliest token over that step |
    | `last_min_top1` | probability | 0 to 1 | minimum of it |
    | `running_acceptance` | probability | 0 to 1 | (accepted + 1) / (tried + 2) in this sequence |
    | `target_entropy` | nats | 0 to 24 ln 2 | of the target at the last committed token; 0 in the first step |
    | `target_margin` | logits | 0 to largest | of the target there, its likeliest token over the second |
    | `batch_size` | sequences | 0 to largest | decoded together: as many as the costs are of, mostly 1 |

    With `probe` there are 25, those above and what is known of the token that was drafted; all are 0 where there was
    no room for one:

    | name | unit | range | meaning |
    | --- | --- | --- | --- |
    | `draft_index` | tokens | 0 to `gamma_max` | its position in the draft, from 1 |
    | `draft_entropy` | nats | 0 to 24 ln 2 | of the draft's distribution at this token |
    | `draft_top1` | probability | 0 to 1 | of the draft's likeliest token |
    | `draft_top2` | probability | 0 to 1 | of the second likeliest |
    | `draft_top10` | probability | 0 to 1 | of the ten likeliest together |
    | `draft_probability` | probability | 0 to 1 | of the drafted token |

    ## Rewards
    - `reward="throughput"`: committed tokens / seconds of the step.
    - `reward="average"`: committed tokens - `rate` * seconds. Over a whole episode, not discounted, this is the length
      of the text - `rate` * its seconds: the one form whose best policy is the one with the best throughput. Set `rate`
      to the throughput to be improved on.
    - `reward="tokens"`: committed tokens of the step, as the SpecKV paper rewards them. Time does not count.
    - `reward="accepted"`: accepted tokens / seconds of the step, as Learning to Draft rewards them. Not to speculate
      is worth nothing there, however slow the draft.

    ## Starting State
    A sequence drawn at random (`options={"sequence": row}` chooses one), nothing committed.

    ## Episode End
    Terminates when the recorded text has been committed. Never truncates.

    ## Arguments
    - `traces`: `Rollouts` or a `TraceDataset`; by default the recording that ships with speckv.
    - `costs`: a `CostModel`; by default the first that ships with speckv.
    - `gammas`: the choices; by default 0 to `gamma_max` of the traces, with `probe` to one less.
    - `reward`: `throughput` (the default), `average`, `tokens` or `accepted`.
    - `rate`: of `average`, tokens a second: a number, or one for each compression by name. By default what decoding
      without speculation reaches at each.
    - `probe`: whether to draft one token before each action; False by default.

    The vector form takes `num_envs` and `autoreset_mode`, too; see `speckv_envs.games.GameVectorEnv`.

    ## Information
    After a reset `sequence`, its row in the traces. After a step `gamma`, `accepted`, `committed` (tokens), `seconds`,
    `forwards` (of the draft) and, with `reward="average"`, `rate` (tokens a second). committed = accepted + 1, but for
    one less where the text ended with its last accepted token.

    ## Version History
    - v0: first.
    """

    def __init__(
        self,
        traces: Rollouts | TraceDataset | None = None,
        costs: CostModel | None = None,
        gammas: Sequence[int] | None = None,
        reward: str = "throughput",
        rate: float | Mapping[str, float] | None = None,
        probe: bool = False,
    ) -> None:
        super().__init__(ReplayGame(1, traces, costs, gammas, reward, rate, probe))


class ReplayVectorEnv(GameVectorEnv):
    """`ReplayEnv`, many episodes at once; see `GameVectorEnv`."""

    def __init__(
        self,
        num_envs: int,
        traces: Rollouts | TraceDataset | None = None,
        costs: CostModel | None = None,
        gammas: Sequence[int] | None = None,
        reward: str = "throughput",
        rate: float | Mapping[str, float] | None = None,
        probe: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(ReplayGame(num_envs, traces, costs, gammas, reward, rate, probe), autoreset_mode)
