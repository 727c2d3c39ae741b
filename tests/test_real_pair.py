"""The promise on real weights: the default pair's speculative output is the target's own, to the bit of its logits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from doubles import HostileDrafter

import pilotfish
from pilotfish import DenseCache, DraftModelDrafter, PagedCache, PagePool, SamplingParams, catalog
from pilotfish.drafters import Drafter
from pilotfish.kvcache import KVStore
from pilotfish.model import ForwardBatch, ForwardInput, Transformer, run_forward
from pilotfish.ops.reference import ReferenceBackend
from pilotfish.types import GenerationStats

pytestmark = pytest.mark.real_model

PROMPTS = {
    prompt["id"]: prompt["user"]
    for prompt in json.loads((Path(pilotfish.__file__).parent / "bench/prompts.json").read_text())
}
SHORT_PROMPTS = ("code", "explain", "sql", "creative")
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)


class Recorder:
    """A model that keeps the logits of each position, the last ones where a rejected draft had others before."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.logits: dict[int, torch.Tensor] = {}
        self._model = model

    def forward(self, batch: ForwardBatch, store: KVStore) -> torch.Tensor:
        logits = self._model.forward(batch, store)
        positions = batch.positions[batch.logits_indices].tolist()
        self.logits.update(zip(positions, logits.clone(), strict=True))
        return logits


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    logits: dict[int, torch.Tensor]
    stats: GenerationStats


class Pair(NamedTuple):
    model: Transformer
    tokenizer: pilotfish.Tokenizer
    draft_model: Transformer
    draft_tokenizer: pilotfish.Tokenizer

    def answer(
        self,
        prompt: str,
        max_tokens: int,
        drafter: Drafter | None = None,
        k: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        **options,
    ) -> Answer:
        recorder = Recorder(self.model)
        events = pilotfish.stream(
            recorder,
            self.tokenizer,
            [{"role": "user", "content": prompt}],
            sampling=replace(sampling, max_tokens=max_tokens),
            drafter=drafter,
            proposal_length=k,
            **options,
        )
        result = list(events)[-1].result
        return Answer(result.token_ids, result.text, recorder.logits, result.stats)

    def drafter(self) -> DraftModelDrafter:
        return DraftModelDrafter(self.draft_model, pilotfish.check_pair(self.draft_tokenizer, self.tokenizer))

    def hostile(self, seed: int) -> HostileDrafter:
        return HostileDrafter(seed, min(self.tokenizer.eos_token_ids))


def assert_same(found: Answer, plain: Answer) -> None:
    """Ids, text and the logits of every position that led to an output token."""
    for place, (token_id, expected) in enumerate(zip(found.token_ids, plain.token_ids, strict=False)):
        assert token_id == expected, f"token {place} differs: {margins(plain, place)}"
    assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
    for position, logits in plain.logits.items():
        assert torch.equal(found.logits[position], logits), f"the logits at position {position} differ"
        assert not torch.isnan(logits).any()


def margins(plain: Answer, place: int) -> str:
    position = sorted(plain.logits)[place]
    (first, second), ids = plain.logits[position].topk(2)
    return f"the target's logits are {first} for {ids[0]} and {second} for {ids[1]}, {first - second} apart"


@pytest.fixture(scope="session")
def pair(model_path) -> Pair:
    """Both models, loaded once for the whole run."""
    target, draft = (model_path(name) for name in catalog.default_pair())
    return Pair(*pilotfish.load(target), *pilotfish.load(draft))


@pytest.fixture(scope="session")
def plain(pair: Pair) -> dict[str, Answer]:
    return {name: pair.answer(PROMPTS[name], 32) for name in SHORT_PROMPTS}


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("name", SHORT_PROMPTS)
def test_speculative_output_on_the_real_pair_is_the_targets_own(
    pair: Pair, plain: dict[str, Answer], name: str, k: int
) -> None:
    found = pair.answer(PROMPTS[name], 32, pair.drafter(), k)
    assert_same(found, plain[name])
    assert found.stats.num_accepted_tokens > 0
    assert_same(pair.answer(PROMPTS[name], 32, pair.hostile(k), k), plain[name])


def test_speculative_output_with_pages_and_small_chunks_on_the_real_pair(pair: Pair, plain: dict[str, Answer]) -> None:
    pool = PagePool(pair.model.config, 20, page_size=16)
    cache = PagedCache(pool, 320)
    found = pair.answer(
        PROMPTS["code"], 32, pair.drafter(), 3, cache=cache, context_length=320, max_num_batched_tokens=13
    )
    assert_same(found, plain["code"])
    pool.check_integrity()


