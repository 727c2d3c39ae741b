"""Option types that several commands share."""

from __future__ import annotations

import click


class WholeNumber(click.IntRange):
    name = "whole number"  # as errors call it
