"""Every option of a request does the same with speculation as without, for every pattern of acceptance.

The target is scripted: no model file is needed, and any slip of cache, history or noise changes what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import (
    NO_EOS,
    DialledDrafter,
    HostileDrafter,
    ScriptedModel,
    ShuffledPool,
    TalkativeModel,
    byte_tokenizer,
    scripted_next,
)
from test_output_text import cut

import pilotfish
from pilotfish import DraftModelDrafter, GenerationResult, SamplingParams, TextEvent
from pilotfish.decode import FixedLength, SequenceState, step
from pilotfish.drafters import Drafter
from pilotfish.errors import DrafterError, NonFiniteLogitsError, OptionError
from pilotfish.kvcache import PagedCache
from pilotfish.tokenizer import check_pair
from pilotfish.types import Distribution, Draft
from pilotfish.verify import RequestVerifier

PROMPT = list(b"abc")
A, B, C, D = TalkativeModel.ALPHABET
TOKENIZER = byte_tokenizer()
PAIR = check_pair(TOKENIZER, TOKENIZER)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
FILTERS = {"temperature": 0.8, "top_p": 0.95, "top_k": 4, "min_p": 0.02}

OPTIONS = {
    "greedy": {},
    "max_tokens": {"max_tokens": 7},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition_penalty below 1": {"repetition_penalty": 0.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {A: 4.0, B: -100.0, 7: 12.0}},
    "min_tokens": {"min_tokens": 20},
    "min_tokens and an end of one's own": {"min_tokens": 15, "stop_token_ids": [A, C]},
    "stop": {"stop": ["dd", "ca"]},
    "stop_token_ids": {"stop_token_ids": [A]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 30},
    "logprobs": {"logprobs": 3},
    "logprobs with penalties": {"logprobs": 20, **PENALTIES},
    "everything": {
        **PENALTIES,
        "logit_bias": {A: 1.0, NO_EOS: -1.0},
        "min_tokens": 5,
        "stop": ["dddd", "abab"],
        "logprobs": 2,
        "max_tokens": 40,
    },
}
MODES = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0, "seed": 3},
    "filters": {**FILTERS, "seed": 4},
}
REJECTION = {**FILTERS, "seed": 5, "acceptance": "rejection"}
DIALS = [[-1], [0], [1], [2], [3], [4], [9], [9, 0], [1, -1, 3], [2, 9, 0, 1]]


def run(
    sampling: SamplingParams,
    drafter: Drafter | None = None,
    k: int = 0,
    prompt: Sequence[int] = PROMPT,
    **options: object,
) -> tuple[GenerationResult, list[TextEvent]]:
    *events, last = pilotfish.stream(
        TalkativeModel(),
        TOKENIZER,
        prompt,
        drafter=drafter,
        proposal_length=k,
        sampling=sampling,
        context_length=len(prompt) + 60,
        **options,
    )
    assert "".join(event.text for event in events) == last.result.text
    assert tuple(token_id for event in events for token_id in event.token_ids) == last.result.token_ids
    return last.result, events


def endless(sampling: SamplingParams) -> list[int]:
    """The prompt, and what would be said if nothing ended the text: a draft that goes on beyond its end."""
    own = run(sampling)[0].token_ids
    further = run(replace(sampling, stop=(), stop_token_ids=(), max_tokens=None, min_tokens=0, ignore_eos=True))[0]
    longer = further.token_ids if further.token_ids[: len(own)] == own else (*own, *further.token_ids)
    return [*PROMPT, *longer]


def same(found: GenerationResult, plain: GenerationResult) -> bool:
    parts = [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in (found, plain)]
    return parts[0] == parts[1] and found.stats.num_tokens == len(found.token_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_the_same_with_speculation_as_without(name: str, mode: str) -> None:
    sampling = SamplingParams(**{**OPTIONS[name], **MODES[mode]})
    plain, _ = run(sampling)
    truth = endless(sampling)
    kinds: set[str] = set()
    for k in (1, 4):
        for dials in DIALS:
            found, events = run(sampling, DialledDrafter(truth, dials), k, max_num_batched_tokens=1 + k)
            assert same(found, plain), (k, dials)
            kinds |= {token.kind for event in events for token in event.tokens}
            assert found.stats.num_accepted_tokens == sum(
                token.kind == "accepted" for event in events for token in event.tokens
            )
    assert {"accepted", "plain"} <= kinds
    for seed in range(3):
        assert same(run(sampling, HostileDrafter(seed, NO_EOS), 4)[0], plain)
        drafter = DraftModelDrafter(TalkativeModel(seed), PAIR)  # seed 0 is a twin
        found, events = run(sampling, drafter, 4)
        assert same(found, plain)
        if seed == 0:
            assert found.stats.num_accepted_tokens == found.stats.num_draft_tokens or name == "stop"


def test_the_options_are_not_idle() -> None:
    """Each of them changes what is said, or how it ends."""
    for name, options in OPTIONS.items():
        changes = [
            not same(run(SamplingParams(**{**options, **mode}))[0], run(SamplingParams(**mode))[0])
            for mode in MODES.values()
        ]
        assert any(changes) == (name != "greedy"), name


@pytest.mark.parametrize("mode", MODES)
def test_penalties_count_the_drafts_before_a_row(mode: str) -> None:
    """The same token proposed four times: each row has a history of its own."""
    sampling = SamplingParams(
        frequency_penalty=0.7, presence_penalty=0.1, max_tokens=50, ignore_eos=True, **MODES[mode]
    )

    class Repeats(DialledDrafter):
        def draft(self, token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
            return [token_ids[-1]] * max_draft_tokens

    found, events = run(sampling, Repeats([], [0]), 4)
    assert same(found, run(sampling)[0])
    accepted = {sum(token.kind == "accepted" for token in event.tokens) for event in events}
    assert {0, 1, 2} <= accepted, accepted  # without penalties runs would be longer


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_under_rejection_what_it_says(name: str) -> None:
    """There a seed's text depends on the drafts: with the same ones it is the same, and it ends where it should."""
    kinds: set[str] = set()
    for seed in range(6):
        sampling = SamplingParams(**{**OPTIONS[name], **REJECTION, "seed": seed})
        found, events = run(sampling, DraftModelDrafter(TalkativeModel(1), PAIR), 4)
        assert same(found, run(sampling, DraftModelDrafter(TalkativeModel(1), PAIR), 4)[0])
        kinds |= {token.kind for event in events for token in event.tokens}
        ends = {*sampling.stop_token_ids} if sampling.ignore_eos else {NO_EOS, *sampling.stop_token_ids}
        last = len(found.token_ids) - 1
        assert ends.isdisjoint(found.token_ids[: max(last, sampling.min_tokens)])
        text = TOKENIZER.decode(found.token_ids[: last if found.token_ids[last] in ends else None])
        expected, num_read = cut(text, sampling.stop)
        assert (found.text, num_read) == (expected, len(text))
        is_stopped = expected != text or found.token_ids[last] in ends
        assert found.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(found.token_ids) == (sampling.max_tokens or 60)
    assert {"plain", "accepted", "recovered"} <= kinds


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dials", [[9], [1], [0, 9]])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_stop_string_at_every_place(length: int, dials: list[int]) -> None:
    """On the first token, in the middle of an accepted run, across two steps: the text that is there is declared a stop
    string, at each place in turn."""
    endless_sampling = SamplingParams(ignore_eos=True, max_tokens=24, **MODES["temperature 1"])
    whole, _ = run(endless_sampling)
    assert len(whole.text) > 12
    for start in range(len(whole.text) - length + 1):
        stop = whole.text[start : start + length]
        expected, num_read = cut(whole.text, [stop])
        sampling = replace(endless_sampling, stop=stop)
        found, events = run(sampling, DialledDrafter([*PROMPT, *whole.token_ids], dials), 4)
        assert (found.text, found.finish_reason) == (expected, "stop")
        ids = [token_id for token_id in whole.token_ids if token_id != NO_EOS][:num_read]
        assert [token_id for token_id in found.token_ids if token_id != NO_EOS] == ids
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        shown = ""
        for event in events:
            shown += event.text
            assert expected.startswith(shown)
        assert found.stats.num_tokens == len(found.token_ids)