def test_logits_of_a_text_do_not_depend_on_how_it_is_fed(pair: Pair) -> None:
    """300 tokens whole, one at a time, and in chunks of random sizes: the same bits, for both models."""
    text = (Path(__file__).parent.parent / "docs/design.md").read_text()
    token_ids = pair.tokenizer.encode(text)[:300]
    sizes = torch.randint(1, 40, (100,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(model: Transformer, chunks: Iterable[int]) -> torch.Tensor:
        cache = DenseCache(model.config)
        found = []
        for size in chunks:
            chunk = token_ids[cache.length : cache.length + size]
            if chunk:
                cache.reserve(len(chunk))
                found += run_forward(model, [ForwardInput(cache, chunk, len(chunk))])
        return torch.cat(found)

    assert len(token_ids) == 300
    for model in (pair.model, pair.draft_model):
        whole = logits(model, [300])
        assert not torch.isnan(whole).any()
        assert torch.equal(logits(model, [1] * 300), whole)
        assert torch.equal(logits(model, sizes), whole)


@pytest.mark.parametrize("name", SHORT_PROMPTS[:2])
def test_a_seed_gives_the_same_text_on_the_real_pair(pair: Pair, name: str) -> None:
    plain = pair.answer(PROMPTS[name], 24, sampling=SEEDED)
    found = pair.answer(PROMPTS[name], 24, pair.drafter(), 4, SEEDED)
    assert_same(found, plain)
    assert found.stats.num_accepted_tokens > 0
    assert_same(pair.answer(PROMPTS[name], 24, pair.hostile(4), 4, SEEDED), plain)


@pytest.mark.full
@pytest.mark.parametrize("name", PROMPTS)
def test_a_seed_gives_the_same_text_on_the_real_pair_over_the_whole_grid(pair: Pair, name: str) -> None:
    plain = pair.answer(PROMPTS[name], 96, sampling=SEEDED)
    for k in (1, 4, 8):
        assert_same(pair.answer(PROMPTS[name], 96, pair.drafter(), k, SEEDED), plain)
        assert_same(pair.answer(PROMPTS[name], 96, pair.hostile(k), k, SEEDED), plain)


@pytest.mark.full
def test_rejection_accepts_no_less_than_matching_on_the_real_pair(pair: Pair) -> None:
    """At temperature 0.7, over all prompts; seeds are fixed."""
    rates = {}
    for rule in ("rejection", "matching"):
        sampling = SamplingParams(temperature=0.7, seed=1, acceptance=rule)
        stats = [pair.answer(prompt, 96, pair.drafter(), 4, sampling).stats for prompt in PROMPTS.values()]
        rates[rule] = sum(one.num_accepted_tokens for one in stats) / sum(one.num_draft_tokens for one in stats)
    assert rates["rejection"] >= rates["matching"] > 0.2, rates


def test_speculative_generate_on_the_real_pair(pair: Pair) -> None:
    """Raw text in, text out, through the function of the README."""
    texts = [
        pilotfish.speculative_generate(
            pair.draft_model, pair.model, pair.draft_tokenizer, pair.tokenizer, "def merge(a, b):\n", k, 24
        )
        for k in (0, 4)
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.full
@pytest.mark.parametrize("name", PROMPTS)
def test_speculative_output_on_the_real_pair_over_the_whole_grid(pair: Pair, name: str) -> None:
    """Every proposal length, 128 tokens, with the draft model and with a hostile drafter."""
    plain = pair.answer(PROMPTS[name], 128)
    for k in range(1, 9):
        assert_same(pair.answer(PROMPTS[name], 128, pair.drafter(), k), plain)
        assert_same(pair.answer(PROMPTS[name], 128, pair.hostile(k), k), plain)


@pytest.mark.full
@pytest.mark.parametrize("name", SHORT_PROMPTS)
def test_speculative_output_on_the_real_pair_with_reference_operations(model_path, name: str) -> None:
    """In float32, 9.5 GB for a while: slow, and exact all the same."""
    target, draft = (model_path(name) for name in catalog.default_pair())
    backend = ReferenceBackend()
    pair = Pair(*pilotfish.load(target, backend=backend), *pilotfish.load(draft, backend=backend))
    plain = pair.answer(PROMPTS[name], 16)
    for k in (1, 4):
        assert_same(pair.answer(PROMPTS[name], 16, pair.drafter(), k), plain)
