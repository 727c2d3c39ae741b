"""How an artifact, or two side by side, look in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pilotfish.bench.aggregates import MAX_RESIDUAL_SHARE, ArmSummary, summarise
from pilotfish.bench.artifact import Artifact, Host, Mismatch, TokenChoice
from pilotfish.bench.compare import differences, same_machine, same_work
from pilotfish.bench.statistics import show
from pilotfish.cli.terminal import UNBROKEN, one_line, print_parts

_STYLES = {"pays": "bold green", "does not pay": "bold red", "cannot tell": "bold yellow"}


def print_artifact(artifact: Artifact) -> None:
    """Verdict, arms, classes of prompts, and what it was measured on."""
    print_parts(_artifact(artifact), UNBROKEN)


def host_line(host: Host) -> str:
    """What a measurement ran on, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in host.versions.items())
    return (
        f"{host.cpu}, {host.num_cores} cores, {host.memory_bytes / 2**30:.0f} GiB, {host.instruction_set}, "
        f"{host.num_threads} threads, {host.operating_system}; {versions}"
        + (f"; commit {host.commit}" if host.commit else "")
    )


def print_comparison(first: Artifact, second: Artifact) -> None:
    print_parts(_comparison(first, second), UNBROKEN)


def _artifact(artifact: Artifact) -> Iterator[RenderableType]:
    yield _verdict(artifact)
    yield from _notices(artifact)
    summaries = summarise(artifact)
    yield Text()
    yield _arms(artifact, summaries)
    if artifact.comparisons and len({prompt.prompt_class for prompt in artifact.prompts}) > 1:
        yield Text()
        yield _classes(artifact)
    yield Text()
    yield from _conditions(artifact)


def _verdict(artifact: Artifact) -> Text:
    kind = artifact.verdict.partition(":")[0]
    return Text(one_line(artifact.verdict), style=_STYLES.get(kind, ""))


def _notices(artifact: Artifact) -> Iterator[Text]:
    if not artifact.complete:
        yield Text(f"incomplete: {len(artifact.samples)} of {len(artifact.order)} samples", style="yellow")
    for mismatch in artifact.mismatches:
        yield Text(one_line(_describe(mismatch)), style="red")
    if artifact.identical:
        yield Text("identical: every arm of pilotfish put out the same tokens as target-only")


def _describe(mismatch: Mismatch) -> str:
    """In one line: where two outputs part, and how near the two tokens were to the target."""
    line = (
        f"{mismatch.arm} differs from {mismatch.baseline}: prompt {mismatch.prompt_id}, output token "
        f"{mismatch.position}: {_token(mismatch.expected)} became {_token(mismatch.found)}"
    )
    margin = mismatch.margin
    if margin is None:
        return line
    return (
        f"{line}; there the target's likeliest tokens are {_token(margin.first)} and {_token(margin.second)}, "
        f"{margin.first_logit - margin.second_logit:.4g} apart (logits {margin.first_logit:.6g} and "
        f"{margin.second_logit:.6g})"
    )


def _token(token: TokenChoice | None) -> str:
    return "the end" if token is None else f"{token.token_id} ({token.text!r})"


def _arms(artifact: Artifact, summaries: list[ArmSummary]) -> Table:
    table = _table("arm", "ratio", "tokens/s", "decode", "acceptance", "tokens/step", "steps", "peak memory", "verdict")
    comparisons = {comparison.arm: comparison for comparison in artifact.comparisons}
    for summary in summaries:
        comparison = comparisons.get(summary.arm)
        _add_row(
            table,
            summary.arm,
            show(comparison.overall) if comparison else "1",
            f"{summary.end_to_end.tokens_per_second:.1f}",
            _number(summary.decode_tokens_per_second, ".1f"),
            _number(summary.acceptance_rate, ".0%"),
            _number(summary.mean_acceptance_length, ".2f"),
            _number(summary.num_steps, ".0f"),
            f"{summary.peak_memory_bytes / 1e9:.2f} GB",
            comparison.verdict if comparison else "baseline",
        )
    return table


