"""One decoder-only transformer for every architecture: what differs between them is data in the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import InvariantError
from pilotfish.kvcache import KVStore
from pilotfish.model.batch import ForwardBatch
from pilotfish.ops import reference as ops
from pilotfish.ops.backend import AttentionInputs, Backend, LayerWeights, Norm, Projection
from pilotfish.types import RawTensor


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
        weights = _Weights(tensors, config.rms_norm_eps)
        # The output first: it is the largest matrix, and while it is prepared it is in memory twice.
        self._output = self._backend.make_linear([weights.projection("output")], weights.norm("output_norm"))
        self._embedding = self._backend.make_embedding(tensors["token_embd.weight"])
        self._layers = self._backend.make_layers([weights.layer(f"blk.{i}") for i in range(config.num_layers)])
        self._rotary_tables = ops.rotary_tables(config.head_dim, config.context_length, config.rope_theta)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the matrices that a forward with logits reads. Of the embedding it reads a row for each token."""
        return self._layers.num_bytes + self._output.num_bytes

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
        inputs = AttentionInputs(
            num_heads=config.num_heads,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            page_table=batch.page_table,
            tables=self._rotary_tables,
            keys=store.keys,
            values=store.values,
            filled=store.filled,
        )
        attention = self._backend.make_attention(inputs)
        x = self._layers(self._embedding(batch.input_ids), attention)  # [num_tokens, hidden_size]
        wanted = batch.logits_indices
        if not len(wanted):
            return torch.empty(0, config.vocab_size, dtype=torch.float32)
        logits = self._output(x.index_select(0, wanted))
        return logits.index_fill_(1, self._masked_ids, -torch.inf)


class _Weights:
    """Finds a model's tensors by name."""

    def __init__(self, tensors: Mapping[str, RawTensor], rms_norm_eps: float) -> None:
        self._tensors = tensors
        self._eps = rms_norm_eps

    def layer(self, name: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=self.norm(f"{name}.attn_norm"),
            qkv=[self.projection(f"{name}.attn_{part}") for part in "qkv"],
            attention_output=self.projection(f"{name}.attn_output"),
            feed_forward_norm=self.norm(f"{name}.ffn_norm"),
            gate=self.projection(f"{name}.ffn_gate"),
            up=self.projection(f"{name}.ffn_up"),
            down=self.projection(f"{name}.ffn_down"),
        )

    def norm(self, name: str) -> Norm:
        return Norm(ops.dense(self._tensors[f"{name}.weight"]), self._eps)

    def projection(self, name: str) -> Projection:
        return Projection(self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
