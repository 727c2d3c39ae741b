"""Stand-ins that make faults visible: each says in its docstring what it would catch.

A vocabulary of these tests is `VOCAB_SIZE` ids: the 256 bytes, and a few control tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.drafters import SingleSequenceDrafter
from pilotfish.kvcache import DenseCache, KVCache, KVStore, PagePool
from pilotfish.model import ForwardBatch, ForwardInput, run_forward
from pilotfish.ops.reference import write_cache
from pilotfish.tokenizer import Tokenizer
from pilotfish.types import Draft, DraftRequest, SequenceView, VerifyOutcome

VOCAB_SIZE = 260
NO_EOS = 256  # a control token that no scripted model ever says


def scripted_config(context_length: int = 512, vocab_size: int = VOCAB_SIZE, num_layers: int = 3) -> ModelConfig:
    return ModelConfig(
        architecture="scripted",
        num_layers=num_layers,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=vocab_size,
        context_length=context_length,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        qkv_bias=False,
        qk_norm=False,
    )


def scripted_next(prefix: Sequence[int], seed: int = 0) -> int:
    """The token a scripted model says after `prefix`: a hash of all ids and their absolute positions."""
    text = ",".join(f"{position}:{token_id}" for position, token_id in enumerate(prefix))
    return zlib.crc32(f"{seed}|{text}".encode()) % 256


def write_layer(store: KVStore, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Rows k and v, float32 [n, num_kv_heads, head_dim], into one layer of a store, counted as a model's are."""
    write_cache(slot_mapping, k, v, store.keys[layer], store.values[layer], store.filled[layer])


