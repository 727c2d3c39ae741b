"""The operations: what each means, against float64 and the `gguf` package, and that rows are independent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlx_blocks import MLX_TYPES, mlx_quantized, mlx_values
from tiny_models import (
    ARCHITECTURES,
    K_TYPES,
    ROPE_FACTORS,
    WEIGHT_TYPES,
    WIDE,
    random_blocks,
    scale_dtype,
    tiny_config,
    torch_threads,
    write_tiny_model,
)
from torch import Tensor

import pilotfish
from pilotfish import _kernels
from pilotfish.errors import InvariantError, NonFiniteLogitsError
from pilotfish.kvcache import DenseCache, KVCache, PagedCache, PagePool
from pilotfish.model import ForwardBatch, ForwardInput, Transformer, run_forward
from pilotfish.model.transformer import RotaryTables
from pilotfish.ops import reference as ops
from pilotfish.ops.backend import LinearLayer, Norm, Projection
from pilotfish.ops.dequantize import dequantize
from pilotfish.ops.native import NativeBackend
from pilotfish.types import RawTensor, WeightType

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = tuple(kind for kind in WEIGHT_TYPES if kind not in FLOAT_TYPES)
ALL_TYPES = (*WEIGHT_TYPES, *(weight_type.name for weight_type in MLX_TYPES))
NATIVE = [NativeBackend(_kernels, isa, 2) for isa in _kernels.instruction_sets()]
ARGMAXES = [ops.argmax, *(backend.argmax for backend in NATIVE)]
LOG_SUM_EXPS = [ops.log_sum_exp, *(backend.log_sum_exp for backend in NATIVE)]
ROW_COUNTS = range(1, 34)
MATRICES = [(64, 64), (32, 64), (96, 64), (64, 96), (304, 64), (300, 40), (1, 7), (192, 576), (576, 1536), (1536, 576)]
"""Shapes [out, in] of tiny models, of SmolLM2-135M, and some that fit no vector width."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    """float32 against float64, as a share of the largest value."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equality of bits: unlike `torch.equal` it knows NaN, and -0 from 0."""
    return torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


# -- dequantize ---------------------------------------------------------------------------------------------------


def oracle_values(data: np.ndarray[Any, Any], kind: str) -> Tensor:
    if WeightType[kind] in MLX_TYPES:
        return torch.from_numpy(mlx_values(data, WeightType[kind]))
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def random_rows(kind: str, rows: int) -> np.ndarray[Any, Any]:
    """Rows of 256 weights of any type, as a file holds them: uint8 [rows, row_bytes]."""
    rng = np.random.default_rng(0)
    if kind not in FLOAT_TYPES:
        return random_blocks(kind, rows, 256, rng)
    values = rng.normal(size=(rows, 256)).astype(np.float32)
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)


