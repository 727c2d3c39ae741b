"""From a Hugging Face folder to a config and checked tensors: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_folders import (
    ABSENT,
    CLASSES,
    DTYPES,
    LLAMA3_ROPE,
    folder_tensors,
    hf_config,
    hf_name,
    write_folder,
    write_tiny_folder,
)
from tiny_models import ARCHITECTURES, OUTPUTS, tiny_config, tiny_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pilotfish.config import ModelConfig
from pilotfish.errors import FormatError, ModelNotFoundError, PilotfishError, UnsupportedModelError, brief
from pilotfish.formats.hf_model import read_folder
from pilotfish.formats.model_checks import RECURRENT_LAYERS, WINDOWED_LAYERS
from pilotfish.ops.reference import dense
from pilotfish.types import RawTensor

Read = Callable[..., tuple[ModelConfig, dict[str, RawTensor]]]
Refusal = Callable[..., str]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def read(tmp_path: Path, architecture: str) -> Read:
    """Reads a tiny folder with other config `values` and other `tensors`; ABSENT takes one out."""

    def read(
        values: dict[str, object] | None = None,
        tensors: dict[str, Any] | None = None,
        config: ModelConfig | None = None,
        output: str = "untied",
    ) -> tuple[ModelConfig, dict[str, RawTensor]]:
        config = config or tiny_config(architecture)
        stored = folder_tensors(tiny_tensors(config, output=output))[0] | (tensors or {})
        write_folder(
            tmp_path, hf_config(config, values), {name: value for name, value in stored.items() if value is not ABSENT}
        )
        return read_folder(tmp_path)

    return read


@pytest.fixture
def refusal(read: Read) -> Refusal:
    """The message of the error, of one type exactly and of one line, that a changed folder must give."""

    def refusal(kind: type[PilotfishError], *args: object, **changes: object) -> str:
        with pytest.raises(PilotfishError) as caught:
            read(*args, **changes)
        assert type(caught.value) is kind
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 1000
        return str(caught.value)

    return refusal


# -- the promise --------------------------------------------------------------------------------------------------


@st.composite
def folders(draw: st.DrawFn) -> tuple[ModelConfig, dict[str, Any]]:
    """A config of small sizes, and what `write_tiny_folder` is to do with it."""
    num_kv_heads = draw(st.integers(1, 3))
    config = tiny_config(
        draw(st.sampled_from(ARCHITECTURES)),
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, 12)),
        intermediate_size=draw(st.integers(1, 12)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(1, 20)),
        context_length=draw(st.integers(1, 1 << 20)),
        rms_norm_eps=draw(st.floats(1e-12, 1)),
        rope_theta=draw(st.floats(1, 1e9)),
    )
    options = {
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "sharded": draw(st.booleans()),
    }
    return config, options


@given(folders(), st.sampled_from(OUTPUTS), st.integers(0, 3))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, folder: tuple[ModelConfig, dict[str, Any]], output: str, seed: int
) -> None:
    config, options = folder
    path = tmp_path_factory.mktemp("folder")
    tensors = tiny_tensors(config, seed=seed, output=output)
    write_tiny_folder(path, config, tensors, values={"tie_word_embeddings": output != "untied"}, **options)
    found, raw = read_folder(path)
    assert found == config
    stored = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    assert {hf_name(name) for name in raw} == stored.keys()
    for name, tensor in raw.items():
        values = stored[hf_name(name)]
        assert tensor.shape == tuple(values.shape)
        assert tensor.weight_type.label == options["dtype"]
        assert tensor.read().tobytes() == values.view(torch.uint8).numpy().tobytes()


def test_nothing_is_permuted_and_evicted_tensors_are_read_again(read: Read, architecture: str) -> None:
    config = tiny_config(architecture)
    _, raw = read()
    expected = tiny_tensors(config, output="untied")
    for name in raw:
        for _ in range(2):
            assert torch.equal(dense(raw[name]), torch.tensor(expected[name].floats()))
            raw[name].evict()


# -- the config ---------------------------------------------------------------------------------------------------

COUNTS = {
    "num_hidden_layers": True,
    "hidden_size": True,
    "intermediate_size": True,
    "num_attention_heads": True,
    "num_key_value_heads": False,
    "head_dim": False,
    "vocab_size": True,
    "max_position_embeddings": True,
}
"""Whether a count must be there."""


@pytest.mark.parametrize("key", COUNTS)
def test_counts_are_integers_in_range(refusal: Refusal, key: str) -> None:
    for value in ("2", 2.0, True, [2], {}, 0, -1, 2**20 + 1, 2**64, 10**400):
        assert f"'{key}' must be an integer from 1" in refusal(FormatError, {key: value})
    if COUNTS[key]:
        for value in (None, ABSENT):
            assert f"'{key}' must be an integer from 1" in refusal(FormatError, {key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_constants_are_positive_numbers(refusal: Refusal, tmp_path: Path, key: str) -> None:
    for value in ("1.0", True, 0, 0.0, -1.0, 10**400):
        assert f"'{key}' must be a positive number" in refusal(FormatError, {key: value})
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = json.dumps(hf_config(tiny_config(), {key: "VALUE"})).replace('"VALUE"', text)
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(FormatError, match=r"is not sound JSON|must be a positive number"):
            read_folder(tmp_path)


def test_an_epsilon_is_required_and_a_theta_is_not_below_one(refusal: Refusal) -> None:
    for value in (None, ABSENT):
        assert "'rms_norm_eps'" in refusal(FormatError, {"rms_norm_eps": value})
    assert "'rope_theta' must be at least 1" in refusal(FormatError, {"rope_theta": 1e-300})


def test_integers_are_numbers(read: Read) -> None:
    found, _ = read({"rms_norm_eps": 1, "rope_theta": 1000000})
    assert (found.rms_norm_eps, found.rope_theta) == (1.0, 1e6)


@pytest.mark.parametrize("absent", [None, ABSENT], ids=["null", "absent"])
def test_what_may_be_left_out_is_as_in_transformers(read: Read, architecture: str, absent: object) -> None:
    config = tiny_config(architecture, num_kv_heads=4, head_dim=128 if architecture == "qwen3" else 16)
    optional = ("rope_theta", "num_key_value_heads", "head_dim", "architectures", "hidden_act", "tie_word_embeddings")
    found, _ = read(dict.fromkeys(optional, absent), config=config)
    assert found == replace(config, rope_theta=10000.0)

    values = hf_config(config, dict.fromkeys(optional, ABSENT) | {"num_key_value_heads": None})
    theirs = transformers.AutoConfig.for_model(**values)
    assert getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads) == config.head_dim
    assert theirs.num_key_value_heads == config.num_kv_heads
    assert theirs.hidden_act == "silu"
    assert theirs.tie_word_embeddings is False
    assert theirs.rope_parameters["rope_theta"] == 10000.0


def test_a_config_that_transformers_saved_is_read(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture)
    theirs = transformers.AutoConfig.for_model(**hf_config(config), tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path)
    found, raw = read_folder(tmp_path)
    assert found == config
    assert raw["output.weight"] is raw["token_embd.weight"]


def test_an_explicit_head_size_wins(read: Read, architecture: str) -> None:
    config = tiny_config(architecture, head_dim=8)
    assert config.head_dim != config.hidden_size // config.num_heads
    assert read(config=config)[0] == config


@pytest.mark.parametrize("value", ["gelu", "relu", "swish", 1, ["silu"]], ids=str)
def test_the_activation_is_silu(refusal: Refusal, value: object) -> None:
    assert "'hidden_act'" in refusal(UnsupportedModelError, {"hidden_act": value})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mistral", "supported are llama, qwen2, qwen3"),
        ("qwen3_moe", "supported are llama, qwen2, qwen3"),
        ("LLAMA", "supported are llama, qwen2, qwen3"),
        (None, "supported are llama, qwen2, qwen3"),
        (ABSENT, "supported are llama, qwen2, qwen3"),
        (["llama"], "supported are llama, qwen2, qwen3"),
        ("qwen3_next", RECURRENT_LAYERS),
        ("mamba2", RECURRENT_LAYERS),
        ("gemma3_text", WINDOWED_LAYERS),
        ("gpt_oss", WINDOWED_LAYERS),
    ],
    ids=str,
)
def test_another_model_type_is_named(refusal: Refusal, model_type: object, reason: str) -> None:
    message = refusal(UnsupportedModelError, {"model_type": model_type})
    assert reason in message
    if isinstance(model_type, str):
        assert repr(model_type) in message


@pytest.mark.parametrize(
    "value", ["LlamaForSequenceClassification", [], ["Qwen2Model"], [1], {}, 5, ["BertForMaskedLM", "Qwen3ForCausalLM"]]
)
def test_another_class_is_refused(refusal: Refusal, architecture: str, value: object) -> None:
    message = refusal(UnsupportedModelError, {"architectures": value})
    assert "'architectures'" in message
    assert CLASSES[architecture] in message


def test_a_window_that_is_switched_off_changes_nothing(read: Read, architecture: str) -> None:
    values: dict[str, object] = {"sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}
    assert read(values | {"layer_types": ["full_attention"] * 2})[0] == tiny_config(architecture)
    del values["use_sliding_window"]
    assert read(values)[0] == tiny_config(architecture)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096}, WINDOWED_LAYERS),
        ({"use_sliding_window": True}, WINDOWED_LAYERS),
        ({"layer_types": ["full_attention", "sliding_attention"]}, WINDOWED_LAYERS),
        ({"layer_types": ["chunked_attention", "full_attention"]}, WINDOWED_LAYERS),
        ({"layer_types": ["full_attention", "linear_attention"]}, RECURRENT_LAYERS),
        ({"layer_types": ["full_attention", "mamba"]}, RECURRENT_LAYERS),
        ({"layer_types": ["full_attention", "another"]}, "layers of the type 'another'"),
        ({"layer_types": ["full_attention", ["full_attention"]]}, "layers of the type ['full_attention']"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_rewound_is_refused(refusal: Refusal, values: dict[str, object], reason: str) -> None:
    assert reason in refusal(UnsupportedModelError, values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", 1),
        ("use_sliding_window", "true"),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention"] * 3),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 0),
    ],
    ids=str,
)
def test_an_impossible_value_is_named(refusal: Refusal, key: str, value: object) -> None:
    assert f"'{key}' must be" in refusal(FormatError, {key: value})


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama", "attention_bias"),
        ("llama", "mlp_bias"),
        ("llama", "rope_traditional"),
        ("qwen2", "rope_traditional"),
        ("qwen3", "attention_bias"),
    ],
)
def test_options_that_must_be_false(refusal: Refusal, read: Read, architecture: str, key: str) -> None:
    bias = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    assert f"'{key}' is true" in refusal(UnsupportedModelError, {key: True}, bias)
    assert f"'{key}' must be true or false" in refusal(FormatError, {key: 1})
    assert read({key: False})[0] == tiny_config(architecture)


# -- rotary positions ---------------------------------------------------------------------------------------------


def test_a_theta_may_stand_in_any_place(read: Read, architecture: str) -> None:
    config = tiny_config(architecture)
    theta = config.rope_theta
    for values in (
        {"rope_theta": theta},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": theta}},
        {"rope_theta": int(theta), "rope_parameters": {"type": "default", "rope_theta": theta}},
        {"rope_theta": theta, "rope_scaling": {"rope_type": "default", "type": "default"}},
        {"rope_theta": theta, "rope_scaling": {}, "rope_parameters": {"rope_theta": None, "partial_rotary_factor": 1}},
    ):
        assert read(values)[0] == config, values


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        ({"rope_scaling": {"rope_theta": 1e6}, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, "rope_type"),
        ({"rope_parameters": LLAMA3_ROPE | {"type": "linear"}}, "rope_type"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": LLAMA3_ROPE | {"factor": 9.0}}, "factor"),
        (
            {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 8192},
            "original_max_position_embeddings",
        ),
    ],
    ids=str,
)
def test_two_values_that_disagree_are_an_error(refusal: Refusal, values: dict[str, object], key: str) -> None:
    values = {"rope_theta": ABSENT} | values
    message = refusal(FormatError, values)
    assert f"'{key}' is " in message
    assert "make them agree" in message


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope_type", ["yarn", "linear", "dynamic", "longrope", "mrope", "proportional", "Llama3", "", 3, True]
)
def test_another_rope_type_is_named(refusal: Refusal, place: str, rope_type: object) -> None:
    for key in ("rope_type", "type"):
        message = refusal(UnsupportedModelError, {place: {key: rope_type, "factor": 4.0}})
        assert f"the rope type {rope_type!r}" in message


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_factor_without_a_rope_type_is_refused(refusal: Refusal, place: str) -> None:
    assert "'rope_type' must be there beside 'factor'" in refusal(FormatError, {place: {"factor": 4.0}})


def test_rope_parameters_are_an_object_of_single_values(refusal: Refusal) -> None:
    for place in ("rope_scaling", "rope_parameters"):
        for value in (1, "llama3", [], [LLAMA3_ROPE], True):
            assert f"'{place}' must be an object" in refusal(FormatError, {place: value})
        for inner in ({"full_attention": LLAMA3_ROPE}, {"rope_theta": [1e4]}, {"rope_type": ["default"]}):
            assert repr(next(iter(inner))) in refusal(UnsupportedModelError, {"rope_theta": ABSENT, place: inner})
    for values in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        assert "partial_rotary_factor" in refusal(UnsupportedModelError, values)


@given(
    head_dim=st.integers(1, 64).map(lambda half: 2 * half),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    width=st.floats(0.5, 8),
    context=st.integers(16, 16384),
)
def test_the_scaling_of_llama_3_divides_as_in_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    head_dim: int,
    theta: float,
    factor: float,
    low: float,
    width: float,
    context: int,
) -> None:
    path = tmp_path_factory.mktemp("scaled")
    config = tiny_config("llama", head_dim=head_dim, rope_theta=theta, num_layers=1)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + width,
        "original_max_position_embeddings": context,
    }
    values = {"rope_scaling": scaling, "tie_word_embeddings": True}
    write_tiny_folder(path, config, tiny_tensors(config), values=values)
    found, _ = read_folder(path)
    assert found.rope_factors is not None
    assert replace(found, rope_factors=None) == config
    theirs = transformers.LlamaConfig(**hf_config(config, values))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    # Theirs is in float32, in which the ends of the ramp are a step: 1e-5 of a turn is some 1e-5 of a factor.
    np.testing.assert_allclose(plain / np.array(found.rope_factors), scaled.numpy(), rtol=1e-3)
    np.testing.assert_allclose(np.median(plain / np.array(found.rope_factors) / scaled.numpy()), 1, rtol=2e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", None),
        ("factor", 0.5),
        ("factor", "8"),
        ("factor", True),
        ("factor", 10**400),
        ("low_freq_factor", None),
        ("low_freq_factor", 0),
        ("low_freq_factor", 4.0),
        ("low_freq_factor", 5.0),
        ("high_freq_factor", None),
        ("high_freq_factor", -4.0),
        ("original_max_position_embeddings", None),
        ("original_max_position_embeddings", 0),
        ("original_max_position_embeddings", 64.5),
        ("original_max_position_embeddings", 2**40),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_impossible_scaling_is_named(refusal: Refusal, key: str, value: object) -> None:
    assert f"'{key}' must be" in refusal(FormatError, {"rope_scaling": LLAMA3_ROPE | {key: value}})


def test_the_original_context_may_stand_at_the_top(read: Read) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    inside, _ = read({"rope_scaling": LLAMA3_ROPE})
    assert read({"rope_scaling": scaling, "original_max_position_embeddings": 64})[0] == inside


# -- tied and untied ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False, None, ABSENT], ids=["true", "false", "null", "absent"])
def test_tied_and_untied_heads(read: Read, refusal: Refusal, tie: object) -> None:
    values = {"tie_word_embeddings": tie}
    if tie is True:
        for output in ("tied", "copy"):
            _, raw = read(values, output=output)
            assert raw["output.weight"] is raw["token_embd.weight"]
        assert "'lm_head.weight' is not the embedding" in refusal(FormatError, values, output="untied")
        return
    for output in ("copy", "untied"):
        _, raw = read(values, output=output)
        assert raw["output.weight"].name == "lm_head.weight"
    assert "lacks the tensor 'lm_head.weight'" in refusal(FormatError, values, output="tied")


def test_a_tied_head_differs_by_one_bit_or_by_its_type(refusal: Refusal) -> None:
    embedding = torch.randn(304, 64).half()
    other = embedding.clone()
    other.view(torch.int16)[-1, -1] ^= 1
    for head in (other, embedding.float(), embedding.view(torch.bfloat16).clone()):
        tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        assert "'lm_head.weight'" in refusal(FormatError, {"tie_word_embeddings": True}, tensors)


def test_a_large_tied_head_is_compared_to_its_end(refusal: Refusal, read: Read) -> None:
    config = tiny_config("llama", vocab_size=70_000)
    embedding = torch.randn(config.vocab_size, 64)
    other = embedding.clone()
    other[-1, 0] += 1
    values = {"tie_word_embeddings": True, "model_type": "llama", "architectures": ABSENT}
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    read(values, tensors, config=config)
    refusal(FormatError, values, tensors | {"lm_head.weight": other}, config=config)


# -- tensors ------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(refusal: Refusal, architecture: str) -> None:
    stored = folder_tensors(tiny_tensors(tiny_config(architecture), output="untied"))[0]
    for name in stored:
        assert repr(name) in refusal(FormatError, None, {name: ABSENT})


def test_a_tensor_too_many_is_named(refusal: Refusal, architecture: str) -> None:
    names = [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "lm_head.bias",
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "",
        "x" * 200,
        "score.weight\n",
    ]
    if architecture != "qwen2":
        names.append("model.layers.1.self_attn.q_proj.bias")
    if architecture != "qwen3":
        names.append("model.layers.1.self_attn.q_norm.weight")
    for name in names:
        assert brief(name) in refusal(UnsupportedModelError, None, {name: torch.zeros(4)})


def test_stored_rotary_frequencies_are_ignored(read: Read, refusal: Refusal, architecture: str) -> None:
    frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(8) for index in range(2)}
    found, raw = read(None, frequencies)
    assert found == tiny_config(architecture)
    assert not any("rotary" in name for name in raw)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq.x", "x.model.layers.0.self_attn.rotary_emb.inv_freq"):
        assert repr(name) in refusal(UnsupportedModelError, None, {name: torch.ones(8)})


def test_shapes_are_those_of_the_config(refusal: Refusal, architecture: str) -> None:
    stored = folder_tensors(tiny_tensors(tiny_config(architecture), output="untied"))[0]
    for name, tensor in stored.items():
        for other in (tensor[:-1], tensor[None], tensor.flatten()[:-2]):
            assert f"tensor {name!r} has the shape" in refusal(FormatError, None, {name: other.contiguous()})


def test_a_padded_vocabulary_is_that_of_the_config(refusal: Refusal, read: Read, architecture: str) -> None:
    config = tiny_config(architecture, vocab_size=512)
    assert read(config=config)[0].vocab_size == 512
    assert "the config asks for (304, 64)" in refusal(FormatError, {"vocab_size": 304}, config=config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint32, torch.float8_e4m3fn])
def test_another_dtype_is_named(refusal: Refusal, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    message = refusal(UnsupportedModelError, None, {name: torch.zeros(96, 64).to(dtype)})
    assert f"tensor {name!r} has the dtype" in message


def test_layers_without_end_are_refused_at_once(refusal: Refusal) -> None:
    assert "1048576 layers" in refusal(FormatError, {"num_hidden_layers": 2**20})


# -- files --------------------------------------------------------------------------------------------------------


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no such file: .*config\.json"):
        read_folder(tmp_path)
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        read_folder(tmp_path)


def test_a_config_is_bounded_json(read: Read, tmp_path: Path) -> None:
    read()
    for content in ("", "[]", "{", '{"model_type": "llama", "model_type": "llama"}', " " * (5 << 20) + "{}"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(FormatError, match=r"config\.json"):
            read_folder(tmp_path)
