"""The promise on real weights: the default pair's speculative output is the target's own, complete, token for token."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from doubles import HostileDrafter

import pilotfish
from pilotfish import DraftModelDrafter, PagedCache, PagePool, SamplingParams, catalog
from pilotfish.types import GenerationResult

pytestmark = pytest.mark.real_model

PROMPTS = {
    "code": "Write a Python function that merges two sorted lists.",
    "explain": "What is a hash map?",
    "sql": "Write a SQL query that counts orders per customer.",
    "creative": "Write a haiku about the sea.",
}
MAX_TOKENS = 16


class Pair(NamedTuple):
    model: pilotfish.model.Transformer
    tokenizer: pilotfish.Tokenizer
    draft_model: pilotfish.model.Transformer
    draft_tokenizer: pilotfish.Tokenizer
    plain: dict[str, GenerationResult]
    """Target-only answers by prompt, filled on demand: each costs seconds."""

    def answer(self, prompt: str, **options: object) -> GenerationResult:
        messages = [{"role": "user", "content": prompt}]
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        events = pilotfish.stream(self.model, self.tokenizer, messages, sampling=sampling, **options)
        return list(events)[-1].result

    def plain_answer(self, prompt: str) -> GenerationResult:
        if prompt not in self.plain:
            self.plain[prompt] = self.answer(prompt)
        return self.plain[prompt]

    def drafter(self) -> DraftModelDrafter:
        return DraftModelDrafter(self.draft_model, pilotfish.check_pair(self.draft_tokenizer, self.tokenizer))


@pytest.fixture(scope="session")
def pair(model_path) -> Pair:
    """Both models in float32, 9.5 GB: loaded once for the whole run."""
    target_name, draft_name = catalog.default_pair()
    paths = [model_path(name) for name in (target_name, draft_name)]
    model, tokenizer = pilotfish.load(paths[0])
    draft_model, draft_tokenizer = pilotfish.load(paths[1])
    return Pair(model, tokenizer, draft_model, draft_tokenizer, {})


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", PROMPTS)
def test_speculative_output_on_the_real_pair_is_the_targets_own(pair: Pair, name: str, k: int) -> None:
    plain = pair.plain_answer(PROMPTS[name])
    result = pair.answer(PROMPTS[name], drafter=pair.drafter(), proposal_length=k)
    assert result.token_ids == plain.token_ids
    assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
    assert result.stats.num_accepted_tokens > 0


def test_speculative_hostile_drafter_and_paged_cache_on_the_real_pair(pair: Pair) -> None:
    pool = PagePool(pair.model.config, 20, page_size=16)
    result = pair.answer(
        PROMPTS["code"],
        drafter=HostileDrafter(1, min(pair.tokenizer.eos_token_ids)),
        proposal_length=3,
        cache=PagedCache(pool, 320),
        context_length=320,
        max_num_batched_tokens=13,
    )
    assert result.token_ids == pair.plain_answer(PROMPTS["code"]).token_ids
    pool.check_integrity()


def test_speculative_generate_on_the_real_pair(pair: Pair) -> None:
    """Raw text in, text out, through the function of the README."""
    prompt = "def merge(a, b):\n"
    texts = [
        pilotfish.speculative_generate(
            pair.draft_model, pair.model, pair.draft_tokenizer, pair.tokenizer, prompt, proposal_length=k, max_tokens=12
        )
        for k in (0, 4)
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.full
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("name", PROMPTS)
def test_speculative_output_on_the_real_pair_for_every_length(pair: Pair, name: str, k: int) -> None:
    assert pair.answer(PROMPTS[name], drafter=pair.drafter(), proposal_length=k).token_ids == (
        pair.plain_answer(PROMPTS[name]).token_ids
    )
