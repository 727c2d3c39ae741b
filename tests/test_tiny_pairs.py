"""Whole answers of tiny random transformers, from file to text: the step over real arithmetic, both architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles import HostileDrafter, ShuffledPool, model_next, recompute
from tiny_models import ARCHITECTURES, WIDE, tiny_config, torch_threads, write_tiny_model

import pilotfish
from pilotfish import DraftModelDrafter, PagedCache, PagePool, SamplingParams, check_pair

PROMPT = "the end of the line and then"
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=[(a, t) for a in ARCHITECTURES for t in ("F32", "Q5_0", "Q6_K")], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A target, and a draft model of the same kind that agrees with it often, but not always."""
    architecture, weight_type = request.param
    folder = tmp_path_factory.mktemp("pair")
    config = tiny_config(architecture, **(WIDE if weight_type.endswith("_K") else {}))
    common = {"config": config, "output": "untied", "weight_type": weight_type}
    target = write_tiny_model(folder / "target.gguf", **common)
    if weight_type.endswith("_K"):
        draft = write_tiny_model(folder / "draft.gguf", seed=1, **common)
    else:
        draft = write_tiny_model(folder / "draft.gguf", noise=0.15, **common)
    with torch_threads(1):
        model, tokenizer = pilotfish.load(target)
        draft_model, draft_tokenizer = pilotfish.load(str(draft))
        expected, _ = recompute(model_next(model), tokenizer.encode(PROMPT), NUM_TOKENS, tokenizer.eos_token_ids)
    return model, tokenizer, draft_model, draft_tokenizer, expected


def answer(pair, **options):
    model, tokenizer, *_ = pair
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    return list(pilotfish.stream(model, tokenizer, PROMPT, sampling=sampling, **options))[-1].result


@pytest.mark.parametrize("page_size", [0, 1, 4, 16])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_speculative_answer_is_recomputed_greedily(pair, k: int, page_size: int) -> None:
    model, tokenizer, draft_model, draft_tokenizer, expected = pair
    drafter = DraftModelDrafter(draft_model, check_pair(draft_tokenizer, tokenizer, PROMPT), max_num_batched_tokens=5)
    pool = ShuffledPool(model.config, 128, page_size or 1)
    result = answer(
        pair,
        drafter=drafter,
        proposal_length=k,
        cache=PagedCache(pool, 128) if page_size else None,
        max_num_batched_tokens=1 + 3 * k,
    )
    assert list(result.token_ids) == expected
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_speculative_hostile_drafter_against_a_transformer(pair, seed: int) -> None:
    drafter = HostileDrafter(seed, min(pair[1].eos_token_ids))
    assert list(answer(pair, drafter=drafter, proposal_length=6).token_ids) == pair[4]


@pytest.mark.parametrize("k", [1, 4])
def test_speculative_twin_accepts_everything(pair, k: int) -> None:
    model, tokenizer, *_ = pair
    pool = PagePool(model.config, 64, 4)
    twin = DraftModelDrafter(model, check_pair(tokenizer, tokenizer), make_cache=lambda: PagedCache(pool, 256))
    result = answer(pair, drafter=twin, proposal_length=k)
    assert list(result.token_ids) == pair[4]
    assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens > 0
    pool.check_integrity()


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(304, 320), (320, 304), (270, 304)])
def test_speculative_pair_whose_matrices_are_padded_differently(
    tmp_path: Path, target_rows: int, draft_rows: int
) -> None:
    """As Qwen's are: 151936 rows beside 152064, and one tokenizer of fewer ids than either."""
    paths = [
        write_tiny_model(tmp_path / f"{rows}.gguf", config=tiny_config("qwen3", vocab_size=rows), seed=rows)
        for rows in (target_rows, draft_rows)
    ]
    (model, tokenizer), (draft_model, draft_tokenizer) = map(pilotfish.load, paths)
    assert tokenizer.vocab_size == 270 <= min(target_rows, draft_rows)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    plain = pilotfish.generate(model, tokenizer, PROMPT, sampling=sampling)
    drafter = DraftModelDrafter(draft_model, check_pair(draft_tokenizer, tokenizer, PROMPT))
    found = pilotfish.generate(model, tokenizer, PROMPT, drafter=drafter, proposal_length=3, sampling=sampling)
    assert found.token_ids == plain.token_ids
    assert max(plain.token_ids) < tokenizer.vocab_size
    assert found.stats.num_draft_tokens > 0


def test_generate_answers_messages_text_and_ids_alike(pair) -> None:
    model, tokenizer, *_ = pair
    messages = [{"role": "user", "content": PROMPT}]
    rendered = tokenizer.render_chat(messages)
    sampling = SamplingParams(max_tokens=8)
    results = [
        pilotfish.generate(model, tokenizer, prompt, sampling=sampling)
        for prompt in (messages, rendered, tokenizer.encode(rendered))
    ]
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids
    assert results[0].text == tokenizer.decode(results[0].token_ids)


def test_load_names_what_it_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(
        pilotfish.errors.ModelNotFoundError, match=r"no file or folder, no name in the catalog.*smollm2"
    ):
        pilotfish.load("no-such-model")
    with pytest.raises(pilotfish.errors.ModelNotFoundError, match="holds neither a GGUF file nor"):
        pilotfish.load(tmp_path)
    path = write_tiny_model(tmp_path / "small.gguf", config=tiny_config(vocab_size=250))
    with pytest.raises(pilotfish.errors.UnsupportedModelError, match="the tokenizer has"):
        pilotfish.load(path)