def layer_slots(store: KVStore, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's keys and values by slot: float32 [num_slots, num_kv_heads, head_dim] each."""
    return store.keys[layer].flatten(0, 1), store.values[layer].flatten(0, 1)


class ScriptedModel:
    """A model whose argmax is `scripted_next` of what its *cache* holds.

    It keeps token ids and positions in the K/V store, in every layer, and reads the whole prefix back through the
    page table; so any slip of slot, page, position, layer or length changes the next token. `calls` records the batch
    of every forward. `fail_at` makes that call raise half-way through its layers; `skip_layer` never writes that layer.
    """

    def __init__(
        self,
        seed: int = 0,
        context_length: int = 512,
        fail_at: int | None = None,
        skip_layer: int | None = None,
        nan_at: int | None = None,
    ) -> None:
        self.config = scripted_config(context_length)
        self.seed = seed
        self.fail_at = fail_at
        self.skip_layer = skip_layer
        self.nan_at = nan_at
        self.calls: list[ForwardBatch] = []

    @property
    def rows_per_call(self) -> list[int]:
        return [len(call.input_ids) for call in self.calls]

    def forward(self, batch: ForwardBatch, store: KVStore) -> Tensor:
        self.calls.append(batch)
        k = torch.stack((batch.input_ids, batch.input_ids + 1), dim=-1).float().unsqueeze(1)
        v = torch.stack((batch.positions, batch.positions + 1), dim=-1).float().unsqueeze(1)
        for layer in range(self.config.num_layers):
            if self.fail_at == len(self.calls) - 1 and layer == 1:
                raise RuntimeError("injected fault in a forward")
            if layer != self.skip_layer:
                write_layer(store, layer, batch.slot_mapping, k, v)
        logits = torch.zeros(len(batch.logits_indices), self.config.vocab_size)
        for row, index in enumerate(batch.logits_indices.tolist()):
            self.say(logits[row], self._read_back(batch, store, index))
        if self.nan_at == len(self.calls) - 1:
            logits.fill_(torch.nan)
        return logits

    def say(self, logits: Tensor, prefix: Sequence[int]) -> None:
        """Fills in one row, float32 [vocab_size] of zeros."""
        logits[scripted_next(prefix, self.seed)] = 1.0

    def _read_back(self, batch: ForwardBatch, store: KVStore, row: int) -> list[int]:
        starts = batch.query_start_loc.tolist()
        sequence = next(i for i in range(len(starts) - 1) if starts[i] <= row < starts[i + 1])
        length = int(batch.seq_lens[sequence]) - (starts[sequence + 1] - row) + 1
        pages = batch.page_table[sequence].tolist()
        slots = [pages[p // store.page_size] * store.page_size + p % store.page_size for p in range(length)]
        layers = [
            tuple(side[slots, 0, 0].int().tolist() for side in layer_slots(store, layer))
            for layer in range(self.config.num_layers)
        ]
        if any(layer != layers[0] for layer in layers) or layers[0][1] != list(range(length)):
            return [-1, *slots]  # a slip: this prefix gives a token that no honest run gives
        return list(layers[0][0])


class TalkativeModel(ScriptedModel):
    """A scripted model of few words, `ALPHABET` and `NO_EOS`, whose rows are not one-hot: random logits that depend on
    the whole prefix, in halves and so with ties. Penalties, biases, bans and filters all change what it says."""

    ALPHABET = tuple(b"abcd")

    def say(self, logits: Tensor, prefix: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(scripted_next(prefix, self.seed) + 256 * len(prefix))
        words = [*self.ALPHABET, NO_EOS]
        logits[:] = -10.0
        logits[words] = (4 * torch.randn(len(words), generator=generator)).round() / 2
        logits[prefix[-1]] += 3  # what was just said is likely again, so that penalties bite


class TableModel(ScriptedModel):
    """A tiny vocabulary with hand-set probabilities: `table` gives those that follow a prefix. So the law of whole
    outputs is known exactly, and any slip of bookkeeping or of the acceptance rules shows in it."""

    def __init__(self, table: Callable[[Sequence[int]], Sequence[float]], vocab_size: int) -> None:
        super().__init__()
        self.config = scripted_config(64, vocab_size, num_layers=1)
        self.table = table

    def say(self, logits: Tensor, prefix: Sequence[int]) -> None:
        logits[:] = torch.tensor(self.table(prefix), dtype=torch.float64).log()


class FakeClock:
    """Time that passes only where a test says so, and `tick` at every look at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class TimedModel(ScriptedModel):
    """A forward takes 10 seconds and 1 for each row, times what `slowness` says to the number of forwards so far."""

    def __init__(self, clock: FakeClock, slowness: Callable[[int], float] = lambda calls: 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock
        self.slowness = slowness

    def forward(self, batch: ForwardBatch, store: KVStore) -> Tensor:
        self.clock.now += (10 + len(batch.input_ids)) * self.slowness(len(self.calls))
        return super().forward(batch, store)


def recompute(
    next_token: Callable[[Sequence[int]], int],
    prompt: Sequence[int],
    max_tokens: int | None = None,
    eos_token_ids: Iterable[int] = (),
    context_length: int = 512,
) -> tuple[list[int], str]:
    """Greedy decoding by definition: the whole prefix every time, no cache, no step. Catches what plain and
    speculative decoding have wrong in common."""
    token_ids, eos = list(prompt), set(eos_token_ids)
    while len(token_ids) < context_length and (max_tokens is None or len(token_ids) - len(prompt) < max_tokens):
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in eos:
            return token_ids[len(prompt) :], "stop"
    return token_ids[len(prompt) :], "length"


def model_next(model: object) -> Callable[[Sequence[int]], int]:
    """`recompute`'s next token for a real model: a fresh cache for every prefix."""

    def next_token(prefix: Sequence[int]) -> int:
        cache = DenseCache(model.config)
        cache.reserve(len(prefix))
        (logits,) = run_forward(model, [ForwardInput(cache, list(prefix), 1)])
        return int(logits[0].argmax())

    return next_token


class DialledDrafter(SingleSequenceDrafter):
    """Knows the truth, and is told per proposal how many tokens to get right before a wrong one. Reaches every
    acceptance count: full, zero, alternating. A dial of -1 proposes nothing."""

    name = "dialled"

    def __init__(self, truth: Sequence[int], dials: Sequence[int]) -> None:
        self.truth = list(truth)
        self.dials = list(dials)
        self.proposals: list[tuple[int, ...]] = []

    def draft(self, token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        dial = self.dials[len(self.proposals) % len(self.dials)]
        following = self.truth[len(token_ids) : len(token_ids) + max_draft_tokens]
        guesses = [token if place < dial else (token + 1) % 256 for place, token in enumerate(following)]
        self.proposals.append(tuple(guesses if dial >= 0 else ()))
        return self.proposals[-1]


class HostileDrafter:
    """Random ids, EOS first, ids beyond the vocabulary or below zero, nothing, more than asked. Catches trust in
    drafts: it may change nothing but the speed."""

    name = "hostile"

    def __init__(self, seed: int, eos_token_id: int) -> None:
        self.random = random.Random(seed)
        self.eos_token_id = eos_token_id
        self.observed: list[tuple[str, int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(tuple(self._guess(request.max_draft_tokens))) for request in requests]

    def observe(self, sequence: SequenceView, outcome: VerifyOutcome) -> None:
        self.observed.append((sequence.request_id, len(sequence.token_ids)))

    def release(self, request_id: str) -> None:
        """Nothing to forget."""

    def _guess(self, limit: int) -> list[int]:
        anything = [self.random.randrange(256) for _ in range(limit)]
        return self.random.choice(
            [
                anything,
                [self.eos_token_id, *anything],
                [*anything[:1], VOCAB_SIZE, *anything],
                [*anything[:2], -1, 2**40],
                [],
                anything * 5,
            ]
        )


class ExplodingModel:
    """Fails the test when anything of it is touched: for models that must not run."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a model (or tokenizer) that must not be touched")


class ShuffledPool(PagePool):
    """Hands its pages out in random order. Catches a lookup that does not go through the page table."""

    def __init__(self, config: ModelConfig, max_pages: int, page_size: int, seed: int = 0) -> None:
        super().__init__(config, max_pages, page_size)
        random.Random(seed).shuffle(self._free)


def released(cache: KVCache) -> bool:
    return cache.length == 0 and not cache.page_ids


def byte_tokenizer(eos_token_ids: Sequence[int] = (NO_EOS,), **changes: object) -> Tokenizer:
    """A tokenizer whose ids 0 … 255 are the bytes and 256 … 259 control tokens; at most two ids are EOS.

    `changes` replace metadata, keys written with underscores for dots: `tokens`, `token_type`.
    """
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*_bytes_in_order(), "<|a|>", "<|b|>", "<|c|>", "<|d|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": eos_token_ids[0],
    }
    if len(eos_token_ids) > 1:
        metadata["tokenizer.ggml.eot_token_id"] = eos_token_ids[1]
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf_metadata(metadata)


def _bytes_in_order() -> list[str]:
    """GPT-2's printable stand-in for each byte 0 … 255, so that an id is its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