def _classes(artifact: Artifact) -> Table:
    table = _table("prompts", *(comparison.arm for comparison in artifact.comparisons))
    for name in artifact.comparisons[0].classes:
        _add_row(table, name, *(show(comparison.classes[name]) for comparison in artifact.comparisons))
    return table


def _conditions(artifact: Artifact) -> Iterator[Text]:
    settings = artifact.settings
    yield _dim(
        f"{len(artifact.prompts)} prompts, at most {settings.max_tokens} tokens each; rounds: {settings.repeats}; "
        "a fresh process for each sample; tokens/s are end to end, both prefills counted; "
        "ratios are paired within rounds"
    )
    for model in artifact.models:
        yield _dim(f"{model.role}: {model.file_name}, sha256 {model.sha256}")
    host = artifact.host
    if host is not None:
        yield _dim(host_line(host))
    for name, drift in artifact.baseline_drift.items():
        bandwidths = [s.bandwidth_bytes_per_second for s in artifact.samples if s.bandwidth_bytes_per_second]
        memory = f"; memory read at {min(bandwidths) / 1e9:.0f}–{max(bandwidths) / 1e9:.0f} GB/s" if bandwidths else ""
        yield _dim(f"{name} samples differ by {drift:.1%}{memory}")
    worst = max((summary.worst_residual_share or 0 for summary in summarise(artifact)), default=0)
    if worst > MAX_RESIDUAL_SHARE:
        yield _dim(f"of one answer's time {worst:.0%} belong to no phase (more than {MAX_RESIDUAL_SHARE:.0%})")


def _comparison(first: Artifact, second: Artifact) -> Iterator[RenderableType]:
    for name, artifact in (("A", first), ("B", second)):
        yield Text(one_line(f"{name}, {artifact.created_at}: ")) + _verdict(artifact)
    same = same_machine(first, second)
    if same is None:
        yield Text("one of them has no samples, so that its machine is not known")
    elif same:
        yield Text("the same machine; its speed may have been another, though: rates of two runs are not paired")
    else:
        yield Text("different machines: rates say nothing about the software, and only ratios can be compared")
    yield Text()
    comparable = same and same_work(first, second)
    table = _table("arm", "ratio in A", "ratio in B", "tokens/s in A", "tokens/s in B", "B over A")
    rows = [{summary.arm: summary for summary in summarise(artifact)} for artifact in (first, second)]
    ratios = [{c.arm: show(c.overall) for c in artifact.comparisons} for artifact in (first, second)]
    for arm in dict.fromkeys([*rows[0], *rows[1]]):
        rates = [row[arm].end_to_end.tokens_per_second if arm in row else None for row in rows]
        quotient = rates[1] / rates[0] if comparable and rates[0] and rates[1] else None
        _add_row(
            table,
            arm,
            *(ratio.get(arm, "–") for ratio in ratios),
            *(_number(value, ".1f") for value in rates),
            _number(quotient, ".2f"),
        )
    yield table
    yield Text()
    rows_of_differences = differences(first, second)
    if not rows_of_differences:
        yield Text("models, prompts, settings and software are the same")
        return
    table = _table("differs", "A", "B", justify="left")
    for row in rows_of_differences:
        _add_row(table, *row)
    yield table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _dim(text: str) -> Text:
    return Text(one_line(text), style="dim")


def _add_row(table: Table, *cells: str) -> None:
    # Not as strings, which rich would read as its markup.
    table.add_row(*(Text(one_line(cell)) for cell in cells))


def _table(first: str, *titles: str, justify: str = "right") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(Text(one_line(first)))
    for title in titles:
        table.add_column(Text(one_line(title)), justify="left" if justify == "left" or title == "verdict" else "right")
    return table