def test_a_stop_string_that_overlaps_itself() -> None:
    class Counting(ScriptedModel):
        """aabaabaab…"""

        def say(self, logits: torch.Tensor, prefix: Sequence[int]) -> None:
            logits[b"aab"[len(prefix) % 3]] = 1.0

    def answer(k: int) -> tuple[str, int]:
        truth = list(b"aab" * 20)
        sampling = SamplingParams(stop="aabaaa", max_tokens=20)
        drafter = DialledDrafter(truth, [9])
        result = pilotfish.generate(
            Counting(), TOKENIZER, list(b"aab"), sampling=sampling, drafter=drafter, proposal_length=k
        )
        return result.text, len(result.token_ids)

    assert answer(0) == answer(2) == answer(4) == (("aab" * 7)[:20], 20)  # what was held back comes at the end


def test_a_stop_string_that_the_end_of_the_text_completes() -> None:
    class HalfCharacter(ScriptedModel):
        def say(self, logits: torch.Tensor, prefix: Sequence[int]) -> None:
            logits[0xE2] = 1.0

    sampling = SamplingParams(max_tokens=1, stop="\ufffd")
    result = pilotfish.generate(HalfCharacter(), TOKENIZER, PROMPT, sampling=sampling)
    assert (result.text, result.finish_reason) == ("", "stop")


