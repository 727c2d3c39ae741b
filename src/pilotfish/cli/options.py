"""Option types and exit statuses that several commands share."""

from __future__ import annotations

import click

EXIT_INTERRUPTED = 130
"""After Ctrl-C."""


class WholeNumber(click.IntRange):
    name = "whole number"  # as errors call it
