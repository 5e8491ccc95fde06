"""What every policy must keep to, wherever it runs."""

from collections.abc import Callable, Mapping

from speckv.costs import CostModel
from speckv.policy import Clairvoyant, Policy
from speckv.testing.checks import Check, expecting, make_checks
from speckv.testing.policies.cases import Case, if_it_plays
from speckv.testing.policies.deciding import (
    answers_in_range,
    can_be_interleaved,
    decides_each_row_alone,
    draws_blindly,
    foresees_in_range,
    keeps_its_memory_layout,
    keeps_nothing_hidden,
    serves_a_batch,
    states_its_propensity,
)
from speckv.testing.policies.decoding import decodes_live_as_replayed, decodes_losslessly
from speckv.testing.policies.identity import (
    asks_for_known_features,
    decides_something,
    describes_itself,
    keeps_state_by_sequence,
    reads_its_features,
    stores_parameters,
)
from speckv.testing.policies.learning import (
    fits_anew,
    fits_by_seed,
    fits_step_logs,
    fits_without_changing_parameters,
    refuses_useless_logs,
    saves_no_pickle,
    survives_saving,
)
from speckv.testing.policies.looking import leaves_the_recording_alone, sees_no_future
from speckv.testing.policies.surviving import (
    copes_with_every_compression,
    copes_with_extreme_signals,
    copes_with_gamma_max_1,
    copes_with_no_rows,
    copes_with_short_texts,
    copes_with_unknown_costs,
    decides_in_time,
    refuses_in_one_line,
)
from speckv.traces import Rollouts


def policy_checks(
    policy: Policy,
    *,
    traces: Rollouts | None = None,
    costs: CostModel | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of a policy. None of them changes it: they work on clones, which they fit themselves.

    Args:
        policy: with the parameters to be checked.
        traces, costs: what it is fitted on and played on; by default a small recording made up by the kit.
        expected_failed_checks: name of a check -> why it fails.

    Raises:
        SpecKVError: no check has such a name.
    """
    case = Case(policy, traces, costs)
    of_all: list[Callable[[Case], None]] = [
        stores_parameters,
        describes_itself,
        asks_for_known_features,
        refuses_in_one_line,
        answers_in_range,
    ]
    if isinstance(policy, Clairvoyant):
        of_its_kind = [foresees_in_range]
    else:
        of_all += [decides_something, keeps_state_by_sequence]
        of_online, of_others = [serves_a_batch, keeps_its_memory_layout], [decides_each_row_alone, can_be_interleaved]
        of_its_kind = [
            reads_its_features,
            *(of_online if policy.online else of_others),
            *([states_its_propensity] if policy.overrides("choose_gamma") else []),
            *([draws_blindly] if policy.overrides("draw_token") else []),
            sees_no_future,
            copes_with_no_rows,
            decides_in_time,
            decodes_live_as_replayed,
            decodes_losslessly,
        ]
    if policy.online or type(policy).fit is not Policy.fit:
        of_its_kind += [fits_by_seed, fits_anew, fits_without_changing_parameters]
    if policy.overrides("fit_steps"):
        of_its_kind += [fits_step_logs, refuses_useless_logs]
    of_its_kind += [
        keeps_nothing_hidden,
        leaves_the_recording_alone,
        survives_saving,
        saves_no_pickle,
        copes_with_extreme_signals,
        copes_with_short_texts,
        copes_with_gamma_max_1,
        copes_with_every_compression,
        copes_with_unknown_costs,
    ]
    functions = [*of_all, *map(if_it_plays, of_its_kind)]
    return expecting(make_checks(policy.label, functions, case), expected_failed_checks)
