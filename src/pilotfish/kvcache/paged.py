"""A pool of equal pages that many sequences draw from, and the cache that lists one sequence's pages.

Pages are handed out in any order; nothing may rely on neighbours in a sequence being neighbours in memory (Kwon et
al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pilotfish.config import ModelConfig
from pilotfish.errors import CacheError, CacheFullError, InvariantError, OptionError
from pilotfish.kvcache.base import CacheBase, KVStore


class PagePool(KVStore):
    """At most `max_pages` pages of `page_size` slots; the tensors double on demand until they hold that many."""

    def __init__(
        self, config: ModelConfig, max_pages: int, page_size: int = 16, dtype: torch.dtype = torch.float16
    ) -> None:
        if max_pages < 1 or page_size < 1:
            raise OptionError(f"a pool needs pages and slots, got {max_pages} pages of {page_size}")
        super().__init__(config, min(max_pages, 16), page_size, dtype)
        self.max_pages = max_pages
        self._config = config
        self._free = list(range(max_pages))[::-1]
        self._used: set[int] = set()

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n free pages, none written by any layer; `CacheFullError`, and no change, where there are fewer."""
        if n > len(self._free):
            raise CacheFullError(f"{n} pages are needed, {len(self._free)} of {self.max_pages} are free")
        taken = self._free[len(self._free) - n :][::-1]
        needed = max(taken, default=0) + 1
        if needed > self.num_pages:
            self.resize(self._config, min(self.max_pages, max(needed, 2 * self.num_pages)), self.page_size)
        del self._free[len(self._free) - n :]
        self._used.update(taken)
        return taken

    def give_back(self, page_ids: Iterable[int]) -> None:
        """Returns pages, each exactly once; one that is not in use raises `CacheError` and changes nothing."""
        page_ids = list(page_ids)
        seen: set[int] = set()
        for page_id in page_ids:
            if page_id not in self._used or page_id in seen:
                raise CacheError(f"page {page_id} is given back but not in use")
            seen.add(page_id)
        for page_id in page_ids:
            self._used.remove(page_id)
            self.truncate(page_id, 0)
            self._free.append(page_id)

    def check_integrity(self, caches: Iterable[PagedCache] = ()) -> None:
        """Raises `InvariantError` unless free pages and the pages of `caches`, each held once, make up the pool."""
        held = sorted(page_id for cache in caches for page_id in cache.page_ids)
        if held != sorted(self._used):
            raise InvariantError(f"caches hold the pages {held}, the pool counts {sorted(self._used)} as used")
        if sorted([*self._free, *held]) != list(range(self.max_pages)):
            raise InvariantError(f"{len(self._free)} free and {len(held)} used pages are not {self.max_pages} in all")


class PagedCache(CacheBase):
    """Keys and values of one sequence in pages of a shared pool."""

    def __init__(self, pool: PagePool, context_length: int) -> None:
        super().__init__(context_length)
        self._pool = pool

    @property
    def store(self) -> KVStore:
        return self._pool

    def _room(self) -> int:
        return (len(self.page_ids) + self._pool.num_free_pages) * self._pool.page_size - self._length

    def _grow(self, num_slots: int) -> None:
        if num_slots > self._context_length:
            raise CacheFullError(f"{num_slots} tokens do not fit into the context of {self._context_length}")
        self.page_ids += self._pool.take(max(0, self._pages_for(num_slots) - len(self.page_ids)))

    def _drop_pages(self, num_slots: int) -> None:
        keep = self._pages_for(num_slots)
        dropped, self.page_ids = self.page_ids[keep:], self.page_ids[:keep]
        self._pool.give_back(dropped)

    def _pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self._pool.page_size)
