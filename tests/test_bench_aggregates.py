"""What an arm did in all: sums over known answers, and None where a system does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from bench_artifacts import make_arm
from bench_reports import measured

from pilotfish.bench.aggregates import Rate, show_rate, summarise
from pilotfish.bench.artifact import Answer, Artifact, Phases

PHASES = Phases(
    draft_seconds=1.0, target_seconds=2.0, verification_seconds=0.5, cache_maintenance_seconds=0.25, other_seconds=0.25
)


def with_answers(*samples: Sequence[Answer]) -> Artifact:
    """A single arm whose samples have these answers; prompt 0 is of class a, the others of class b."""
    artifact = measured(repeats=len(samples), arms=[make_arm("only", 4, baseline=None)])
    prompts = [p.model_copy(update={"id": str(n), "prompt_class": "ab"[n > 0]}) for n, p in enumerate(artifact.prompts)]
    answered = [
        sample.model_copy(update={"answers": list(answers), "peak_memory_bytes": 10 + index})
        for index, (sample, answers) in enumerate(zip(artifact.samples, samples, strict=True))
    ]
    return artifact.model_copy(update={"prompts": prompts[: len(samples[0])], "samples": answered})


def answer(number: int, num_tokens: int, seconds: float, **told: object) -> Answer:
    values = {
        "prompt_id": str(number),
        "num_prompt_tokens": 3,
        "token_ids": [7] * num_tokens,
        "finish_reason": "length",
        "end_to_end_seconds": seconds,
    }
    return Answer.model_validate(values | told)


def test_rates_are_geometric_means_over_prompts_and_rounds() -> None:
    first = [answer(0, 8, 1), answer(1, 8, 4), answer(2, 8, 2)]  # 8, 2 and 4 tokens/s
    second = [answer(0, 8, 0.5), answer(1, 8, 2), answer(2, 8, 1)]  # all twice as fast
    (summary,) = summarise(with_answers(first, second))
    assert summary.end_to_end.tokens_per_second == pytest.approx(4 * 2**0.5)
    assert summary.classes["a"].tokens_per_second == pytest.approx(8 * 2**0.5)
    assert summary.classes["b"].tokens_per_second == pytest.approx(8**0.5 * 2**0.5)
    for rate in (summary.end_to_end, *summary.classes.values()):
        assert rate.low is not None
        assert rate.high is not None
        assert rate.low < rate.tokens_per_second < rate.high
    assert summary.num_tokens == 24
    assert summary.peak_memory_bytes == 11


def test_single_round_has_no_interval() -> None:
    (summary,) = summarise(with_answers([answer(0, 8, 1)]))
    assert summary.end_to_end == Rate(pytest.approx(8.0), None, None)  # type: ignore[arg-type]
    assert show_rate(summary.end_to_end) == "8.00"
    assert show_rate(Rate(8.0, 7.5, 8.5)) == "8.00 [7.50, 8.50]"


def test_acceptance_counts_drafts_that_reach_a_position() -> None:
    told = answer(0, 9, 4, num_steps=4, num_draft_tokens=[4, 4, 2], num_accepted_tokens=[4, 1, 0])
    (summary,) = summarise(with_answers([told]))
    assert [(p.position, p.num_drafted, p.num_accepted) for p in summary.positions] == [
        (1, 3, 2), (2, 3, 1), (3, 2, 1), (4, 2, 1),
    ]  # fmt: skip
    assert summary.acceptance_rate == 5 / 10
    assert summary.mean_acceptance_length == 8 / 4
    assert summary.num_steps == 4


def test_phases_are_for_100_tokens_and_the_residual_is_a_share() -> None:
    told = [answer(0, 10, 4, phases=PHASES), answer(1, 40, 2), answer(2, 10, 8, phases=PHASES)]
    (summary,) = summarise(with_answers(told))
    assert summary.phases_per_100_tokens == Phases(
        draft_seconds=10, target_seconds=20, verification_seconds=5, cache_maintenance_seconds=2.5, other_seconds=2.5
    )
    assert summary.residual_share == 0.25 / 4
    assert summary.worst_residual_share == 0.25 / 4


def test_phases_of_no_length_have_no_residual_share() -> None:
    (summary,) = summarise(with_answers([answer(0, 8, 1, phases=Phases(**dict.fromkeys(Phases.model_fields, 0.0)))]))
    assert summary.residual_share is None


def test_decode_rate_is_over_the_answers_that_tell() -> None:
    told = [answer(0, 5, 3, prefill_seconds=1), answer(1, 9, 2, prefill_seconds=1), answer(2, 1, 1, prefill_seconds=1)]
    (summary,) = summarise(with_answers(told))
    assert summary.decode_tokens_per_second == pytest.approx(4)  # 2 and 8; one token alone has no decode rate


def test_what_a_system_does_not_tell_is_none() -> None:
    (summary,) = summarise(with_answers([answer(0, 8, 1)]))
    assert summary.positions == []
    assert (summary.acceptance_rate, summary.mean_acceptance_length, summary.num_steps) == (None, None, None)
    assert (summary.phases_per_100_tokens, summary.residual_share, summary.worst_residual_share) == (None, None, None)
    assert summary.decode_tokens_per_second is None


def test_arms_without_a_sample_are_left_out() -> None:
    assert [summary.arm for summary in summarise(measured(interrupt_at=2))] == ["target-only", "k=2"]
    assert summarise(measured(interrupt_at=0)) == []