def test_the_cache_and_the_counts_end_with_the_token_that_completes_a_stop_string() -> None:
    whole, _ = run(SamplingParams(ignore_eos=True, max_tokens=24))
    target = TalkativeModel()
    pool = ShuffledPool(target.config, 40, 4)
    stop = whole.text[7:10]
    sampling = SamplingParams(stop=stop, ignore_eos=True)
    sequence = SequenceState(
        "a", list(PROMPT), PagedCache(pool, 100), sampling, frozenset({NO_EOS}), 100, TOKENIZER.detokenizer()
    )
    drafter = DialledDrafter([*PROMPT, *whole.token_ids], [9])
    while sequence.finish_reason is None:
        step([sequence], target, [drafter], RequestVerifier(), FixedLength(drafter, 5))
    assert sequence.finish_reason == "stop"
    assert sequence.cache.length == len(sequence.token_ids) - 1
    assert sequence.stats.num_tokens == len(sequence.token_ids) - len(PROMPT)
    assert sequence.stats.num_accepted_tokens <= sequence.stats.num_tokens
    assert sequence.history.num_output_tokens == sequence.stats.num_tokens


def test_end_tokens_of_ones_own_give_no_text() -> None:
    usual, _ = run(SamplingParams(ignore_eos=True, max_tokens=30))
    found, _ = run(SamplingParams(stop_token_ids=[A]))
    assert found.token_ids == usual.token_ids[: usual.token_ids.index(A) + 1]
    assert found.finish_reason == "stop"
    assert found.text == TOKENIZER.decode(found.token_ids[:-1])


def test_min_tokens_bans_end_tokens_and_nothing_else() -> None:
    for end in (NO_EOS, D):
        sampling = SamplingParams(min_tokens=12, stop_token_ids=[D])
        found, _ = run(sampling)
        assert end not in found.token_ids[:12]
    assert len(run(SamplingParams(min_tokens=12, stop=["a", "b", "c", "d"]))[0].token_ids) == 1


