"""The group of commands that measure."""

from __future__ import annotations

import click

from pilotfish.cli.roofline import roofline


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure what speculation costs and gives on this machine."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


bench.add_command(roofline)
