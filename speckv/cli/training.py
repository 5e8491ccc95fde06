"""`speckv train`: a policy learns from a recording, and is kept."""

import contextlib
import importlib.util
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from speckv.cli.common import COSTS, FOLDER, TRACES, must_be_writable, must_learn, showing_progress
from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from speckv.costs import CostModel
    from speckv.policy import Policy
    from speckv.traces import Rollouts
    from speckv.training import Watch


@click.command()
@click.argument("policy_spec", metavar="POLICY")
@TRACES
@click.option(
    "--from",
    "log_path",
    type=click.Path(path_type=pathlib.Path),
    help="Learn from this step log, a file or a folder, and not from a recording; --costs defaults to its own seconds.",
)
@COSTS
@click.option("--out", required=True, type=FOLDER, help="Where the policy is saved, and checkpoints until then.")
@click.option("--steps", type=click.IntRange(1), help="Of training, for agents.  [default: the agent's own]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--folds",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="One in so many prompts is held out, to be played at the end; 1 trains on all.",
)
@click.option("--log-dir", type=FOLDER, help="Write TensorBoard logs, for agents.")
@click.option("--resume", is_flag=True, help="Go on with a training that was stopped, with the same settings.")
def train(
    policy_spec: str,
    traces_path: pathlib.Path | None,
    log_path: pathlib.Path | None,
    costs_name: str | None,
    out: pathlib.Path,
    steps: int | None,
    seed: int,
    folds: int,
    log_dir: pathlib.Path | None,
    resume: bool,
) -> None:
    """Train POLICY (NAME or NAME:PARAMETER=VALUE,…) and save it.

    What was saved can be decoded with (`speckv decode --policy FOLDER`) and exported. `speckv compare` trains anew in
    each fold, so that no policy is judged on prompts that it has seen.
    """
    import numpy as np

    from speckv.comparison import folds_of, naming
    from speckv.files import write_json
    from speckv.plugins import load_costs, make_policy
    from speckv.saving import save_policy
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.traces import TraceDataset
    from speckv.training import TrainedPolicy, fingerprints

    must_be_writable(out)
    checkpoint = out / "checkpoint.safetensors"
    if (out / "policy.json").exists():
        raise SpecKVError(f"{out}: holds a policy already; choose another folder")
    if resume != checkpoint.exists():
        raise SpecKVError(
            f"{out}: holds no training to go on with; leave --resume out"
            if resume
            else f"{out}: holds a training that was stopped; add --resume, or choose another folder"
        )
    policy = make_policy(policy_spec)
    must_learn(policy)
    if isinstance(policy, TrainedPolicy):
        policy.steps = steps or policy.steps
    elif steps or log_dir or resume:
        raise SpecKVError(f"policy {policy.label!r} is fitted in one go; leave out --steps, --log-dir and --resume")

    if log_dir and importlib.util.find_spec("tensorboard") is None:
        raise SpecKVError("--log-dir writes with tensorboard, which is not installed; pip install 'speckv[rl]'")

    about: dict[str, Any] = {"command": shlex.join(["speckv", *sys.argv[1:]]), "seed": seed}
    if log_path is not None:
        if traces_path is not None:
            raise SpecKVError("a policy learns from a recording or from a step log: give one of --traces and --from")
        _train_from_log(policy, log_path, costs_name, out, seed, folds, about)
        return
    traces = (shipped_traces() if traces_path is None else TraceDataset(traces_path)).load()
    costs = load_costs(costs_name) if costs_name else shipped_costs()[0]
    fold_of = folds_of(traces, folds, seed) if folds > 1 else np.ones(len(traces), dtype=np.int64)
    learned = traces.take(fold_of > 0)
    with naming(policy):
        if isinstance(policy, TrainedPolicy):
            with _watched(policy, checkpoint, log_dir) as watch:
                policy.train(learned, costs, seed, watch)
        else:
            policy.fit(learned, costs, seed)
    prompts = sorted(set(learned.ids.tolist()))
    about |= {"costs": costs.name, "sequences": fingerprints(learned), "traces": traces.manifest.settings}
    write_json(out / "training.json", about | {"prompts": prompts})
    save_policy(policy, out)
    checkpoint.unlink(missing_ok=True)
    click.echo(f"{out}: {policy.label}, trained on {len(prompts)} prompts under {costs.name}")
    if folds > 1:
        _report(policy, learned, traces.take(fold_of == 0), costs)


