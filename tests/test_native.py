"""The native kernels: what they compute, and that a row's bits depend on nothing but the row.

The oracle is exact: the quantised activations times the weights that the `gguf` package dequantises, in float64.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from doubles import HostileDrafter
from hypothesis import given
from hypothesis import strategies as st
from mlx_blocks import MLX_TYPES, mlx_values, parts
from tiny_models import ARCHITECTURES, WIDE, random_blocks, scale_dtype, tiny_config, write_tiny_model

import pilotfish
from pilotfish import _kernels
from pilotfish.errors import NonFiniteLogitsError, OptionError
from pilotfish.model import ForwardInput, Transformer, run_forward
from pilotfish.ops import reference
from pilotfish.ops.backend import AttentionInputs, HeadNorms, LayerWeights, Norm, Projection
from pilotfish.ops.cores import num_usable_cores
from pilotfish.ops.native import NativeBackend, choose_backend
from pilotfish.ops.native_arguments import TYPE_NUMBERS
from pilotfish.types import RawTensor, WeightType

ISAS = _kernels.instruction_sets()
TYPES = list(TYPE_NUMBERS)
QUANTISED = [kind for kind in TYPES if kind.block_size > 1]
FLOATS = [kind for kind in TYPES if kind.block_size == 1]
SOME_MLX = [WeightType.MLX4_64_BF16, WeightType.MLX8_128_F32]
"""For the long grid: what else an MLX type may be is a branch within these two kernels."""
LONG_GRID = [kind for kind in TYPES if kind not in MLX_TYPES or kind in SOME_MLX]


def matrix(kind: WeightType, num_rows: int, num_columns: int, seed: int = 0, extreme: bool = False) -> RawTensor:
    """Random blocks, or such with every code byte at its extremes: all bits set, none set."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return float_matrix(kind, torch.from_numpy(rng.normal(size=(num_rows, num_columns))))
    data = random_blocks(kind.name, num_rows, num_columns, rng)
    if extreme:
        blocks = data.reshape(-1, kind.block_bytes)
        without_minimum = {"Q4_0": slice(0, 2), "Q5_0": slice(0, 2), "Q8_0": slice(0, 2), "Q6_K": slice(208, 210)}
        scales = without_minimum.get(kind.name, slice(0, 2 * scale_dtype(kind).itemsize))
        kept = blocks[:, scales].copy()
        blocks[:] = rng.choice(np.array([0, 255, 0x80, 0x7F], np.uint8), (len(blocks), 1))
        blocks[:, scales] = kept
    return RawTensor("w", kind, (num_rows, num_columns), lambda: data.reshape(num_rows, -1))


def float_matrix(kind: WeightType, values: torch.Tensor) -> RawTensor:
    dtype = {WeightType.F32: torch.float32, WeightType.F16: torch.float16, WeightType.BF16: torch.bfloat16}[kind]
    data = values.to(dtype).contiguous().view(torch.uint8).numpy()
    return RawTensor("w", kind, tuple(values.shape), lambda: data)


def values_of(weight: RawTensor) -> np.ndarray:
    """float64 [out, in], by the `gguf` and `mlx` packages."""
    if weight.weight_type in MLX_TYPES:
        return mlx_values(weight.read(), weight.weight_type).astype(np.float64)
    return gguf.dequantize(weight.read(), gguf.GGMLQuantizationType[weight.weight_type.label]).astype(np.float64)


def magnitudes_of(weight: RawTensor) -> np.ndarray:
    """|w|, or for MLX |scale · code| + |bias|: the two may all but cancel each other."""
    values = values_of(weight)
    if weight.weight_type not in MLX_TYPES:
        return np.abs(values)
    biases = np.repeat(parts(weight.read(), weight.weight_type)[1], weight.weight_type.block_size, axis=1)
    return np.abs(values - biases) + np.abs(biases)


def columns(kind: WeightType, blocks: int) -> int:
    """That many blocks, or for float weights a number of columns that fills no register."""
    return blocks * kind.block_size if kind.block_size > 1 else min(37 * blocks, 555)


def layer(weight: RawTensor, isa: str = ISAS[0], threads: int = 1):
    return NativeBackend(_kernels, isa, threads).make_linear([Projection(weight)])


