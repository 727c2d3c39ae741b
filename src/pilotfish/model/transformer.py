"""One decoder-only transformer for every architecture: what differs between them is data in the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import InvariantError
from pilotfish.kvcache import KVStore
from pilotfish.model.batch import ForwardBatch
from pilotfish.ops import reference as ops
from pilotfish.ops.backend import Backend, LinearLayer, Norm, Projection
from pilotfish.types import RawTensor


@dataclass(frozen=True)
class _Layer:
    """One layer's products; what reads the same rows is one, the norm before it included."""

    qkv: LinearLayer
    attention_output: LinearLayer
    gate_up: LinearLayer
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
        weights = _Weights(tensors, self._backend, config.rms_norm_eps)
        self._embedding = self._backend.make_embedding(tensors["token_embd.weight"])
        self._layers = [
            _Layer(
                qkv=weights.linear([f"blk.{i}.attn_{part}" for part in "qkv"], norm=f"blk.{i}.attn_norm"),
                attention_output=weights.linear([f"blk.{i}.attn_output"]),
                gate_up=weights.linear([f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"], norm=f"blk.{i}.ffn_norm", gated=True),
                down=weights.linear([f"blk.{i}.ffn_down"]),
            )
            for i in range(config.num_layers)
        ]
        self._output = weights.linear(["output"], norm="output_norm")
        self._rotary_tables = ops.rotary_tables(config.head_dim, config.context_length, config.rope_theta)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the matrices that a forward with logits reads. Of the embedding it reads a row for each token."""
        layers = (
            part for layer in self._layers for part in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        )
        return self._output.num_bytes + sum(part.num_bytes for part in layers)

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
        attention = self._backend.make_attention(
            config.num_heads,
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.page_table,
            self._rotary_tables,
            store.keys,
            store.values,
            store.filled,
        )
        x = self._embedding(batch.input_ids)  # [num_tokens, hidden_size]
        delta = None  # what the last product adds to x, before the next norm
        for index, layer in enumerate(self._layers):
            attended = attention(index, layer.qkv(x, delta))  # [num_tokens, num_heads · head_dim]
            gated = layer.gate_up(x, layer.attention_output(attended))  # [num_tokens, intermediate_size]
            delta = layer.down(gated)
        wanted = batch.logits_indices
        if not len(wanted):
            return torch.empty(0, config.vocab_size)
        logits = self._output(x.index_select(0, wanted), None if delta is None else delta.index_select(0, wanted))
        return logits.index_fill_(1, self._masked_ids, -torch.inf)


class _Weights:
    """Makes layers of raw tensors."""

    def __init__(self, tensors: Mapping[str, RawTensor], backend: Backend, rms_norm_eps: float) -> None:
        self._tensors = tensors
        self._backend = backend
        self._eps = rms_norm_eps

    def linear(self, names: Sequence[str], norm: str | None = None, gated: bool = False) -> LinearLayer:
        projections = [Projection(self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")) for name in names]
        before = None if norm is None else Norm(ops.dense(self._tensors[f"{norm}.weight"]), self._eps)
        return self._backend.make_linear(projections, before, gated)
