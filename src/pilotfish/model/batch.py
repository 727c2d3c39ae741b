"""From sequences with something to feed to the flat int32 arrays of one forward, and back to logits per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import InvariantError
from pilotfish.kvcache import KVCache, KVStore


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward, the sequences one after the other: int32 and contiguous, or `InvariantError`."""

    input_ids: Tensor
    """[num_tokens]"""
    positions: Tensor
    """[num_tokens]"""
    slot_mapping: Tensor
    """[num_tokens]: the slot of the store that takes each row's keys and values"""
    query_start_loc: Tensor
    """[num_seqs + 1]: where each sequence's rows start; the last entry is num_tokens"""
    seq_lens: Tensor
    """[num_seqs]: tokens in the cache once the new rows are written"""
    page_table: Tensor
    """[num_seqs, max_pages]: each sequence's pages in order, -1 where there is none"""
    logits_indices: Tensor
    """[num_logits]: the rows whose logits are wanted; empty for a chunk that is not a prompt's last"""

    def __post_init__(self) -> None:
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise InvariantError(f"ForwardBatch.{field.name} must be contiguous int32, got {tensor.dtype}")


class ForwardModel(Protocol):
    """What decoding needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: ForwardBatch, store: KVStore) -> Tensor:
        """Writes the rows' keys and values into the store; float32 [num_logits, vocab_size]."""


@dataclass(frozen=True)
class ForwardInput:
    """Token ids that continue what `cache` holds, slots for them reserved; logits of the last `num_logits` rows."""

    cache: KVCache
    token_ids: Sequence[int]
    num_logits: int


def make_batch(inputs: Sequence[ForwardInput]) -> ForwardBatch:
    """The flat arrays of inputs whose caches share one store."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    lengths: list[int] = []
    logits_rows: list[int] = []
    starts = [0]
    for entry in inputs:
        cache, page_size = entry.cache, entry.cache.store.page_size
        new_positions = range(cache.length, cache.length + len(entry.token_ids))
        ids += entry.token_ids
        positions += new_positions
        slots += [cache.page_ids[p // page_size] * page_size + p % page_size for p in new_positions]
        starts.append(len(ids))
        lengths.append(new_positions.stop)
        logits_rows += range(len(ids) - entry.num_logits, len(ids))
    width = max(len(entry.cache.page_ids) for entry in inputs)
    table = [[*entry.cache.page_ids, *[-1] * (width - len(entry.cache.page_ids))] for entry in inputs]
    return ForwardBatch(*map(_int32, (ids, positions, slots, starts, lengths, table, logits_rows)))


def run_forward(model: ForwardModel, inputs: Sequence[ForwardInput]) -> list[Tensor]:
    """One forward per store over all inputs; per input the logits, float32 [num_logits, vocab_size].

    Afterwards each cache holds its new rows. If a forward raises, every cache is back at the length it came with, and
    its reserved slots are given up.
    """
    lengths = [entry.cache.length for entry in inputs]
    results: dict[int, Tensor] = {}
    try:
        for group in _by_store(inputs):
            members = [inputs[index] for index in group]
            logits = model.forward(make_batch(members), members[0].cache.store)
            parts = torch.split(logits, [entry.num_logits for entry in members])
            for index, entry, part in zip(group, members, parts, strict=True):
                entry.cache.advance(len(entry.token_ids))
                results[index] = part
    except BaseException:
        for entry, length in zip(inputs, lengths, strict=True):
            entry.cache.rewind(entry.cache.length - length)
        raise
    return [results[index] for index in range(len(inputs))]


def prefill(model: ForwardModel, cache: KVCache, token_ids: Sequence[int], max_num_batched_tokens: int) -> Tensor:
    """Feeds at least one token to `cache`, in chunks; the logits behind the last one, float32 [1, vocab_size]."""
    for first in range(0, len(token_ids), max_num_batched_tokens):
        chunk = token_ids[first : first + max_num_batched_tokens]
        cache.reserve(len(chunk))
        is_last = first + len(chunk) == len(token_ids)
        (logits,) = run_forward(model, [ForwardInput(cache, chunk, int(is_last))])
    return logits


def _by_store(inputs: Sequence[ForwardInput]) -> list[list[int]]:
    """Indices of the inputs, grouped by the store they share; dense caches have one each."""
    groups: dict[int, list[int]] = {}
    for index, entry in enumerate(inputs):
        groups.setdefault(id(entry.cache.store), []).append(index)
    return list(groups.values())


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