def quantised(x: torch.Tensor, block: int) -> np.ndarray:
    """x as the kernels see it: codes of at most 127, one float32 scale for each block; ties to even."""
    blocks = x.numpy().reshape(len(x), -1, block)
    most = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    codes = np.rint(blocks * inverse).astype(np.float64)
    return (codes * (most / np.float32(127)).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", QUANTISED)
def test_linear_is_the_product_of_quantised_rows(kind: WeightType, extreme: bool) -> None:
    k = columns(kind, 3)
    weight = matrix(kind, 50, k, extreme=extreme)
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(1)) * 3
    rows = quantised(x, 256 if kind.block_size == 256 else 32)
    expected = rows @ values_of(weight).T
    found = layer(weight)(x).numpy()
    # Only the sums over blocks are rounded: a few units of float32 of the largest possible sum.
    bound = np.abs(rows) @ magnitudes_of(weight).T * 2.0**-20 + 1e-30
    assert np.all(np.abs(found - expected) <= bound)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("k", [1, 3, 64, 577])
def test_float_weights_meet_the_rows_as_they_are(kind: WeightType, k: int) -> None:
    weight, x = matrix(kind, 37, k), normal(9, k)
    exact = x.double() @ torch.from_numpy(values_of(weight)).T
    bound = x.double().abs() @ torch.from_numpy(np.abs(values_of(weight))).T * 2.0**-20
    assert ((layer(weight)(x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", TYPES)
def test_linear_is_close_to_the_reference(kind: WeightType) -> None:
    k = columns(kind, 4)
    weight = matrix(kind, 64, k)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(2))
    expected = reference.ReferenceBackend().make_linear([Projection(weight)])(x)
    error = (layer(weight)(x) - expected).norm() / expected.norm()
    assert error < 0.01


MIXES = [
    [WeightType.Q4_K, WeightType.Q4_K, WeightType.Q6_K],
    [WeightType.Q5_0, WeightType.Q8_0, WeightType.Q4_1],
    [WeightType.Q8_0, WeightType.Q6_K, WeightType.F16],
    [WeightType.F32, WeightType.BF16, WeightType.Q4_K],
    [WeightType.Q4_0, WeightType.Q5_K, WeightType.Q5_1],
    [WeightType.MLX4_64_BF16, WeightType.MLX8_128_F16, WeightType.Q6_K],
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kinds", MIXES, ids=str)
def test_fused_products_are_the_separate_ones(kinds: list[WeightType], isa: str) -> None:
    """With sum, norm and biases, and whatever the number of threads: also more of them than panels."""
    sizes, k = (100, 40, 7), 512
    projections = [
        Projection(matrix(kind, size, k, seed=i), float_matrix(WeightType.F32, normal(size, seed=10 + i)[None]))
        for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    projections = [replace(p, bias=replace(p.bias, shape=(p.bias.shape[1],))) for p in projections]
    norm = Norm(normal(k, seed=5), 1e-6)
    for count in (1, 2, 9, 70):
        x, delta = normal(count, k, seed=6), normal(count, k, seed=7)
        normed = normed_by(isa, x + delta, norm)
        for threads in (1, 2, 16):
            summed = x.clone()
            outputs = NativeBackend(_kernels, isa, threads).make_linear(projections, norm)(summed, delta)
            assert torch.equal(summed, x + delta)
            for output, projection in zip(outputs.split(sizes, dim=1), projections, strict=True):
                bias = torch.from_numpy(projection.bias.read()).view(torch.float32)
                assert torch.equal(output, layer(projection.weight)(normed) + bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K"), ("Q5_0", "Q8_0"), ("Q6_K", "Q4_1"), ("F16", "Q8_0"), ("MLX4_64_BF16", "Q5_K")]
)
def test_a_gated_pair_is_silu_of_one_product_times_the_other(kinds: tuple[str, str], isa: str) -> None:
    gate, up = (matrix(WeightType[kind], 100, 512, seed=seed) for seed, kind in enumerate(kinds))
    for count in (1, 5, 70):
        x = normal(count, 512, seed=3) * 0.1
        for threads in (1, 2, 16):
            pair = NativeBackend(_kernels, isa, threads).make_linear([Projection(gate), Projection(up)], gated=True)
            assert torch.equal(pair(x), gated_by(isa, layer(gate)(x), layer(up)(x)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", LONG_GRID)
@pytest.mark.parametrize("extreme", [False, True])
def test_linear_rows_are_independent_and_variants_equal(kind: WeightType, isa: str, extreme: bool) -> None:
    k = columns(kind, 512 // kind.block_size)
    weight = matrix(kind, 520, k, extreme=extreme)  # large enough for several threads even with one row
    x = torch.randn(129, k, generator=torch.Generator().manual_seed(3))
    expected = torch.cat([layer(weight)(row.unsqueeze(0)) for row in x])
    for threads in (1, 2, 3):
        product = layer(weight, isa, threads)
        for count in (*range(1, 34), 63, 64, 65, 129):
            assert torch.equal(product(x[:count]), expected[:count])
        order = torch.randperm(129, generator=torch.Generator().manual_seed(threads))
        assert torch.equal(product(x[order]), expected[order])


@given(
    kind=st.sampled_from(TYPES),
    num_rows=st.integers(1, 70),
    num_outputs=st.integers(1, 40),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]),
)
def test_linear_of_any_size_is_equal_across_variants(kind, num_rows, num_outputs, blocks, seed, scale) -> None:
    weight = matrix(kind, num_outputs, columns(kind, blocks), seed)
    x = torch.randn(num_rows, columns(kind, blocks), generator=torch.Generator().manual_seed(seed)) * scale
    results = [layer(weight, isa, 2)(x) for isa in ISAS]
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert results[0].shape == (num_rows, num_outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", TYPES)
def test_linear_with_a_poisoned_row_is_not_finite_there_alone(kind: WeightType, poison: float, isa: str) -> None:
    k = columns(kind, 2)
    weight = matrix(kind, 20, k)
    x = torch.randn(6, k, generator=torch.Generator().manual_seed(4))
    clean = layer(weight, isa)(x)
    x[2, 1] = poison
    found = layer(weight, isa)(x)
    assert not torch.isfinite(found[2]).any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("kind", TYPES)
def test_linear_of_zeros_and_of_no_rows(kind: WeightType) -> None:
    product = layer(matrix(kind, 20, columns(kind, 2)))
    assert torch.equal(product(torch.zeros(2, columns(kind, 2))), torch.zeros(2, 20))
    assert product(torch.empty(0, columns(kind, 2))).shape == (0, 20)


def test_matrices_that_cannot_read_the_same_rows_are_refused() -> None:
    native = backend()
    narrow, wide, tall = (Projection(matrix(WeightType.Q8_0, *size)) for size in ((20, 64), (20, 96), (30, 64)))
    with pytest.raises(ValueError, match="cannot read the same rows"):
        native.make_linear([narrow, wide])
    with pytest.raises(ValueError, match="cannot read the same rows"):
        native.make_linear([narrow, tall], gated=True)
    with pytest.raises(ValueError, match=r"linear: norm must be \[64\]"):
        native.make_linear([narrow], Norm(torch.ones(32), 1e-6))
    with pytest.raises(ValueError, match="there is none"):
        native.make_linear([narrow])(torch.zeros(1, 64), torch.zeros(1, 64))
    with pytest.raises(ValueError, match="linear: delta has 2 rows, x has 1"):
        native.make_linear([narrow], Norm(torch.ones(64), 1e-6))(torch.zeros(1, 64), torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"linear: delta must be \[any, 64\]"):
        native.make_linear([narrow], Norm(torch.ones(64), 1e-6))(torch.zeros(1, 64), torch.zeros(1, 32))


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    whole = matrix(WeightType.MLX4_128_F16, 20, 128)
    cut = replace(whole, shape=(20, 192))
    for make in (lambda: layer(cut), lambda: backend().make_embedding(cut)):
        with pytest.raises(ValueError, match="rows of 192 weights are no whole blocks of 128"):
            make()


def test_linear_checks_what_it_is_given() -> None:
    product = layer(matrix(WeightType.Q8_0, 20, 64))
    for x in (torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64, 2).T, torch.zeros(2, 64, device="meta")):
        with pytest.raises(ValueError, match="linear: x must be contiguous torch"):
            product(x)
    for x in (torch.zeros(2, 32), torch.zeros(64)):
        with pytest.raises(ValueError, match=r"linear: x must be \[any, 64\]"):
            product(x)


# -- norm, gate, attention --------------------------------------------------------------------------------------------


def backend(isa: str = ISAS[0], threads: int = 1) -> NativeBackend:
    return NativeBackend(_kernels, isa, threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity(size: int) -> Projection:
    return Projection(float_matrix(WeightType.F32, torch.eye(size)))


def normed_by(isa: str, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Just the norm: a product with the identity adds zeros."""
    return backend(isa).make_linear([identity(x.shape[1])], norm)(x.clone())


def gated_by(isa: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Just silu(gate) · up, by a pair that picks each half of its rows."""
    size = gate.shape[1]
    halves = torch.eye(2 * size).split(size)
    pair = [Projection(float_matrix(WeightType.F32, half)) for half in halves]
    return backend(isa).make_linear(pair, gated=True)(torch.cat((gate, up), dim=1))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 576, 896, 1536])
def test_norm_and_gate_against_float64(size: int) -> None:
    x, weight = normal(5, size) * 4, normal(size, seed=1)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).mean(dim=1, keepdim=True) + 1e-6) * weight.double()
    assert torch.allclose(normed_by(ISAS[0], x, Norm(weight, 1e-6)).double(), expected, rtol=1e-6, atol=1e-7)
    expected = wide * torch.sigmoid(wide) * normal(5, size, seed=2).double()
    assert torch.allclose(gated_by(ISAS[0], x, normal(5, size, seed=2)).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [17, 96, 576])
def test_norm_and_gate_rows_are_independent_and_variants_equal(size: int, isa: str) -> None:
    x, up, norm = normal(33, size) * 9, normal(33, size, seed=1), Norm(normal(size, seed=2), 1e-5)
    norms = torch.cat([normed_by(ISAS[0], row[None], norm) for row in x])
    gates = torch.cat([gated_by(ISAS[0], row[None], other[None]) for row, other in zip(x, up, strict=True)])
    for count in range(1, 34):
        assert torch.equal(normed_by(isa, x[:count], norm), norms[:count])
        assert torch.equal(gated_by(isa, x[:count], up[:count]), gates[:count])


@pytest.mark.parametrize("isa", ISAS)
def test_gate_over_the_whole_range(isa: str) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, 20.0, -20.0, 80.0, -80.0, 100.0, -100.0, 1e30, -1e30, 3e38]])
    found = gated_by(isa, x, torch.ones_like(x))
    # Where e^-x leaves float32, a little of x is left in place of zero: below 1e-34 of it.
    assert torch.allclose(found, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-6 + 1e-34 * 3e38)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_poisoned_before_the_norm_is_nan_alone(poison: float, isa: str) -> None:
    pair = [Projection(matrix(WeightType.Q4_K, 40, 256, seed=seed)) for seed in range(2)]
    linear = backend(isa).make_linear(pair, Norm(torch.ones(256), 1e-6), gated=True)
    x = normal(6, 256)
    clean = linear(x.clone())
    x[2, 100] = poison
    found = linear(x)
    assert torch.isnan(found[2]).all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_floating_point_mode_changes_nothing(isa: str, threads: int) -> None:
    """With subnormal numbers flushed to zero these products and keys would be 0; workers are not told of the mode."""
    weight, x = float_matrix(WeightType.F32, torch.full((4096, 64), 1e-20)), torch.full((1, 64), 1e-20)
    case = attention_case([600], [2], 16)
    case.keys.mul_(1e-6)
    expected = layer(weight, isa, threads)(x), case.run(backend(isa, threads))[0]
    try:
        assert torch.set_flush_denormal(True)
        found = layer(weight, isa, threads)(x), case.run(backend(isa, threads))[0]
    finally:
        torch.set_flush_denormal(False)
    assert float(found[0].abs().max()) > 0
    for each, wanted in zip(found, expected, strict=True):
        assert torch.equal(each.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
def test_the_callers_floating_point_mode_does_not_reach_the_last_sum(isa: str) -> None:
    """Rows too small for their products to be anything but 0 come back as they were."""
    ops, weights = backend(isa), layer_weights()
    case = attention_case([4], [4], 16, heads=2, kv_heads=1, head_dim=32)
    layers = ops.make_layers([weights, weights])
    x = torch.full((4, 64), 1e-40)
    attention, copy = ops.make_attention(case), x.clone()
    try:
        assert torch.set_flush_denormal(True)
        found = layers(copy, attention)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int32), x.view(torch.int32))