# -- log-probabilities, answers, errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [MODES["greedy"], MODES["temperature 1"], REJECTION])
@pytest.mark.parametrize("k", [0, 4])
def test_logprobs_are_those_of_the_raw_logits(options: dict[str, object], k: int) -> None:
    sampling = SamplingParams(logprobs=2, max_tokens=20, ignore_eos=True, logit_bias={A: 1.0}, **options)
    found, events = run(sampling, DraftModelDrafter(TalkativeModel(0), PAIR), k)
    assert k == 0 or found.stats.num_accepted_tokens > 2
    assert found.logprobs == tuple(token.logprobs for event in events for token in event.tokens)
    model, prefix = TalkativeModel(), list(PROMPT)
    for token_id, logprobs in zip(found.token_ids, found.logprobs or (), strict=True):
        row = torch.zeros(model.config.vocab_size)
        model.say(row, prefix)
        expected = row.double().log_softmax(0)
        assert logprobs.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
        assert logprobs.top_token_ids == tuple(order[:2])
        assert logprobs.top_logprobs == pytest.approx(expected[order[:2]].tolist(), abs=1e-5)
        prefix.append(token_id)
    assert run(replace(sampling, logprobs=None))[0].logprobs is None
    assert all(not own.top_token_ids for own in run(replace(sampling, logprobs=0))[0].logprobs or ())


def test_answers_draw_from_seed_and_number() -> None:
    sampling = SamplingParams(max_tokens=20, n=4, ignore_eos=True, **MODES["temperature 1"])
    drafter = DraftModelDrafter(TalkativeModel(1), PAIR)
    answers = pilotfish.generate_answers(TalkativeModel(), TOKENIZER, PROMPT, sampling=sampling)
    assert len({answer.token_ids for answer in answers}) == 4
    speculative = pilotfish.generate_answers(TalkativeModel(), TOKENIZER, PROMPT, sampling=sampling, drafter=drafter)
    assert all(same(one, other) for one, other in zip(answers, speculative, strict=True))
    assert same(answers[0], run(replace(sampling, n=1))[0])
    fewer = pilotfish.generate_answers(TalkativeModel(), TOKENIZER, PROMPT, sampling=replace(sampling, n=2))
    assert [answer.token_ids for answer in fewer] == [answer.token_ids for answer in answers[:2]]
    assert same(pilotfish.generate(TalkativeModel(), TOKENIZER, PROMPT, sampling=sampling, answer=2), answers[2])


def test_without_a_seed_each_run_is_another() -> None:
    """By chance two of these are equal once in a million runs."""
    sampling = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    for acceptance in ("rejection", "matching"):
        drafter = DraftModelDrafter(TalkativeModel(1), PAIR)
        texts = {run(replace(sampling, acceptance=acceptance), drafter, 3)[0].token_ids for _ in range(4)}
        assert len(texts) == 4


