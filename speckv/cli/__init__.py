"""The command line: one file a family of commands.

Each command imports what it needs when it runs, so that `--help` is quick.
"""

import click

from speckv.cli import (
    checking,
    comparing,
    costs,
    decoding,
    evaluating,
    exporting,
    paper,
    plugins,
    policies,
    recommending,
    recording,
    reporting,
    traces,
    training,
    tuning,
)
from speckv.cli.common import CommandGroup


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="speckv")
def main() -> None:
    """Adaptive control of speculative decoding: record a model pair, replay any policy, compare, ship."""


#: The built-in commands; plugins add theirs through the hook `speckv_register_commands`.
COMMANDS: tuple[click.Command, ...] = (
    recording.record,
    recording.profile,
    decoding.decode,
    training.train,
    tuning.tune,
    comparing.compare,
    evaluating.evaluate,
    reporting.report,
    reporting.plot,
    paper.paper,
    policies.policies,
    policies.new_policy,
    plugins.plugins,
    exporting.export,
    recommending.recommend,
    traces.traces,
    costs.costs,
    checking.check,
)
for _command in COMMANDS:
    main.add_command(_command)
