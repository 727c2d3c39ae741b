"""Whole artifacts as a plausible machine would leave them behind, made by a `Measurement` over invented samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench_artifacts import make_arm, make_host, make_settings

from pilotfish.bench.artifact import (
    Answer,
    Arm,
    Artifact,
    Margin,
    ModelFile,
    Phases,
    Prompt,
    Sample,
    TokenChoice,
)
from pilotfish.bench.prompts import default_prompts
from pilotfish.bench.runner import Measurement, Turn
from pilotfish.bench.worker import Event

HOSTILE = "$\\x$<script>alert('x')</script>\"& \x00\x1b[31m//evil.test/a.png 漢字 _x"
TOKEN = TokenChoice(token_id=9, text=HOSTILE)
MARGIN = Margin(first=TOKEN, first_logit=12.5, second=TokenChoice(token_id=8, text=" b"), second_logit=12.25)


def measured(
    prompts: Sequence[Prompt] = (),
    repeats: int = 4,
    *,
    arms: Sequence[Arm] = (),
    interrupt_at: int | None = None,
    differ: bool = False,
) -> Artifact:
    """What a measurement on a plausible machine leaves behind. Arms of other systems tell no phases or proposals."""
    prompts = prompts or default_prompts()
    arms = arms or [make_arm("target-only", 0), *(make_arm(f"k={length}", length) for length in (2, 4, 8))]
    numbers = random.Random(0)
    levels = {prompt.id: numbers.uniform(0.55, 0.95) for prompt in prompts}

    @contextmanager
    def start(turn: Turn) -> Iterator[Iterator[Event]]:
        if turn.place == interrupt_at:
            raise KeyboardInterrupt
        told = turn.arm.system == "pilotfish"
        answers = [_answer(numbers, turn.arm.proposal_length, prompt.id, levels[prompt.id], told) for prompt in prompts]
        if differ and turn.arm.baseline:
            answers[-1] = answers[-1].model_copy(update={"token_ids": [*answers[-1].token_ids[:-1], 8]})
        yield iter([Event(kind="sample", sample=_sample(numbers, turn, answers), host=make_host() if told else None)])

    return Measurement(
        arms,
        prompts,
        [ModelFile(role="target", name="big", file_name="big.gguf", num_bytes=1 << 30, sha256="a" * 64)],
        make_settings(max_tokens=64, repeats=repeats),
        start=start,
        explain=lambda mismatch, _: mismatch.model_copy(update={"margin": MARGIN, "expected": TOKEN}),
    ).run()


def _answer(numbers: random.Random, length: int, prompt_id: str, level: float, told: bool) -> Answer:
    proposed, accepted, num_tokens = [], [], 1
    while num_tokens < 64:
        asked = min(length, 63 - num_tokens)
        hits = next((place for place in range(asked) if numbers.random() > level), asked)
        if asked:
            proposed.append(asked)
            accepted.append(hits)
        num_tokens += hits + 1
    num_steps = len(proposed) if length else 63
    noise = numbers.gauss(1, 0.01)
    target, draft = (
        (0.9 + 0.14 * num_steps * (1 + 0.03 * length)) * noise,
        0.022 * sum(proposed) + (0.2 if length else 0),
    )
    seconds = target + draft + 0.06
    phases = Phases(
        draft_seconds=draft,
        target_seconds=target,
        verification_seconds=0.01,
        cache_maintenance_seconds=0.02,
        other_seconds=0.03,
    )
    return Answer(
        prompt_id=prompt_id,
        num_prompt_tokens=40,
        token_ids=[7] * 64,
        finish_reason="length",
        end_to_end_seconds=seconds,
        prefill_seconds=0.9,
        num_steps=num_steps if told else None,
        num_draft_tokens=proposed if told else None,
        num_accepted_tokens=accepted if told else None,
        phases=phases if told else None,
    )


def _sample(numbers: random.Random, turn: Turn, answers: list[Answer]) -> Sample:
    return Sample(
        arm=turn.arm.name,
        round=turn.round,
        place=turn.place,
        process_id=100 + turn.place,
        started_at="2026-01-01T00:00:00+00:00",
        bandwidth_bytes_per_second=numbers.gauss(2.4e10, 4e8),
        load_average_before=0.4,
        load_average_after=1.9,
        load_seconds=2.5,
        peak_memory_bytes=(2 if turn.arm.proposal_length else 1) << 30,
        answers=answers,
    )