@pytest.mark.parametrize(
    ("options", "telling"),
    [
        ({"logit_bias": {260: 1}}, "logit_bias must name token ids of this model, from 0 to 259, got 260"),
        ({"stop_token_ids": [3, 999]}, "stop_token_ids must name token ids of this model, from 0 to 259, got 999"),
        ({"n": 2}, "n is 2, and this gives one answer"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(options: dict[str, object], telling: str) -> None:
    with pytest.raises(OptionError, match=telling):
        run(SamplingParams(**options))
    with pytest.raises(OptionError, match="answer must be below n, 2, got 2"):
        run(SamplingParams(n=2), answer=2)


@pytest.mark.parametrize("options", [{"logit_bias": {259: 5.0}}, {"stop_token_ids": [A, 259]}])
def test_options_about_padding_are_errors(options: dict[str, object]) -> None:
    """The model never says padding, so neither could do anything."""
    padded = byte_tokenizer(token_type=[1] * 256 + [3] * 3 + [5])
    with pytest.raises(OptionError, match=f"{next(iter(options))} names token id 259, which is padding"):
        pilotfish.stream(TalkativeModel(), padded, PROMPT, sampling=SamplingParams(**options))


def test_logits_that_are_not_finite_end_their_own_request_alone() -> None:
    class Unsound(TalkativeModel):
        def say(self, logits: torch.Tensor, prefix: Sequence[int]) -> None:
            super().say(logits, prefix)
            if prefix[0] == A and len(prefix) > 6:
                logits[3] = torch.nan

    for mode in MODES.values():
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, **mode)
        target, drafter = Unsound(), DraftModelDrafter(Unsound(1), PAIR)
        pool = ShuffledPool(target.config, 60, 4)
        sequences = [
            SequenceState(
                str(first),
                [first, B, C],
                PagedCache(pool, 100),
                sampling,
                frozenset({NO_EOS}),
                100,
                TOKENIZER.detokenizer(),
            )
            for first in (A, B, D)
        ]
        errors = []
        while any(sequence.finish_reason is None for sequence in sequences):
            outputs = step(sequences, target, [drafter], RequestVerifier(), FixedLength(drafter, 3))
            errors += [(output.request_id, output.finish_reason, output.error) for output in outputs if output.error]
            for sequence in sequences:
                assert sequence.cache.length == len(sequence.token_ids) - 1
        ((request_id, finish_reason, error),) = errors
        assert (request_id, finish_reason) == (str(A), "abort")
        assert isinstance(error, NonFiniteLogitsError)
        assert [sequence.finish_reason for sequence in sequences] == ["abort", "length", "length"]
        for sequence in sequences[1:]:
            expected, _ = run(sampling, prompt=sequence.token_ids[:3])
            assert tuple(sequence.token_ids[3:]) == expected.token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 1},
        {"stop": "b"},
        {"min_tokens": 15, "ignore_eos": False},
        {"min_tokens": 15, "ignore_eos": False, "logprobs": 1},
    ],
)
def test_logits_that_are_not_finite_end_a_text_where_they_would_without_drafts(
    mode: str, options: dict[str, object]
) -> None:
    """Behind the tokens said before, and not at all where the text ends before them."""

    class Unsound(TalkativeModel):
        def __init__(self, num_sound: int) -> None:
            super().__init__()
            self.num_sound = num_sound

        def say(self, logits: torch.Tensor, prefix: Sequence[int]) -> None:
            super().say(logits, prefix)
            if len(prefix) >= len(PROMPT) + self.num_sound:
                logits[NO_EOS] = torch.nan  # which min_tokens hides, but not from log-probabilities

    def said(num_sound: int, drafter: Drafter | None, k: int) -> tuple[list[object], str]:
        tokens: list[object] = []
        with pilotfish.stream(
            Unsound(num_sound), TOKENIZER, PROMPT, drafter=drafter, proposal_length=k, sampling=sampling
        ) as events:
            try:
                for event in events:
                    if isinstance(event, TextEvent):
                        tokens += [(token.token_id, token.text, token.logprobs) for token in event.tokens]
            except NonFiniteLogitsError:
                assert list(events) == []
                assert events.result.finish_reason == "abort"
                return tokens, "error"
            return tokens, events.result.finish_reason

    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **options, **MODES[mode]})
    truth = endless(sampling)
    ends = set()
    for num_sound in range(12):
        plain = said(num_sound, None, 0)
        ends.add(plain[1])
        for k, dials in ((1, [9]), (4, [9]), (4, [0, 9]), (7, [9]), (4, [2])):
            assert said(num_sound, DialledDrafter(truth, dials), k) == plain, (num_sound, k, dials)
    assert "error" in ends
    assert ("stop" in ends) == ("stop" in options)


# -- what a drafter may not do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "telling"),
    [
        (Draft((A, 260), ()), "drew id 260, which the target lacks"),
        (Draft((A, B), (Distribution(*map(torch.Tensor.numpy, (torch.tensor([A]).int(), torch.ones(1).double()))),)),
         "probabilities for 1 of 2 tokens"),
        (Draft((A,), ([0.1, 0.9],)), "must be a Distribution for each token, got list"),
    ],
)  # fmt: skip
def test_a_drafter_with_probabilities_must_stand_by_its_draws(draft: Draft, telling: str) -> None:
    class Fixed(HostileDrafter):
        def propose(self, requests):
            return [draft for _ in requests]

    with pytest.raises(DrafterError, match=telling):
        run(SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True), Fixed(0, NO_EOS), 4)


