"""The cache contract, and what dense and paged caches share: one accept/raise table and one store of pages.

A *store* owns the key and value tensors as pages of slots. A *cache* belongs to one sequence and lists the pages that
hold its tokens, in order: position p lies in slot `page_ids[p // page_size] * page_size + p % page_size`. One forward
does `reserve` (slots for the new rows), the writes of every layer, then `advance`; `rewind` takes rows back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import CacheError, InvariantError


class KVCache(Protocol):
    """One sequence's keys and values."""

    @property
    def store(self) -> KVStore: ...
    @property
    def page_ids(self) -> Sequence[int]: ...
    @property
    def length(self) -> int:
        """Tokens held: what `advance` said, less what `rewind` took back."""

    @property
    def layer_lengths(self) -> Sequence[int]:
        """Tokens held by each layer, counted by that layer's own writes: an account independent of `length`."""

    @property
    def room(self) -> int:
        """The largest n that `reserve(n)` would grant now."""

    def reserve(self, n: int) -> None:
        """Makes slots for n tokens beyond `length`, all or nothing; `CacheFullError` where there are not that many."""

    def advance(self, n: int) -> None:
        """Counts n reserved slots, which every layer has written, as held."""

    def rewind(self, n: int) -> None:
        """Takes back the last n tokens and all reserved slots. An illegal n raises `CacheError` and changes nothing."""

    def release(self) -> None:
        """Gives everything back; idempotent. Afterwards every other call but `check_integrity` raises."""

    def check_integrity(self) -> None:
        """Raises `InvariantError`, with the numbers, where the accounts do not agree."""


class KVStore:
    """Owner of the tensors: `keys` and `values` are [num_layers, num_pages, page_size, num_kv_heads, head_dim].

    Their `dtype` is float16; the reference operations also take float32, which the native kernels refuse. `filled` is
    int32 [num_layers, num_pages]: how many slots of each page each layer has written.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype = torch.float16) -> None:
        self._dtype = dtype
        self.keys, self.values = (_pages(config, num_pages, page_size, self._dtype) for _ in range(2))
        self.filled = torch.zeros(config.num_layers, num_pages, dtype=torch.int32)

    @property
    def num_pages(self) -> int:
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def truncate(self, page_id: int, num_slots: int) -> None:
        """Counts at most the first `num_slots` slots of a page as written."""
        self.filled[:, page_id].clamp_(max=num_slots)

    def resize(self, config: ModelConfig, num_pages: int, page_size: int) -> None:
        """Grows to the given shape, keeping what the first pages and slots hold; without memory nothing changes."""
        keys, values = (_pages(config, num_pages, page_size, self._dtype) for _ in range(2))
        filled = torch.zeros(config.num_layers, num_pages, dtype=torch.int32)
        for grown, tensor in ((keys, self.keys), (values, self.values)):
            grown[:, : self.num_pages, : self.page_size] = tensor
        filled[:, : self.num_pages] = self.filled
        self.keys, self.values, self.filled = keys, values, filled


def _pages(config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype) -> Tensor:
    shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype)


class CacheBase(ABC):
    """The accept/raise table. A subclass says where pages come from (`_grow`) and go to (`_drop_pages`)."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._length = 0
        self._reserved = 0
        self._released = False
        self.page_ids: list[int] = []

    @property
    @abstractmethod
    def store(self) -> KVStore: ...

    @abstractmethod
    def _room(self) -> int:
        """How many more tokens pages could be had for, the context limit aside."""

    @abstractmethod
    def _grow(self, num_slots: int) -> None:
        """Gets pages for `num_slots` slots in all, or raises `CacheFullError` and changes nothing."""

    @abstractmethod
    def _drop_pages(self, num_slots: int) -> None:
        """Gives back every page wholly past the first `num_slots` slots."""

    @property
    def length(self) -> int:
        return self._length

    @property
    def layer_lengths(self) -> list[int]:
        counts: list[int] = self.store.filled[:, self.page_ids].sum(dim=1).tolist()
        return counts

    @property
    def room(self) -> int:
        return min(self._context_length - self._length, self._room())

    def reserve(self, n: int) -> None:
        self._check_alive("reserve")
        _check_n("reserve", n)
        self._grow(self._length + n)
        self._reserved = n

    def advance(self, n: int) -> None:
        self._check_alive("advance")
        _check_n("advance", n)
        if n > self._reserved:
            raise CacheError(f"advance({n}): only {self._reserved} slots are reserved")
        self._length += n
        self._reserved -= n

    def rewind(self, n: int) -> None:
        self._check_alive("rewind")
        _check_n("rewind", n)
        if n > self._length:
            raise CacheError(f"rewind({n}): only {self._length} tokens are held")
        self._length -= n
        self._reserved = 0
        self._drop_pages(self._length)
        if self.page_ids:  # earlier pages stay full: only the tail page, the last one kept, loses slots
            self.store.truncate(self.page_ids[-1], self._length - (len(self.page_ids) - 1) * self.store.page_size)

    def release(self) -> None:
        if not self._released:
            self._length = self._reserved = 0
            self._drop_pages(0)
            self._released = True

    def check_integrity(self) -> None:
        if self._released:
            if self.page_ids or self._length:
                raise InvariantError(f"a released cache holds {self._length} tokens in {len(self.page_ids)} pages")
            return
        slots = len(self.page_ids) * self.store.page_size
        if not 0 <= self._length + self._reserved <= min(slots, self._context_length):
            raise InvariantError(
                f"{self._length} tokens and {self._reserved} reserved slots in {slots} slots, "
                f"with a context of {self._context_length}"
            )
        if any(length != self._length for length in self.layer_lengths):
            raise InvariantError(f"the cache holds {self._length} tokens, its layers {self.layer_lengths}")
        if len(set(self.page_ids)) != len(self.page_ids):
            raise InvariantError(f"a page stands twice in {self.page_ids}")

    def _check_alive(self, operation: str) -> None:
        if self._released:
            raise CacheError(f"{operation}: the cache has been released")


def _check_n(operation: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise CacheError(f"{operation}({n!r}): a non-negative integer is needed")
