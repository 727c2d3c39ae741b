"""A cache of its own store: one private page, copied into a larger one when it is full."""

from __future__ import annotations

import torch

from pilotfish.config import ModelConfig
from pilotfish.errors import CacheFullError
from pilotfish.kvcache.base import CacheBase, KVStore

_FIRST_CAPACITY = 256


class DenseCache(CacheBase):
    """Keys and values of one sequence in one page, whose size doubles on demand up to `context_length` tokens."""

    def __init__(
        self, config: ModelConfig, context_length: int | None = None, dtype: torch.dtype = torch.float16
    ) -> None:
        super().__init__(config.context_length if context_length is None else context_length)
        self._config = config
        self._store = KVStore(config, 1, min(_FIRST_CAPACITY, self._context_length), dtype)
        self.page_ids = [0]

    @property
    def store(self) -> KVStore:
        return self._store

    def _room(self) -> int:
        return self._context_length - self._length

    def _grow(self, num_slots: int) -> None:
        if num_slots > self._context_length:
            raise CacheFullError(f"{num_slots} tokens do not fit into the context of {self._context_length}")
        capacity = self._store.page_size
        if num_slots > capacity:
            while capacity < num_slots:
                capacity *= 2
            self._store.resize(self._config, 1, min(capacity, self._context_length))

    def _drop_pages(self, num_slots: int) -> None:
        pass  # the one page is private: there is nobody to give it back to

    def release(self) -> None:
        if not self._released:
            super().release()
            self.page_ids = []
            self._store = KVStore(self._config, 0, self._store.page_size)