def test_torchs_defaults_do_not_reach_the_kernels() -> None:
    """A loader of some other library may have set another default dtype: half the memory for what they write."""
    case, weight = attention_case([40, 20], [4, 2], 16), matrix(WeightType.Q8_0, 100, 64)
    ids, x = torch.tensor([3, 5], dtype=torch.int32), normal(5, 64)

    def run() -> list[torch.Tensor]:
        return [
            layer(weight)(x),
            case.run(backend())[0],
            backend().make_embedding(weight)(ids),
            backend().log_sum_exp(x),
        ]

    expected = run()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for each, wanted in zip(found, expected, strict=True):
        assert torch.equal(each, wanted)


def test_two_threads_may_use_the_same_layers_at_once() -> None:
    """The interpreter lock is free while a kernel runs, and scratch memory must be each thread's own."""
    weights = [matrix(kind, 520, 512, seed=seed) for seed, kind in enumerate((WeightType.Q4_K, WeightType.Q5_0))]
    layers = [layer(weight, threads=2) for weight in weights]
    inputs = [normal(rows, 512, seed=rows) for rows in (1, 5, 70)]
    expected = [[product(x) for x in inputs] for product in layers]

    def work(first: int) -> bool:
        return all(
            torch.equal(layers[i % 2](x), wanted)
            for i in range(first, first + 40)
            for x, wanted in zip(inputs, expected[i % 2], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (0, 1)))


