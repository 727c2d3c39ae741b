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
from pilotfish.ops.backend import AttentionInputs, Backend, HeadNorms, LayerWeights, Norm, Projection
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
        padding, beyond = torch.tensor(sorted(padding_token_ids)), torch.arange(num_token_ids, config.vocab_size)
        self._masked_ids = torch.cat((padding.long(), beyond))
        self._backend = backend or ops.ReferenceBackend()
        weights = _Weights(tensors, config.rms_norm_eps)
        # The output first: it is the largest matrix, and while it is prepared it is in memory twice.
        self._output = self._backend.make_linear([weights.projection("output")], weights.norm("output_norm"))
        self._embedding = self._backend.make_embedding(tensors["token_embd.weight"])
        self._layers = self._backend.make_layers(
            [weights.layer(f"blk.{i}", config.qk_norm) for i in range(config.num_layers)]
        )
        self._rotary_tables = RotaryTables(config)

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
        last_position = int(batch.positions.max())
        if last_position >= config.context_length or int(batch.slot_mapping.max()) >= store.num_slots:
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
            tables=self._rotary_tables.up_to(last_position),
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


class RotaryTables:
    """Cosine and sine for the positions of a context, made when first needed: few contexts are used to the end.

    Blocks of one size make a row's bits independent of how far the tables reach.
    """

    _BLOCK = 4096

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables = self._block(0)

    def up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """Float32 [num_positions, head_dim / 2] each; `position` is one of their rows."""
        while position >= len(self._tables[0]):
            cos, sin = self._block(len(self._tables[0]))
            self._tables = torch.cat((self._tables[0], cos)), torch.cat((self._tables[1], sin))
        return self._tables

    def _block(self, first: int) -> tuple[Tensor, Tensor]:
        config = self._config
        return ops.rotary_tables(config.head_dim, self._BLOCK, config.rope_theta, config.rope_factors, first)


class _Weights:
    """Finds a model's tensors by name."""

    def __init__(self, tensors: Mapping[str, RawTensor], rms_norm_eps: float) -> None:
        self._tensors = tensors
        self._eps = rms_norm_eps

    def layer(self, name: str, qk_norm: bool) -> LayerWeights:
        return LayerWeights(
            attention_norm=self.norm(f"{name}.attn_norm"),
            qkv=[self.projection(f"{name}.attn_{part}") for part in "qkv"],
            head_norms=self._head_norms(name) if qk_norm else None,
            attention_output=self.projection(f"{name}.attn_output"),
            feed_forward_norm=self.norm(f"{name}.ffn_norm"),
            gate=self.projection(f"{name}.ffn_gate"),
            up=self.projection(f"{name}.ffn_up"),
            down=self.projection(f"{name}.ffn_down"),
        )

    def _head_norms(self, name: str) -> HeadNorms:
        return HeadNorms(self.norm(f"{name}.attn_q_norm"), self.norm(f"{name}.attn_k_norm"))

    def norm(self, name: str) -> Norm:
        return Norm(ops.dense(self._tensors[f"{name}.weight"]), self._eps)

    def projection(self, name: str) -> Projection:
        return Projection(self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
