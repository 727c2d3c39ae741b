"""One decoder-only transformer for every architecture: what differs between them is data in the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.kvcache import KVStore
from pilotfish.model.batch import ForwardBatch
from pilotfish.ops import reference as ops
from pilotfish.types import RawTensor


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, named by what they project to."""

    attention_norm: Tensor
    q: ops.Linear
    k: ops.Linear
    v: ops.Linear
    attention_output: ops.Linear
    feed_forward_norm: Tensor
    gate: ops.Linear
    up: ops.Linear
    down: ops.Linear


class Transformer:
    """A pre-norm transformer with rotary positions, grouped key/value heads and a gated feed-forward part.

    Ids in `padding_token_ids`, and rows of the output matrix beyond `num_token_ids`, stand for no text: their logits
    are -infinity, so that no consumer can choose one.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, RawTensor],
        num_token_ids: int,
        padding_token_ids: Collection[int] = (),
    ) -> None:
        self.config = config
        masked = sorted({*padding_token_ids, *range(num_token_ids, config.vocab_size)})
        self._masked_ids = torch.tensor(masked, dtype=torch.int64)
        weights = _Weights(tensors)
        table = tensors["token_embd.weight"]
        self._embedding = ops.Embedding(ops.raw_bytes(table), table.weight_type)
        self._layers = [
            _Layer(
                attention_norm=weights.vector(f"blk.{i}.attn_norm"),
                q=weights.linear(f"blk.{i}.attn_q"),
                k=weights.linear(f"blk.{i}.attn_k"),
                v=weights.linear(f"blk.{i}.attn_v"),
                attention_output=weights.linear(f"blk.{i}.attn_output"),
                feed_forward_norm=weights.vector(f"blk.{i}.ffn_norm"),
                gate=weights.linear(f"blk.{i}.ffn_gate"),
                up=weights.linear(f"blk.{i}.ffn_up"),
                down=weights.linear(f"blk.{i}.ffn_down"),
            )
            for i in range(config.num_layers)
        ]
        self._output_norm = weights.vector("output_norm")
        self._output = weights.linear("output")
        self._rotary_tables = ops.rotary_tables(config.head_dim, config.context_length, config.rope_theta)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, store: KVStore) -> Tensor:
        """One pass over the rows of `batch`: their keys and values are written to `store` layer by layer.

        Returns float32 [num_logits, vocab_size]; without logits rows the output matrix is skipped.
        """
        config = self.config
        x = ops.embedding(batch.input_ids, self._embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            q, k, v = (
                ops.linear(normed, projection).view(len(x), -1, config.head_dim)
                for projection in (layer.q, layer.k, layer.v)
            )  # [num_tokens, num_heads or num_kv_heads, head_dim]
            q, k = (ops.rotary(heads, batch.positions, self._rotary_tables) for heads in (q, k))
            store.write(index, batch.slot_mapping, k, v)
            attended = ops.attention(
                q, store.keys[index], store.values[index], batch.query_start_loc, batch.seq_lens, batch.page_table
            )
            x = x + ops.linear(attended.flatten(1), layer.attention_output)
            normed = ops.rms_norm(x, layer.feed_forward_norm, config.rms_norm_eps)
            gated = ops.silu_mul(ops.linear(normed, layer.gate), ops.linear(normed, layer.up))
            x = x + ops.linear(gated, layer.down)
        wanted = ops.rms_norm(x.index_select(0, batch.logits_indices), self._output_norm, config.rms_norm_eps)
        if not len(wanted):
            return torch.empty(0, config.vocab_size)
        logits = ops.linear(wanted, self._output)
        return logits.index_fill_(1, self._masked_ids, -torch.inf)


class _Weights:
    """Makes layers of raw tensors; each shape of matrix is checked once for independent rows."""

    def __init__(self, tensors: Mapping[str, RawTensor]) -> None:
        self._tensors = tensors
        self._pads_rows: dict[tuple[int, ...], bool] = {}

    def vector(self, name: str) -> Tensor:
        return ops.dense(self._tensors[f"{name}.weight"])

    def linear(self, name: str) -> ops.Linear:
        weight = ops.dense(self._tensors[f"{name}.weight"])
        if weight.shape not in self._pads_rows:
            self._pads_rows[weight.shape] = ops.padding_keeps_rows_independent(weight)
        bias = self._tensors.get(f"{name}.bias")
        return ops.Linear(weight, None if bias is None else ops.dense(bias), self._pads_rows[weight.shape])