def _train_from_log(
    policy: "Policy",
    path: pathlib.Path,
    costs_name: str | None,
    out: pathlib.Path,
    seed: int,
    folds: int,
    about: dict[str, Any],
) -> None:
    """Train on a step log, save, and print what the log's other prompts let expect."""
    import numpy as np

    from speckv.compression import COMPRESSIONS
    from speckv.costs import fit_costs_to_log
    from speckv.evaluation.ranking import RANKED_BY, split_by_prompt, throughput_by_compression
    from speckv.files import write_json
    from speckv.plugins import load_costs, make_policy, registry
    from speckv.saving import save_policy
    from speckv.steplogs import StepLog

    if not policy.overrides("fit_steps"):
        every = {name: entry.value() for name, entry in sorted(registry().policies.items())}
        able = [name for name, other in every.items() if other.overrides("fit_steps") and not other.explores]
        raise SpecKVError(
            f"policy {policy.label!r} learns from recordings, not from step logs; give it one with --traces, or train "
            f"one of {', '.join(able)}"
        )
    log = StepLog.load(path)
    learned, held_out = split_by_prompt(log, folds, seed) if folds > 1 else (log, log)
    costs = load_costs(costs_name) if costs_name else fit_costs_to_log(log, "the log's own seconds", str(path))
    policy.fit_steps(learned, costs, seed)
    told = []
    if folds > 1:
        fixed = make_policy("best-fixed")
        others = [] if policy.label == fixed.label else [fixed.fit_steps(learned, costs, seed)]
        most = int(log.gamma.max())
        mine, *best = (throughput_by_compression(each, held_out, costs, most) for each in (policy, *others))
        for code in np.flatnonzero(mine):
            name = list(COMPRESSIONS)[code]
            texts = len(np.unique(held_out.sequence[held_out.compression == name]))
            beside = [
                f", {mine[code] / one[code] - 1:+.1%} against the best fixed gamma ({one[code]:.3g})" for one in best
            ]
            told.append(
                f"{name}: {mine[code]:.3g} tokens/s estimated on {texts} held-out texts ({RANKED_BY}){''.join(beside)}"
            )
    # Last, so that what goes wrong before leaves no policy in the way of another try.
    sequences = sorted(set(learned.sequence.tolist()))
    write_json(out / "training.json", about | {"costs": costs.name, "log": log.provenance, "logged": sequences})
    save_policy(policy, out)
    click.echo(f"{out}: {policy.label}, trained on {len(learned)} steps of {len(sequences)} texts under {costs.name}")
    for line in told:
        click.echo(line)


@contextlib.contextmanager
def _watched(policy: "Policy", checkpoint: pathlib.Path, log_dir: pathlib.Path | None) -> "Iterator[Watch]":
    """A watch that shows a progress bar."""
    from speckv.training import Watch

    with showing_progress(f"training {policy.label}") as progress:
        yield Watch(checkpoint, log_dir, progress)


def _report(policy: "Policy", learned: "Rollouts", held_out: "Rollouts", costs: "CostModel") -> None:
    """Print what it reaches on the held-out prompts, beside the best fixed gamma of the others."""
    import numpy as np

    from speckv.comparison import naming
    from speckv.plugins import make_policy
    from speckv.tuning import play

    seconds = []
    for each in (policy, make_policy("best-fixed").fit(learned, costs)):
        with naming(each):
            seconds.append(play(each, held_out, costs).sequence_seconds)
    for compression in np.unique(held_out.compressions):
        of_it = held_out.compressions == compression
        mine, fixed = (held_out.lengths[of_it].sum() / each[of_it].sum() for each in seconds)
        click.echo(
            f"{compression}: {mine:.3g} tokens/s on {of_it.sum()} held-out prompts, {mine / fixed - 1:+.1%} against "
            f"the best fixed gamma ({fixed:.3g})"
        )