@pytest.mark.parametrize(("kind", "extreme"), [*((k, False) for k in TYPES), *((k, True) for k in QUANTISED)])
def test_embedding_is_the_references_to_the_bit(kind: WeightType, extreme: bool) -> None:
    weight = matrix(kind, 50, columns(kind, 3), extreme=extreme)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32)
    found = backend().make_embedding(weight)(ids)
    assert torch.equal(found, reference.ReferenceBackend().make_embedding(weight)(ids))
    assert torch.equal(found.double(), torch.from_numpy(values_of(weight)[ids]))
    for outside in (50, -1):
        with pytest.raises(IndexError, match=f"no row {outside} among 50"):
            backend().make_embedding(weight)(torch.tensor([0, outside], dtype=torch.int32))


def layer_weights(hidden: int = 64, intermediate: int = 96, heads: int = 2, kv_heads: int = 1) -> LayerWeights:
    """A layer with heads of 32 values."""

    def projection(num_outputs: int, num_inputs: int) -> Projection:
        return Projection(matrix(WeightType.Q8_0, num_outputs, num_inputs))

    norm = Norm(torch.ones(hidden), 1e-6)
    qkv = [projection(32 * count, hidden) for count in (heads, kv_heads, kv_heads)]
    gate, up = (projection(intermediate, hidden) for _ in range(2))
    output, down = projection(hidden, 32 * heads), projection(hidden, intermediate)
    return LayerWeights(norm, qkv, head_norms(32), output, norm, gate, up, down)


