"""From a GGUF header to a config and checked tensors: what is read, and what is refused by name."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import (
    ARCHITECTURES,
    ROPE_FACTORS,
    TinyTensor,
    Weights,
    permute_rows,
    tiny_config,
    tiny_tensors,
    write_tiny_model,
)

from pilotfish.config import ModelConfig
from pilotfish.errors import FormatError, PilotfishError, UnsupportedModelError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model, unpermute_rows
from pilotfish.formats.model_checks import tensor_shapes
from pilotfish.types import RawTensor, WeightType

# Spelled out here too: an option that falls out of the source's table must be missed.
OPTIONS_THAT_MUST_BE_OFF: dict[str, tuple[object, object]] = {
    "rope.scaling.type": ("none", "yarn"),
    "rope.scale_linear": (1.0, 4.0),
    "rope.scaling.factor": (1.0, 8.0),
    "attention.scale": (0.0, 0.125),
    "attention.causal": (True, False),
    "attn_logit_softcapping": (0.0, 50.0),
    "final_logit_softcapping": (0.0, 30.0),
    "logit_scale": (1.0, 0.5),
    "embedding_scale": (1.0, 12.0),
    "residual_scale": (1.0, 0.25),
    "expert_count": (0, 8),
}

Read = Callable[..., tuple[ModelConfig, dict[str, RawTensor]]]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def read(tmp_path: Path, architecture: str) -> Read:
    """Reads a tiny model whose header has other `values`, under the architecture's prefix where they have none."""

    def read(
        values: dict[str, object] | None = None, config: ModelConfig | None = None, tensors: Weights | None = None
    ) -> tuple[ModelConfig, dict[str, RawTensor]]:
        metadata = {
            key if key.startswith("general.") else f"{architecture}.{key}": value
            for key, value in (values or {}).items()
        }
        path = write_tiny_model(tmp_path / "tiny.gguf", architecture, config=config, tensors=tensors, metadata=metadata)
        return read_model(GGUFFile.open(path))

    return read


@pytest.fixture
def refusal(read: Read) -> Callable[..., PilotfishError]:
    """The error of one type exactly, and of one line, that a changed model must give."""

    def refusal(kind: type[PilotfishError], *args: object, **changes: object) -> PilotfishError:
        with pytest.raises(PilotfishError) as caught:
            read(*args, **changes)
        assert type(caught.value) is kind
        assert len(str(caught.value).splitlines()) == 1
        return caught.value

    return refusal


# -- the config ---------------------------------------------------------------------------------------------------


def test_every_value_comes_from_the_header(read: Read, architecture: str) -> None:
    config = tiny_config(
        architecture,
        num_layers=3,
        hidden_size=48,
        intermediate_size=80,
        num_heads=6,
        num_kv_heads=3,
        head_dim=12,
        vocab_size=290,
        context_length=77,
        rms_norm_eps=0.25,
        rope_theta=123456.0,
    )
    assert read(config=config)[0] == config


def test_what_may_be_left_out(read: Read, architecture: str) -> None:
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = tiny_config(architecture, num_kv_heads=4)
    found, _ = read(dict.fromkeys(optional), config=config)
    assert found == replace(config, rope_theta=10000.0)


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
    ],
)
def test_counts_are_integers_in_range(refusal: Callable[..., PilotfishError], architecture: str, key: str) -> None:
    for value in ("2", 2.0, True, [2], 0, -1, 2**20 + 1, 2**24 + 1, 2**31, 2**63 - 1):
        assert f"'{architecture}.{key}' must be an integer" in str(refusal(FormatError, {key: value}))


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_constants_are_positive_numbers(refusal: Callable[..., PilotfishError], architecture: str, key: str) -> None:
    for value in ("1.0", True, [1.0], 0, -1, 0.0, -1.0, math.nan, math.inf):
        assert f"'{architecture}.{key}' must be a positive number" in str(refusal(FormatError, {key: value}))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(refusal: Callable[..., PilotfishError], architecture: str, key: str) -> None:
    assert f"{architecture}.{key}" in str(refusal(FormatError, {key: None}))


