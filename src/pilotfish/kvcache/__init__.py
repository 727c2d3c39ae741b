"""Keys and values of past tokens: who owns them, how they grow, and how a rejected draft is taken back."""

from pilotfish.kvcache.base import KVCache, KVStore
from pilotfish.kvcache.dense import DenseCache
from pilotfish.kvcache.paged import PagedCache, PagePool

__all__ = ["DenseCache", "KVCache", "KVStore", "PagePool", "PagedCache"]
