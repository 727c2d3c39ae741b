"""Parts of artifacts with chosen numbers, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.bench import statistics
from pilotfish.bench.artifact import Answer, Arm, Artifact, Host, ModelFile, Prompt, Sample, Settings


def make_arm(name: str, proposal_length: int, **changes: object) -> Arm:
    baseline = "target-only" if proposal_length else None
    values = {"name": name, "system_version": "0", "proposal_length": proposal_length, "baseline": baseline}
    return Arm.model_validate(values | changes)


def make_settings(**changes: object) -> Settings:
    values = {"max_tokens": 8, "repeats": 4, "seed": 0, "threads": None, "warm_up": "none", "clock": "fake"}
    return Settings.model_validate(values | changes)


def prompts_of_classes(*classes: str) -> list[Prompt]:
    """Prompts with the ids 0, 1, …"""
    return [Prompt(id=str(number), prompt_class=name, user=f"Say {number}.") for number, name in enumerate(classes)]


def make_sample(arm: str, number: int, rates: Sequence[float], place: int = 0, num_tokens: int = 8) -> Sample:
    """A sample of round `number` whose answer to prompt i has `rates[i]` tokens per second, end to end."""
    return Sample(
        arm=arm,
        round=number,
        place=place,
        process_id=1,
        started_at="2026-01-01T00:00:00+00:00",
        load_average_before=0.0,
        load_average_after=0.0,
        load_seconds=1.0,
        peak_memory_bytes=1 << 30,
        answers=[
            Answer(
                prompt_id=str(index),
                num_prompt_tokens=5,
                token_ids=[7] * num_tokens,
                finish_reason="length",
                end_to_end_seconds=num_tokens / speed,
            )
            for index, speed in enumerate(rates)
        ],
    )


def make_host(**changes: object) -> Host:
    values = {
        "machine_id": "here",
        "cpu": "a CPU",
        "instruction_set": "avx2",
        "num_logical_cpus": 4,
        "num_cores": 2,
        "num_threads": 2,
        "memory_bytes": 1 << 34,
        "operating_system": "a system",
        "versions": {"pilotfish": "0", "torch": "1"},
        "commit": None,
    }
    return Host.model_validate(values | changes)


def make_artifact(
    arms: Sequence[Arm], prompts: Sequence[Prompt], samples: Sequence[Sample], **changes: object
) -> Artifact:
    """What a complete run with these samples leaves."""
    settings = make_settings(repeats=1 + max(sample.round for sample in samples))
    compared = [arm for arm in arms if arm.baseline is not None]
    comparisons = [statistics.compare(arm, samples, prompts, True, settings) for arm in compared]
    baselines = [arm.name for arm in arms if arm.baseline is None]
    values = {
        "created_at": "2026-01-01T00:00:00+00:00",
        "complete": True,
        "settings": settings,
        "prompts": prompts,
        "host": make_host(),
        "models": [ModelFile(role="target", name="t.gguf", file_name="t.gguf", num_bytes=9, sha256="0" * 64)],
        "arms": arms,
        "order": [sample.arm for sample in samples],
        "samples": samples,
        "identical": True,
        "mismatches": [],
        "baseline_drift": {
            name: statistics.drift([sample for sample in samples if sample.arm == name]) for name in baselines
        },
        "comparisons": comparisons,
        "verdict": statistics.headline(comparisons, arms),
    }
    return Artifact.model_validate(values | changes)
