"""What a measurement of several systems looks like: a Markdown table, what was set, the host."""

from __future__ import annotations

from collections.abc import Mapping

from pilotfish.bench import statistics
from pilotfish.bench.aggregates import summarise
from pilotfish.bench.artifact import OWN_SYSTEM, Arm, Artifact
from pilotfish.cli.bench_tables import host_line


def table(artifact: Artifact, skipped: Mapping[str, str]) -> str:
    """Markdown: a row for each system, what was set, who is missing, the host."""
    lines = [
        "| system | version | target-only tokens/s | speculative tokens/s | speculative ÷ its own target-only "
        "| target-only ÷ pilotfish's | speculative ÷ pilotfish's | same output as its own target-only | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    summaries = {summary.arm: summary for summary in summarise(artifact)}
    by_system: dict[str, list[Arm]] = {}
    for arm in artifact.arms:
        by_system.setdefault(arm.system, []).append(arm)
    own = by_system[OWN_SYSTEM]
    for system, arms in by_system.items():
        alone, speculative = arms
        rates = [
            f"{summaries[arm.name].end_to_end.tokens_per_second:.1f}" if arm.name in summaries else "–" for arm in arms
        ]
        memory = [
            f"{summaries[arm.name].peak_memory_bytes / 1e9:.1f}" if arm.name in summaries else "–" for arm in arms
        ]
        cells = [system, alone.system_version, rates[0], f"{rates[1]} (k = {speculative.proposal_length})"]
        cells.append(ratio(artifact, speculative, alone))
        cells += ["1" if system == OWN_SYSTEM else ratio(artifact, *pair) for pair in zip(arms, own, strict=True)]
        cells += [equal_prompts(artifact, speculative), f"{memory[0]} / {memory[1]} GB"]
        lines.append("| " + " | ".join(cells) + " |")
    settings = artifact.settings
    lines += [
        "",
        f"{len(artifact.prompts)} prompts, at most {settings.max_tokens} tokens each; rounds: {settings.repeats}; "
        "tokens/s are end to end, both prefills counted, the geometric mean; ratios are paired within rounds, with "
        "intervals; peak memory is target-only's / speculative's.",
        "",
    ]
    for system, arms in by_system.items():
        if arms[-1].settings:
            lines.append(f"* {system}: {'; '.join(arms[-1].settings.values())}.")
    lines += [f"* {name} was skipped: {reason}" for name, reason in skipped.items()]
    if artifact.host is not None:
        lines += ["", host_line(artifact.host)]
    return "\n".join(lines)


def ratio(artifact: Artifact, arm: Arm, baseline: Arm) -> str:
    """The paired ratio over the rounds that have both, as in `0.55× [0.53, 0.57]`."""
    rounds = [{sample.round for sample in artifact.samples if sample.arm == name} for name in (arm.name, baseline.name)]
    if not rounds[0] & rounds[1]:
        return "–"
    against = arm.model_copy(update={"baseline": baseline.name})
    found = statistics.compare(against, artifact.samples, artifact.prompts, True, artifact.settings)
    return statistics.show(found.overall)


def equal_prompts(artifact: Artifact, arm: Arm) -> str:
    """How many prompts have, in every sample, the output of the baseline's first sample, as in `10/12`."""
    outputs = {
        name: [[answer.token_ids for answer in sample.answers] for sample in artifact.samples if sample.arm == name]
        for name in (arm.name, arm.baseline)
    }
    if not outputs[arm.name] or not outputs[arm.baseline]:
        return "–"
    reference = outputs[arm.baseline][0]
    equal = sum(
        all(sample[place] == expected for sample in outputs[arm.name]) for place, expected in enumerate(reference)
    )
    return f"{equal}/{len(reference)}"
