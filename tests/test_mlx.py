"""MLX-quantised folders: each matrix as `mlx` quantised it, and every way in which tensors and config can disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from tiny_folders import ABSENT, FolderTensors, folder_tensors, hf_config, write_folder, write_tiny_folder
from tiny_models import ARCHITECTURES, OUTPUTS, WIDE, tiny_config, tiny_tensors

from pilotfish.config import ModelConfig
from pilotfish.errors import FormatError, PilotfishError, UnsupportedModelError
from pilotfish.formats.hf_model import read_folder
from pilotfish.formats.mlx import Quantization, Scheme, join_quantized
from pilotfish.formats.safetensors_folder import read_weights
from pilotfish.types import RawTensor, WeightType

BITS, GROUP_SIZES = (4, 8), (32, 64, 128)
SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCHEME = {"group_size": 64, "bits": 4}
Q_PROJ = "model.layers.0.self_attn.q_proj"
Refusal = Callable[..., str]


def decode(raw: RawTensor, bits: int, dtype: str) -> np.ndarray[Any, Any]:
    """The float32 weights that blocks of scale, bias and little-endian codes stand for."""
    rows, columns = raw.shape
    blocks = torch.tensor(raw.read()).reshape(rows, -1, raw.weight_type.block_bytes)
    size = SCALE_DTYPES[dtype].itemsize
    scale, bias = (
        blocks[..., start : start + size].contiguous().view(SCALE_DTYPES[dtype]).float() for start in (0, size)
    )
    codes = blocks[..., 2 * size :]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return (scale * codes + bias).reshape(rows, columns).numpy()


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_a_matrix_is_what_mlx_quantised(tmp_path: Path, bits: int, group_size: int, dtype: str) -> None:
    config = tiny_config("qwen2", **WIDE)
    expected = write_tiny_folder(
        tmp_path,
        config,
        tiny_tensors(config, output="untied"),
        dtype=dtype,
        quantization={"group_size": group_size, "bits": bits, "mode": "affine"},
    )
    found, raw = read_folder(tmp_path)
    assert found == config
    assert raw.keys() == expected.keys()
    for name, tensor in raw.items():
        assert tensor.shape == expected[name].shape
        if tensor.read().shape[0] == 1:
            assert tensor.weight_type is WeightType[dtype]
            continue
        assert tensor.weight_type is WeightType[f"MLX{bits}_{group_size}_{dtype}"]
        assert tensor.read().shape == (tensor.shape[0], tensor.weight_type.row_bytes(tensor.shape[1]))
        for _ in range(2):
            # mlx may round once where scale times code plus bias rounds twice.
            np.testing.assert_allclose(decode(tensor, bits, dtype), expected[name], rtol=0, atol=1e-6)
            tensor.evict()


def test_the_three_parts_are_in_the_blocks_byte_for_byte(tmp_path: Path) -> None:
    config = tiny_config("llama", **WIDE)
    stored, _ = folder_tensors(tiny_tensors(config, output="untied"), "BF16", SCHEME)
    write_folder(tmp_path, hf_config(config, {"quantization": SCHEME}), stored, sharded=True)
    raw = read_folder(tmp_path)[1]["blk.1.ffn_down.weight"]
    module = "model.layers.1.mlp.down_proj"
    parts = [stored[f"{module}.{part}"].contiguous().view(torch.uint8) for part in ("scales", "biases", "weight")]
    blocks = np.concatenate([part.numpy().reshape(256, 256 // 64, -1) for part in parts], axis=-1)
    assert np.array_equal(raw.read(), blocks.reshape(256, -1))
    assert not np.may_share_memory(raw.read(), raw.read())


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_embedding_is_quantised_and_shared_as_well(tmp_path: Path, output: str) -> None:
    config = tiny_config("qwen3", **WIDE)
    write_tiny_folder(
        tmp_path,
        config,
        tiny_tensors(config, output=output),
        quantization=SCHEME,
        values={"tie_word_embeddings": output != "untied"},
    )
    _, raw = read_folder(tmp_path)
    assert raw["token_embd.weight"].weight_type is WeightType.MLX4_64_F32
    assert (raw["output.weight"] is raw["token_embd.weight"]) == (output != "untied")


def test_a_tied_head_that_differs_in_one_scale_is_refused(tmp_path: Path) -> None:
    config = tiny_config("qwen3", **WIDE)
    stored, _ = folder_tensors(tiny_tensors(config, output="copy"), "F32", SCHEME)
    stored["lm_head.scales"][-1, -1] *= 1.001
    write_folder(tmp_path, hf_config(config, {"quantization": SCHEME, "tie_word_embeddings": True}), stored)
    with pytest.raises(FormatError, match=r"'lm_head\.weight' is not the embedding"):
        read_folder(tmp_path)


def test_modules_may_differ(tmp_path: Path) -> None:
    config = tiny_config("llama", **WIDE)
    quantization: dict[str, Any] = SCHEME | {
        "lm_head": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.up_proj": {"group_size": 128, "bits": 8, "mode": "affine"},
        "model.layers.1.mlp.up_proj": False,
        "model.embed_tokens": False,
        "model.layers.7.mlp.up_proj": False,  # there is no such module: as in mlx-lm, that is no harm
    }
    expected = write_tiny_folder(
        tmp_path, config, tiny_tensors(config, output="untied"), dtype="F16", quantization=quantization
    )
    _, raw = read_folder(tmp_path)
    types = {name: tensor.weight_type.name for name, tensor in raw.items()}
    assert types["output.weight"] == "MLX8_32_F16"
    assert types["blk.0.ffn_up.weight"] == "MLX8_128_F16"
    assert types["blk.1.ffn_up.weight"] == types["token_embd.weight"] == types["blk.0.attn_norm.weight"] == "F16"
    assert types["blk.1.ffn_gate.weight"] == "MLX4_64_F16"
    found = decode(raw["blk.0.ffn_up.weight"], 8, "F16")
    np.testing.assert_allclose(found, expected["blk.0.ffn_up.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_matrix_without_scales_is_not_quantised(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture, **WIDE)
    stored, _ = folder_tensors(tiny_tensors(config, output="untied"), "F16", SCHEME | {"lm_head": False})
    write_folder(tmp_path, hf_config(config, {"quantization": SCHEME}), stored)
    assert read_folder(tmp_path)[1]["output.weight"].weight_type is WeightType.F16


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_either_key_will_do(tmp_path: Path, key: str) -> None:
    config = tiny_config("qwen2", **WIDE)
    stored, _ = folder_tensors(tiny_tensors(config, output="untied"), "F32", SCHEME)
    values = hf_config(config, {key: SCHEME | {"lm_head": True}})
    write_folder(tmp_path, values, stored)
    assert read_folder(tmp_path)[1]["output.weight"].weight_type is WeightType.MLX4_64_F32


# -- refusals -----------------------------------------------------------------------------------------------------


@cache
def sound_folder() -> tuple[ModelConfig, FolderTensors]:
    config = tiny_config("llama", **WIDE)
    return config, folder_tensors(tiny_tensors(config, output="untied"), "F16", SCHEME)[0]


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    """The message of the error that a folder with other config `values` or `tensors` must give."""

    def refusal(
        kind: type[PilotfishError],
        values: dict[str, object] | None = None,
        tensors: dict[str, Any] | None = None,
    ) -> str:
        config, sound = sound_folder()
        write_folder(
            tmp_path,
            hf_config(config, {"quantization": SCHEME} | (values or {})),
            {name: value for name, value in (sound | (tensors or {})).items() if value is not ABSENT},
        )
        with pytest.raises(PilotfishError) as caught:
            read_folder(tmp_path)
        assert type(caught.value) is kind
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 1000
        return str(caught.value)

    return refusal


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bits": 2}, "'bits'"),
        ({"bits": 3}, "'bits'"),
        ({"bits": 6}, "'bits'"),
        ({"bits": 10**400}, "'bits'"),
        ({"group_size": 16}, "'group_size'"),
        ({"group_size": 256}, "'group_size'"),
        ({"mode": "mxfp4"}, "'mxfp4'"),
        ({"mode": "nvfp4"}, "'nvfp4'"),
        ({"mode": None}, "None"),
        ({"linear_class": "BitLinear"}, "linear_class"),
        ({"lm_head": 1}, "lm_head"),
        ({"lm_head": {"group_size": 64, "bits": 5}}, "lm_head"),
        ({"lm_head": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "lm_head"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_another_quantisation_is_named(refusal: Refusal, changes: dict[str, object], what: str) -> None:
    assert what in refusal(UnsupportedModelError, {"quantization": SCHEME | changes})


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4", None, 7])
def test_another_method_is_named(refusal: Refusal, method: object) -> None:
    for options in ({}, SCHEME, {"bits": 4, "group_size": -1, "desc_act": False}):
        for quantization in (ABSENT, SCHEME):
            values = {"quantization": quantization, "quantization_config": options | {"quant_method": method}}
            assert f"by the method {method!r}" in refusal(UnsupportedModelError, values)


@pytest.mark.parametrize(
    "quantization",
    [
        1,
        "4bit",
        [],
        {},
        {"bits": 4},
        {"group_size": 64},
        SCHEME | {"bits": "4"},
        SCHEME | {"bits": True},
        SCHEME | {"bits": 4.0},
        SCHEME | {"bits": 0},
        SCHEME | {"group_size": -64},
        SCHEME | {"lm_head": {"bits": 4}},
        SCHEME | {"lm_head": {}},
    ],
    ids=str,
)
def test_an_impossible_quantisation_is_an_error(refusal: Refusal, quantization: object) -> None:
    for key in ("quantization", "quantization_config"):
        assert key in refusal(FormatError, {"quantization": ABSENT, key: quantization})


def test_two_places_that_disagree_are_an_error(refusal: Refusal) -> None:
    for other in (SCHEME | {"bits": 8}, SCHEME | {"lm_head": False}):
        assert "disagree" in refusal(FormatError, {"quantization_config": other})


def test_codes_without_a_config_are_refused(refusal: Refusal) -> None:
    assert "has the dtype U32" in refusal(UnsupportedModelError, {"quantization": ABSENT})


@pytest.mark.parametrize("changes", [{"bits": 8}, {"group_size": 32}, {"group_size": 128}], ids=str)
def test_tensors_of_another_scheme_are_an_error(refusal: Refusal, changes: dict[str, int]) -> None:
    assert "which does not fit" in refusal(FormatError, {"quantization": SCHEME | changes})
    message = refusal(FormatError, {"quantization": SCHEME | {"lm_head": SCHEME | changes}})
    assert "tensor 'lm_head.scales' has the shape" in message


def test_a_scheme_that_fits_the_tensors_but_not_the_model_is_an_error(refusal: Refusal) -> None:
    # Codes of 8 bits with half as many weights to a group have the shapes of 4 bits: only the model tells.
    message = refusal(FormatError, {"quantization": {"group_size": 32, "bits": 8}})
    assert "has the shape (304, 128), the config asks for (304, 256)" in message


def test_what_the_config_says_is_quantised_must_be(refusal: Refusal) -> None:
    assert "'lm_head' are not quantised" in refusal(FormatError, {"quantization": SCHEME | {"lm_head": False}})
    plain = {"lm_head.weight": torch.zeros(304, 256), "lm_head.scales": ABSENT, "lm_head.biases": ABSENT}
    for choice in (SCHEME, True):
        assert "'lm_head' are quantised" in refusal(FormatError, {"quantization": SCHEME | {"lm_head": choice}}, plain)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_three_tensors_belong_together(refusal: Refusal, part: str) -> None:
    name = f"{Q_PROJ}.{part}"
    assert f"has no '{name}'" in refusal(FormatError, None, {name: ABSENT})
    assert f"there is '{Q_PROJ}." in refusal(FormatError, None, {f"{Q_PROJ}.weight": torch.zeros(256, 256)})
    message = refusal(FormatError, None, {f"{Q_PROJ}.weight": ABSENT})
    assert f"there is no '{Q_PROJ}.weight'" in message
    assert "'another.scales'" in refusal(FormatError, None, {"another.scales": torch.zeros(4)})


@pytest.mark.parametrize(
    "tensors",
    [
        {"scales": torch.zeros(256, 4)},  # float32 beside float16
        {"biases": torch.zeros(256, 4).bfloat16()},
        {"scales": torch.zeros(256, 4).double(), "biases": torch.zeros(256, 4).double()},
        {"scales": torch.zeros(256, 4).to(torch.uint8), "biases": torch.zeros(256, 4).to(torch.uint8)},
    ],
)
def test_scales_and_biases_have_one_float_dtype(refusal: Refusal, tensors: dict[str, torch.Tensor]) -> None:
    changes = {f"{Q_PROJ}.{part}": tensor for part, tensor in tensors.items()}
    assert f"{Q_PROJ}.scales" in refusal(UnsupportedModelError, None, changes)


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("scales", (256, 3)),
        ("scales", (255, 4)),
        ("biases", (256, 8)),
        ("biases", (1024,)),
        ("biases", (256, 4, 1)),
        ("biases", (0, 4)),
        ("weight", (256, 31)),
        ("weight", (255, 32)),
        ("weight", (8192,)),
        ("weight", (256, 32, 1)),
        ("weight", (256, 0)),
        ("weight", ()),
    ],
    ids=str,
)
def test_a_wrong_shape_names_its_tensor(refusal: Refusal, part: str, shape: tuple[int, ...]) -> None:
    dtype = torch.uint32 if part == "weight" else torch.float16
    assert Q_PROJ in refusal(FormatError, None, {f"{Q_PROJ}.{part}": torch.zeros(shape).to(dtype)})


def test_a_row_is_whole_groups(refusal: Refusal) -> None:
    tensors = {f"{Q_PROJ}.weight": torch.zeros(256, 31).to(torch.uint32)} | {
        f"{Q_PROJ}.{part}": torch.zeros(256, 3).half() for part in ("scales", "biases")
    }
    assert "which does not fit" in refusal(FormatError, None, tensors)


def test_all_three_tensors_are_evicted(tmp_path: Path) -> None:
    _, sound = sound_folder()
    write_folder(tmp_path, {}, {name: sound[name] for name in sound if name.startswith("lm_head.")})
    evicted: list[str] = []
    stored = {
        name: replace(tensor, evict=partial(evicted.append, name)) for name, tensor in read_weights(tmp_path).items()
    }
    raw = join_quantized(stored, Quantization(Scheme(4, 64), {}))
    assert raw.keys() == {"lm_head.weight"}
    raw["lm_head.weight"].evict()
    assert sorted(evicted) == sorted(stored)


def test_a_norm_cannot_be_quantised(refusal: Refusal) -> None:
    codes, scales, biases = (torch.tensor(np.array(part)) for part in mx.quantize(mx.ones((1, 256)), 64, 4))
    tensors = {"model.norm.weight": codes, "model.norm.scales": scales, "model.norm.biases": biases}
    assert "'model.norm.weight' has the shape (1, 256)" in refusal(FormatError, None, tensors)
