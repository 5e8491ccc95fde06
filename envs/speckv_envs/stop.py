"""speckv/ReplayStop-v0: stop or go after each drafted token, on recorded sequences."""

from collections.abc import Mapping

from gymnasium.vector import AutoresetMode

from speckv.costs import CostModel
from speckv.traces import Rollouts, TraceDataset
from speckv_envs.games import GameEnv, GameVectorEnv
from speckv_envs.recorded import StopGame


class ReplayStopEnv(GameEnv):
    """
    ## Description
    An episode is one recorded sequence, as in `speckv/Replay-v0`, but the agent decides token by token: once before
    the draft of a step whether to draft at all, and behind each drafted token whether to draft another. A token that
    was drafted is verified. In the contract of `speckv.policy.Policy` these are `choose_gamma` (0, or no limit) and
    `keep_drafting`; `draw_token`, which pays for a distribution to look at, is not played here.

    ## Action Space
    `Discrete(2)`: 0 stops, and the target verifies what was drafted; 1 drafts a token. Where that was the last one
    that the sequence has room for, the target verifies at once.

    ## Observation Space
    `Box(0, high, (25,), float32)`: the 19 numbers of `speckv/Replay-v0`, which stay as they are during a step, and
    what is known of the token just drafted. Before the draft these are all 0.

    | name | unit | range | meaning |
    | --- | --- | --- | --- |
    | `draft_index` | tokens | 0 to `gamma_max` | its position in the draft, from 1 |
    | `draft_entropy` | nats | 0 to 24 ln 2 | of the draft's distribution at this token |
    | `draft_top1` | probability | 0 to 1 | of the draft's likeliest token |
    | `draft_top2` | probability | 0 to 1 | of the second likeliest |
    | `draft_top10` | probability | 0 to 1 | of the ten likeliest together |
    | `draft_probability` | probability | 0 to 1 | of the drafted token |

    ## Rewards
    0 for drafting. The action that ends the draft gets the reward of the whole step, drafting included; its forms are
    those of `speckv/Replay-v0`. Do not discount: a longer draft would lose by being more actions.

    ## Starting State
    A sequence drawn at random (`options={"sequence": row}` chooses one), nothing committed or drafted.

    ## Episode End
    Terminates when the recorded text has been committed. Never truncates.

    ## Arguments
    `traces`, `costs`, `reward`, `rate` as of `speckv/Replay-v0`; the vector form takes `num_envs` and `autoreset_mode`.

    ## Information
    As of `speckv/Replay-v0`. While drafting goes on, all of a step's numbers are 0.

    ## Version History
    - v0: first.
    """

    def __init__(
        self,
        traces: Rollouts | TraceDataset | None = None,
        costs: CostModel | None = None,
        reward: str = "throughput",
        rate: float | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(StopGame(1, traces, costs, reward, rate))


class ReplayStopVectorEnv(GameVectorEnv):
    """`ReplayStopEnv`, many episodes at once; see `GameVectorEnv`."""

    def __init__(
        self,
        num_envs: int,
        traces: Rollouts | TraceDataset | None = None,
        costs: CostModel | None = None,
        reward: str = "throughput",
        rate: float | Mapping[str, float] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(StopGame(num_envs, traces, costs, reward, rate), autoreset_mode)