def with_scales(blocks: np.ndarray[Any, Any], kind: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The blocks with `values`, as numbers of their type, for all their scales and minima, going round."""
    dtype = scale_dtype(WeightType[kind])
    first = 208 if kind == "Q6_K" else 0
    blocks = blocks.copy()
    for index in range(1 if kind in ("Q8_0", "Q4_0", "Q5_0", "Q6_K") else 2):
        scales = torch.from_numpy(np.resize(np.roll(values, index), (len(blocks), 1))).to(dtype)
        start = first + index * dtype.itemsize
        blocks[:, start : start + dtype.itemsize] = scales.view(torch.uint8)
    return blocks


@pytest.mark.parametrize("kind", [kind for kind in ALL_TYPES if kind not in FLOAT_TYPES])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_have_the_values_of_the_gguf_and_mlx_packages_to_the_bit(kind: str, seed: int) -> None:
    weight_type, rng = WeightType[kind], np.random.default_rng(seed)
    data = random_blocks(kind, 40, 512, rng)
    assert data.shape == (40, weight_type.row_bytes(512))
    assert same_bits(dequantize(torch.from_numpy(data), weight_type), oracle_values(data, kind))
    one_block = random_blocks(kind, 2000, weight_type.block_size, rng)
    one_block = with_scales(one_block, kind, rng.normal(0, 10.0 ** rng.integers(-7, 4, 500), 500))
    assert same_bits(dequantize(torch.from_numpy(one_block), weight_type), oracle_values(one_block, kind))


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "MLX4_32_F16", "MLX8_64_F32", "MLX4_128_BF16"])
@pytest.mark.parametrize("code", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0xAA, 0x55, 0x3F, 0xC0])
def test_extreme_codes_and_scales(kind: str, code: int) -> None:
    weight_type = WeightType[kind]
    scales = np.array([0.0, -0.0, 1.0, -1.0, 2.0**-24, -(2.0**-24), 2.0**-14, 65504.0, -65504.0, 0.1, 3.0])
    blocks = np.full((len(scales) ** 2, weight_type.block_bytes), code, np.uint8)
    blocks = with_scales(blocks, kind, np.repeat(scales, len(scales)))
    assert same_bits(dequantize(torch.from_numpy(blocks), weight_type), oracle_values(blocks, kind))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_floats_keep_their_bits(kind: str) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (50, WeightType[kind].row_bytes(64)), dtype=np.uint8)
    if kind == "F16":
        bits[0] = np.arange(64, dtype=np.uint16).view(np.uint8)  # subnormal numbers
        finite = np.isfinite(bits.view(np.float16))
        bits = np.where(np.repeat(finite, 2, axis=1), bits, 0).astype(np.uint8)
    assert same_bits(dequantize(torch.from_numpy(bits), WeightType[kind]), oracle_values(bits, kind))


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_rows_may_lie_anywhere_in_memory(kind: str) -> None:
    """A tensor in a memory map starts where the file says, not where float32 likes it."""
    row_bytes = WeightType[kind].row_bytes(256)
    memory = np.zeros(3 * row_bytes + 1, np.uint8)
    memory[1:] = random_rows(kind, 3).reshape(-1)
    rows = memory[1:].reshape(3, row_bytes)
    expected = dequantize(torch.from_numpy(rows.copy()), WeightType[kind])
    assert same_bits(dequantize(torch.from_numpy(rows), WeightType[kind]), expected)


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_dense_fills_in_chunks(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ops, "_CHUNK_WEIGHTS", 256 * 3)
    data = random_rows(kind, 10)
    raw = RawTensor("x", WeightType[kind], (2, 5, 256), lambda: data)
    assert same_bits(ops.dense(raw), oracle_values(data, kind).view(2, 5, 256))


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_an_embedding_is_dequantised_on_lookup(kind: str) -> None:
    data = random_rows(kind, 50)
    table, whole = ops.Embedding(torch.from_numpy(data), WeightType[kind]), oracle_values(data, kind)
    token_ids = torch.tensor([49, 0, 7, 7, 0], dtype=torch.int32)
    assert same_bits(ops.embedding(token_ids, table), whole[token_ids.long()])


@pytest.mark.parametrize("weight_type", MLX_TYPES, ids=lambda weight_type: weight_type.name)
def test_what_mlx_quantises_comes_back_near_what_it_was(weight_type: WeightType) -> None:
    """Also the order of the parts of a block: the values are compared with the ones that were quantised."""
    weights = np.random.default_rng(0).normal(size=(5, 256)).astype(np.float32)
    found = dequantize(torch.from_numpy(mlx_quantized(weights, weight_type)), weight_type).numpy()
    blocks = weights.reshape(-1, weight_type.block_size)
    step = np.ptp(blocks, axis=1, keepdims=True) / (2 ** int(weight_type.name[3]) - 1)
    bound = step + np.abs(blocks).max(axis=1, keepdims=True) * (0.05 if weight_type.name.endswith("BF16") else 0.01)
    assert (np.abs(found.reshape(blocks.shape) - blocks) <= bound).all()


# -- what each operation means ------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 1e4])
def test_rms_norm(eps: float, spread: float) -> None:
    x, weight = randn(9, 65) * spread, randn(65, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(dim=1, keepdim=True) + eps).sqrt() * weight.double()
    assert_close(ops.rms_norm(x, weight, eps), expected, 1e-6)


def test_silu_mul() -> None:
    gate, up = randn(9, 65) * 10, randn(9, 65, seed=1)
    gate[0, :4] = torch.tensor([0.0, -100.0, 100.0, -1e-30])
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert_close(ops.silu_mul(gate, up), expected, 1e-6)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (16, 10000.0), (64, 1e6), (128, 500000.0)])
def test_rotary(head_dim: int, theta: float) -> None:
    positions = torch.tensor([0, 1, 2, 511, 4095, 100], dtype=torch.int32)
    tables = ops.rotary_tables(head_dim, 4096, theta)
    x = randn(len(positions), 3, head_dim)
    frequencies = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    angle = positions.double()[:, None] * frequencies
    turned = torch.view_as_complex(torch.stack(x.double().chunk(2, dim=-1), dim=-1)) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    assert_close(ops.rotary(x, positions, tables), torch.cat((turned.real, turned.imag), dim=-1), 1e-6)
    assert torch.equal(ops.rotary(x, torch.zeros(len(x), dtype=torch.int32), tables), x)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("pads_rows", [True, False])
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_linear(shape: tuple[int, int], pads_rows: bool, with_bias: bool) -> None:
    weight, bias = randn(*shape), randn(shape[0], seed=1) if with_bias else None
    for count in (1, 7, 8, 130):
        x = randn(count, shape[1], seed=2)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(ops.linear(x, ops.Linear(weight, bias, pads_rows)), expected, 1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_attention(num_kv_heads: int, page_size: int) -> None:
    """Several sequences of several new rows each, in pages that lie anywhere, against a loop over everything."""
    lengths, new_rows, num_heads, head_dim = [5, 1, 23], [2, 1, 4], 4, 8
    cache = PagedKeys(lengths, page_size, num_kv_heads, head_dim)
    q = randn(sum(new_rows), num_heads, head_dim, seed=5)
    starts = torch.tensor([0, *itertools.accumulate(new_rows)], dtype=torch.int32)
    found = ops.attention(q, cache.keys, cache.values, starts, cache.seq_lens, cache.page_table)
    expected = torch.empty_like(q, dtype=torch.float64)
    row = 0
    for sequence, (length, count) in enumerate(zip(lengths, new_rows, strict=True)):
        for position in range(length - count, length):
            for head in range(num_heads):
                shared = head // (num_heads // num_kv_heads)
                k, v = (rows[sequence][: position + 1, shared].double() for rows in (cache.k, cache.v))
                weights = (k @ q[row, head].double() / head_dim**0.5).exp()
                expected[row, head] = weights / weights.sum() @ v
            row += 1
    assert_close(found, expected, 1e-6)


class PagedKeys:
    """Random keys and values of sequences, and the same in shuffled pages, between which lies NaN."""

    def __init__(self, lengths: list[int], page_size: int, num_kv_heads: int, head_dim: int) -> None:
        self.k = [randn(length, num_kv_heads, head_dim, seed=10 + i) for i, length in enumerate(lengths)]
        self.v = [randn(length, num_kv_heads, head_dim, seed=20 + i) for i, length in enumerate(lengths)]
        counts = [-(-length // page_size) for length in lengths]
        free = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3)).tolist()
        self.keys, self.values = (
            torch.full((len(free), page_size, num_kv_heads, head_dim), torch.nan) for _ in range(2)
        )
        pages = [[free.pop() for _ in range(count)] for count in counts]
        for pool, rows in ((self.keys, self.k), (self.values, self.v)):
            for owned, sequence in zip(pages, rows, strict=True):
                for page, part in zip(owned, sequence.split(page_size), strict=True):
                    pool[page, : len(part)] = part
        width = max(counts)
        self.page_table = torch.tensor([page + [-1] * (width - len(page)) for page in pages], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("argmax", ARGMAXES)
def test_argmax_gives_the_lowest_of_equal_ids(argmax: Callable[[Tensor], list[int]]) -> None:
    logits = torch.zeros(4, 1000)
    logits[1, [999, 17, 500]] = 3.0
    logits[2] = -torch.inf
    logits[2, [800, 600]] = -5.0
    logits[3, 3:] = -0.0  # equal to 0
    assert argmax(logits) == [0, 17, 600, 0]
    assert argmax(torch.empty(0, 5)) == []


@pytest.mark.parametrize("argmax", ARGMAXES)
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 64, 1000, 3000])
def test_argmax_finds_a_tie_at_every_pair_of_places(argmax: Callable[[Tensor], list[int]], vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, second = sorted(rng.integers(0, vocab_size, 2).tolist())
        row = -torch.rand(1, vocab_size, generator=torch.Generator().manual_seed(first))
        row[0, first] = row[0, second] = 1.0
        assert argmax(row) == [first]


@pytest.mark.parametrize("argmax", ARGMAXES)
@pytest.mark.parametrize("at", [0, 500, 999])
def test_argmax_refuses_what_is_no_answer(argmax: Callable[[Tensor], list[int]], at: int) -> None:
    logits = randn(3, 1000)
    for bad in (torch.nan, torch.inf):
        logits[1, at] = bad
        with pytest.raises(NonFiniteLogitsError, match="row 1"):
            argmax(logits)
    logits[1] = -torch.inf
    with pytest.raises(NonFiniteLogitsError, match="row 1"):
        argmax(logits)
    logits[1, at] = 0.0
    assert argmax(logits)[1] == at


@pytest.mark.parametrize("log_sum_exp", LOG_SUM_EXPS)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 1e4])
def test_log_sum_exp(log_sum_exp: Callable[[Tensor], Tensor], spread: float) -> None:
    logits = randn(4, 1003) * spread
    logits[1, 5:] = -torch.inf
    expected = logits.double().logsumexp(dim=1)
    assert ((log_sum_exp(logits) - expected).abs() <= 3e-7 * expected.abs() + 1e-6).all()
    odd = torch.tensor([[-torch.inf, -torch.inf], [torch.inf, 0.0], [torch.nan, 0.0], [-torch.inf, 2.0]])
    assert log_sum_exp(odd).tolist()[:2] == [-torch.inf, torch.inf]
    assert log_sum_exp(odd)[2].isnan()
    assert log_sum_exp(odd)[3] == 2.0
    assert log_sum_exp(torch.empty(0, 5)).shape == (0,)


# -- independent rows: single operations --------------------------------------------------------------------------


def row_operations(width: int = 64) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every operation as a function of rows [n, width] alone; rotary needs a multiple of 16."""
    weight, up = randn(width, seed=1), randn(width, seed=2)
    tables = ops.rotary_tables(16, 64, 10000.0)

    def rotary(x: Tensor) -> Tensor:
        # The position must go with the row, so it is made of the row.
        positions = (x[:, 0].abs() * 10).to(torch.int32)
        return ops.rotary(x.view(len(x), -1, 16), positions, tables)

    return {
        "rms_norm": lambda x: ops.rms_norm(x, weight, 1e-5),
        "silu_mul": lambda x: ops.silu_mul(x, x * up),
        "rotary": rotary,
    }


def assert_rows_independent(function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Each row alone, and among every number of others at random places, with one and two threads: the same bits."""
    alone = torch.cat([function(row[None]) for row in rows])
    generator = torch.Generator().manual_seed(9)
    for threads, counts in ((1, (*ROW_COUNTS, len(rows))), (2, (1, 2, 7, 8, 9, 17, 33, len(rows)))):
        with torch_threads(threads):
            for count in counts:
                chosen = torch.randperm(len(rows), generator=generator)[:count]
                assert same_bits(function(rows[chosen]), alone[chosen]), (threads, count)


@pytest.mark.parametrize(
    ("name", "width"),
    # Widths that fill no vector register are the hard ones: where a row's last numbers fall depends on the row before.
    [*itertools.product(("rms_norm", "silu_mul"), (1, 3, 64, 67, 577, 1536)), ("rotary", 16), ("rotary", 576)],
)
def test_rows_of_an_operation_are_independent(name: str, width: int) -> None:
    assert_rows_independent(row_operations(width)[name], randn(70, width, seed=4))


@pytest.mark.parametrize("pads_rows", [None, False], ids=["as measured", "row by row"])
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_rows_of_linear_are_independent(shape: tuple[int, int], pads_rows: bool | None) -> None:
    weight = randn(*shape)
    if pads_rows is None:
        pads_rows = ops.padding_keeps_rows_independent(weight)
    layer = ops.Linear(weight, randn(shape[0], seed=1), pads_rows)
    assert_rows_independent(lambda x: ops.linear(x, layer), randn(140, shape[1], seed=4))


def test_both_ways_of_linear_are_close() -> None:
    padded = ops.Linear(randn(96, 64), randn(96, seed=1), True)
    x = randn(37, 64, seed=2)
    assert_close(ops.linear(x, padded), ops.linear(x, replace(padded, pads_rows=False)).double(), 1e-6)


def test_the_measurement_notices_rows_that_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, honest = randn(8, 16), torch.nn.functional.linear
    assert ops.padding_keeps_rows_independent(weight)
    for wrong in (
        lambda x: honest(x, weight) * (1 + 1e-7 * (len(x) > 64)),  # other blocking for many rows
        lambda x: honest(x, weight) + 1e-6 * torch.arange(len(x))[:, None],  # it matters where a row stands
        lambda x: honest(x, weight) + 1e-7 * x.sum(),  # it matters what stands beside it
    ):
        monkeypatch.setattr(ops.functional, "linear", lambda x, _, wrong=wrong: wrong(x))
        assert not ops.padding_keeps_rows_independent(weight)


def test_linear_pads_to_whole_blocks_and_cuts_at_the_largest_checked_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, honest = [], torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(len(x))
        return honest(x, weight)

    monkeypatch.setattr(ops.functional, "linear", linear)
    weight = randn(4, 4)
    for count, expected in [(1, [8]), (8, [8]), (9, [16]), (128, [128]), (130, [128, 8]), (300, [128, 128, 48])]:
        seen.clear()
        assert len(ops.linear(randn(count, 4), ops.Linear(weight, None, True))) == count
        assert seen == expected
    seen.clear()
    ops.linear(randn(3, 4), ops.Linear(weight, None, False))
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("pads_rows", [True, False])
def test_nan_in_one_row_stays_in_that_row(pads_rows: bool) -> None:
    functions = row_operations() | {
        "linear": lambda x: ops.linear(x, ops.Linear(randn(32, 64), randn(32, seed=1), pads_rows)),
    }
    del functions["rotary"]  # it has its position from the row
    for name, function in functions.items():
        rows = randn(11, 64, seed=4)
        clean = function(rows)
        for value in (torch.nan, torch.inf):
            dirty = rows.clone()
            dirty[3] = value
            found = function(dirty)
            others = [row for row in range(11) if row != 3]
            assert same_bits(found[others], clean[others]), name
            assert not found[3].isfinite().all(), name


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_rows_are_independent(threads: int) -> None:
    """One sequence's rows all at once, one by one, and beside another sequence; in pages of any size."""
    lengths, num_heads, head_dim = [33, 20], 4, 16
    q = [randn(length, num_heads, head_dim, seed=30 + index) for index, length in enumerate(lengths)]
    results = []
    with torch_threads(threads):
        for page_size in (1, 4, 16, 64):
            cache = PagedKeys(lengths, page_size, 2, head_dim)

            def run(
                rows: Tensor, starts: list[int], lens: list[int], tables: Tensor, cache: PagedKeys = cache
            ) -> Tensor:
                as_ids = [torch.tensor(values, dtype=torch.int32) for values in (starts, lens)]
                return ops.attention(rows, cache.keys, cache.values, *as_ids, tables)

            results.append(run(q[0], [0, 33], [33], cache.page_table[:1]))
            results.append(torch.cat([run(q[0][i : i + 1], [0, 1], [i + 1], cache.page_table[:1]) for i in range(33)]))
            results.append(run(torch.cat(q), [0, 33, 53], lengths, cache.page_table)[:33])
            results.append(run(torch.cat(q[::-1]), [0, 20, 53], lengths[::-1], cache.page_table.flip(0))[20:])
    with torch_threads(1):
        results.append(run(q[0], [0, 33], [33], cache.page_table[:1]))
    assert all(same_bits(result, results[0]) for result in results)


def test_nan_of_another_sequence_or_past_the_end_does_not_reach_attention() -> None:
    """`PagedKeys` fills what no sequence holds with NaN; here one sequence is NaN too."""
    cache = PagedKeys([7, 9], 4, 2, 8)
    starts, q = torch.tensor([0, 2, 3], dtype=torch.int32), randn(3, 4, 8, seed=5)
    clean = ops.attention(q, cache.keys, cache.values, starts, cache.seq_lens, cache.page_table)
    assert clean.isfinite().all()
    pages = cache.page_table[1].long()
    cache.keys[pages] = cache.values[pages] = torch.nan
    found = ops.attention(q, cache.keys, cache.values, starts, cache.seq_lens, cache.page_table)
    assert same_bits(found[:2], clean[:2])
    assert found[2].isnan().all()


# -- independent rows: the whole model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Transformer]:
    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(architecture: str, weight_type: str) -> Transformer:
        if (architecture, weight_type) not in made:
            config = tiny_config(architecture, **(WIDE if weight_type in K_TYPES else {}))
            path = write_tiny_model(
                folder / f"{architecture}-{weight_type}.gguf", config=config, weight_type=weight_type
            )
            made[architecture, weight_type] = pilotfish.load(path, backend=ops.ReferenceBackend())[0]
        return made[architecture, weight_type]

    return make


def ids(count: int, seed: int) -> list[int]:
    """Ids that are real tokens of a tiny model."""
    found: list[int] = np.random.default_rng(seed).integers(0, 268, count).tolist()
    return found


def feed(model: Transformer, cache: KVCache, token_ids: list[int], chunks: list[int]) -> Tensor:
    """The logits of all rows, fed in chunks of these sizes."""
    parts, start = [torch.empty(0, model.config.vocab_size)], 0
    for size in chunks:
        cache.reserve(size)
        parts += run_forward(model, [ForwardInput(cache, token_ids[start : start + size], size)])
        start += size
    assert start == len(token_ids)
    return torch.cat(parts)


def random_chunks(total: int, rng: np.random.Generator) -> list[int]:
    cuts = sorted(rng.choice(np.arange(1, total), rng.integers(0, total), replace=False).tolist())
    return [stop - start for start, stop in itertools.pairwise([0, *cuts, total])]


def shuffled_pool(model: Transformer, page_size: int, seed: int = 0) -> PagePool:
    pool = PagePool(model.config, 200, page_size)
    np.random.default_rng(seed).shuffle(pool._free)
    return pool


@pytest.mark.parametrize("weight_type", ["F32", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_do_not_depend_on_chunks_pages_or_threads(
    tiny: Callable[..., Transformer], architecture: str, weight_type: str
) -> None:
    model, token_ids, rng = tiny(architecture, weight_type), ids(70, seed=1), np.random.default_rng(2)
    expected = feed(model, DenseCache(model.config), token_ids, [1] * 70)
    chunkings = [[70], [33, 37], *([size] * (70 // size) + [70 % size] * (70 % size > 0) for size in (2, 3, 5, 8, 9))]
    chunkings += [random_chunks(70, rng) for _ in range(4)]
    caches: list[Callable[[], KVCache]] = [lambda: DenseCache(model.config)]
    for page_size in (1, 4, 16, 64):
        caches.append(lambda size=page_size: PagedCache(shuffled_pool(model, size), 512))
    for chunks in chunkings:
        for kind, make_cache in enumerate(caches):
            assert same_bits(feed(model, make_cache(), token_ids, chunks), expected), (chunks, kind)
    with torch_threads(2):  # one pass only: on busy cores torch's threads wait for each other at every small operation
        assert same_bits(feed(model, caches[3](), token_ids, [33, 37]), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_do_not_depend_on_the_neighbours(tiny: Callable[..., Transformer], architecture: str) -> None:
    """One sequence among 0 to 32 others of every length, at every place of the batch, each in one pool."""
    model = tiny(architecture, "F32")
    prompt, probe = ids(19, seed=1), ids(3, seed=2)
    alone = feed(model, DenseCache(model.config), prompt + probe, [19, 3])[-3:]
    rng = np.random.default_rng(3)
    for num_others in (0, 1, 2, 6, 7, 8, 15, 32):
        pool = shuffled_pool(model, 4, seed=num_others)
        cache, inputs = PagedCache(pool, 512), []
        feed(model, cache, prompt, [19])
        for other in range(num_others):
            held, new = int(rng.integers(0, 9)), int(rng.integers(1, 4))
            neighbour = PagedCache(pool, 512)
            feed(model, neighbour, ids(held, seed=other), [held] if held else [])
            neighbour.reserve(new)
            inputs.append(ForwardInput(neighbour, ids(new, seed=100 + other), int(rng.integers(0, new + 1))))
        at = int(rng.integers(0, num_others + 1))
        cache.reserve(3)
        inputs.insert(at, ForwardInput(cache, probe, 3))
        assert same_bits(run_forward(model, inputs)[at], alone), (num_others, at)


def test_a_dense_and_a_paged_cache_in_one_call(tiny: Callable[..., Transformer]) -> None:
    """Caches of three stores: one forward each, and the results in the order of the inputs."""
    model, token_ids = tiny("llama", "F32"), ids(9, seed=1)
    expected = feed(model, DenseCache(model.config), token_ids, [9])
    pool = shuffled_pool(model, 4)
    caches = [DenseCache(model.config), PagedCache(pool, 512), DenseCache(model.config), PagedCache(pool, 512)]
    for cache in caches:
        cache.reserve(9)
    logits = run_forward(model, [ForwardInput(cache, token_ids, n) for n, cache in enumerate(caches, start=1)])
    for count, found in enumerate(logits, start=1):
        assert same_bits(found, expected[-count:])


# -- the output ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_without_text_cannot_be_chosen(tmp_path: Path, architecture: str) -> None:
    """Unused ids of the vocabulary, and rows of the embedding past its end."""
    model, tokenizer = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf", architecture))
    masked = sorted({*tokenizer.padding_token_ids, *range(tokenizer.vocab_size, model.config.vocab_size)})
    assert len(tokenizer.padding_token_ids) == 2
    assert len(masked) == 36
    logits = feed(model, DenseCache(model.config), ids(12, seed=1), [12])
    assert (logits == -torch.inf).nonzero()[:, 1].tolist() == masked * 12
    assert logits.isfinite().sum() == 12 * (304 - 36)


class CountingBackend(ops.ReferenceBackend):
    """Records rows and outputs of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int]] = []

    def make_linear(
        self, projections: Sequence[Projection], norm: Norm | None = None, gated: bool = False
    ) -> LinearLayer:
        return CountingLayer(super().make_linear(projections, norm, gated), projections, self.products)


@dataclass(frozen=True)
class CountingLayer:
    layer: LinearLayer
    projections: Sequence[Projection]
    products: list[tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        return self.layer.num_bytes

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        self.products.extend((len(x), projection.weight.shape[0]) for projection in self.projections)
        return self.layer(x, delta)


def test_the_output_matrix_is_skipped_where_no_logits_are_wanted(tmp_path: Path) -> None:
    backend = CountingBackend()
    model, _ = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf"), backend=backend)
    token_ids = ids(10, seed=1)
    cache = DenseCache(model.config)
    for size, num_logits in ((6, 0), (3, 1), (1, 1)):
        backend.products.clear()
        cache.reserve(size)
        start = cache.length
        (logits,) = run_forward(model, [ForwardInput(cache, token_ids[start : start + size], num_logits)])
        assert logits.shape == (num_logits, 304)
        assert [rows for rows, out in backend.products if out == 304] == [num_logits] * (num_logits > 0)
        assert len(backend.products) == 7 * model.config.num_layers + (num_logits > 0)
    assert cache.layer_lengths == [10, 10]
    assert same_bits(logits, feed(model, DenseCache(model.config), token_ids, [10])[-1:])


@pytest.mark.parametrize("tensor", [torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(4).int()[::2]])
def test_a_batch_is_contiguous_int32(tensor: Tensor) -> None:
    good = torch.zeros(2, dtype=torch.int32)
    names = list(ForwardBatch.__dataclass_fields__)
    ForwardBatch(**dict.fromkeys(names, good))
    for name in names:
        with pytest.raises(InvariantError, match=name):
            ForwardBatch(**(dict.fromkeys(names, good) | {name: tensor}))


def test_rotary_tables_have_the_same_bits_however_they_grow() -> None:
    config = tiny_config("llama", context_length=20_000, rope_factors=ROPE_FACTORS)
    at_once, slowly = RotaryTables(config), RotaryTables(config)
    assert len(at_once.up_to(0)[0]) < 5000
    for position in range(0, 12_000, 700):
        tables = slowly.up_to(position)
        assert len(tables[0]) == len(tables[1]) > position
    for found, expected in zip(tables, at_once.up_to(position), strict=True):
        assert same_bits(found, expected)
    frequencies = 50000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16) / torch.tensor(ROPE_FACTORS).double()
    angles = torch.arange(len(tables[0])).double()[:, None] * frequencies
    assert_close(tables[0], angles.cos(), 1e-7)
    assert_close(tables[1], angles.sin(), 1e-7)
