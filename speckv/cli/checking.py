"""`speckv check`: whether this installation is whole."""

import click

from speckv.errors import SpecKVError


@click.command()
def check() -> None:
    """Check this installation: plugins, shipped data, and every policy on a few recorded sequences."""
    import warnings

    import numpy as np

    from speckv.errors import SpecKVWarning
    from speckv.plugins import registry
    from speckv.replaying import replay
    from speckv.shipped import shipped_costs, shipped_traces
    from speckv.training import TrainedPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)  # failures are reported below
        found = registry()
    faults = [f"plugin {plugin} is broken: {reason}" for plugin, reason in found.skipped]
    traces, costs = shipped_traces().load(), shipped_costs()
    click.echo(
        f"recording: {len(traces)} sequences, {traces.lengths.sum()} tokens; cost models: "
        f"{', '.join(model.name for model in costs)}"
    )
    few = traces.take(np.arange(0, len(traces), max(1, len(traces) // 24)))
    for name, entry in sorted(found.policies.items()):
        policy = entry.value()
        if policy.untrainable:
            click.echo(f"policy {name}: left out; it {policy.untrainable}")
            continue
        if isinstance(policy, TrainedPolicy):
            policy.steps = 1_000  # whether it can be trained is the question, not how well
        try:
            rates = [replay(policy.fit(few, model), few, model).throughput for model in costs]
        except Exception as error:  # whatever a policy raises is what this command is there to report
            faults.append(f"policy {name} of {entry.origin}: {type(error).__name__}: {error}")
        else:
            click.echo(f"policy {name}: ok ({', '.join(f'{rate:.3g}' for rate in rates)} tokens/s)")
    for name, registered in sorted(found.cost_models.items()):
        try:
            registered.value()
        except Exception as error:
            faults.append(f"cost model {name} of {registered.origin}: {type(error).__name__}: {error}")
    if faults:
        raise SpecKVError("; ".join(faults))
    click.echo("all is well")
