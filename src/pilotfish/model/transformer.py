"""One decoder-only transformer for every architecture: what differs between them is data in the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import InvariantError
from pilotfish.kvcache import KVStore
from pilotfish.model.batch import ForwardBatch
from pilotfish.ops import reference as ops
from pilotfish.ops.backend import Backend, LinearLayer
from pilotfish.types import RawTensor


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, named by what they project to."""

    attention_norm: Tensor
    q: LinearLayer
    k: LinearLayer
    v: LinearLayer
    attention_output: LinearLayer
    feed_forward_norm: Tensor
    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer


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
        backend: Backend | None = None,
    ) -> None:
        """`backend` does the arithmetic, by default the reference."""
        self.config = config
        masked = sorted({*padding_token_ids, *range(num_token_ids, config.vocab_size)})
        self._masked_ids = torch.tensor(masked, dtype=torch.int64)
        self._backend = backend or ops.ReferenceBackend()
        weights = _Weights(tensors, self._backend)
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
        # The kernels look angles and slots up unchecked.
        if int(batch.positions.max()) >= config.context_length or int(batch.slot_mapping.max()) >= store.num_slots:
            raise InvariantError(
                f"a row's position or slot is beyond the context of {config.context_length} tokens or the store's "
                f"{store.num_slots} slots"
            )
        x = ops.embedding(batch.input_ids, self._embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self._layers):
            normed = self._backend.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            q, k, v = (
                projection(normed).view(len(x), -1, config.head_dim) for projection in (layer.q, layer.k, layer.v)
            )  # [num_tokens, num_heads or num_kv_heads, head_dim]
            keys, values = store.keys[index], store.values[index]
            q = self._backend.rotary_write(
                q, k, v, batch.positions, self._rotary_tables, batch.slot_mapping, keys, values, store.filled[index]
            )
            attended = self._backend.attention(q, keys, values, batch.query_start_loc, batch.seq_lens, batch.page_table)
            x = x + layer.attention_output(attended.flatten(1))
            normed = self._backend.rms_norm(x, layer.feed_forward_norm, config.rms_norm_eps)
            gated = self._backend.silu_mul(layer.gate(normed), layer.up(normed))
            x = x + layer.down(gated)
        if not len(batch.logits_indices):
            return torch.empty(0, config.vocab_size)
        wanted = self._backend.rms_norm(x.index_select(0, batch.logits_indices), self._output_norm, config.rms_norm_eps)
        logits = self._output(wanted)
        return logits.index_fill_(1, self._masked_ids, -torch.inf)


class _Weights:
    """Makes layers of raw tensors."""

    def __init__(self, tensors: Mapping[str, RawTensor], backend: Backend) -> None:
        self._tensors = tensors
        self._backend = backend

    def vector(self, name: str) -> Tensor:
        return ops.dense(self._tensors[f"{name}.weight"])

    def linear(self, name: str) -> LinearLayer:
        return self._backend.make_linear(self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
