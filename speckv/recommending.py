"""The best setting that a decoder without policies can hold, and what a policy would gain on top.

Settings and policies are treated alike: each sequence is played by the one that was fastest on the prompts of the other
folds. So what is expected of them is not the best of many on the very prompts that it was chosen on.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import joblib
import numpy as np

from speckv.comparison import folds_of, gain_interval, holm, permutation_p, play_held_out, with_decision_times
from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporters.settings import SettingsExporter, fastest
from speckv.exporting import Exporter
from speckv.features import FloatArray, IntArray
from speckv.plugins import make_exporter, make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import Rollouts

FORMAT = "speckv-recommendation"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Gain:
    """One throughput over another on the same held-out prompts.

    Attributes:
        gain: their ratio, minus 1.
        ci: its 95 % interval (paired bootstrap over prompts).
        p: of no difference (paired permutation over prompts), Holm-corrected for the questions of its row.
    """

    gain: float
    ci: tuple[float, float]
    p: float


@dataclass(frozen=True)
class Advice:
    """What to set for one compression of the target, or, of `all`, what comes of setting each as advised.

    Attributes:
        compression: name, or `all`.
        setting: in the decoder's own names, the fastest on all prompts; None of `all`.
        paste: the same as users give it to the decoder.
        throughput: expected committed tokens a second of the decoder so set, all sequences of a batch together.
        throughput_ci: its 95 % interval (bootstrap over prompts).
        over_plain, over_default: the setting against no speculation, and against what the decoder does if nobody sets
            anything; None if it does not speculate then.
        policy: the fastest policy on all prompts, for a host that plays it; None of `all`, or if none was asked for.
        on_top: policies on their host against the setting.
        judge: throughput of the perfect judge, which knows of each drafted token whether it is right; about as much as
            a policy can reach.
    """

    compression: str
    setting: dict[str, Any] | None
    paste: str | None
    throughput: float
    throughput_ci: tuple[float, float]
    over_plain: Gain
    over_default: Gain | None
    policy: str | None
    on_top: Gain | None
    judge: float


@dataclass(frozen=True)
class Recommendation:
    """Advice for each compression, and how it was found.

    Attributes:
        decoder: what is to be set.
        rows: one for each compression, and one for all of them if there are several.
        about: settings of the search: costs, batch size, policies and so on.
    """

    decoder: str
    rows: list[Advice]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, "decoder": self.decoder, "about": self.about,
                "rows": [asdict(row) for row in self.rows]}  # fmt: skip


def recommend(
    exporter: SettingsExporter,
    traces: Rollouts,
    costs: CostModel,
    policies: Sequence[Policy] = (),
    batch_size: int = 1,
    folds: int = 5,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recommendation:
    """Find the best setting of a decoder, and what policies would gain on top.

    Args:
        exporter: of the decoder.
        traces: recorded sequences.
        costs: how long forwards take.
        policies: unfitted, for the decoder's host; those that learn do so on the other folds.
        batch_size: sequences that share every step; all draft alike. The costs must have been measured for it.
        folds: number of folds; each prompt is held out once.
        seed: of the folds, the fits and the resampling.
        jobs: processes to work in.
        progress: called with how many policies have been played, and how many there are.

    Raises:
        SpecKVError: fewer prompts than folds, a compression of a single prompt, the decoder has no host or its host
            can't hold a policy, a policy fails, or the costs lack a compression or the batch size.
    """
    host = host_of(exporter)
    for policy in policies:
        if host is None:
            raise SpecKVError(f"nothing plays policies inside {exporter.decoder}; leave policy {policy.label!r} out")
        fit, reason = host.verdict(policy)
        if fit != "exactly":
            raise SpecKVError(f"policy {policy.label!r} can't be played by {host.decoder}: {reason}; leave it out")
    for stored in np.unique(traces.compressions).tolist():
        if len(np.unique(traces.ids[traces.compressions == stored])) < 2:
            raise SpecKVError(f"the recording holds one prompt at {stored}, which says nothing of others; record more")
    costs = costs.at_batch(batch_size)
    fold_of = folds_of(traces, folds, seed)
    candidates = exporter.candidates(traces.gamma_max)

    def seconds_of(policy: Policy) -> FloatArray:
        return replay(policy, traces, costs, (0.0, 0.0)).sequence_seconds  # what decides is the decoder itself

    set_best, chosen = _on_other_folds(
        np.stack([seconds_of(exporter.played(setting)) for setting in candidates]), traces, fold_of
    )
    played = {"plain": seconds_of(make_policy("none")), "setting": set_best}
    if (untouched := exporter.untouched()) is not None:
        played["default"] = seconds_of(untouched)
    judge = play_held_out(make_policy("perfect-judge"), traces, costs, fold_of, folds, seed).seconds
    best: IntArray | None = None
    if policies:
        hosted = _hosted(policies, traces, costs, fold_of, seed, jobs, progress)
        played["policy"], best = _on_other_folds(hosted, traces, fold_of)

    def advise(name: str) -> Advice:
        mask = np.ones(len(traces), dtype=bool) if name == "all" else traces.compressions == name
        _, prompt_of = np.unique(traces.ids[mask], return_inverse=True)
        by_prompt = {label: np.bincount(prompt_of, weights=of[mask]).astype(float) for label, of in played.items()}
        tokens = np.bincount(prompt_of, weights=traces.lengths[mask]).astype(float)
        low, high = (batch_size * (1 + gain) for gain in gain_interval(by_prompt["setting"], tokens, seed))
        pairs = {"plain": ("setting", "plain"), "default": ("setting", "default"), "policy": ("policy", "setting")}
        pairs = {label: pair for label, pair in pairs.items() if label in played}
        gains = dict(zip(pairs, _gains([(by_prompt[a], by_prompt[b]) for a, b in pairs.values()], seed), strict=True))
        code = None if name == "all" else list(COMPRESSIONS).index(name)
        native = None if code is None else exporter.to_native(candidates[int(chosen[code])])
        return Advice(
            compression=name,
            setting=native,
            paste=None if native is None else exporter.paste(native),
            throughput=batch_size * float(tokens.sum() / by_prompt["setting"].sum()),
            throughput_ci=(low, high),
            over_plain=gains["plain"],
            over_default=gains.get("default"),
            policy=None if code is None or best is None else policies[int(best[code])].label,
            on_top=gains.get("policy"),
            judge=batch_size * float(tokens.sum() / judge[mask].sum()),
        )

    names = [str(name) for name in np.unique(traces.compressions)]
    set_or_default = [*(candidates[row] for row in chosen), *([exporter.default] if exporter.default else [])]
    about = {
        "exporter": exporter.name,
        "note": exporter.note,
        "default": None if exporter.default is None else exporter.to_native(exporter.default),
        "settings": len(candidates),
        "policies": [policy.label for policy in policies],
        "host": None if host is None else host.name,
        "costs": costs.name,
        "batch_size": batch_size,
        "traces": traces.manifest.settings,
        "gamma_max": traces.gamma_max,
        "cut": max(setting.cap for setting in set_or_default) > traces.gamma_max,
        "prompts": len(np.unique(traces.ids)),
        "sequences": len(traces),
        "folds": folds,
        "seed": seed,
    }
    return Recommendation(
        exporter.decoder, [advise(name) for name in (names if len(names) == 1 else [*names, "all"])], about
    )


def host_of(exporter: SettingsExporter) -> Exporter | None:
    """The exporter that brings policies to where a decoder is hosted by something that plays them, if there is one."""
    return None if exporter.host is None else make_exporter(exporter.host)


def _hosted(
    policies: Sequence[Policy],
    traces: Rollouts,
    costs: CostModel,
    fold_of: IntArray,
    seed: int,
    jobs: int,
    progress: Callable[[int, int], None],
) -> FloatArray:
    """(policies, S) seconds of each sequence, played by policies that were fitted on the other folds."""
    timed = [with_decision_times(policy, traces, [costs])[0] for policy in policies]
    work = joblib.Parallel(n_jobs=jobs, return_as="generator")(
        joblib.delayed(play_held_out)(policy, traces, model, fold_of, int(fold_of.max()) + 1, seed)
        for policy, model in zip(policies, timed, strict=True)
    )
    seconds = []
    for tally in work:
        seconds.append(tally.seconds)
        progress(len(seconds), len(policies))
    return np.stack(seconds)


def _on_other_folds(seconds: FloatArray, traces: Rollouts, fold_of: IntArray) -> tuple[FloatArray, IntArray]:
    """Play each sequence by the candidate that was fastest on the other folds, for its compression.

    Args:
        seconds: (candidates, S), none of them learned from the sequence itself.

    Returns:
        (S,) seconds, and for each known compression the candidate that is fastest on all sequences.
    """
    masks = [traces.compressions == name for name in COMPRESSIONS]
    codes = np.array([list(COMPRESSIONS).index(name) for name in traces.compressions])

    def chosen(rows: IntArray) -> IntArray:
        return fastest(np.stack([seconds[:, rows & mask].sum(axis=1) for mask in masks], axis=1))

    held = np.zeros(len(traces))
    for fold in np.unique(fold_of):
        test = np.flatnonzero(fold_of == fold)
        held[test] = seconds[chosen(fold_of != fold)[codes[test]], test]
    return held, chosen(np.ones(len(traces), dtype=bool))


def _gains(pairs: Sequence[tuple[FloatArray, FloatArray]], seed: int) -> list[Gain]:
    """Of seconds by prompt, the first of each pair against the second."""
    p_values = holm([permutation_p(*pair, seed) for pair in pairs])
    return [
        Gain(float(other.sum() / one.sum() - 1), gain_interval(one, other, seed), p)
        for (one, other), p in zip(pairs, p_values, strict=True)
    ]
