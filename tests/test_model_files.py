"""Every kind of model file, from disk to a speculative answer on the kernels: equal to decoding without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import model_next, recompute
from tiny_folders import write_tiny_folder
from tiny_models import (
    ARCHITECTURES,
    K_TYPES,
    WEIGHT_TYPES,
    WIDE,
    tiny_config,
    tiny_tensors,
    torch_threads,
    write_tiny_model,
)
from tokenizer_folders import tiny_document, tiny_gguf
from tokenizer_folders import write_folder as write_tokenizer

import pilotfish
from pilotfish import DraftModelDrafter, SamplingParams, check_pair
from pilotfish.errors import TokenizerError, UnsupportedModelError

PROMPT = "the end of the line and then"
NUM_TOKENS = 24
FOLDERS: dict[str, dict[str, Any]] = {
    "F32": {"dtype": "F32"},
    "F16 in shards": {"dtype": "F16", "sharded": True},
    "BF16": {"dtype": "BF16"},
    "MLX 4-bit, BF16": {"dtype": "BF16", "quantization": {"bits": 4, "group_size": 64}},
    "MLX 8-bit, F16, in shards": {"dtype": "F16", "sharded": True, "quantization": {"bits": 8, "group_size": 32}},
    "MLX 4-bit, F32": {"dtype": "F32", "quantization": {"bits": 4, "group_size": 128}},
}
KINDS = [*(f"GGUF {name}" for name in WEIGHT_TYPES), *(f"folder {name}" for name in FOLDERS)]
FAMILY = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def write_model(path: Path, architecture: str, kind: str, *, noise: float = 0.0, seed: int = 2) -> Path:
    """A tiny model with the tokenizer of `tokenizer_folders`, in a file or folder of `kind`."""
    container, _, name = kind.partition(" ")
    config = tiny_config(architecture, vocab_size=640, **WIDE)
    if container == "GGUF":
        weights = {"weight_type": name, "output": "untied", "seed": seed}
        if name not in K_TYPES:
            weights["noise"] = noise
        return write_tiny_model(
            path.with_suffix(".gguf"), config=config, metadata=tiny_gguf(FAMILY[architecture]), **weights
        )
    write_tokenizer(path, tiny_document(FAMILY[architecture]))
    tensors = tiny_tensors(config, output="untied", noise=noise, seed=seed)
    write_tiny_folder(path, config, tensors, **FOLDERS[name])
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_speculative_answer_is_plains_whatever_the_files(tmp_path: Path, architecture: str, kind: str) -> None:
    model, tokenizer = pilotfish.load(write_model(tmp_path / "target", architecture, kind), threads=1)
    # The blocks of K types take no noise: another seed makes a draft model that agrees only now and then.
    other = {"seed": 9} if kind.split()[1] in K_TYPES else {"noise": 0.04}
    draft = write_model(tmp_path / "draft", architecture, kind, **other)
    draft_model, draft_tokenizer = pilotfish.load(draft, threads=1)
    token_ids = tokenizer.encode(PROMPT, add_special_tokens=True)
    expected, _ = recompute(model_next(model), token_ids, NUM_TOKENS, tokenizer.eos_token_ids)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    plain = pilotfish.generate(model, tokenizer, PROMPT, sampling=sampling)
    assert list(plain.token_ids) == expected
    drafter = DraftModelDrafter(draft_model, check_pair(draft_tokenizer, tokenizer, PROMPT))
    found = pilotfish.generate(model, tokenizer, PROMPT, drafter=drafter, proposal_length=4, sampling=sampling)
    assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
    assert len(plain.token_ids) > 5
    assert found.stats.num_draft_tokens > found.stats.num_accepted_tokens
    assert "seed" in other or found.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_and_a_folder_of_one_model_say_the_same_and_make_a_pair(tmp_path: Path, architecture: str) -> None:
    file, folder = (
        pilotfish.load(write_model(tmp_path / kind.split()[0], architecture, kind), threads=1)
        for kind in ("GGUF F32", "folder F32")
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    answers = [pilotfish.generate(*loaded, PROMPT, sampling=sampling) for loaded in (file, folder)]
    assert answers[0].token_ids == answers[1].token_ids
    for (model, tokenizer), (draft_model, draft_tokenizer) in ((file, folder), (folder, file)):
        drafter = DraftModelDrafter(draft_model, check_pair(draft_tokenizer, tokenizer, PROMPT))
        found = pilotfish.generate(model, tokenizer, PROMPT, drafter=drafter, proposal_length=4, sampling=sampling)
        assert found.token_ids == answers[0].token_ids
        assert found.stats.num_accepted_tokens == found.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["GGUF F32", "folder F32"])
def test_an_error_about_a_tokenizer_says_of_which_model(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "target", "qwen3", kind)
    if path.is_dir():
        (path / "generation_config.json").write_text('{"eos_token_id": -1}')
    else:
        config, metadata = tiny_config("qwen3", vocab_size=640, **WIDE), tiny_gguf("qwen2")
        path = write_tiny_model(path, config=config, metadata=metadata | {"tokenizer.ggml.eos_token_id": 700})
    with pytest.raises(TokenizerError, match=rf"^{path}: .*eos_token_id"):
        pilotfish.load(path)


@pytest.mark.parametrize("kind", ["GGUF F32", "folder F32"])
def test_a_tokenizer_of_more_ids_than_the_embedding_is_refused(tmp_path: Path, kind: str) -> None:
    config = tiny_config("qwen3", vocab_size=600)
    if kind.startswith("GGUF"):
        path = write_tiny_model(tmp_path / "tiny.gguf", config=config, metadata=tiny_gguf("qwen2"))
    else:
        path = write_tokenizer(tmp_path, tiny_document("qwen2"))
        write_tiny_folder(path, config, tiny_tensors(config, output="untied"))
    with pytest.raises(UnsupportedModelError, match="the tokenizer has 604 ids, the embedding only 600 rows"):
        pilotfish.load(path)
