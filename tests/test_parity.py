"""Logits against `transformers`: tiny models of both architectures in every form, and a real file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_folders import DTYPES, LLAMA3_ROPE, hf_name, write_tiny_folder
from tiny_models import (
    ARCHITECTURES,
    K_TYPES,
    OUTPUTS,
    ROPE_FACTORS,
    WEIGHT_TYPES,
    WIDE,
    float_weights,
    tiny_config,
    tiny_tensors,
    torch_threads,
    write_tiny_model,
)
from torch import Tensor

import pilotfish
from pilotfish.config import ModelConfig
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
from pilotfish.formats.hf_model import read_folder
from pilotfish.kvcache import DenseCache
from pilotfish.model import ForwardInput, Transformer, run_forward
from pilotfish.ops.reference import ReferenceBackend

RELATIVE_BOUND = 1e-5
"""Largest difference allowed, as a share of the largest logit. Both sides compute in float32 and differ only in the
order of their sums, worth about 1e-6; a wrong eps, theta or row order is worth 1e-3 and more."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def oracle(config: ModelConfig, weights: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The same model in `transformers`, in float32 with eager attention, from weights in its own row order."""
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[config.architecture]
    model = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    state = {hf_name(name): torch.tensor(values) for name, values in weights.items() if name != "rope_freqs.weight"}
    model.load_state_dict(state, strict=True)
    if config.rope_factors is not None:
        model.model.rotary_emb.inv_freq /= torch.tensor(config.rope_factors)
    return model.to(torch.float32).eval()


