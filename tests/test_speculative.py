"""The promise: with any drafter, length, chunking or cache, the output is the target's own, and nothing leaks.

Everything runs through the one decode step; the oracle is `recompute`, which knows neither cache nor step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from doubles import (
    NO_EOS,
    VOCAB_SIZE,
    DialledDrafter,
    ExplodingModel,
    HostileDrafter,
    ScriptedModel,
    ShuffledPool,
    byte_tokenizer,
    recompute,
    released,
    scripted_next,
)
from hypothesis import given
from hypothesis import strategies as st

import pilotfish
from pilotfish.decode import FixedLength, SequenceState, step
from pilotfish.drafters import DraftModelDrafter
from pilotfish.errors import (
    CacheError,
    DrafterError,
    InvariantError,
    NonFiniteLogitsError,
    OptionError,
    PairMismatchError,
    PromptError,
)
from pilotfish.kvcache import DenseCache, PagedCache
from pilotfish.tokenizer import check_pair
from pilotfish.types import Draft, FinishEvent, SamplingParams, TextEvent
from pilotfish.verify import GreedyVerifier

PROMPT = [7, 1, 250, 3, 3]
PAIR = check_pair(byte_tokenizer(), byte_tokenizer())


def truth(prompt: Sequence[int] = PROMPT, count: int = 60) -> list[int]:
    """Prompt and the first `count` tokens the scripted target says."""
    return [*prompt, *recompute(scripted_next, prompt, max_tokens=count)[0]]


def run(model, prompt=PROMPT, *, drafter=None, k=None, max_tokens=None, eos=(NO_EOS,), **options):
    return list(
        pilotfish.stream(
            model,
            byte_tokenizer(eos),
            prompt,
            drafter=drafter,
            proposal_length=k,
            sampling=SamplingParams(max_tokens=max_tokens),
            **options,
        )
    )


def answer(events) -> tuple[list[int], str]:
    assert isinstance(events[-1], FinishEvent)
    assert all(isinstance(event, TextEvent) for event in events[:-1])
    result = events[-1].result
    told = [token_id for event in events[:-1] for token_id in event.token_ids]
    assert told == list(result.token_ids)
    assert "".join(event.text for event in events[:-1]) == result.text
    return told, result.finish_reason


def kinds(events) -> list[str]:
    return [token.kind for event in events[:-1] for token in event.tokens]


# -- the promise over everything at once ----------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    k=st.integers(0, 9),
    dials=st.lists(st.integers(-1, 9), min_size=1, max_size=6),
    max_tokens=st.one_of(st.none(), st.integers(0, 40)),
    context_length=st.integers(41, 90),
    chunk=st.integers(1, 20),
    page_size=st.sampled_from([0, 1, 4, 16]),
    eos_at=st.integers(0, 99),
)
def test_speculative_output_is_the_targets_own(
    prompt, k, dials, max_tokens, context_length, chunk, page_size, eos_at
) -> None:
    free = truth(prompt, 100)
    eos = (free[len(prompt) + eos_at],)  # declare the token at that position to be EOS
    expected = recompute(scripted_next, prompt, max_tokens, eos, context_length)
    pool = ShuffledPool(ScriptedModel().config, 128, page_size or 1)
    cache = PagedCache(pool, context_length) if page_size else None
    drafter = DialledDrafter(free, dials)
    model = ScriptedModel()
    events = run(
        model,
        prompt,
        drafter=drafter,
        k=k,
        max_tokens=max_tokens,
        eos=eos,
        context_length=context_length,
        max_num_batched_tokens=chunk,
        cache=cache,
    )
    assert answer(events) == expected
    pool.check_integrity()
    check_counts(events, model, len(prompt), chunk)


def check_counts(events, model: ScriptedModel, num_prompt_tokens: int, chunk: int) -> None:
    stats = events[-1].result.stats
    assert stats.num_prompt_tokens == num_prompt_tokens
    assert stats.num_tokens == len(events[-1].result.token_ids)
    assert stats.num_accepted_tokens == kinds(events).count("accepted") <= stats.num_draft_tokens
    prefill_calls = -(-num_prompt_tokens // chunk) if stats.num_tokens else 0
    assert len(model.calls) == prefill_calls + stats.num_steps
    assert sum(model.rows_per_call) == (num_prompt_tokens if stats.num_tokens else 0) + (
        stats.num_steps + stats.num_draft_tokens
    )
    if stats.num_steps:
        assert stats.mean_acceptance_length == (stats.num_tokens - 1) / stats.num_steps


@given(seed=st.integers(0, 10**6), k=st.integers(1, 9), max_tokens=st.integers(1, 40))
def test_speculative_hostile_drafter_changes_nothing(seed, k, max_tokens) -> None:
    eos = (truth()[len(PROMPT) + 25],)
    expected = recompute(scripted_next, PROMPT, max_tokens, eos)
    assert answer(run(ScriptedModel(), drafter=HostileDrafter(seed, eos[0]), k=k, max_tokens=max_tokens, eos=eos)) == (
        expected
    )


@given(seed=st.integers(0, 5), draft_seed=st.integers(0, 5), k=st.integers(1, 6), chunk=st.integers(1, 9))
def test_speculative_draft_model_changes_nothing(seed, draft_seed, k, chunk) -> None:
    target, draft_model = ScriptedModel(seed), ScriptedModel(draft_seed)
    pool = ShuffledPool(draft_model.config, 60, 4)
    drafter = DraftModelDrafter(
        draft_model, PAIR, make_cache=lambda: PagedCache(pool, 512), max_num_batched_tokens=chunk
    )
    events = run(target, drafter=drafter, k=k, max_tokens=30)
    assert answer(events) == recompute(lambda prefix: scripted_next(prefix, seed), PROMPT, 30)
    pool.check_integrity()
    if seed == draft_seed:  # a twin: whatever it proposes is right, so a rejection would be a bookkeeping fault
        stats = events[-1].result.stats
        assert stats.acceptance_rate == 1.0
        assert "recovered" not in kinds(events)


# -- acceptance patterns by name ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dial", "expected"),
    [
        pytest.param(0, ["recovered"], id="mismatch-first"),
        pytest.param(2, ["accepted", "accepted", "recovered"], id="mismatch-middle"),
        pytest.param(3, ["accepted"] * 3 + ["recovered"], id="mismatch-final"),
        pytest.param(4, ["accepted"] * 4 + ["bonus"], id="full"),
        pytest.param(-1, ["plain"], id="no-draft"),
    ],
)
def test_speculative_acceptance(dial: int, expected: list[str]) -> None:
    model = ScriptedModel()
    events = run(model, drafter=DialledDrafter(truth(), [dial]), k=4, max_tokens=1 + 2 * len(expected) + 8)
    assert kinds(events)[: 1 + 2 * len(expected)] == ["plain", *expected, *expected]
    assert model.rows_per_call[1:3] == [5 if dial >= 0 else 1] * 2  # one target call per step, k + 1 rows
    assert answer(events)[0] == truth()[len(PROMPT) :][: len(kinds(events))]


def test_speculative_full_acceptance_twice_feeds_the_draft_model_what_it_lacks_for_free() -> None:
    target, twin = ScriptedModel(), ScriptedModel()
    events = run(target, drafter=DraftModelDrafter(twin, PAIR), k=4, max_tokens=16)
    assert kinds(events)[1:11] == (["accepted"] * 4 + ["bonus"]) * 2
    # First proposal: the prompt and the first token; then the token it lacks with the newest one. k forwards each.
    assert twin.rows_per_call[:12] == [len(PROMPT) + 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]
    assert all(call.input_ids.dtype == torch.int32 for call in [*target.calls, *twin.calls])


def test_speculative_draft_model_is_wrong_now_and_then() -> None:
    """A draft model that agrees with the target on some prefixes only: partial rewinds of its cache."""

    class Sometimes(ScriptedModel):
        def forward(self, batch, store):
            logits = super().forward(batch, store)
            return torch.roll(logits, 1, dims=1) if int(batch.seq_lens[0]) % 3 == 0 else logits

    events = run(ScriptedModel(), drafter=DraftModelDrafter(Sometimes(), PAIR), k=5, max_tokens=40)
    assert answer(events)[0] == truth()[len(PROMPT) :][:40]
    assert {"accepted", "recovered"} <= set(kinds(events))


# -- how sequences end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("dial", [0, 1, 4])
@pytest.mark.parametrize("position", range(12))
def test_speculative_eos_at_every_position(position: int, dial: int, k: int) -> None:
    """EOS inside a proposal, as bonus, as recovered token, as the very first token."""
    eos = (truth()[len(PROMPT) + position],)
    drafter = DialledDrafter(truth(), [dial])
    ids, reason = answer(run(ScriptedModel(), drafter=drafter, k=k, eos=eos))
    assert (ids, reason) == recompute(scripted_next, PROMPT, eos_token_ids=eos)
    assert ids[-1] == eos[0]
    assert reason == "stop"


def test_speculative_eos_as_first_token_never_runs_the_draft_model() -> None:
    eos = (truth()[len(PROMPT)],)
    events = run(ScriptedModel(), drafter=DraftModelDrafter(_ConfigOnly(), PAIR), k=4, eos=eos)
    assert answer(events) == ([eos[0]], "stop")
    assert events[-1].result.text == ""


class _ConfigOnly(ExplodingModel):
    config = ScriptedModel().config


def test_speculative_nothing_follows_an_eos_in_the_proposal() -> None:
    """A draft model that says EOS stops there: the proposal ends with it."""
    eos = truth()[len(PROMPT) + 3]
    pair = check_pair(byte_tokenizer((eos,)), byte_tokenizer((eos,)))
    twin, target = ScriptedModel(), ScriptedModel()
    events = run(target, drafter=DraftModelDrafter(twin, pair), k=8, eos=(eos,))
    assert kinds(events) == ["plain", "accepted", "accepted", "accepted"]
    assert target.rows_per_call == [len(PROMPT), 4]
    assert len(twin.calls) == 3


def test_speculative_drafters_eos_is_overruled() -> None:
    class SaysEos(DialledDrafter):
        def draft(self, token_ids, max_draft_tokens):
            return (super().draft(token_ids, max_draft_tokens)[0], NO_EOS, 1, 1)[:max_draft_tokens]

    events = run(ScriptedModel(), drafter=SaysEos(truth(), [4]), k=4, max_tokens=9)
    assert answer(events) == (truth()[len(PROMPT) :][:9], "length")
    assert events[-1].result.stats.num_draft_tokens == 2 + 2 + 2 + 1  # nothing behind the EOS is verified


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 4, 5])
def test_speculative_max_tokens(max_tokens: int, k: int) -> None:
    model = ScriptedModel()
    events = run(model, drafter=DialledDrafter(truth(), [9]), k=k, max_tokens=max_tokens)
    assert answer(events) == (truth()[len(PROMPT) :][:max_tokens], "length")
    if max_tokens == 0:
        assert model.calls == []
    assert max(model.rows_per_call, default=0) <= max(len(PROMPT), max_tokens)  # nothing drafted beyond the budget


def test_speculative_runs_to_the_context_limit() -> None:
    expected = recompute(scripted_next, PROMPT, context_length=20)
    assert answer(run(ScriptedModel(), drafter=DialledDrafter(truth(), [9]), k=8, context_length=20)) == expected
    assert len(expected[0]) == 20 - len(PROMPT)
    model = ScriptedModel(context_length=20)
    assert answer(run(model, drafter=DialledDrafter(truth(), [9]), k=8)) == expected


@pytest.mark.parametrize("length", [20, 21, 500])
def test_speculative_prompt_at_and_over_the_context_limit_is_refused(length: int) -> None:
    with pytest.raises(PromptError, match=f"{length} tokens.*context of 20"):
        run(ScriptedModel(context_length=20), [1] * length)
    assert answer(run(ScriptedModel(context_length=20), [1] * 19))[1] == "length"


@pytest.mark.parametrize("prompt", ["", [], (), 5, None, [256 + 4], [-1], [True], ["a"]])
def test_speculative_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(PromptError):
        run(ScriptedModel(), prompt)


# -- options --------------------------------------------------------------------------------------------------------

NO_COUNT = [-1, True, False, 1.0, "4", None, 2**70 * -1]


@pytest.mark.parametrize("proposal_length", NO_COUNT)
def test_speculative_generate_refuses_a_bad_proposal_length_before_any_model_runs(proposal_length: object) -> None:
    nothing = ExplodingModel()
    with pytest.raises(ValueError, match="proposal_length must be a non-negative integer"):
        pilotfish.speculative_generate(nothing, nothing, nothing, nothing, "x", proposal_length=proposal_length)


@pytest.mark.parametrize("max_tokens", [value for value in NO_COUNT if value is not None])
def test_speculative_generate_refuses_a_bad_max_tokens_before_any_model_runs(max_tokens: object) -> None:
    nothing = ExplodingModel()
    with pytest.raises(ValueError, match="max_tokens must be a non-negative integer"):
        pilotfish.speculative_generate(nothing, nothing, nothing, nothing, "x", max_tokens=max_tokens)


def test_speculative_generate_gives_the_targets_text_for_every_length() -> None:
    tokenizer, prompt = byte_tokenizer(), "merge two lists"
    ids, _ = recompute(scripted_next, list(prompt.encode()), 20)
    for draft_seed in (0, 1):
        for k in range(7):
            text = pilotfish.speculative_generate(
                ScriptedModel(draft_seed), ScriptedModel(), byte_tokenizer(), tokenizer, prompt, k, 20
            )
            assert text == tokenizer.decode(ids)


def test_speculative_generate_stops_at_eos_without_max_tokens() -> None:
    prompt = "merge"
    ids, _ = recompute(scripted_next, list(prompt.encode()), 20)
    eos = (ids[9],)
    expected, _ = recompute(scripted_next, list(prompt.encode()), None, eos)
    tokenizers = byte_tokenizer(eos), byte_tokenizer(eos)
    text = pilotfish.speculative_generate(ScriptedModel(), ScriptedModel(), *tokenizers, prompt, 3)
    assert text == tokenizers[0].decode(expected[:-1])


def test_speculative_generate_with_length_zero_never_touches_the_draft_model() -> None:
    nothing = ExplodingModel()
    pilotfish.speculative_generate(nothing, ScriptedModel(), nothing, byte_tokenizer(), "x", 0, 5)


def test_speculative_stream_with_length_zero_never_touches_the_drafter() -> None:
    assert answer(run(ScriptedModel(), drafter=ExplodingModel(), k=0, max_tokens=5))[0] == truth()[5:10]


def test_speculative_generate_checks_the_pair_before_either_model_runs() -> None:
    target, draft_model = ScriptedModel(), ScriptedModel()
    with pytest.raises(PairMismatchError, match="end texts with different tokens"):
        pilotfish.speculative_generate(draft_model, target, byte_tokenizer((257,)), byte_tokenizer(), "x")
    assert target.calls == draft_model.calls == []


def test_speculative_options_that_cannot_be_honoured_are_errors() -> None:
    model = ScriptedModel()
    with pytest.raises(OptionError, match="needs a drafter"):
        run(model, k=3)
    with pytest.raises(OptionError, match="context_length must be from 1 to"):
        run(model, context_length=513)
    with pytest.raises(OptionError, match="context_length"):
        run(model, context_length=0)
    with pytest.raises(OptionError, match="at least 1"):
        run(model, max_num_batched_tokens=0)
    assert model.calls == []


# -- what a draft model cannot do, the request does without -----------------------------------------------------------


def test_speculative_goes_on_past_the_draft_models_context() -> None:
    draft_model = ScriptedModel(context_length=12)
    pool = ShuffledPool(draft_model.config, 20, 4)
    drafter = DraftModelDrafter(draft_model, PAIR, make_cache=lambda: PagedCache(pool, 12))
    sampling = SamplingParams(max_tokens=30)
    told: list[int] = []
    for event in pilotfish.stream(ScriptedModel(), byte_tokenizer(), PROMPT, drafter=drafter, sampling=sampling):
        if isinstance(event, TextEvent):
            told += event.token_ids
            if len(PROMPT) + len(told) > 16:  # one step beyond its context, the draft model holds nothing any more
                pool.check_integrity()
                assert [token.kind for token in event.tokens] == ["plain"]
    assert told == truth()[len(PROMPT) :][:30]
    assert max(int(call.positions.max()) for call in draft_model.calls) < 12


def test_speculative_goes_on_where_the_draft_models_pool_is_full() -> None:
    draft_model = ScriptedModel()
    pool = ShuffledPool(draft_model.config, 3, 4)
    drafter = DraftModelDrafter(draft_model, PAIR, make_cache=lambda: PagedCache(pool, 512))
    assert answer(run(ScriptedModel(), drafter=drafter, k=4, max_tokens=30))[0] == truth()[len(PROMPT) :][:30]
    pool.check_integrity()


def test_speculative_drafts_are_shortened_to_the_targets_pool() -> None:
    model = ScriptedModel()
    pool = ShuffledPool(model.config, 3, 4)
    cache = PagedCache(pool, 12)  # 12 slots: 5 of the prompt and 7 more tokens, the last of them not cached
    events = run(model, drafter=DialledDrafter(truth(), [9]), k=6, max_tokens=8, cache=cache)
    assert answer(events)[0] == truth()[len(PROMPT) :][:8]
    pool.check_integrity()


def test_speculative_ids_that_the_draft_model_does_not_know_end_its_drafting() -> None:
    token = truth()[len(PROMPT) + 6]  # the target will say this id, which the draft vocabulary lacks
    types = [1] * 256 + [3] * 4
    types[token] = 5
    pair = check_pair(byte_tokenizer(token_type=types), byte_tokenizer())
    assert pair.target_only_token_ids == {token}
    draft_model = ScriptedModel(seed=1)
    events = run(ScriptedModel(), drafter=DraftModelDrafter(draft_model, pair), k=3, max_tokens=20)
    assert answer(events)[0] == truth()[len(PROMPT) :][:20]
    assert all(token not in call.input_ids.tolist() for call in draft_model.calls)


def test_speculative_ids_that_the_target_lacks_are_never_proposed() -> None:
    twin = ScriptedModel()
    token = truth()[len(PROMPT) + 1]  # the draft model's first guess would be this id
    types = [1] * 256 + [3] * 4
    types[token] = 5
    pair = check_pair(byte_tokenizer(), byte_tokenizer(token_type=types))
    assert pair.draft_only_token_ids == {token}
    drafter = DraftModelDrafter(twin, pair)
    run(ScriptedModel(), drafter=drafter, k=3, max_tokens=9)
    assert token not in twin.calls[1].input_ids.tolist()


# -- nothing leaks, nothing is half done ------------------------------------------------------------------------------


def pools() -> tuple[ShuffledPool, ShuffledPool]:
    config = ScriptedModel().config
    return ShuffledPool(config, 60, 4, seed=1), ShuffledPool(config, 60, 4, seed=2)


@pytest.mark.parametrize("victim", ["target", "draft"])
@pytest.mark.parametrize("fail_at", range(9))
def test_speculative_fault_in_any_forward_releases_both_caches(victim: str, fail_at: int) -> None:
    target_pool, draft_pool = pools()
    target = ScriptedModel(fail_at=fail_at if victim == "target" else None)
    draft_model = ScriptedModel(seed=1, fail_at=fail_at if victim == "draft" else None)
    drafter = DraftModelDrafter(
        draft_model, PAIR, make_cache=lambda: PagedCache(draft_pool, 512), max_num_batched_tokens=3
    )
    with pytest.raises(RuntimeError, match="injected fault"):
        run(target, drafter=drafter, k=3, max_num_batched_tokens=2, cache=PagedCache(target_pool, 512), max_tokens=40)
    target_pool.check_integrity()
    draft_pool.check_integrity()


@pytest.mark.parametrize("end", ["drop", "close", "with", "throw"])
@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_speculative_abandoned_stream_releases_both_caches(num_events: int, end: str) -> None:
    target_pool, draft_pool = pools()
    drafter = DraftModelDrafter(ScriptedModel(1), PAIR, make_cache=lambda: PagedCache(draft_pool, 512))
    events = pilotfish.stream(
        ScriptedModel(), byte_tokenizer(), PROMPT, drafter=drafter, cache=PagedCache(target_pool, 512)
    )
    for _ in range(num_events):
        next(events)
    if end == "close":
        events.close()
        events.close()
        assert events.result.finish_reason == "abort"
        assert list(events) == []
        assert list(events.result.token_ids) == truth()[len(PROMPT) :][: len(events.result.token_ids)]
    elif end == "with":
        with events:
            pass
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt), events:
            raise KeyboardInterrupt
    del events
    gc.collect()
    target_pool.check_integrity()
    draft_pool.check_integrity()


def test_speculative_failed_stream_is_closed_while_somebody_still_holds_it() -> None:
    target_pool, _ = pools()
    events = pilotfish.stream(ScriptedModel(fail_at=3), byte_tokenizer(), PROMPT, cache=PagedCache(target_pool, 512))
    with pytest.raises(RuntimeError, match="injected fault"):
        list(events)
    target_pool.check_integrity()
    assert list(events) == []
    assert list(events.result.token_ids) == truth()[len(PROMPT) :][:3]


def test_speculative_drafter_that_raises_releases_everything() -> None:
    class Raises(DialledDrafter):
        def draft(self, token_ids, max_draft_tokens):
            raise LookupError("injected fault in a drafter")

    target_pool, _ = pools()
    with pytest.raises(LookupError):
        run(ScriptedModel(), drafter=Raises([], [0]), k=3, cache=PagedCache(target_pool, 512))
    target_pool.check_integrity()


@pytest.mark.parametrize("drafts", [[], [Draft(()), Draft(())]])
def test_speculative_drafter_with_the_wrong_number_of_drafts_is_an_error(drafts: list[Draft]) -> None:
    class Miscounts(HostileDrafter):
        def propose(self, requests):
            return drafts

    with pytest.raises(DrafterError, match=r"'hostile' gave \d drafts for 1"):
        run(ScriptedModel(), drafter=Miscounts(0, 0), k=3)


def test_speculative_drafter_with_ids_that_are_no_integers_is_an_error() -> None:
    class Texts(DialledDrafter):
        def draft(self, token_ids, max_draft_tokens):
            return ["a"]

    with pytest.raises(DrafterError, match="must be integers, got 'a'"):
        run(ScriptedModel(), drafter=Texts([], [0]), k=3)


def test_speculative_nan_logits_are_an_error_and_release_the_cache() -> None:
    pool, _ = pools()
    with pytest.raises(NonFiniteLogitsError):
        run(ScriptedModel(nan_at=3), cache=PagedCache(pool, 512))
    pool.check_integrity()


@pytest.mark.parametrize("layer", range(3))
def test_speculative_layer_that_was_not_written_breaks_the_length_invariant(layer: int) -> None:
    with pytest.raises(InvariantError, match="its layers"):
        run(ScriptedModel(skip_layer=layer))
    with pytest.raises(InvariantError, match="draft cache"):
        run(ScriptedModel(), drafter=DraftModelDrafter(ScriptedModel(skip_layer=layer), PAIR), k=2)


def test_speculative_fresh_dense_caches_are_released() -> None:
    caches = []

    def make_cache():
        caches.append(DenseCache(ScriptedModel().config))
        return caches[-1]

    cache = DenseCache(ScriptedModel().config)
    run(
        ScriptedModel(),
        drafter=DraftModelDrafter(ScriptedModel(1), PAIR, make_cache=make_cache),
        k=2,
        max_tokens=9,
        cache=cache,
    )
    assert released(cache)
    assert len(caches) == 1
    assert released(caches[0])
    with pytest.raises(CacheError, match="released"):
        cache.reserve(1)


# -- the step on many sequences ---------------------------------------------------------------------------------------


def sequence(prompt: Sequence[int], pool: ShuffledPool, name: str, max_tokens: int = 20) -> SequenceState:
    sampling = SamplingParams(max_tokens=max_tokens)
    detokenizer = byte_tokenizer().detokenizer()
    return SequenceState(name, list(prompt), PagedCache(pool, 512), sampling, frozenset({NO_EOS}), 512, detokenizer)


@given(
    prompts=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=5),
    chunk=st.integers(6, 30),
    k=st.integers(0, 5),
    draft_seed=st.integers(0, 1),
)
def test_speculative_neighbours_in_a_batch_change_nothing(prompts, chunk, k, draft_seed) -> None:
    target, draft_model = ScriptedModel(), ScriptedModel(draft_seed)
    pool, draft_pool = ShuffledPool(target.config, 200, 4), ShuffledPool(target.config, 200, 4, seed=1)
    drafter = DraftModelDrafter(draft_model, PAIR, make_cache=lambda: PagedCache(draft_pool, 512))
    sequences = [sequence(prompt, pool, str(i), max_tokens=5 + 3 * i) for i, prompt in enumerate(prompts)]
    for _ in range(1000):
        calls = len(target.calls)
        outputs = step(
            sequences, target, [drafter], GreedyVerifier(), FixedLength(drafter, k), max_num_batched_tokens=chunk
        )
        assert [output.request_id for output in outputs] == [s.request_id for s in sequences]
        assert len(target.calls) <= calls + 1  # one call for all sequences
        pool.check_integrity([s.cache for s in sequences])
        for s in sequences:
            s.cache.check_integrity()
        if all(s.finish_reason for s in sequences):
            break
    for i, s in enumerate(sequences):
        assert s.token_ids[s.num_prompt_tokens :] == recompute(scripted_next, prompts[i], 5 + 3 * i)[0]
        drafter.release(s.request_id)
    draft_pool.check_integrity()


@pytest.mark.parametrize("victim", ["target", "draft"])
def test_speculative_step_that_fails_leaves_what_was_committed_and_can_be_repeated(victim: str) -> None:
    for fail_at in range(6):
        target = ScriptedModel(fail_at=fail_at if victim == "target" else None)
        draft_model = ScriptedModel(fail_at=fail_at if victim == "draft" else None)
        pool = ShuffledPool(target.config, 60, 4)
        drafter = DraftModelDrafter(draft_model, PAIR)
        sequences = [sequence(PROMPT, pool, "a"), sequence([9, 9], pool, "b")]
        failures = 0
        while not all(s.finish_reason for s in sequences):
            before = [(list(s.token_ids), s.cache.length) for s in sequences]
            try:
                step(sequences, target, [drafter], GreedyVerifier(), FixedLength(drafter, 3))
            except RuntimeError:
                failures += 1
                assert before == [(s.token_ids, s.cache.length) for s in sequences]
                for s in sequences:
                    s.cache.check_integrity()
                pool.check_integrity([s.cache for s in sequences])
        assert failures == 1
        assert [s.token_ids[s.num_prompt_tokens :] for s in sequences] == [
            recompute(scripted_next, PROMPT, 20)[0],
            recompute(scripted_next, [9, 9], 20)[0],
        ]


def test_speculative_step_without_room_changes_nothing() -> None:
    target = ScriptedModel()
    pool = ShuffledPool(target.config, 2, 4)
    sequences = [sequence(PROMPT, pool, "a"), sequence([1, 2], pool, "b")]
    with pytest.raises(CacheError, match="pages are needed"):
        step(sequences, target, [], GreedyVerifier(), FixedLength(None, 0))
    assert target.calls == []
    assert [s.cache.length for s in sequences] == [0, 0]
    pool.check_integrity([s.cache for s in sequences])
    assert pool.num_free_pages == 2


def test_speculative_dense_neighbours_run_in_one_step_too() -> None:
    target = ScriptedModel()
    sampling, detokenizer = SamplingParams(max_tokens=9), byte_tokenizer().detokenizer
    sequences = [
        SequenceState(str(i), [i, i + 1], DenseCache(target.config), sampling, frozenset(), 512, detokenizer())
        for i in range(3)
    ]
    drafter = DialledDrafter([], [-1])
    while not all(s.finish_reason for s in sequences):
        step(sequences, target, [drafter], GreedyVerifier(), FixedLength(drafter, 2))
    for i, s in enumerate(sequences):
        assert s.token_ids[s.num_prompt_tokens :] == recompute(scripted_next, [i, i + 1], 9)[0]


def test_speculative_seconds_are_the_clocks() -> None:
    ticks = iter(range(10**6))
    events = run(
        ScriptedModel(), drafter=DialledDrafter(truth(), [2]), k=3, max_tokens=7, clock=lambda: float(next(ticks))
    )
    stats = events[-1].result.stats
    parts = stats.draft_seconds + stats.target_seconds + stats.verify_seconds + stats.cache_seconds
    assert 0 < parts <= stats.end_to_end_seconds
    assert stats.prefill_seconds + stats.decode_seconds == stats.end_to_end_seconds
    assert stats.tokens_per_second == 6 / stats.decode_seconds


def test_scripted_target_notices_every_slip() -> None:
    """The double itself: a wrong id, position or order in the cache changes what it says."""
    assert scripted_next([1, 2, 3]) == scripted_next([1, 2, 3])
    assert len({scripted_next([1, 2, 3]), scripted_next([1, 3, 2]), scripted_next([0, 1, 2, 3])}) == 3
    assert all(0 <= scripted_next([i]) < VOCAB_SIZE for i in range(256))