def head_norms(head_dim: int) -> HeadNorms:
    return HeadNorms(Norm(1 + normal(head_dim, seed=3), 1e-6), Norm(1 + normal(head_dim, seed=4), 1e-3))


LAYER = 1  # of two: what is written to the other one would be noticed


@dataclass(frozen=True)
class AttentionCase(AttentionInputs):
    """New rows of several sequences, and the cache that holds what stands before them."""

    qkv: torch.Tensor
    norms: HeadNorms | None = None

    def run(self, ops) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows' results, and the cache afterwards: keys, values and filled."""
        fresh = replace(self, keys=self.keys.clone(), values=self.values.clone(), filled=torch.zeros_like(self.filled))
        found = ops.make_attention(fresh)(LAYER, self.qkv.clone(), self.norms)
        return found, fresh.keys, fresh.values, fresh.filled

    def row_alone(self, row: int) -> AttentionCase:
        sequence = int((self.query_start_loc <= row).sum()) - 1
        return replace(
            self,
            qkv=self.qkv[row : row + 1],
            positions=self.positions[row : row + 1],
            slot_mapping=self.slot_mapping[row : row + 1],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=self.positions[row : row + 1] + 1,
            page_table=self.page_table[sequence : sequence + 1],
        )


def attention_case(
    lengths: list[int],
    rows: list[int],
    page_size: int,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    with_norms: bool = False,
) -> AttentionCase:
    """Sequences of `lengths` tokens whose last `rows` are new, in shuffled pages. Slots of no token hold NaN."""
    num_pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lengths), max(num_pages)), -1, dtype=torch.int32)
    content = normal(2, len(lengths), max(lengths), kv_heads, head_dim, seed=1)
    keys, values = (
        torch.full((2, len(order), page_size, kv_heads, head_dim), torch.nan, dtype=torch.float16) for _ in range(2)
    )
    positions, slots = [], []
    for sequence, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        table[sequence, : num_pages[sequence]] = torch.tensor([order.pop() for _ in range(num_pages[sequence])])
        for position in range(length):
            page, slot = int(table[sequence, position // page_size]), position % page_size
            if position < length - count:
                keys[LAYER, page, slot], values[LAYER, page, slot] = content[:, sequence, position]
            else:
                positions.append(position)
                slots.append(page * page_size + slot)
    return AttentionCase(
        heads,
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor([0, *rows]).cumsum(0).int(),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        reference.rotary_tables(head_dim, max(lengths), 10000.0),
        keys,
        values,
        torch.zeros(keys.shape[:2], dtype=torch.int32),
        normal(sum(rows), (heads + 2 * kv_heads) * head_dim, seed=2),
        head_norms(head_dim) if with_norms else None,
    )


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, or NaN both."""
    return torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 128])
@pytest.mark.parametrize(("page_size", "with_norms"), [(1, False), (16, False), (16, True)])
def test_attention_is_close_to_the_reference_and_writes_the_same_cache(
    head_dim: int, page_size: int, with_norms: bool, isa: str
) -> None:
    case = attention_case([40, 7, 1300], [3, 7, 1], page_size, head_dim=head_dim, with_norms=with_norms)
    # As values: what float16 rounds, overflows to, and holds as a subnormal number. Nobody sees the last row's.
    case.qkv[9, -8:] = torch.tensor([65519.0, 65520.0, 1e-7, 3e-8, 2.9e-8, -6.1e-5, torch.inf, 2049.0])
    found, expected = case.run(backend(isa, 2)), case.run(reference.ReferenceBackend())
    seen = [row for row in range(11) if row != 9]
    # A norm's sum may round otherwise, which can push a key over the edge between two float16.
    bounds = (1e-3, 1e-4) if with_norms else (1e-5, 1e-6)
    assert torch.allclose(found[0][seen], expected[0][seen], *bounds)
    for cache, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(cache, wanted, 2**-10, 2**-24, equal_nan=True) if with_norms else same(cache, wanted)
    assert int(found[3].max()) == int((case.positions % page_size).max()) + 1
    assert found[1][0].isnan().all()  # the other layer


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("page_size", "with_norms"), [(1, False), (4, True), (16, False), (64, True)])
def test_attention_rows_are_independent_and_variants_equal(page_size: int, with_norms: bool, isa: str) -> None:
    lengths, rows = [50, 3, 1300], [9, 3, 2]  # the last over several chunks of the context
    expected = attention_case(lengths, rows, 16).run(backend())[0]
    case = attention_case(lengths, rows, page_size)
    for threads in (1, 2):
        found, keys, values, _ = case.run(backend(isa, threads))
        assert torch.equal(found, expected)
    written = replace(case, keys=keys, values=values)
    for row in range(sum(rows)):
        assert torch.equal(written.row_alone(row).run(backend(isa))[0][0], expected[row])


@pytest.mark.parametrize("isa", ISAS)
def test_attention_of_a_poisoned_row_is_nan_and_its_neighbours_are_not(isa: str) -> None:
    case = attention_case([40, 20], [4, 2], 16)
    expected = case.run(backend(isa))[0]
    for poison in (float("nan"), float("inf")):
        poisoned = replace(case, qkv=case.qkv.clone())
        poisoned.qkv[1, 3 : 6 * 64 : 64] = poison  # in every query head
        found = poisoned.run(backend(isa))[0]
        assert torch.isnan(found[1]).all()
        others = [0, 2, 3, 4, 5]
        assert torch.equal(found[others], expected[others])


def test_attention_at_32k_positions() -> None:
    case = attention_case([32768], [1], 16, heads=2, kv_heads=1, head_dim=16)
    results = [case.run(backend(isa, 2))[0] for isa in ISAS]
    assert torch.allclose(results[0], case.run(reference.ReferenceBackend())[0], rtol=1e-4, atol=1e-6)
    assert all(torch.equal(result, results[0]) for result in results)


def test_more_rows_than_there_is_room_for_at_once() -> None:
    """300 rows behind 2,000 tokens give 25 MB of partial results."""
    case = attention_case([2300], [300], 16, heads=64, kv_heads=2, head_dim=64)
    found, keys, values, _ = case.run(backend(threads=2))
    written = replace(case, keys=keys, values=values)
    for row in (0, 150, 299):
        assert torch.equal(written.row_alone(row).run(backend())[0][0], found[row])


def test_attention_checks_what_it_is_given() -> None:
    case, ops = attention_case([40, 20], [4, 2], 16), backend()
    for change, message in (
        ({"seq_lens": case.seq_lens.long()}, "attention: seq_lens must be contiguous torch.int32"),
        ({"page_table": case.page_table[:1]}, "attention: page_table must be [2, any]"),
        ({"num_heads": 5}, "5 query heads cannot share 2 key/value heads"),
        ({"keys": case.keys.float()}, "keys must be contiguous torch.float16"),
        ({"qkv": case.qkv[:5]}, "attention: qkv must be [6, 640], got [5, 640]"),
        ({"qkv": case.qkv.double()}, "attention: qkv must be contiguous torch.float32"),
        ({"tables": (case.tables[0], case.tables[1][:, 1:].clone())}, "attention: tables must be [40, 32]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            replace(case, **change).run(ops)
    for head_dim in (514, 63):
        with pytest.raises(ValueError, match=f"an even number of at most 512 values, got {head_dim}"):
            replace(
                case,
                keys=torch.zeros(2, 9, 16, 2, head_dim).half(),
                values=torch.zeros(2, 9, 16, 2, head_dim).half(),
            ).run(ops)
    for change, message in (
        ({"positions": case.positions - 37}, "a position is beyond the rotary tables"),
        ({"positions": case.positions + 4}, "a position is beyond the rotary tables"),
        ({"slot_mapping": case.slot_mapping - 1000}, "there is no such slot"),
        ({"slot_mapping": case.slot_mapping + 1000}, "there is no such slot"),
        ({"query_start_loc": torch.tensor([0, 4, 5], dtype=torch.int32)}, "does not span the rows"),
        ({"query_start_loc": torch.tensor([0, 7, 6], dtype=torch.int32)}, "must count the new rows"),
        ({"seq_lens": torch.tensor([3, 20], dtype=torch.int32)}, "must count the new rows"),
        ({"seq_lens": torch.tensor([49, 20], dtype=torch.int32)}, "longer than its pages"),
        ({"seq_lens": torch.tensor([40, 33], dtype=torch.int32)}, "there is no such page"),
        ({"page_table": case.page_table + 3}, "there is no such page"),
    ):
        with pytest.raises(ValueError, match=f"attention: .*{message}"):
            replace(case, **change).run(ops)
    made = ops.make_attention(case)
    for outside in (-1, 2):
        with pytest.raises(ValueError, match=f"no layer {outside} among 2"):
            made(outside, case.qkv)


def test_layers_check_what_they_are_given() -> None:
    ops, fits = backend(), layer_weights()
    with pytest.raises(ValueError, match="2 kinds of layers"):
        ops.make_layers([fits, layer_weights(heads=4)])
    with pytest.raises(ValueError, match="0 kinds of layers"):
        ops.make_layers([])
    for wrong in (
        replace(fits, down=Projection(matrix(WeightType.Q8_0, 64, 64))),
        replace(fits, down=Projection(matrix(WeightType.Q8_0, 32, 96))),
        replace(fits, attention_output=Projection(matrix(WeightType.Q8_0, 32, 64))),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            ops.make_layers([wrong])
    layers = ops.make_layers([fits, fits])
    case = attention_case([4], [3], 16, heads=2, kv_heads=1, head_dim=32)
    attention = ops.make_attention(case)
    assert layers(torch.zeros(3, 64), attention).shape == (3, 64)
    with pytest.raises(ValueError, match=r"layers: x must be \[any, 64\]"):
        layers(torch.zeros(3, 32), attention)
    with pytest.raises(ValueError, match=re.escape("are (2, 2, 128, 64), the attention's (2, 3, 128, 64)")):
        layers(torch.zeros(2, 64), attention)
    with pytest.raises(ValueError, match=re.escape("are (3, 3, 128, 64), the attention's (2, 3, 128, 64)")):
        ops.make_layers([fits] * 3)(torch.zeros(3, 64), attention)
    with pytest.raises(TypeError, match="need native attention"):
        layers(torch.zeros(3, 64), reference.ReferenceBackend().make_attention(case))


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_packed_bytes_stay_near_the_files(kind: WeightType) -> None:
    weight = matrix(kind, 64, columns(kind, 4))
    assert backend().make_linear([Projection(weight)]).num_bytes <= 1.03 * weight.read().size


def test_environment_chooses_the_kernels() -> None:
    for isa in ISAS:
        environment = {"PILOTFISH_ISA": isa, "PILOTFISH_THREADS": "3"}
        assert choose_backend(environment=environment).name == f"native ({isa}, 3 threads)"
        assert choose_backend(5, environment).name == f"native ({isa}, 5 threads)"
    assert choose_backend(environment={}).name == f"native ({ISAS[0]}, {num_usable_cores()} threads)"
    with pytest.raises(OptionError, match="PILOTFISH_ISA is 'sse9'; this machine has"):
        choose_backend(environment={"PILOTFISH_ISA": "sse9"})
    for threads in ("0", "-1", "two", "9999"):
        with pytest.raises(OptionError, match="PILOTFISH_THREADS must be a number"):
            choose_backend(environment={"PILOTFISH_THREADS": threads})


def test_threads_are_checked(tmp_path: Path) -> None:
    for threads in (0, -1, 1025):
        with pytest.raises(OptionError, match=f"threads must be a number from 1 to 1024, got '{threads}'"):
            choose_backend(threads)
    path = write_tiny_model(tmp_path / "model.gguf")
    assert pilotfish.load(path, threads=3)[0]._backend.name.endswith("3 threads)")
    with pytest.raises(OptionError, match="cannot be combined"):
        pilotfish.load(path, threads=3, backend=backend())


def test_without_the_extension_there_is_one_warning_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pilotfish._kernels", None)
    monkeypatch.delattr(pilotfish, "_kernels", raising=False)
    with pytest.warns(RuntimeWarning, match="native kernels are missing") as warned:
        assert choose_backend(environment={}).name == "reference"
    assert len(warned) == 1


@pytest.fixture(scope="module", params=[(a, t) for a in ARCHITECTURES for t in ("Q4_K", "Q6_K", "Q5_0")], ids="-".join)
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, weight_type = request.param
    path = tmp_path_factory.mktemp("native") / "model.gguf"
    return write_tiny_model(path, config=tiny_config(architecture, **WIDE), weight_type=weight_type)


def logits_in_chunks(model: Transformer, ids: list[int], chunks: list[int]) -> torch.Tensor:
    cache = pilotfish.DenseCache(model.config)
    parts = []
    for count in chunks:
        cache.reserve(count)
        parts += run_forward(model, [ForwardInput(cache, ids[cache.length : cache.length + count], count)])
    return torch.cat(parts)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_of_a_model_depend_on_neither_chunks_nor_variant(tiny_model: Path, isa: str) -> None:
    ids = [(7 * i) % 250 for i in range(24)]
    expected = logits_in_chunks(pilotfish.load(tiny_model)[0], ids, [1] * 24)
    model, _ = pilotfish.load(tiny_model, backend=NativeBackend(_kernels, isa, 2))
    for chunks in ([24], [1, 5, 9, 2, 7], [1] * 24):
        assert torch.equal(logits_in_chunks(model, ids, chunks), expected)


def test_logits_of_a_model_are_close_to_the_reference(tiny_model: Path) -> None:
    ids = [(7 * i) % 250 for i in range(24)]
    native = logits_in_chunks(pilotfish.load(tiny_model)[0], ids, [24])
    plain = logits_in_chunks(pilotfish.load(tiny_model, backend=reference.ReferenceBackend())[0], ids, [24])
    finite = plain.isfinite()
    assert torch.equal(finite, native.isfinite())
    assert (native[finite] - plain[finite]).norm() / plain[finite].norm() < 0.05


@pytest.mark.parametrize("k", [1, 4])
def test_speculative_output_on_the_kernels_is_the_targets_own(tiny_model: Path, k: int) -> None:
    model, tokenizer = pilotfish.load(tiny_model)
    sampling = pilotfish.SamplingParams(max_tokens=20)
    plain = pilotfish.generate(model, tokenizer, "the end", sampling=sampling)
    for drafter in (
        HostileDrafter(0, min(tokenizer.eos_token_ids)),
        pilotfish.DraftModelDrafter(model, pilotfish.check_pair(tokenizer, tokenizer)),
    ):
        found = pilotfish.generate(model, tokenizer, "the end", drafter=drafter, proposal_length=k, sampling=sampling)
        assert found.token_ids == plain.token_ids


def test_nan_weights_are_reported(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", config=tiny_config(**WIDE), weight_type="Q8_0")
    data = bytearray(path.read_bytes())
    start = pilotfish.formats.gguf.GGUFFile.open(path)._infos["blk.0.ffn_down.weight"].start
    data[start : start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    model, tokenizer = pilotfish.load(path)
    with pytest.raises(NonFiniteLogitsError):
        pilotfish.generate(model, tokenizer, "the end", sampling=pilotfish.SamplingParams(max_tokens=2))


def test_committed_stub_is_what_the_extension_gives(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanobind.stubgen", "-m", "pilotfish._kernels", "-o", str(tmp_path / "stub.pyi")]
    subprocess.run(command, check=True, capture_output=True)
    committed = Path(pilotfish.__file__).with_name("_kernels.pyi")
    assert (tmp_path / "stub.pyi").read_text() == committed.read_text()
