"""Option types, their words and exit statuses that several commands share."""

from __future__ import annotations

import click

EXIT_INTERRUPTED = 130
"""After Ctrl-C."""

MODEL_FORMS = (
    "a name that `pilotfish models` lists, a path to a GGUF file or to a folder of safetensors, or a hub repository "
    "ORG/NAME, ORG/NAME:FILE or ORG/NAME:QUANTISATION"
)
"""What can be given for a model."""


class WholeNumber(click.IntRange):
    name = "whole number"  # as errors call it