def test_untrue_probabilities_for_one_request_lose_no_tokens_of_another() -> None:
    """What the step raises, it raises before the first commit: else tokens would be committed that nobody was given."""

    class Liar(HostileDrafter):
        def propose(self, requests):
            share = {"1": 0.2}
            return [
                Draft((A,), (Distribution(np.array([A], np.int32), np.array([share.get(r.sequence.request_id, 1.0)])),))
                for r in requests
            ]

    target, drafter = TalkativeModel(), Liar(0, NO_EOS)
    pool = ShuffledPool(target.config, 40, 4)
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    sequences = [
        SequenceState(
            str(i), [A, B, i], PagedCache(pool, 40), sampling, frozenset({NO_EOS}), 40, TOKENIZER.detokenizer()
        )
        for i in range(2)
    ]
    step(sequences, target, [drafter], RequestVerifier(), FixedLength(drafter, 1))
    before = [list(sequence.token_ids) for sequence in sequences]
    with pytest.raises(DrafterError, match="cannot have been drawn from"):
        step(sequences, target, [drafter], RequestVerifier(), FixedLength(drafter, 1))
    assert [sequence.token_ids for sequence in sequences] == before
    assert [sequence.cache.length for sequence in sequences] == [len(token_ids) - 1 for token_ids in before]


def test_options_about_ids_that_the_draft_model_lacks_are_no_matter() -> None:
    """A draft model with a smaller matrix: biases, ends and penalties of other ids change nothing."""

    class Smaller(TalkativeModel):
        def __init__(self) -> None:
            super().__init__()
            self.config = replace(self.config, vocab_size=258)

    sampling = SamplingParams(
        logit_bias={259: 1.0, A: 1.0}, stop_token_ids=[258], min_tokens=30, **PENALTIES, **MODES["temperature 1"]
    )
    found, _ = run(sampling, DraftModelDrafter(Smaller(), PAIR), 4)
    assert same(found, run(sampling)[0])
    assert found.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", ["greedy", "temperature 1", "rejection"])
def test_ids_that_the_target_lacks_are_banned_before_anything_is_drawn(mode: str) -> None:
    types = [1] * 256 + [3] * 4
    types[B] = 5
    pair = check_pair(TOKENIZER, byte_tokenizer(token_type=types))
    assert pair.draft_only_token_ids == {B}
    drafts: list[Draft] = []

    class Watched(DraftModelDrafter):
        def propose(self, requests):
            found = super().propose(requests)
            drafts.extend(found)
            return found

    options = MODES.get(mode, REJECTION)
    # The bias would bring it back, were it added to anything but -infinity.
    run(SamplingParams(ignore_eos=True, logit_bias={B: 100.0}, **options), Watched(TalkativeModel(), pair), 4)
    assert sum(len(draft.token_ids) for draft in drafts) > 20
    assert all(B not in draft.token_ids for draft in drafts)
    assert all((draft.probs is not None) == (mode == "rejection") for draft in drafts if draft.token_ids)
    assert all(B not in found.token_ids for draft in drafts for found in draft.probs or ())


def test_drafts_end_at_the_requests_own_end_tokens() -> None:
    drafter = DialledDrafter(endless(SamplingParams(ignore_eos=True)), [9])
    found, _ = run(SamplingParams(stop_token_ids=[A]), drafter, 6)
    place = found.token_ids.index(A)
    assert place == len(found.token_ids) - 1 < 6
    assert len(drafter.proposals[0]) == 6
    assert found.stats.num_draft_tokens == place  # nothing behind it is verified


def test_scripted_words_depend_on_the_whole_prefix() -> None:
    """The double itself."""
    rows = []
    for prefix in ([1, 2, 3], [2, 1, 3], [1, 2]):
        row = torch.zeros(260)
        TalkativeModel().say(row, prefix)
        rows.append(row)
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert scripted_next([1]) != scripted_next([2])
