"""The report of a measurement: `report.html`, one page that needs nothing but itself."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from statistics import median

from jinja2 import Environment, StrictUndefined

from pilotfish.bench import statistics
from pilotfish.bench.aggregates import MAX_RESIDUAL_SHARE, ArmSummary, show_rate, summarise
from pilotfish.bench.artifact import Artifact, Comparison, TokenChoice
from pilotfish.bench.plots import draw_plots

REPORT_FILE = "report.html"
# No place in HTML, whatever a model or a user wrote.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def write_report(artifact: Artifact, folder: Path) -> Path:
    """Writes `report.html` into the folder, whole or not at all, and returns its path."""
    path = folder / REPORT_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(_render(artifact).translate(_CONTROLS), "utf-8", errors="replace")
    os.replace(partial, path)
    return path


def _render(artifact: Artifact) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "rate": show_rate,
        "gib": lambda num_bytes: f"{num_bytes / 2**30:.2f} GiB",
        "percent": lambda share: "–" if share is None else f"{share:.1%}",
        "ratio": statistics.show,
        "sentence": statistics.sentence,
        "of": lambda number, noun: f"{number} {noun}" if number == 1 else f"{number} {noun}s",
        "short": lambda number: "–" if number is None else f"{number:.2f}",
        "count": lambda number: "–" if number is None else f"{number:.0f}",
        "token": _token,
    }
    summaries = summarise(artifact)
    bandwidths = [s.bandwidth_bytes_per_second for s in artifact.samples if s.bandwidth_bytes_per_second]
    width = max(1, len(artifact.arms))
    return environment.from_string(files("pilotfish.bench").joinpath("report.html.j2").read_text("utf-8")).render(
        artifact=artifact,
        best=statistics.best(artifact.comparisons, artifact.arms),
        table=[_row(artifact, summary) for summary in summaries],
        confidence=statistics.CONFIDENCE,
        max_residual_share=MAX_RESIDUAL_SHARE,
        plots=draw_plots(artifact, summaries),
        bandwidth=median(bandwidths) / 1e9 if bandwidths else None,
        rounds=[artifact.order[start : start + width] for start in range(0, len(artifact.order), width)],
    )


def _row(artifact: Artifact, summary: ArmSummary) -> tuple[ArmSummary, Comparison | None]:
    return summary, next((found for found in artifact.comparisons if found.arm == summary.arm), None)


def _token(choice: TokenChoice | None) -> str:
    return "the end of the output" if choice is None else f"{choice.text!r} (id {choice.token_id})"