def oracle_logits(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def our_logits(model: Transformer, token_ids: list[int]) -> Tensor:
    cache = DenseCache(model.config, dtype=torch.float32)
    cache.reserve(len(token_ids))
    return run_forward(model, [ForwardInput(cache, token_ids, len(token_ids))])[0]


def assert_close(found: Tensor, expected: Tensor, bound: float = RELATIVE_BOUND) -> None:
    difference = (found - expected).abs().max().item() / expected.abs().max().item()
    assert difference <= bound
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


def check_tiny(tmp_path: Path, config: ModelConfig, **weights: Any) -> None:
    tensors = tiny_tensors(config, **weights)
    path = write_tiny_model(tmp_path / "tiny.gguf", config=config, tensors=tensors)
    read_config, raw = read_model(GGUFFile.open(path))
    assert read_config == config
    token_ids = np.random.default_rng(7).integers(0, config.vocab_size, 40).tolist()
    found = our_logits(Transformer(read_config, raw, config.vocab_size), token_ids)
    expected = oracle_logits(oracle(config, float_weights(tensors)), token_ids)
    assert len(set(expected.argmax(dim=-1).tolist())) > 5  # else agreeing on it would mean little
    assert_close(found, expected)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_give_the_logits_of_transformers(
    tmp_path: Path, architecture: str, weight_type: str, output: str
) -> None:
    config = tiny_config(architecture, **(WIDE if weight_type in K_TYPES else {}))
    check_tiny(tmp_path, config, weight_type=weight_type, output=output)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 32},  # unlike hidden_size / num_heads
        {"head_dim": 6, "num_heads": 4, "num_kv_heads": 1},
        {"num_kv_heads": 4},
        {"num_heads": 8, "head_dim": 8, "num_kv_heads": 2},
        {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64},
        {"rope_theta": 1e6},
        {"rope_theta": 100.0},
        {"rms_norm_eps": 0.5},
        {"num_layers": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_size_and_constant_reaches_the_forward(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    check_tiny(tmp_path, tiny_config(architecture, **changes), output="untied")


def test_rotary_factors_reach_the_forward(tmp_path: Path) -> None:
    check_tiny(tmp_path, tiny_config("llama", rope_factors=ROPE_FACTORS), output="untied")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weight_types_may_differ_between_tensors(tmp_path: Path, architecture: str) -> None:
    kinds = {
        "token_embd.weight": "Q8_0",
        "attn_q.weight": "Q5_0",
        "attn_k.weight": "Q4_1",
        "attn_v.weight": "Q6_K",
        "ffn_down.weight": "Q4_K",
        "output.weight": "F16",
    }
    check_tiny(tmp_path, tiny_config(architecture, **WIDE), tensor_types=kinds, output="untied")


def folder_logits(folder: Path, config: ModelConfig) -> Tensor:
    """Ours for 40 tokens, held against those of `transformers`, which reads the folder with its own loader."""
    read_config, raw = read_folder(folder)
    token_ids = np.random.default_rng(7).integers(0, config.vocab_size, 40).tolist()
    found = our_logits(Transformer(read_config, raw, config.vocab_size), token_ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = oracle_logits(model, token_ids)
    assert len(set(expected.argmax(dim=-1).tolist())) > 5
    assert_close(found, expected)
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folders_give_the_logits_of_transformers(
    tmp_path: Path, architecture: str, dtype: str, output: str, sharded: bool
) -> None:
    config = tiny_config(architecture)
    values = {"tie_word_embeddings": output != "untied"}
    write_tiny_folder(
        tmp_path, config, tiny_tensors(config, output=output), dtype=dtype, sharded=sharded, values=values
    )
    folder_logits(tmp_path, config)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_scaling_of_llama_3_gives_the_logits_of_transformers(tmp_path: Path, architecture: str, place: str) -> None:
    config = tiny_config(architecture)
    tensors = tiny_tensors(config, output="untied")
    write_tiny_folder(tmp_path / "scaled", config, tensors, values={place: LLAMA3_ROPE})
    write_tiny_folder(tmp_path / "plain", config, tensors)
    scaled, plain = (folder_logits(tmp_path / name, config) for name in ("scaled", "plain"))
    assert (scaled - plain).abs().max() > 100 * RELATIVE_BOUND * plain.abs().max()  # else the test would show nothing


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group_size", "dtype", "output"), [(32, "F16", "untied"), (64, "BF16", "tied"), (128, "F32", "copy")]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mlx_folders_give_the_logits_of_transformers(
    tmp_path: Path, architecture: str, bits: int, group_size: int, dtype: str, output: str
) -> None:
    """`transformers` computes with the weights that `mlx` itself dequantises."""
    config = tiny_config(architecture, **WIDE)
    weights = write_tiny_folder(
        tmp_path,
        config,
        tiny_tensors(config, output=output),
        dtype=dtype,
        sharded=True,
        quantization={"group_size": group_size, "bits": bits},
        values={"tie_word_embeddings": output != "untied"},
    )
    weights.setdefault("output.weight", weights["token_embd.weight"])
    read_config, raw = read_folder(tmp_path)
    token_ids = np.random.default_rng(7).integers(0, config.vocab_size, 40).tolist()
    found = our_logits(Transformer(read_config, raw, config.vocab_size), token_ids)
    expected = oracle_logits(oracle(config, weights), token_ids)
    assert len(set(expected.argmax(dim=-1).tolist())) > 5
    assert_close(found, expected)


@pytest.mark.real_model
def test_a_real_llama_gives_the_logits_of_transformers(model_path: Callable[[str], Path]) -> None:
    """`transformers` reads the same file with a reader and a q/k permutation of its own."""
    path = model_path("smollm2-135m")
    model, tokenizer = pilotfish.load(path, backend=ReferenceBackend())
    text = (
        "The pilot fish swims a little ahead of the shark. In 1758 Linnaeus gave it its name, "
        "and sailors have told stories about the two ever since, most of them untrue."
    )
    token_ids = tokenizer.encode(text)
    assert len(token_ids) >= 35
    expected = oracle_logits(
        transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval(),
        token_ids,
    )
    found = our_logits(model, token_ids)
    usable = found > -torch.inf
    assert usable.sum(dim=1).min() == model.config.vocab_size - len(tokenizer.padding_token_ids)
    assert_close(found.where(usable, 0), expected.where(usable, 0), 1e-4)