@pytest.mark.parametrize("name", ["falcon", "LLAMA", 1, True, ["llama"], None], ids=str)
def test_another_architecture_is_named(refusal: Callable[..., PilotfishError], name: object) -> None:
    error = refusal(UnsupportedModelError, {"general.architecture": name})
    assert repr(name) in str(error)
    assert "llama, qwen2, qwen3" in str(error)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"general.architecture": "gemma3"}, "sliding-window"),
        ({"general.architecture": "gpt-oss"}, "sliding-window"),
        ({"general.architecture": "mamba2"}, "recurrent"),
        ({"general.architecture": "qwen3next"}, "recurrent"),
        ({"attention.sliding_window": 4096}, "sliding-window"),
        ({"ssm.state_size": 16}, "recurrent"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_rewound_is_refused_with_the_reason(
    refusal: Callable[..., PilotfishError], values: dict[str, object], reason: str
) -> None:
    error = refusal(UnsupportedModelError, values)
    assert f"{reason} layers" in str(error)
    assert "neither target nor draft" in str(error)


def test_a_window_that_is_switched_off_says_nothing(read: Read, architecture: str) -> None:
    assert read({"attention.sliding_window": 0})[0] == tiny_config(architecture)


@pytest.mark.parametrize("key", OPTIONS_THAT_MUST_BE_OFF)
def test_an_option_that_changes_the_forward_must_be_off(
    read: Read, refusal: Callable[..., PilotfishError], architecture: str, key: str
) -> None:
    off, on = OPTIONS_THAT_MUST_BE_OFF[key]
    assert read({key: off})[0] == tiny_config(architecture)
    error = refusal(UnsupportedModelError, {key: on})
    assert f"'{architecture}.{key}' is {on!r}" in str(error)


def test_an_option_of_another_architecture_says_nothing(read: Read, architecture: str) -> None:
    assert read({"general.expert_count": 8})[0] == tiny_config(architecture)


@pytest.mark.parametrize("key", ["attention.value_length", "rope.dimension_count"])
def test_all_head_sizes_are_one(refusal: Callable[..., PilotfishError], architecture: str, key: str) -> None:
    assert f"'{architecture}.{key}' is 8" in str(refusal(UnsupportedModelError, {key: 8}))


@pytest.mark.parametrize(
    "values",
    [
        {"attention.head_count_kv": 3},
        {"attention.head_count": 2, "attention.head_count_kv": 4},
        {"attention.key_length": 15, "attention.value_length": 15},
    ],
    ids=str,
)
def test_impossible_heads(refusal: Callable[..., PilotfishError], values: dict[str, object]) -> None:
    assert "heads" in str(refusal(FormatError, values))


@pytest.mark.parametrize("count", [1 << 20, 1 << 24])
def test_layers_that_are_not_there_cost_no_memory(refusal: Callable[..., PilotfishError], count: int) -> None:
    tracemalloc.start()
    try:
        error = refusal(FormatError, {"block_count": count})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "layers" in str(error)
    assert peak < 1 << 24


# -- the tensors --------------------------------------------------------------------------------------------------


def test_every_tensor_is_needed_and_named(refusal: Callable[..., PilotfishError], architecture: str) -> None:
    whole = tiny_tensors(tiny_config(architecture))
    assert set(tensor_shapes(tiny_config(architecture))) == {*whole, "output.weight"}
    for name in whole:
        error = refusal(FormatError, tensors={other: tensor for other, tensor in whole.items() if other != name})
        assert f"lacks the tensor '{name}'" in str(error)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_norm.bias", "blk.2.attn_q.weight", "blk.0.attn_output.bias", "rope_factors_long.weight", "x"]
)
def test_a_tensor_too_many_is_named(refusal: Callable[..., PilotfishError], architecture: str, name: str) -> None:
    extra = {name: TinyTensor(np.ones((64, 4), np.float32), gguf.GGMLQuantizationType.F32)}
    error = refusal(UnsupportedModelError, tensors=tiny_tensors(tiny_config(architecture)) | extra)
    assert f"'{name}'" in str(error)


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
def test_factors_of_the_rotary_frequencies_are_read(read: Read, architecture: str) -> None:
    config = tiny_config(architecture, rope_factors=ROPE_FACTORS)
    assert read(config=config)[0] == config


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"], indirect=True)
def test_only_a_llama_has_factors(refusal: Callable[..., PilotfishError], architecture: str) -> None:
    tensors = tiny_tensors(tiny_config(architecture, rope_factors=ROPE_FACTORS))
    assert "'rope_freqs.weight'" in str(refusal(UnsupportedModelError, tensors=tensors))


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "factors",
    [[1.0] * 7, [1.0] * 9, [*[1.0] * 7, 0.0], [*[1.0] * 7, -2.0], [*[1.0] * 7, math.nan], [math.inf] * 8, [[1.0] * 8]],
    ids=str,
)
def test_factors_that_cannot_be_are_refused(
    refusal: Callable[..., PilotfishError], architecture: str, factors: list[float]
) -> None:
    tensor = TinyTensor(np.array(factors, np.float32), gguf.GGMLQuantizationType.F32)
    error = refusal(FormatError, tensors=tiny_tensors(tiny_config(architecture)) | {"rope_freqs.weight": tensor})
    assert "rotary" in str(error) or "rope_freqs.weight" in str(error)


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
def test_factors_are_not_read_before_they_are_counted(
    refusal: Callable[..., PilotfishError], architecture: str
) -> None:
    tensor = TinyTensor(np.ones(1 << 20, np.float32), gguf.GGMLQuantizationType.F32)
    tensors = tiny_tensors(tiny_config(architecture)) | {"rope_freqs.weight": tensor}
    tracemalloc.start()
    try:
        error = refusal(FormatError, tensors=tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "the shape (1048576,), where F32 and (8,) are needed" in str(error)
    assert peak < 1 << 23  # the file is written in here too


def test_rows_of_the_embedding_are_bounded(refusal: Callable[..., PilotfishError], architecture: str) -> None:
    tensor = TinyTensor(np.zeros(((1 << 20) + 1, 1), np.float32), gguf.GGMLQuantizationType.F32)
    error = refusal(FormatError, tensors={"token_embd.weight": tensor})
    assert "the embedding has 1048577 rows" in str(error)


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
def test_a_llama_has_no_bias(refusal: Callable[..., PilotfishError]) -> None:
    bias = {"blk.0.attn_q.bias": TinyTensor(np.ones(64, np.float32), gguf.GGMLQuantizationType.F32)}
    error = refusal(UnsupportedModelError, tensors=tiny_tensors(tiny_config("llama")) | bias)
    assert "'blk.0.attn_q.bias'" in str(error)


def test_a_wrong_shape_is_named(refusal: Callable[..., PilotfishError], architecture: str) -> None:
    whole = tiny_tensors(tiny_config(architecture), output="untied")
    for name, tensor in whole.items():
        data = np.concatenate((tensor.data, tensor.data), axis=-1)
        error = refusal(FormatError, tensors=whole | {name: replace(tensor, data=data)})
        # The embedding says how wide the others have to be only through the header, so it too can be named itself.
        assert f"tensor '{name}' has the shape {data.shape}" in str(error)


def test_more_rows_than_the_embedding(refusal: Callable[..., PilotfishError], architecture: str) -> None:
    whole = tiny_tensors(tiny_config(architecture), output="untied")
    short = replace(whole["output.weight"], data=whole["output.weight"].data[:-1])
    error = refusal(FormatError, tensors=whole | {"output.weight": short})
    assert "'output.weight' has the shape (303, 64), the config asks for (304, 64)" in str(error)


def test_transposed_and_flattened_matrices_are_refused(
    refusal: Callable[..., PilotfishError], architecture: str
) -> None:
    whole = tiny_tensors(tiny_config(architecture))
    down = whole["blk.1.ffn_down.weight"]
    for data in (down.data.T.copy(), down.data.reshape(-1), down.data.reshape(1, *down.data.shape)):
        error = refusal(FormatError, tensors=whole | {"blk.1.ffn_down.weight": replace(down, data=data)})
        assert "'blk.1.ffn_down.weight'" in str(error)


def test_a_tied_model_shares_the_embedding(read: Read, architecture: str) -> None:
    _, tied = read()
    assert tied["output.weight"] is tied["token_embd.weight"]
    _, untied = read(tensors=tiny_tensors(tiny_config(architecture), output="untied"))
    assert untied["output.weight"] is not untied["token_embd.weight"]
    assert not np.array_equal(untied["output.weight"].read(), untied["token_embd.weight"].read())


def test_all_tensors_come_in_the_row_order_of_hugging_face(read: Read, architecture: str) -> None:
    tensors = tiny_tensors(tiny_config(architecture), output="untied", weight_type="Q8_0")
    _, found = read(tensors=tensors)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        data = found[name].read()
        assert np.array_equal(data, tensor.data.view(np.uint8).reshape(data.shape)), name


@pytest.mark.parametrize("num_heads", [1, 2, 5])
@pytest.mark.parametrize("head_dim", [2, 4, 64])
def test_unpermuting_undoes_the_converter(num_heads: int, head_dim: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, (num_heads * head_dim, 34), dtype=np.uint8)
    permuted = permute_rows(data, num_heads)
    stored = RawTensor("blk.0.attn_q.weight", WeightType.Q8_0, (num_heads * head_dim, 32), lambda: permuted)
    found = unpermute_rows(stored, head_dim)
    assert np.array_equal(found.read(), data)
    assert found == stored
    assert head_dim == 2 or not np.array_equal(permuted, data)
